"""Compare a finished directory with its manifest, byte for byte and record for record."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from datamat.errors import CorruptDataError, InputError, SchemaError
from datamat.formats import Offsets, get_format
from datamat.manifest import KeyDigest, Manifest
from datamat.storage import digest_file

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from datamat.features import Features
    from datamat.formats import ShardFormat
    from datamat.manifest import ShardInfo

__all__ = ["VerifyReport", "verify"]


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found. `str` of it names every damaged file, and the record where one can be told.

    Attributes:
        path: the directory.
        num_shards: shards that were looked at.
        num_records: records that the manifest tells of.
        problems: one line for each damage.
    """

    path: pathlib.Path
    num_shards: int
    num_records: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as the manifest says."""
        return not self.problems

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path}: {self.num_shards} shards, {self.num_records:,} records: all as the manifest says"
        return "\n".join([f"{self.path}: {len(self.problems)} problems:", *(f"  {line}" for line in self.problems)])


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Compare a directory with its manifest: files, sizes, checksums; and each record of a shard that differs.

    A shard whose checksum is right holds the very bytes that were written; only its offsets and its first record, which
    must be as the features say, are looked at further. In one that differs, every record is read, so that the report
    names those that are damaged.

    Args:
        path: a finished directory.

    Returns:
        The report; it raises nothing for damaged shards.

    Raises:
        OutputError: there is no manifest: the run is not finished.
        CorruptDataError: the manifest itself cannot be read.

    Example:
        >>> print(verify("out/camvid"))   # doctest: +SKIP
        out/camvid: 3 shards, 256 records: all as the manifest says
    """
    folder = pathlib.Path(path)
    manifest = Manifest.read(folder, strict=False)
    shard_format = get_format(manifest.format)
    problems: list[str] = []
    for info in manifest.shards:
        problems += _problems_of(folder, info, manifest.features, shard_format)
    problems += [f"{name}: not in the manifest; remove it" for name in _foreign(folder, manifest, shard_format)]
    return VerifyReport(folder, len(manifest.shards), manifest.num_records, tuple(problems))


def _problems_of(folder: pathlib.Path, info: ShardInfo, features: Features, shard_format: ShardFormat) -> list[str]:
    path = folder / info.file
    problems: list[str] = []
    is_same = False
    try:
        is_same = path.stat().st_size == info.num_bytes and digest_file(path) == info.checksum
        if not is_same:
            problems.append(f"{info.file}: {_difference(path, info, shard_format)}")
        elif told := _mismatch(path, features, shard_format):
            problems.append(f"{info.file}: {told}")
    except OSError as error:
        problems.append(f"{info.file}: {error.strerror or error}")
    try:
        offsets = Offsets.from_text((folder / info.index_file).read_text("ascii"))
        if is_same and _offsets_differ(path, info, offsets, shard_format):
            problems.append(f"{info.index_file}: its offsets are not those of the records in {info.file}")
    except OSError as error:
        problems.append(f"{info.index_file}: {error.strerror or error}")
    except UnicodeDecodeError as error:
        problems.append(f"{info.index_file}: not text (byte {error.start})")
    except CorruptDataError as error:
        problems.append(f"{info.index_file}: {error}")
    return problems


def _mismatch(path: pathlib.Path, features: Features, shard_format: ShardFormat) -> str:
    """Return how the first record of a shard differs from the manifest's features, or nothing."""
    try:
        record = next(iter(shard_format.read(path)), {})
    except CorruptDataError as error:
        return f"its bytes are as the manifest says, but they do not read as {shard_format.name}: {error}"
    kinds = {name: value.dtype.name if isinstance(value, np.ndarray) else "bytes" for name, value in record.items()}
    if kinds != dict(features.columns):
        return f"its records hold {_listed(kinds)}, the manifest's features are {_listed(features.columns)}"
    try:
        features.decode(record)
    except (InputError, SchemaError) as error:
        return f"record 0 is not as the manifest's features say: {error}"
    return ""


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in sorted(kinds.items()))


def _difference(path: pathlib.Path, info: ShardInfo, shard_format: ShardFormat) -> str:
    """Return how a shard with a wrong size or checksum differs, as exactly as can be told."""
    size = path.stat().st_size
    keys = KeyDigest()
    try:
        for record in shard_format.read(path):
            key = record["key"]
            keys.add((key if isinstance(key, bytes) else bytes(key[0])).decode())
    except CorruptDataError as error:
        return str(error)
    except (KeyError, IndexError, UnicodeDecodeError) as error:
        return f"record {keys.count} is whole but not one of this data set ({error!r})"
    if keys.count != info.num_records:
        return f"found {keys.count} records, the manifest says {info.num_records}; {size} bytes for {info.num_bytes}"
    if keys.hexdigest() != info.key_digest:
        return "its records are whole, but they are not those of the manifest, or in another order"
    return "its records are whole and have the right keys, but their content differs from the manifest's checksum"


def _offsets_differ(path: pathlib.Path, info: ShardInfo, offsets: Offsets, shard_format: ShardFormat) -> bool:
    if len(offsets) != info.num_records:
        return True
    with open(path, "rb") as file:
        return shard_format.find_offsets(file, path=str(path)) != offsets


def _foreign(folder: pathlib.Path, manifest: Manifest, shard_format: ShardFormat) -> list[str]:
    """Return shards in the directory that the manifest does not know: a reader by pattern would take them."""
    known = {info.file for info in manifest.shards}
    found = {entry.name for entry in folder.glob(f"{manifest.name}-*.{shard_format.extension}")}
    return sorted(found - known)
