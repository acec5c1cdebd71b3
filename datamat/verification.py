"""Compare a finished directory with its manifest, byte for byte and record for record.

    manifest.json        against its own digest                       changed since it was written?
    index/SPLIT.parquet  against size and checksum in the manifest    and its keys against those of the records
    a shard              against size, checksum, counts, key digest   each record against its own checksums
    its .idx             against where the records are
    sidecars             against what the manifest gives; see `datamat.interop`

What is looked at is only read, never unpickled or run; what others may have planted (pipes, devices, numbers that would
fill the memory) is a problem in the report like any other damage.
"""

from __future__ import annotations

import dataclasses
import html
import pathlib
from itertools import groupby
from typing import TYPE_CHECKING

from datamat.errors import CorruptDataError, OptionError
from datamat.formats import get_format
from datamat.index_files import read_index_file
from datamat.interop import sidecar_names, sidecar_problems
from datamat.manifest import MANIFEST_FILE, Manifest, manifest_bytes
from datamat.shard_check import Problem, ShardCheck, unreadable
from datamat.storage import digest_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.formats import ShardFormat
    from datamat.manifest import IndexInfo, ShardInfo
    from datamat.shard_check import Recomputed

__all__ = ["VerifyReport", "examine", "verify"]


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found. `str` of it names every damaged file, and the record where one can be told.

    Attributes:
        path: the directory.
        num_shards: shards that were looked at, in every format.
        num_records: records that the manifest tells of.
        found: each damage.
        num_formats: in which the records are there.
    """

    path: pathlib.Path
    num_shards: int
    num_records: int
    found: tuple[Problem, ...]
    num_formats: int = 1

    @property
    def ok(self) -> bool:
        """Whether everything is as the manifest says."""
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
            formats = f" in {self.num_formats} formats" if self.num_formats > 1 else ""
            size = f"{self.num_shards} shards{formats}, {self.num_records:,} records"
            return f"{self.path}: {size}: all as the manifest says"
        count = f"{len(self.found)} problem{'' if len(self.found) == 1 else 's'}"
        return "\n".join([f"{self.path}: {count}:", *(f"  {line}" for line in self.problems)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def verify(path: str | os.PathLike[str], deep: bool = False) -> VerifyReport:
    """Compare a directory with its manifest: files, sizes, checksums, counts, keys and their order, and each record.

    Every byte is read, and every record tested against the checksums that its format gives it.

    Args:
        path: a finished directory.
        deep: also decode every record as the features say, pixels included.

    Returns:
        The report; it raises nothing for damage, not even of the manifest.

    Raises:
        OutputError: there is no manifest: the run is not finished.

    Example:
        >>> print(verify("out/camvid"))   # doctest: +SKIP
        out/camvid: 3 shards, 256 records: all as the manifest says
    """
    return examine(pathlib.Path(path), deep=deep, recomputed=None)


def examine(folder: pathlib.Path, *, deep: bool, recomputed: Recomputed | None) -> VerifyReport:
    """Do what `verify` does, and ask `recomputed` about every record, with its key and columns: "" if it is right."""
    try:
        manifest = Manifest.read(folder, strict=False)
        formats = {name: get_format(name).with_features(manifest.features) for name in manifest.by_format}
    except (CorruptDataError, OptionError) as error:
        told = str(error).removeprefix(f"{folder / MANIFEST_FILE} ")
        return VerifyReport(folder, 0, 0, (Problem(MANIFEST_FILE, told),))
    found = _manifest_problems(folder, manifest)
    rows: dict[str, list[list[str]]] = {}
    for entry in manifest.index:
        problems, rows[entry.split] = _index_problems(folder, entry, manifest.splits.get(entry.split, ()))
        found += problems
    for name, shard_format in formats.items():
        mine = manifest.of_format(name)
        check = ShardCheck(folder, mine.shards, mine.features, shard_format, deep=deep, recomputed=recomputed)
        found += _shard_problems(check, mine, rows)
    found += [Problem(name, "not in the manifest; remove it") for name in _foreign(folder, manifest, formats.values())]
    if not found:  # they are compared with manifest and shards, which must be whole
        found += [Problem(name, told) for name, told in sidecar_problems(folder, manifest).items()]
    return VerifyReport(folder, len(manifest.shards), manifest.num_records, tuple(found), len(formats))


def _shard_problems(check: ShardCheck, manifest: Manifest, rows: Mapping[str, list[list[str]]]) -> list[Problem]:
    """Return what is wrong with the shards of one format; `rows` has the keys of the rows of each, by split."""
    found = []
    for split, infos in manifest.splits.items():
        for number, info in enumerate(infos):
            problems, keys = check.problems(info)
            found += problems
            if keys is not None and number < len(rows.get(split, ())):
                found += _key_problems(info, keys, rows[split][number])
    return found


def _manifest_problems(folder: pathlib.Path, manifest: Manifest) -> list[Problem]:
    found = []
    if manifest.render() != manifest_bytes(folder):
        found.append(Problem(MANIFEST_FILE, "changed since it was written: it does not have its digest"))
    if {info.split for info in manifest.index} != set(manifest.splits):
        found.append(Problem(MANIFEST_FILE, "the splits of its index are not those of its shards"))
    files = [info.file for info in manifest.all_files]
    twice = sorted({file for file in files if files.count(file) > 1}) if len(set(files)) < len(files) else []
    found += [Problem(MANIFEST_FILE, f"tells of {file} twice") for file in twice]
    told = [_told_of(info) for info in manifest.shards]
    odd = [name for name, infos in manifest.also.items() if [_told_of(info) for info in infos] != told]
    return found + [
        Problem(MANIFEST_FILE, f"tells of other records in {name} than in {manifest.format}") for name in odd
    ]


def _told_of(info: ShardInfo) -> tuple[object, ...]:
    """Return what an entry tells of records, whatever their format."""
    counts = (info.num_rows, info.num_records, info.num_failed)
    return (info.name, info.split, *counts, info.key_digest, info.fingerprint)


def _index_problems(
    folder: pathlib.Path, info: IndexInfo, shards: Sequence[ShardInfo]
) -> tuple[list[Problem], list[list[str]]]:
    """Return what is wrong with an index file, and the keys of the rows of each shard, if that can be read."""
    path = folder / info.file
    if told := unreadable(path):
        return [Problem(info.file, told)], []
    is_same = path.stat().st_size == info.num_bytes and digest_file(path) == info.checksum
    found = [] if is_same else [Problem(info.file, "its content differs from the manifest's checksum")]
    try:
        table = read_index_file(path, ["key", "shard"])
        keys, numbers = table["key"].to_pylist(), table["shard"].to_pylist()
    except (CorruptDataError, KeyError, ValueError) as error:
        return [*found, Problem(info.file, f"it cannot be read: {error}")], []
    rows = [[key for key, _ in group] for _, group in groupby(zip(keys, numbers, strict=True), key=lambda row: row[1])]
    counts = [len(group) for group in rows]
    if counts != [shard.num_rows for shard in shards]:
        told = f"it has {len(keys)} rows in {len(counts)} shards, the manifest says {sum(s.num_rows for s in shards)}"
        return [*found, Problem(info.file, f"{told} in {len(shards)}")], []
    return found, rows


def _key_problems(info: ShardInfo, keys: Sequence[str], rows: Sequence[str]) -> list[Problem]:
    """Return where the rows of the index are not those whose records a shard holds, in their order."""
    stored = [key for key, _ in groupby(key.partition("#")[0] for key in keys)]
    if info.num_failed:  # rows that gave no record are in the index all the same
        left = iter(rows)
        wrong = next((key for key in stored if key not in left), None)
        if wrong is None and len(stored) == info.num_rows - info.num_failed:
            return []
        told = f"the row of record {wrong!r} is not where the index has it" if wrong else "other rows failed"
        return [Problem(f"index/{info.split}.parquet", f"{told}, in {info.file}")]
    pairs = zip(stored, rows, strict=False)
    place = next((number for number, (key, row) in enumerate(pairs) if key != row), min(len(stored), len(rows)))
    if place == len(stored) == len(rows):
        return []
    key = repr(stored[place]) if place < len(stored) else "no record"
    row = repr(rows[place]) if place < len(rows) else "no row"
    return [Problem(f"index/{info.split}.parquet", f"row {place} of {info.file} is {row}, the shard holds {key} there")]


def _foreign(folder: pathlib.Path, manifest: Manifest, formats: Iterable[ShardFormat]) -> list[str]:
    """Return files that the manifest does not know, under names that a reader by pattern would take."""
    known = {name for info in manifest.all_files for name in (info.file, info.index_file)} | sidecar_names(manifest)
    endings = [*(made.extension for made in formats), "idx", "offsets"]
    found = {entry.name for ending in endings for entry in folder.glob(f"*.{ending}")}
    mine = {name for name in found if name.startswith(f"{manifest.name}-")}
    indexed = {info.file for info in manifest.index}
    rows = {f"index/{entry.name}" for entry in folder.glob("index/*.parquet")}
    return [*sorted(mine - known), *sorted(rows - indexed)]
