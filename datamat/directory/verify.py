"""Verify a finished directory against its manifest, byte for byte and record by record."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shutil
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from datamat.directory.fetched import FilesHere
from datamat.directory.files import MADE, WORK, commit, leave_stand_in, printable
from datamat.directory.index_files import read_index
from datamat.directory.keys import KeyDigest, key_hash, packed_hashes, row_runs, stored_key
from datamat.directory.manifest import (
    INDEX_FOLDER,
    MANIFEST_FILE,
    Manifest,
    index_file,
    keys_file,
    manifest_bytes,
)
from datamat.directory.sidecars.exporting import RECORD, known_sidecars, sidecar_names, sidecar_problems
from datamat.directory.sidecars.indexes import tar_index
from datamat.errors import CorruptDataError, InputError, OptionError, SchemaError, count_of, join_problems
from datamat.folders import open_folder
from datamat.folders.local import read_regular, regular_path
from datamat.formats import Offsets, get_format
from datamat.values import frozen

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from datamat.directory.manifest import IndexInfo, ShardInfo
    from datamat.features import Features
    from datamat.folders import Folder
    from datamat.formats import ShardFormat

# ---------------------------------------------------------------- shard check
#
# Look for damage in one shard: the file as a whole, each of its records, and its offsets.
#
# A shard with the right checksum has exactly the bytes that were written. In a differing one, every record is also read
# through the offsets, so that each damaged record is named, not only the first.


CheckRecord: TypeAlias = "Callable[[str, Mapping[str, Any]], str]"
"""Takes the key and columns of a record; returns how it differs from its expected content, or ""."""

_MOST_NAMED = 20  # records of one shard named in a report
_MOST_BYTES_PER_LINE = 64  # in an offsets file: three numbers of 20 digits
_MOST_BYTES = 1 << 28
_MOST_THREADS, _MOST_AHEAD = 8, 32  # threads that decode, and records that wait for them
_MOST_SHARDS = 8  # behind a URL, fetched and examined at the same time
_SHARE_OF_DISK = 2  # together at most half of the free space, except for a single one


@frozen()
class Problem:
    """A defect: the file, by its path in the directory, and what is wrong with it or one of its records."""

    file: str
    what: str

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.what}")


class ShardCheck:
    """Examines the shards of a directory.

    Args:
        folder: directory of the shards.
        infos: entry of every shard in the manifest.
        features: schema of the records, for decoding.
        shard_format: format of the shards, bound to their features.
        deep: whether to decode every record, not only the first of a shard.
        recomputed: additional check of every record, or None.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        infos: Sequence[ShardInfo],
        features: Features,
        shard_format: ShardFormat,
        *,
        deep: bool,
        recomputed: CheckRecord | None,
    ) -> None:
        self._folder = folder
        self._infos = infos
        self.most_bytes = max((info.num_bytes for info in infos), default=0)
        self._features = features
        self._format = shard_format
        self._deep = deep
        self._recomputed = recomputed

    def problems(self, info: ShardInfo) -> tuple[list[Problem], list[str] | None]:
        """Return the defects of a shard and its offsets, and the keys of its records if all can be read."""
        stored, what = self._stored_offsets(info)
        wrong = [Problem(info.index_file, what)] if what else []
        found, keys, offsets = self._examined(info, stored)
        if stored is not None and offsets is not None and stored != offsets:
            wrong = [Problem(info.index_file, _first_difference(stored, offsets, info))]
        return [*(Problem(info.file, what) for what in found), *wrong], keys

    def _examined(self, info: ShardInfo, stored: Offsets | None) -> tuple[list[str], list[str] | None, Offsets | None]:
        """Return the defects of a shard, and the keys and offsets of its records if all can be read."""
        path = self._folder / info.file
        if what := unreadable(self._folder, info.file):
            return [what], None, None
        try:
            # A file longer than any shard is not a shard, and may have any length.
            checksum = info.checksum_of(path) if path.stat().st_size <= self.most_bytes else ""
            # In a differing shard, decoding may reveal the record if its format has no checksums.
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
            return self._damaged_records(path, info, stored) or [_reason(error, path)], None, None

    def _read(self, path: pathlib.Path, *, deep: bool) -> tuple[list[str], Offsets, list[str]]:
        """Return the keys and offsets of a shard's records, and the defects of those that are examined."""
        keys: list[str] = []
        table, width = array("Q"), 2
        examined: collections.deque[tuple[str, Callable[[], str]]] = collections.deque()
        problems: list[str] = []

        def take(most_left: int) -> None:
            while len(examined) > most_left:
                name, found = examined.popleft()
                if what := found():
                    problems.append(f"{name} {what}")

        with open(path, "rb", buffering=1 << 20) as file, self._examiners(deep=deep) as pool:
            for record, place in self._format.read_file(file, path=str(path)):
                try:
                    keys.append(stored_key(record))
                except (KeyError, IndexError, UnicodeDecodeError) as error:
                    raise CorruptDataError(
                        f"record {len(keys)} is intact but not from this dataset ({error!r})"
                    ) from error
                table.extend(place)
                width = len(place)
                work = functools.partial(self._examine, record, keys[-1], deep=deep or len(keys) == 1)
                examined.append((f"record {len(keys) - 1} ({keys[-1]!r})", pool.submit(work).result if pool else work))
                take(_MOST_AHEAD if pool else 0)
            take(0)
        columns = np.array(table, np.uint64).reshape(-1, width).T
        return keys, Offsets(*map(np.ascontiguousarray, columns)), _shortened(problems)

    def _examiners(self, *, deep: bool) -> contextlib.AbstractContextManager[ThreadPoolExecutor | None]:
        """Return threads for decoding pictures, which takes longer than reading them; None if not needed."""
        if deep and not self._features.is_flat and self._recomputed is None:
            from concurrent.futures import ThreadPoolExecutor  # an import that few calls need

            return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS))
        return contextlib.nullcontext()

    def _examine(self, record: Mapping[str, Any], key: str, *, deep: bool) -> str:
        if deep and (what := _mismatch(record, self._features)):
            return what
        return self._recomputed(key, record) if self._recomputed else ""

    def _differences(self, path: pathlib.Path, info: ShardInfo, checksum: str, keys: Sequence[str]) -> list[str]:
        """Return how a readable shard differs from its manifest entry."""
        size = path.stat().st_size
        if (size, checksum, len(keys)) == (info.num_bytes, info.checksum, info.num_records):
            same = KeyDigest(keys).hexdigest() == info.key_digest
            return [] if same else ["the keys of its records are not those of the manifest"]
        if checksum == info.checksum:
            return ["the manifest describes it wrongly"]
        alike = [other for other in self._infos if other.num_bytes == size and other is not info]
        if other := next((other for other in alike if other.is_whole(path)), None):
            return [f"its content is that of {other.file}"]
        if len(keys) != info.num_records:
            counts = f"found {count_of(len(keys), 'record')}, the manifest says {info.num_records}"
            return [f"{counts}; {size} bytes for {info.num_bytes}"]
        if KeyDigest(keys).hexdigest() != info.key_digest:
            return ["its records are intact, but differ from those in the manifest, or are in another order"]
        ranges = join_problems([f"{start} to {stop}" for start, stop in info.damaged_ranges(path)])
        what = "its records are intact and have the right keys, but their content differs from the manifest's checksum"
        return [f"{what}, in the bytes {ranges}"]

    def _stored_offsets(self, info: ShardInfo) -> tuple[Offsets | None, str]:
        """Return the offsets file of a shard, or its defect."""
        path = self._folder / info.index_file
        if what := unreadable(self._folder, info.index_file):
            return None, what
        try:
            text = read_regular(path, max_bytes=_most_offset_bytes(info)).decode("ascii")
            offsets = Offsets.from_text(text)
        except OSError as error:
            return None, error.strerror or str(error)
        except UnicodeDecodeError as error:
            return None, f"not text (byte {error.start})"
        except ValueError as error:  # too large, or CorruptDataError: not a table of numbers
            return None, _reason(error, path)
        return offsets, ""

    def _damaged_records(self, path: pathlib.Path, info: ShardInfo, offsets: Offsets | None) -> list[str]:
        """Return the defect of each damaged record that can be found by the offsets."""
        if offsets is None or len(offsets) != info.num_records:
            return []
        size, found = path.stat().st_size, []
        ends = (offsets.offset + offsets.size).tolist()
        with (
            contextlib.suppress(OSError, CorruptDataError),
            contextlib.closing(self._format.reader(path, offsets)) as reader,
        ):
            for number, (start, end) in enumerate(zip(offsets.offset.tolist(), ends, strict=True)):
                if end > size:  # never read: this number may be forged
                    cut = f"is cut off: it lies at bytes {start} to {end}" if start < size else "is missing"
                    found.append(f"record {number} {cut}, the file ends at byte {size}")
                    continue
                try:
                    reader.read(number)
                except CorruptDataError as error:
                    found.append(_reason(error, path))
        return _shortened(found)


def _most_offset_bytes(info: ShardInfo) -> int:
    return min((info.num_records + 1) * _MOST_BYTES_PER_LINE, _MOST_BYTES)


def unreadable(folder: pathlib.Path, name: str) -> str:
    """Return why a file of a directory cannot be examined (missing, not a file, or elsewhere), or ""."""
    try:
        regular_path(folder, name)
    except OSError as error:
        return error.strerror or str(error)
    except CorruptDataError as error:
        return str(error).removeprefix(f"{folder / name} ")
    return ""


def _mismatch(record: Mapping[str, Any], features: Features) -> str:
    """Return how a record differs from the manifest's features, or ""."""
    kinds = {name: value.dtype.name if isinstance(value, np.ndarray) else "bytes" for name, value in record.items()}
    wanted = {name: "bytes" if kind == "bytes_list" else kind for name, kind in features.columns.items()}
    if kinds != wanted:
        return f"holds {_listed(kinds)}, the manifest's features are {_listed(features.columns)}"
    try:
        features.decode(record)
    except (InputError, SchemaError) as error:
        return f"does not match the manifest's features: {error}"
    return ""


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in sorted(kinds.items()))


def _first_difference(stored: Offsets, found: Offsets, info: ShardInfo) -> str:
    if len(stored) != len(found):
        return f"it has {len(stored)} offsets, {info.file} holds {count_of(len(found), 'record')}"
    differing = (stored.offset != found.offset) | (stored.size != found.size)
    if stored.skip is not None and found.skip is not None:
        differing |= stored.skip != found.skip
    number = int(np.flatnonzero(differing)[0]) if differing.any() else 0
    return f"its offsets are not those of the records in {info.file}, from record {number} on"


def _reason(error: Exception, path: pathlib.Path) -> str:
    return str(error).removeprefix(f"{path}: ")


def _shortened(lines: list[str]) -> list[str]:
    """Return at most `_MOST_NAMED` lines, one for consecutive records that share a damaged page or member."""
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


# ---------------------------------------------------------------- verification
#
# Compare a finished directory with its manifest, byte for byte and record for record.
#
#     manifest.json        against its own digest                       to detect changes after it was written
#     _index/SPLIT.index   against size and checksum in the manifest    and its keys against those of the records
#     _index/SPLIT.keys    against size and checksum in the manifest
#     a shard              against size, checksum, counts, key digest   each record against its own checksums
#     its .idx             against the places of the records
#     sidecars             against the manifest; see `datamat.directory.sidecars`
#
# Files are only read, never unpickled or run. Planted files (pipes, devices, numbers that would fill the memory) are
# reported like any other damage.
#
# Behind a URL, each shard is fetched to a temporary folder with its offsets, examined there, and removed; the manifest,
# the index, the sidecars and a stand-in stay. So the same code verifies local and remote directories.


@frozen()
class VerifyReport:
    """The report of `verify`. Its `str` names every damaged file, and the record if known.

    Attributes:
        path: the verified directory, or its URL.
        num_shards: number of examined shards, in every format.
        num_records: number of records in the manifest.
        found: all damage, in the order of the files.
        num_formats: number of formats of the records.
        notes: remarks that are not damage, one line each: an edited README.md or croissant.json.
    """

    path: pathlib.Path | str
    num_shards: int
    num_records: int
    found: tuple[Problem, ...]
    num_formats: int = 1
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything matches the manifest."""
        return not self.found

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each damage."""
        return tuple(map(str, self.found))

    @property
    def files(self) -> tuple[str, ...]:
        """The damaged files, each once, by their paths in the directory."""
        return tuple(dict.fromkeys(problem.file for problem in self.found))

    def __str__(self) -> str:
        if self.ok:
            formats = f" in {count_of(self.num_formats, 'format')}" if self.num_formats > 1 else ""
            records = count_of(self.num_records, "record")
            title = f"{count_of(self.num_shards, 'shard')}{formats}, {records}: all as the manifest says"
        else:
            title = f"{count_of(len(self.found), 'problem')}:"
        return "\n".join([f"{self.path}: {title}", *(f"  {line}" for line in (*self.problems, *self.notes))])

    def _repr_html_(self) -> str:
        from datamat.directory.display import render_html

        title, *lines = str(self).splitlines()
        return render_html(title, notes=lines)


def verify(
    path: str | os.PathLike[str], deep: bool = False, *, storage_options: Mapping[str, Any] | None = None
) -> VerifyReport:
    """Compare a directory with its manifest: files, sizes, checksums, counts, keys and their order, and each record.

    It reads every byte, and checks every record against the checksums of its format. For a directory behind a URL,
    shards are fetched to a temporary folder, several at a time, and removed after they are examined.

    Args:
        path: finished directory, or any URL of it that fsspec can read; it is only read.
        deep: also decode every record by its features, including pixels.
        storage_options: fsspec options for the URL, such as `{"key": ..., "secret": ...}` or `{"anon": True}`.

    Returns:
        The report. Damage does not raise, not even damage to the manifest.

    Raises:
        OutputError: there is no manifest, because the run is not finished; or the URL cannot be read, or one of its
            shards does not fit into `TMPDIR`.
        MissingDependencyError: the package that reads such URLs is not installed.

    Example:
        >>> print(verify("out/camvid"))   # doctest: +SKIP
        out/camvid: 3 shards, 256 records: all as the manifest says
    """
    return examine(open_folder(path, storage_options), deep=deep, recomputed=None)


def examine(folder: Folder, *, deep: bool, recomputed: CheckRecord | None) -> VerifyReport:
    """Do what `verify` does, and also call `recomputed`, if given, with the key and columns of every record."""
    files = _Files(folder, at_once=1 if recomputed is not None else _MOST_SHARDS)
    report = _report(files, deep=deep, recomputed=recomputed)
    found = tuple(
        Problem(problem.file, files.not_here.get(problem.file, files.here.named(problem.what)))
        for problem in report.found
    )
    return dataclasses.replace(report, path=folder.address, found=found)


class _Files:
    """The files of a directory during verification.

    Args:
        root: the directory.
        at_once: maximum number of shards to fetch and examine at the same time, if they are not on this machine.

    Attributes:
        root: the directory.
        here: its files on this machine.
        not_here: why files could not be fetched, by name.
    """

    def __init__(self, root: Folder, at_once: int) -> None:
        self.root = root
        self._at_once = at_once
        self.here = FilesHere(root)
        self.not_here: dict[str, str] = {}

    def bring(self, names: Mapping[str, int]) -> None:
        """Fetch small files of limited sizes."""
        self.not_here |= self.here.fetch_all(names)

    def examined(
        self, check: ShardCheck, infos: Sequence[ShardInfo]
    ) -> Iterator[tuple[list[Problem], list[str] | None]]:
        """Yield the defects of each shard and the keys of its records, fetching some shards at a time."""
        from concurrent.futures import ThreadPoolExecutor

        if not self.here.are_copies:
            yield from map(check.problems, infos)
            return
        room = shutil.disk_usage(self.here.path).free // _SHARE_OF_DISK
        at_once = max(1, min(self._at_once, len(infos), room // max(check.most_bytes, 1)))
        waiting: collections.deque[Any] = collections.deque()
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for info in infos:
                    waiting.append(pool.submit(self._examined, check, info))
                    if len(waiting) > 2 * at_once:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _examined(self, check: ShardCheck, info: ShardInfo) -> tuple[list[Problem], list[str] | None]:
        sizes = {info.index_file: _most_offset_bytes(info), info.file: check.most_bytes}
        self.not_here |= self.here.fetch_all(sizes, len(sizes))
        path = self.here.path / info.file
        try:
            if path.exists() and path.stat().st_size > check.most_bytes:
                what = f"it has more than {check.most_bytes} bytes, as no shard has; the manifest says {info.num_bytes}"
                return [Problem(info.file, what)], None
            problems, keys = check.problems(info)
            if info.file.endswith(".tar") and not any(problem.file == info.file for problem in problems):
                made = self.here.path / WORK / MADE / f"{info.file}.idx"  # for the sidecars, which are compared last
                made.parent.mkdir(parents=True, exist_ok=True)
                with commit(made) as file:
                    file.write(tar_index(path))
            return problems, keys
        finally:
            leave_stand_in(path, info.num_bytes)
            self.here.drop([info.index_file])

    def names(self) -> set[str]:
        """Return the names of the files, with folders for those of the index; empty if they cannot be listed."""
        inner = self.root.list(INDEX_FOLDER) or ()
        return {*(self.root.list() or ()), *(f"{INDEX_FOLDER}/{name}" for name in inner)}


def _report(files: _Files, *, deep: bool, recomputed: CheckRecord | None) -> VerifyReport:
    """Compare the files of a directory with its manifest."""
    folder = files.here.path
    try:
        manifest = files.here.manifest(strict=False)
        formats = _formats_of(manifest)
    except CorruptDataError as error:
        what = str(error).removeprefix(f"{files.root.place(MANIFEST_FILE)} ")
        return VerifyReport(folder, 0, 0, (Problem(MANIFEST_FILE, what),))
    found = _manifest_problems(folder, manifest)
    rows: dict[str, list[list[str]]] = {}
    files.bring({entry.file: entry.num_bytes for entry in manifest.index})
    for entry in manifest.index:
        if entry.kind == "index":
            problems, rows[entry.split] = _index_problems(folder, entry, manifest.splits.get(entry.split, ()))
            found += problems
    for name, shard_format in formats.items():
        of_format = manifest.of_format(name)
        check = ShardCheck(folder, of_format.shards, of_format.features, shard_format, deep=deep, recomputed=recomputed)
        found += _shard_problems(files, check, of_format, rows)
    wrong = {problem.file for problem in found}
    for entry in manifest.index:
        if entry.kind == "keys":
            found += _keys_problems(
                folder, entry, [] if index_file(entry.split) in wrong else rows.get(entry.split, [])
            )
    files.bring({RECORD: _MOST_BYTES})
    foreign = _foreign(files.names(), manifest, formats.values(), known_sidecars(folder))
    found += [Problem(name, "not in the manifest; remove it") for name in foreign]
    damaged = {problem.file for problem in found}
    edited: dict[str, str] = {}
    if MANIFEST_FILE not in damaged:  # sidecars are compared with it, and indexes of shards with the shards
        files.bring(dict.fromkeys(sorted(sidecar_names(manifest) | known_sidecars(folder)), _MOST_BYTES))
        wrong_files, edited = sidecar_problems(folder, manifest, damaged)
        found += [Problem(name, what) for name, what in wrong_files.items()]
    notes = tuple(f"{name}: {what}" for name, what in edited.items())
    return VerifyReport(folder, len(manifest.shards), manifest.num_records, tuple(found), len(formats), notes)


def _shard_problems(
    files: _Files, check: ShardCheck, manifest: Manifest, rows: Mapping[str, list[list[str]]]
) -> list[Problem]:
    """Return the defects of the shards of one format; `rows` has the row keys of each, by split."""
    found = []
    for split, infos in manifest.splits.items():
        for number, (info, (problems, keys)) in enumerate(zip(infos, files.examined(check, infos), strict=True)):
            found += problems
            if keys is not None and number < len(rows.get(split, ())):
                found += _key_problems(info, keys, rows[split][number])
    return found


def _formats_of(manifest: Manifest) -> dict[str, ShardFormat]:
    try:
        return {name: get_format(name).with_features(manifest.features) for name in manifest.by_format}
    except OptionError as error:
        raise CorruptDataError(str(error)) from error


def _manifest_problems(folder: pathlib.Path, manifest: Manifest) -> list[Problem]:
    found = []
    content = manifest_bytes(folder)
    if Manifest.parse(content, MANIFEST_FILE, strict=False).render() != content:
        found.append(Problem(MANIFEST_FILE, "changed since it was written: it does not have its digest"))
    if manifest.index_infos.keys() != {
        name for split in manifest.splits for name in (index_file(split), keys_file(split))
    }:
        found.append(Problem(MANIFEST_FILE, "the splits of its index are not those of its shards"))
    files = [info.file for info in manifest.all_files]
    twice = sorted({file for file in files if files.count(file) > 1}) if len(set(files)) < len(files) else []
    found += [Problem(MANIFEST_FILE, f"lists {file} twice") for file in twice]
    records = [_records_in(info) for info in manifest.shards]
    odd = [name for name, infos in manifest.also.items() if [_records_in(info) for info in infos] != records]
    return found + [Problem(MANIFEST_FILE, f"lists other records in {name} than in {manifest.format}") for name in odd]


def _records_in(info: ShardInfo) -> tuple[object, ...]:
    """Return the format-independent part of an entry about its records."""
    counts = (info.num_rows, info.num_records, info.num_failed, info.num_dropped, info.num_dropped_records)
    return (info.name, info.split, *counts, info.key_digest, info.fingerprint)


def _index_problems(
    folder: pathlib.Path, info: IndexInfo, shards: Sequence[ShardInfo]
) -> tuple[list[Problem], list[list[str]]]:
    """Return the defects of an index file, and the row keys of each shard if it can be read."""
    path = folder / info.file
    if what := unreadable(folder, info.file):
        return [Problem(info.file, what)], []
    is_same = info.is_whole(path)
    found = [] if is_same else [Problem(info.file, "its content differs from the manifest's checksum")]
    try:
        table = read_index(folder, info.file, ["key", "shard"], num_rows=sum(shard.num_rows for shard in shards))
        keys, numbers = table["key"].to_pylist(), table["shard"].to_pylist()
    except (CorruptDataError, KeyError, ValueError) as error:
        return [*found, Problem(info.file, f"it cannot be read: {error}")], []
    rows = [[key for key, _ in group] for _, group in groupby(zip(keys, numbers, strict=True), key=lambda row: row[1])]
    counts = [len(group) for group in rows]
    if counts != [shard.num_rows for shard in shards]:
        size = f"{count_of(len(keys), 'row')} in {count_of(len(counts), 'shard')}"
        what = f"it has {size}, the manifest says {sum(s.num_rows for s in shards)}"
        return [*found, Problem(info.file, f"{what} in {len(shards)}")], []
    return found, rows


def _keys_problems(folder: pathlib.Path, info: IndexInfo, rows: Sequence[Sequence[str]]) -> list[Problem]:
    """Return the defects of the sorted key hashes of a split; `rows` has the keys of each shard."""
    if what := unreadable(folder, info.file):
        return [Problem(info.file, what)]
    if not info.is_whole(folder / info.file):
        return [Problem(info.file, "its content differs from the manifest's checksum")]
    hashes = np.array([key_hash(key) for keys in rows for key in keys], np.uint64)
    digest = xxhash.xxh3_128()
    for piece in packed_hashes(len(hashes), hashes.__getitem__):
        digest.update(piece)
    if rows and digest.hexdigest() != info.checksum:
        return [Problem(info.file, f"it leads to other rows than those of {index_file(info.split)}")]
    return []


def _key_problems(info: ShardInfo, keys: Sequence[str], rows: Sequence[str]) -> list[Problem]:
    """Return where the rows in the index differ from those whose records are in a shard, in order."""
    stored = [row_key for row_key, _, _ in row_runs(keys)]
    if info.num_done < info.num_rows:  # the index also lists rows without records
        left = iter(rows)
        wrong = next((key for key in stored if key not in left), None)
        if wrong is None and len(stored) == info.num_done:
            return []
        what = f"the row of record {wrong!r} is not where the index has it" if wrong else "other rows gave no record"
        return [Problem(index_file(info.split), f"{what}, in {info.file}")]
    pairs = zip(stored, rows, strict=False)
    place = next((number for number, (key, row) in enumerate(pairs) if key != row), min(len(stored), len(rows)))
    if place == len(stored) == len(rows):
        return []
    key = repr(stored[place]) if place < len(stored) else "no record"
    row = repr(rows[place]) if place < len(rows) else "no row"
    return [Problem(index_file(info.split), f"row {place} of {info.file} is {row}, the shard holds {key} there")]


def _foreign(
    names: Collection[str], manifest: Manifest, formats: Iterable[ShardFormat], sidecars: Collection[str]
) -> list[str]:
    """Return files that are not in the manifest but have names that pattern-matching readers would pick up."""
    known = {os.path.basename(name) for info in manifest.all_files for name in (info.file, info.index_file)}
    known |= {*sidecar_names(manifest), *sidecars, *manifest.going}
    endings = tuple(f".{ending}" for ending in (*(made.extension for made in formats), "idx", "offsets"))
    mine = {name for name in names if name.startswith(f"{manifest.name}-") and name.endswith(endings)}
    indexed = {*manifest.index_infos, *manifest.going}
    rows = {name for name in names if name.startswith(f"{INDEX_FOLDER}/") and name.endswith((".index", ".keys"))}
    return [*sorted(mine - known), *sorted(rows - indexed)]
