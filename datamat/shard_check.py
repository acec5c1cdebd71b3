"""Look for damage in one shard: the file as a whole, each record of it, and its offsets.

A shard whose checksum is right holds the very bytes that were written. In one that differs, every record is asked for
through the offsets, too, so that each damaged one is named and not only the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from array import array
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from datamat.errors import CorruptDataError, InputError, SchemaError
from datamat.formats import Offsets
from datamat.manifest import KeyDigest
from datamat.readers.keys import stored_key
from datamat.storage import digest_file, read_regular
from datamat.text import printable

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Mapping, Sequence

    from datamat.features import Features
    from datamat.formats import ShardFormat
    from datamat.manifest import ShardInfo

__all__ = ["Problem", "Recomputed", "ShardCheck", "unreadable"]

Recomputed: TypeAlias = "Callable[[str, Mapping[str, Any]], str]"
"""Tells how a record, by its key and columns, differs from what it should be: "" if it does not."""

_MOST_NAMED = 20  # records of one shard that a report names
_MOST_BYTES_PER_LINE = 64  # of an offsets file: three numbers of 20 digits
_MOST_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One damage: the file, by its path in the directory, and what is wrong with it, or with which record of it."""

    file: str
    what: str

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.what}")


class ShardCheck:
    """Looks at the shards of a directory.

    Args:
        folder: the directory.
        infos: what the manifest says of every shard.
        features: of the records.
        shard_format: of the shards.
        deep: whether every record is decoded, and not only the first of a shard.
        recomputed: is asked about every record.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        infos: Sequence[ShardInfo],
        features: Features,
        shard_format: ShardFormat,
        *,
        deep: bool,
        recomputed: Recomputed | None,
    ) -> None:
        self._folder = folder
        self._file_of = {info.checksum: info.file for info in infos}
        self._features = features
        self._format = shard_format
        self._deep = deep
        self._recomputed = recomputed

    def problems(self, info: ShardInfo) -> tuple[list[Problem], list[str] | None]:
        """Return what is wrong with a shard and its offsets, and the keys of its records if all of them are read."""
        stored, told = self._stored_offsets(info)
        wrong = [Problem(info.index_file, told)] if told else []
        found, keys, offsets = self._examined(info, stored)
        if stored is not None and offsets is not None and stored != offsets:
            wrong = [Problem(info.index_file, _first_difference(stored, offsets, info))]
        return [*(Problem(info.file, what) for what in found), *wrong], keys

    def _examined(self, info: ShardInfo, stored: Offsets | None) -> tuple[list[str], list[str] | None, Offsets | None]:
        """Return what is wrong with a shard, and the keys and offsets of its records if all of them are read."""
        path = self._folder / info.file
        if told := unreadable(path):
            return [told], None, None
        try:
            checksum = digest_file(path)
            # In a shard that differs, decoding may name the record where its format has no checksum of its own.
            keys, offsets, problems = self._read(path, deep=self._deep or checksum != info.checksum)
            return [*self._differences(path, info, checksum, keys), *problems], keys, offsets
        except OSError as error:
            return [error.strerror or str(error)], None, None
        except CorruptDataError as error:
            if checksum == info.checksum:
                return (
                    [f"its bytes are as the manifest says, but do not read as {self._format.name}: {error}"],
                    None,
                    None,
                )
            return self._damaged_records(path, info, stored) or [_told(error, path)], None, None

    def _read(self, path: pathlib.Path, *, deep: bool) -> tuple[list[str], Offsets, list[str]]:
        """Return the keys and offsets of the records of a shard, and what is wrong with those that are looked into."""
        keys: list[str] = []
        table, width, problems = array("Q"), 2, []
        with open(path, "rb", buffering=1 << 20) as file:
            for record, place in self._format.read_file(file, path=str(path)):
                try:
                    keys.append(stored_key(record))
                except (KeyError, IndexError, UnicodeDecodeError) as error:
                    raise CorruptDataError(
                        f"record {len(keys)} is whole but not one of this data set ({error!r})"
                    ) from error
                table.extend(place)
                width = len(place)
                if told := self._look_into(record, keys, deep=deep):
                    problems.append(f"record {len(keys) - 1} ({keys[-1]!r}) {told}")
        columns = np.array(table, np.uint64).reshape(-1, width).T
        return keys, Offsets(*map(np.ascontiguousarray, columns)), _shortened(problems)

    def _look_into(self, record: Mapping[str, Any], keys: Sequence[str], *, deep: bool) -> str:
        if (deep or len(keys) == 1) and (told := _mismatch(record, self._features)):
            return told
        return self._recomputed(keys[-1], record) if self._recomputed else ""

    def _differences(self, path: pathlib.Path, info: ShardInfo, checksum: str, keys: Sequence[str]) -> list[str]:
        """Return how a shard that reads well differs from what the manifest says of it."""
        size = path.stat().st_size
        if (size, checksum, len(keys)) == (info.num_bytes, info.checksum, info.num_records):
            same = KeyDigest(keys).hexdigest() == info.key_digest
            return [] if same else ["the keys of its records are not those of the manifest"]
        if other := self._file_of.get(checksum, ""):
            return [f"its content is that of {other}"] if other != info.file else ["the manifest tells of it wrongly"]
        if len(keys) != info.num_records:
            counts = f"found {len(keys)} records, the manifest says {info.num_records}"
            return [f"{counts}; {size} bytes for {info.num_bytes}"]
        if KeyDigest(keys).hexdigest() != info.key_digest:
            return ["its records are whole, but they are not those of the manifest, or in another order"]
        return ["its records are whole and have the right keys, but their content differs from the manifest's checksum"]

    def _stored_offsets(self, info: ShardInfo) -> tuple[Offsets | None, str]:
        """Return the offsets file of a shard, or what is wrong with it."""
        path = self._folder / info.index_file
        if told := unreadable(path):
            return None, told
        try:
            limit = (info.num_records + 1) * _MOST_BYTES_PER_LINE
            text = read_regular(path, max_bytes=min(limit, _MOST_BYTES)).decode("ascii")
            offsets = Offsets.from_text(text)
        except OSError as error:
            return None, error.strerror or str(error)
        except UnicodeDecodeError as error:
            return None, f"not text (byte {error.start})"
        except ValueError as error:  # too large, or CorruptDataError: no table of numbers
            return None, _told(error, path)
        return offsets, ""

    def _damaged_records(self, path: pathlib.Path, info: ShardInfo, offsets: Offsets | None) -> list[str]:
        """Return what is wrong with each damaged record, as far as the offsets still lead to it."""
        if offsets is None or len(offsets) != info.num_records:
            return []
        size, found = path.stat().st_size, []
        ends = (offsets.offset + offsets.size).tolist()
        with (
            contextlib.suppress(OSError, CorruptDataError),
            contextlib.closing(self._format.reader(path, offsets)) as reader,
        ):
            for number, (start, end) in enumerate(zip(offsets.offset.tolist(), ends, strict=True)):
                if end > size:  # never asked for: the size of a range is a number that anybody may have written
                    cut = f"is cut off: it lies at bytes {start} to {end}" if start < size else "is missing"
                    found.append(f"record {number} {cut}, the file ends at byte {size}")
                    continue
                try:
                    reader.read(number)
                except CorruptDataError as error:
                    found.append(_told(error, path))
        return _shortened(found)


def unreadable(path: pathlib.Path) -> str:
    """Return why a file cannot be looked at, or "": it is missing, or a pipe or device that would never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISDIR(mode):
        return "Is a directory"
    return "" if stat.S_ISREG(mode) else "not a regular file"


def _mismatch(record: Mapping[str, Any], features: Features) -> str:
    """Return how a record differs from the manifest's features, or nothing."""
    kinds = {name: value.dtype.name if isinstance(value, np.ndarray) else "bytes" for name, value in record.items()}
    if kinds != dict(features.columns):
        return f"holds {_listed(kinds)}, the manifest's features are {_listed(features.columns)}"
    try:
        features.decode(record)
    except (InputError, SchemaError) as error:
        return f"is not as the manifest's features say: {error}"
    return ""


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in sorted(kinds.items()))


def _first_difference(stored: Offsets, found: Offsets, info: ShardInfo) -> str:
    if len(stored) != len(found):
        return f"it has {len(stored)} offsets, {info.file} holds {len(found)} records"
    differing = (stored.offset != found.offset) | (stored.size != found.size)
    if stored.skip is not None and found.skip is not None:
        differing |= stored.skip != found.skip
    number = int(np.flatnonzero(differing)[0]) if differing.any() else 0
    return f"its offsets are not those of the records in {info.file}, from record {number} on"


def _told(error: Exception, path: pathlib.Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def _shortened(lines: list[str]) -> list[str]:
    """Return at most `_MOST_NAMED` lines: one for records in a row that share a page or member, and its damage."""
    found: list[str] = []
    for what, group in groupby(lines, key=lambda line: re.sub(r"^record \d+ ", "", line)):
        same = list(group)
        numbers = [line.split(" ", 2)[1] for line in same]
        is_run = len(same) > 1 and " is damaged: " in what
        found += (
            [f"records {numbers[0]} to {numbers[-1]} {what.replace('is damaged', 'are damaged', 1)}"]
            if is_run
            else same
        )
    more = len(found) - _MOST_NAMED
    return found if more <= 0 else [*found[:_MOST_NAMED], f"and {more} more records"]
