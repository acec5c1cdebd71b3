"""The manifest of a finished directory, and the entries of shards that are finished before it is written."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import xxhash

from datamat.directory.counts import Counts
from datamat.directory.files import (
    WORK,
    commit,
    commit_json,
    digest_file,
    parse_json,
    read_json,
    render_json,
)
from datamat.directory.keys import DATASET_NAME, SPLIT_NAME, ShardName, is_shard_file
from datamat.errors import CorruptDataError, OptionError, OutputError, SchemaError, count_of
from datamat.features import Features, Statistics
from datamat.features.statistics import check_lines, summarized
from datamat.folders import AbsentError, Folder, LocalFolder
from datamat.folders.local import expand_home, open_regular, read_regular, regular_path, version_of
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.formats import Buffer

# ---------------------------------------------------------------- manifest
#
# The description of a finished directory: `manifest.json`, written last and read first.
#
# JSON only. It contains no time, host or number of workers: the same data gives the same manifest, byte for byte.


MANIFEST_FILE = "manifest.json"
CONVERTED = "converted_from"  # key of `made_by` in datasets made by `convert`
INDEX_FOLDER = "_index"
MOST_MANIFEST_BYTES = 1 << 28  # half a million shards; larger files are not ours
_VERSION = 2
_CHECKSUM = re.compile(r"[0-9a-f]{32}\Z")  # used in names of copies of files
_END_BYTES = 4096  # of a shard, at its beginning and before its trailer, that are compared when it is opened
_LEAST_SHARED_BYTES = 32 << 20  # smallest file read by several threads: 10 ms of work for one
_MOST_THREADS = 8
_READ_BYTES = 1 << 20
_MOST = 1 << 62  # largest number: larger ones could overflow in computations
_RUN_FOLDER = "run-[0-9][0-9][0-9][0-9][0-9]"
_WAITING = re.compile(rf"\{WORK}/run-\d{{5}}/(?:{INDEX_FOLDER}/)?[\w.-]+\Z")


def summarized_fields(features: Features, known: Statistics | None) -> dict[str, dict[str, Any]] | None:
    """Return the known statistics of each field; None if there are none for the records."""
    if known is None:
        return None
    return {
        name: summarized(known.fields[name], feature.class_names())
        for name, feature in features.items()
        if known.fields.get(name)
    }


class FilePart(NamedTuple):
    """A range of a file, and the XXH3-128 digest of its bytes as 32 hex digits."""

    num_bytes: int
    digest: str


def part_of(data: Buffer) -> FilePart:
    """Return the size and digest of some bytes."""
    return FilePart(len(data), xxhash.xxh3_128_hexdigest(data))


def ends_of(file: BinaryIO, num_bytes: int, trailer_bytes: int = 0) -> tuple[FilePart, FilePart]:
    """Return the first and last part of a complete shard, by which readers recognise it.

    The last part includes the whole trailer: in Parquet it gives the place and the range of each column.

    Args:
        file: the shard, open for reading.
        num_bytes: its size.
        trailer_bytes: bytes after the last record.
    """
    head = min(_END_BYTES, num_bytes)
    tail = min(_END_BYTES + trailer_bytes, num_bytes)
    return part_of(_read_at(file, 0, head)), part_of(_read_at(file, num_bytes - tail, tail))


def _read_at(file: BinaryIO, start: int, num_bytes: int) -> bytes:
    file.seek(start)
    return file.read(num_bytes)


def tree_checksum(parts: Iterable[FilePart]) -> str:
    """Return the checksum of a file from the digests of its parts: XXH3-128 of a line "SIZE DIGEST" for each.

    Example:
        >>> tree_checksum([FilePart(3, "0" * 32)])
        'd89b5a2dbdef2b79eacb906bf775146f'
    """
    return xxhash.xxh3_128_hexdigest("".join(f"{part.num_bytes} {part.digest}\n" for part in parts).encode())


class TreeHash:
    """Computes the `tree_checksum` of a file incrementally.

    Args:
        parts: the expected parts, whose sizes define the cuts; further bytes form another part.
    """

    def __init__(self, parts: Iterable[FilePart]) -> None:
        self._sizes = iter([part.num_bytes for part in parts])
        self._found: list[FilePart] = []
        self._digest, self._count = xxhash.xxh3_128(), 0
        self._left: int | None = next(self._sizes, None)

    def update(self, data: Buffer) -> None:
        """Add the next bytes."""
        rest = memoryview(data)
        while rest:
            while self._left == 0:
                self._end()
            piece = rest if self._left is None else rest[: self._left]
            self._digest.update(piece)
            self._count += len(piece)
            self._left = None if self._left is None else self._left - len(piece)
            rest = rest[len(piece) :]

    def hexdigest(self) -> str:
        """Return the checksum of all bytes."""
        return tree_checksum(self.parts())

    def parts(self) -> tuple[FilePart, ...]:
        """Return the completed parts; fewer than expected if the file is too short."""
        while self._left == 0:
            self._end()
        if self._count:
            self._end()
        return tuple(self._found)

    def _end(self) -> None:
        self._found.append(FilePart(self._count, self._digest.hexdigest()))
        self._digest, self._count = xxhash.xxh3_128(), 0
        self._left = next(self._sizes, None)


class _Hash(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


class _ListedFile:
    """The entry of a file in the manifest, with which its bytes can be compared."""

    __slots__ = ()
    num_bytes: int
    checksum: str

    if TYPE_CHECKING:

        @property
        def file(self) -> str: ...

    @property
    def extension(self) -> str:
        """The file's extension, without a leading dot."""
        return self.file.rpartition("/")[2].partition(".")[2]

    def hasher(self) -> _Hash:
        """Return the hasher for the bytes of the file."""
        return xxhash.xxh3_128()

    def checksum_of(self, path: str | os.PathLike[str]) -> str:
        """Return the checksum of a file on disk, computed as for this entry.

        Raises:
            OSError: it cannot be read.
            CorruptDataError: it is not a regular file.
        """
        return digest_file(path)

    def is_whole(self, path: str | os.PathLike[str]) -> bool:
        """Return True if a file has exactly the bytes of this entry; raise as `checksum_of` does."""
        return os.stat(path).st_size == self.num_bytes and self.checksum_of(path) == self.checksum


@frozen()
class ShardInfo(_ListedFile):
    """One finished file.

    Attributes:
        file: its name in the directory, or its path below it while it waits to be named, see `Manifest.placed`.
        split: name of the split that it belongs to.
        num_rows: number of its input rows: those that gave records, failed, or were left out.
        num_records: number of records in it.
        parts: size and XXH3-128 digest of each part of the file, in order; a part was written by one worker at a time.
        key_digest: `KeyDigest` of the keys of its records, in order.
        fingerprint: digest of everything that decides its bytes.
        head: size and digest of its first bytes, from `ends_of`.
        tail: the same for its last bytes.
        offsets: the same for its whole offsets file.
        num_failed: number of input rows that gave no record because they failed; the ledger says why.
        num_dropped: number of input rows of which every record was intentionally left out; the ledger says why.
        num_dropped_records: number of records that were intentionally left out from rows that gave others.
        index_file: name of its offsets file; "" stands for NAME.idx. With several formats, the second and later ones
            have FILE.offsets.
        inputs: digest of the content of its rows' input files, in order; "" if they have none.
        statistics: statistics of the values of its records, from `Statistics.to_lines`; () if unknown.
        num_bytes: size of the file.
        checksum: `tree_checksum` of its parts, 32 hex digits.
    """

    file: str
    split: str
    num_rows: int
    num_records: int
    parts: tuple[FilePart, ...]
    key_digest: str
    fingerprint: str
    head: FilePart
    tail: FilePart
    offsets: FilePart
    num_failed: int = 0
    index_file: str = ""
    inputs: str = ""
    num_dropped: int = 0
    num_dropped_records: int = 0
    statistics: tuple[str, ...] = ()
    num_bytes: int = dataclasses.field(init=False)
    checksum: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        parts = (*self.parts, self.head, self.tail, self.offsets)
        if not all(0 <= part.num_bytes < _MOST and _CHECKSUM.match(part.digest) for part in parts):
            raise CorruptDataError(f"shard entry {self.file!r}: a size or digest of it is not as datamat writes it")
        object.__setattr__(self, "num_bytes", sum(part.num_bytes for part in self.parts))
        object.__setattr__(self, "checksum", tree_checksum(self.parts))
        wrong = _wrong_fields(self)
        if not wrong and max(self.head.num_bytes, self.tail.num_bytes) > self.num_bytes:
            wrong = ["head or tail"]
        if not wrong and not is_shard_file(self.file):
            wrong = ["file"]
        if not wrong and not self.index_file:
            object.__setattr__(self, "index_file", f"{self.name}.idx")
        if not wrong and self.index_file not in (f"{self.name}.idx", f"{self.file}.offsets"):
            wrong = ["index_file"]
        if wrong or not SPLIT_NAME.match(self.split):
            raise CorruptDataError(
                f"shard entry {self.file!r}: {', '.join(wrong) or 'split'} is not as datamat writes it"
            )

    @property
    def offsets_info(self) -> OffsetsInfo:
        """Entry of its offsets file."""
        return OffsetsInfo(self.index_file, *self.offsets)

    @property
    def num_done(self) -> int:
        """Number of its input rows that gave records."""
        return self.num_rows - self.num_failed - self.num_dropped

    @property
    def lacks_records(self) -> bool:
        """Whether records are missing because rows failed or something was left out."""
        return bool(self.num_failed or self.num_dropped or self.num_dropped_records)

    @property
    def name(self) -> str:
        """The file's name without its extension: NAME-SPLIT-XXXXX-of-YYYYY."""
        return self.file.rpartition("/")[2].partition(".")[0]

    def at(self, file: str, index_file: str) -> ShardInfo:
        """Return the entry with the present paths of file and offsets, which differ from the listed ones."""
        found = copy.copy(self)
        object.__setattr__(found, "file", file)
        object.__setattr__(found, "index_file", index_file)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values, without fields that most entries lack."""
        names = [field.name for field in dataclasses.fields(self)]
        value = {name: getattr(self, name) for name in names if name not in _RARE or getattr(self, name)}
        ends = {name: _text_of(getattr(self, name)) for name in _ENDS}
        return {**value, **ends, "parts": [*map(_text_of, self.parts)]}

    @classmethod
    def from_json(cls, value: Any) -> ShardInfo:
        """Return the entry written by `to_json`; raise `CorruptDataError` for anything else."""
        try:
            given = {name: value[name] for name in value if name not in ("num_bytes", "checksum", "parts")}
            given["statistics"] = tuple(map(str, given.get("statistics", ())))
            given |= {name: _part_from(value[name]) for name in _ENDS}
            entry = cls(**given, parts=tuple(map(_part_from, value["parts"])))
            is_same = (entry.num_bytes, entry.checksum) == (value["num_bytes"], value["checksum"])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            if isinstance(error, CorruptDataError):
                raise
            raise CorruptDataError(f"shard entry {value!r}: {error!r}") from error
        if not is_same:
            raise CorruptDataError(f"shard entry {entry.file!r}: num_bytes or checksum is not that of its parts")
        check_lines(entry.statistics)
        return entry

    def hasher(self) -> TreeHash:
        """Return the hasher for the bytes of the file."""
        return TreeHash(self.parts)

    def differences(self, num_bytes: int, head: Buffer, tail: Buffer | None) -> dict[str, str]:
        """Return how a file differs from the one that was written: texts by "head", "size" and "tail".

        Args:
            num_bytes: size of the file.
            head: its first `head.num_bytes` bytes, if it has as many.
            tail: its last `tail.num_bytes` bytes, likewise; None to skip them.
        """
        found = {}
        if num_bytes != self.num_bytes:
            found["size"] = f"has {num_bytes} bytes, the manifest says {self.num_bytes}"
        if part_of(head) != self.head:
            found["head"] = f"begins with other bytes than the {self.head.num_bytes} that were written"
        if not found and tail is not None and part_of(tail) != self.tail:
            found["tail"] = f"ends with other bytes than the {self.tail.num_bytes} that were written"
        return found

    def differences_of(self, path: str | os.PathLike[str]) -> dict[str, str]:
        """Return the `differences` of a file on disk, reading a few KB of it.

        Raises:
            OSError: it cannot be read.
            CorruptDataError: it is not a regular file.
        """
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head, tail = min(self.head.num_bytes, size), min(self.tail.num_bytes, size)
            return self.differences(size, _read_at(file, 0, head), _read_at(file, size - tail, tail))

    def refuse(self, differences: Mapping[str, str], place: object) -> None:
        """Raise `CorruptDataError` if there are differences.

        Args:
            differences: result of `differences`.
            place: path or URL of the file, for the message.
        """
        if differences:
            raise CorruptDataError(
                f"{place} {next(iter(differences.values()))}: it is not the file that {MANIFEST_FILE} lists; copy the "
                "whole directory again, or run the job again, which rebuilds this shard"
            )

    def has_offsets(self, path: str | os.PathLike[str]) -> bool:
        """Return True if a file on disk holds the offsets of this shard's records."""
        with contextlib.suppress(OSError, CorruptDataError):
            return (os.stat(path).st_size, digest_file(path)) == self.offsets
        return False

    def path_in(self, folder: pathlib.Path) -> pathlib.Path:
        """Return the path to open for this shard, after checking that the file is this shard.

        Raises:
            OSError: it is missing or cannot be read.
            CorruptDataError: it is another file, not a file, or outside the directory.
        """
        path = regular_path(folder, self.file)
        self.refuse(self.differences_of(path), folder / self.file)
        return path

    def checksum_of(self, path: str | os.PathLike[str]) -> str:
        """Return the checksum of a file on disk, computed as for this entry; raise as `found_parts` does."""
        return tree_checksum(self.found_parts(path))

    def found_parts(self, path: str | os.PathLike[str]) -> list[FilePart]:
        """Return the actual parts of a file on disk, in the places of the expected ones, and last any further bytes.

        Parts beyond the end of the file have no bytes. Several threads read a large file, since neither reading nor
        XXH3 holds the GIL.

        Raises:
            OSError: it cannot be read.
            CorruptDataError: it is not a regular file.
        """
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            ends = [*itertools.accumulate(part.num_bytes for part in self.parts)]
            bounds = [min(end, size) for end in (0, *ends)] + ([size] if size > self.num_bytes else [])
            ranges = [(start, end - start) for start, end in itertools.pairwise(bounds)]
            if size < _LEAST_SHARED_BYTES or len(ranges) == 1:
                return [_next_part(file, num_bytes) for _, num_bytes in ranges]
        from concurrent.futures import ThreadPoolExecutor  # costs more than reading a small file

        with ThreadPoolExecutor(min(len(ranges), os.cpu_count() or 1, _MOST_THREADS)) as pool:
            return list(pool.map(lambda one: _found_part(path, *one), ranges))

    def intact_parts(self, path: str | os.PathLike[str]) -> list[bool]:
        """Return for each part whether it is intact in a file on disk; raise as `found_parts` does."""
        found = self.found_parts(path)
        return [one == part for part, one in itertools.zip_longest(self.parts, found[: len(self.parts)])]

    def damaged_ranges(self, path: str | os.PathLike[str]) -> list[tuple[int, int]]:
        """Return start and end (exclusive) of each part that differs in a file on disk.

        Raises:
            OSError: it cannot be read.
            CorruptDataError: it is not a regular file.
        """
        ends = itertools.accumulate(part.num_bytes for part in self.parts)
        rows = zip(self.parts, ends, self.intact_parts(path), strict=True)
        ranges = [(end - part.num_bytes, end) for part, end, is_intact in rows if not is_intact]
        size = os.stat(path).st_size
        return ranges + ([(self.num_bytes, size)] if size > self.num_bytes else [])


_ENDS = ("head", "tail", "offsets")
"""Fields of a shard that are a `FilePart`, stored as text in its entry."""


def _text_of(part: FilePart) -> str:
    return f"{part.num_bytes} {part.digest}"


def _part_from(text: str) -> FilePart:
    size, digest = text.split()
    return FilePart(int(size), digest)


def _next_part(file: BinaryIO, num_bytes: int) -> FilePart:
    digest, left = xxhash.xxh3_128(), num_bytes
    while left and (block := file.read(min(left, _READ_BYTES))):
        digest.update(block)
        left -= len(block)
    return FilePart(num_bytes, digest.hexdigest())


def _found_part(path: str | os.PathLike[str], start: int, num_bytes: int) -> FilePart:
    return FilePart(num_bytes, digest_file(path, start=start, num_bytes=num_bytes))


ShardFiles: TypeAlias = tuple[ShardInfo, ...]
"""The files of one shard, one for each format of the run: all hold the same records."""


def counts_of(files: ShardFiles) -> Counts:
    """Return the counts of a shard; the size is that of all its files."""
    return dataclasses.replace(Counts.of(files[0]), num_bytes=sum(info.num_bytes for info in files))


def file_names(shard: str, extensions: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of a shard's files and of their offsets, in the order of the formats.

    The first offsets file has the name that DALI uses for TFRecord; FILE.idx would be DALI's own index of a tar file.

    Args:
        shard: name of the shard, without extension.
        extensions: extension of each format, without a leading dot.

    Example:
        >>> file_names("set-train-00000-of-00001", ["tfrecord", "tar"])[1]
        ('set-train-00000-of-00001.tar', 'set-train-00000-of-00001.tar.offsets')
    """
    files = [f"{shard}.{extension}" for extension in extensions]
    return [(file, f"{file}.offsets" if number else f"{shard}.idx") for number, file in enumerate(files)]


def under_name(files: ShardFiles, shard: str, split: str) -> ShardFiles:
    """Return the entries of a shard's files under the name of another shard with the same content."""
    names = file_names(shard, [info.extension for info in files])
    return tuple(
        dataclasses.replace(info, file=file, index_file=index, split=split)
        for info, (file, index) in zip(files, names, strict=True)
    )


def index_file(split: str) -> str:
    """Return the path, below a directory, of the index of a split.

    It is Parquet, but no reader may mistake it for data. It does not end in `.parquet`, which would attract readers
    that go by extension (Hugging Face `datasets`, DuckDB, polars), and its folder begins with an underscore, which
    hides it from readers that take all other files (Arrow, Spark).
    """
    return f"{INDEX_FOLDER}/{split}.index"


def keys_file(split: str) -> str:
    """Return the path, below a directory, of the file that maps the keys of a split to its rows."""
    return f"{INDEX_FOLDER}/{split}.keys"


def by_shard(infos: Iterable[ShardInfo]) -> dict[str, ShardFiles]:
    """Return the files of each shard, by name."""
    found: dict[str, list[ShardInfo]] = {}
    for info in infos:
        found.setdefault(info.name, []).append(info)
    return {name: tuple(files) for name, files in found.items()}


@frozen()
class OffsetsInfo(_ListedFile):
    """The offsets file of a shard: its name in the directory, size and XXH3-128 digest."""

    file: str
    num_bytes: int
    checksum: str


@frozen()
class IndexInfo(_ListedFile):
    """One file of the index: `_index/SPLIT.index`, or `_index/SPLIT.keys`.

    Attributes:
        split: name of the split whose rows it holds.
        num_bytes: size of the file.
        checksum: XXH3-128 digest of the file, 32 hex digits.
        kind: "index" for the rows, "keys" for the sorted hashes of their keys.
        place: its path below the directory while it waits to be named, see `Manifest.placed`; "" otherwise.
    """

    split: str
    num_bytes: int
    checksum: str
    kind: str = "index"
    place: str = ""

    def __post_init__(self) -> None:
        wrong = _wrong_fields(self)
        if not wrong:
            wrong = ["kind"] if self.kind not in _INDEX_FILES else [] if SPLIT_NAME.match(self.split) else ["split"]
        if wrong:
            raise CorruptDataError(f"index entry {self.split!r}: {', '.join(wrong)} is not as datamat writes it")

    @property
    def name(self) -> str:
        """Its final path below the directory."""
        return _INDEX_FILES[self.kind](self.split)

    @property
    def file(self) -> str:
        """Its present path below the directory."""
        return self.place or self.name

    def is_there(self, folder: pathlib.Path) -> bool:
        """Return True if a directory has this file."""
        with contextlib.suppress(OSError, CorruptDataError):
            return self.is_whole(folder / self.file)
        return False

    @classmethod
    def of_file(cls, path: pathlib.Path) -> IndexInfo:
        """Return the entry of an existing file."""
        return cls(path.stem, path.stat().st_size, digest_file(path), path.suffix[1:])


_INDEX_FILES = {"index": index_file, "keys": keys_file}
"""The index files of a split, by kind, which is also the extension."""


_OF_INDEX = ("split", "num_bytes", "checksum", "kind")
"""Fields in the entry of an index file."""

_RARE = frozenset({"inputs", "num_dropped", "num_dropped_records", "statistics"})
"""Optional fields in the entry of a shard."""


def _wrong_fields(entry: ShardInfo | IndexInfo) -> list[str]:
    """Return the names of fields with a wrong type, a number out of range, or an invalid checksum."""
    wrong = []
    for name, is_text in _ARE_TEXTS[type(entry)].items():
        value = getattr(entry, name)
        if type(value) is not str if is_text else type(value) is not int or not 0 <= value < _MOST:
            wrong.append(name)
    return wrong or ([] if _CHECKSUM.match(entry.checksum) else ["checksum"])


ListedFile: TypeAlias = ShardInfo | OffsetsInfo | IndexInfo
"""A file in the manifest."""

_ARE_TEXTS = {
    kind: {field.name: field.type == "str" for field in dataclasses.fields(kind) if field.type in ("str", "int")}
    for kind in (ShardInfo, IndexInfo)
}
"""Fields of an entry that are texts rather than numbers, by class."""


@frozen(slots=False)
class Manifest:
    """Everything that is known about a finished directory without opening a shard.

    Attributes:
        name: name of the dataset.
        format: name of the shard format; of several, the default for readers.
        features: the schema of the records.
        shards: every file of that format, in the order of splits and numbers.
        seed: base seed of the run; with the key it decided every random draw.
        copies: number of records per row, by split.
        augmented: splits whose records were drawn by a transform, so that their keys are KEY#COPY.
        made_by: names of the writer and the transform; their digests and the packages are among the ingredients.
        index: the index files: for each split its rows, and the hashes of their keys.
        ingredients: digests of everything except rows that determined the output; see `datamat.plan.digests`.
        also: files with the same records in further formats, by name of the format, in the same order.
        generations: for a set with appended rows, the number of shards, by split, of the first run and of each append.
        removed: keys of rows that were dropped from the set in place, and of records of rows that keep others.
        edited: names of the fields that were changed, added or removed in place.
        moving: where listed files wait for their final names, by name: places below the directory. A file is at one of
            both; see `datamat.directory.publication`.
        going: files of the previous set to delete: their versions by name.
    """

    name: str
    format: str
    features: Features
    shards: tuple[ShardInfo, ...]
    seed: int = 0
    copies: Mapping[str, int] = dataclasses.field(default_factory=dict)
    augmented: tuple[str, ...] = ()
    made_by: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    index: tuple[IndexInfo, ...] = ()
    ingredients: Mapping[str, str] = dataclasses.field(default_factory=dict)
    also: Mapping[str, tuple[ShardInfo, ...]] = dataclasses.field(default_factory=dict)
    generations: tuple[Mapping[str, int], ...] = ()
    removed: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    moving: Mapping[str, str] = dataclasses.field(default_factory=dict)
    going: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def by_format(self) -> dict[str, tuple[ShardInfo, ...]]:
        """Every file, by name of the format; the first format is the default for readers."""
        return {self.format: self.shards, **self.also}

    @property
    def all_files(self) -> tuple[ShardInfo, ...]:
        """Every file of every format."""
        return tuple(info for infos in self.by_format.values() for info in infos)

    @property
    def file_names(self) -> set[str]:
        """The names of all files of the set: shards, offsets and index."""
        return {name for info in self.all_files for name in (info.file, info.index_file)} | self.index_infos.keys()

    def placed(self, folder: Folder) -> Manifest:
        """Return the manifest for readers of a folder, with the present path of each moving file.

        Of its final name and its waiting place, the one whose size and digests match counts.
        """
        if not self.moving:
            return self

        def path_of(name: str, num_bytes: int, *ends: tuple[int, FilePart]) -> str:
            if name not in self.moving:
                return name
            there = folder.stat(name)
            is_there = there is not None and there.num_bytes == num_bytes
            is_there = is_there and all(
                part_of(folder.read_range(name, start, start + part.num_bytes).content) == part for start, part in ends
            )
            return name if is_there else self.moving[name]

        def shard_at(info: ShardInfo) -> ShardInfo:
            ends = (0, info.head), (info.num_bytes - info.tail.num_bytes, info.tail)
            return info.at(
                path_of(info.file, info.num_bytes, *ends),
                path_of(info.index_file, info.offsets.num_bytes, (0, info.offsets)),
            )

        def index_at(info: IndexInfo) -> IndexInfo:
            path = path_of(info.name, info.num_bytes, (0, FilePart(info.num_bytes, info.checksum)))
            return dataclasses.replace(info, place="" if path == info.name else path)

        return dataclasses.replace(
            self,
            shards=tuple(map(shard_at, self.shards)),
            also={name: tuple(map(shard_at, infos)) for name, infos in self.also.items()},
            index=tuple(map(index_at, self.index)),
            moving={},
        )

    def of_format(self, name: str) -> Manifest:
        """Return the manifest reduced to one of its formats.

        Raises:
            OptionError: the directory does not have that format.
        """
        if name not in self.by_format:
            raise OptionError(
                f"{self.name!r} is not there in the format {name!r}, only in {', '.join(self.by_format)}; name one"
            )
        return dataclasses.replace(self, format=name, shards=self.by_format[name], also={})

    @functools.cached_property
    def index_infos(self) -> dict[str, IndexInfo]:
        """The entries of the index files, by final path."""
        return {info.name: info for info in self.index}

    @functools.cached_property
    def splits(self) -> dict[str, tuple[ShardInfo, ...]]:
        """The files of each split, in order."""
        found: dict[str, list[ShardInfo]] = {}
        for shard in self.shards:
            found.setdefault(shard.split, []).append(shard)
        return {split: tuple(shards) for split, shards in found.items()}

    @property
    def has_one_count(self) -> bool:
        """Whether the names of all shards of a split hold their number: not where some were appended in a store."""
        return all(
            ShardName.parse(shard.name).count == len(shards) for shards in self.splits.values() for shard in shards
        )

    @property
    def num_records(self) -> int:
        """Number of records of all splits."""
        return sum(shard.num_records for shard in self.shards)

    @property
    def counts(self) -> Counts:
        """Totals of all shards; the size is that of all formats."""
        return dataclasses.replace(Counts.of(*self.shards), num_bytes=self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of all shards, of all formats."""
        return sum(shard.num_bytes for shard in self.all_files)

    @functools.cached_property
    def statistics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Statistics of each field, by split and field; splits with incomplete statistics are left out.

        Counts of classes (`classes` of labels, `pixels` of masks) are dicts by class name. Numbers are dicts of
        `count`, `min`, `max`, `mean`, `std` (of n), for lengths also `histogram` by powers of two: `height`, `width`,
        `length`, `characters`, `tokens`, `boxes`, `seconds`, `value`. `channels` of images is a list of such dicts, one
        for each channel. `missing` is an int.

        Example:
            >>> Manifest.read("out/camvid").statistics["train"]["label"]["classes"]   # doctest: +SKIP
            {'sky': 1201, 'road': 367}
        """
        return {
            split: found
            for split, infos in self.splits.items()
            if (found := summarized_fields(self.features, Statistics.total(info.statistics for info in infos)))
            is not None
        }

    def __repr__(self) -> str:
        splits = ", ".join(f"{name} {sum(info.num_records for info in infos):,}" for name, infos in self.splits.items())
        size = f"{count_of(self.num_records, 'record')}, {self.num_bytes / 1e6:,.1f} MB"
        shards = count_of(len(self.shards), "shard")
        return f"Manifest({self.name!r}, {'+'.join(self.by_format)}: {shards}, {size}: {splits})"

    def _repr_html_(self) -> str:
        from datamat.directory.display import Table, feature_table, render_html, statistics_table

        facts = [
            ("format", ", ".join(self.by_format)),
            ("size", f"{self.num_bytes / 1e6:,.1f} MB in {count_of(len(self.all_files), 'file')}"),
            ("seed", self.seed),
            *((str(name), made) for name, made in self.made_by.items()),
        ]
        rows = [
            [split, len(infos), found.num_rows, found.num_failed, found.num_dropped, found.num_records]
            for split, infos in self.splits.items()
            for found in [Counts.of(*infos)]
        ]
        splits = Table(["split", "shards", "rows", "failed", "left out", "records"], rows)
        title = f"{self.name}: {count_of(self.num_records, 'record')}"
        return render_html(title, facts, [splits, feature_table(self.features), statistics_table(self.statistics)])

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        splits = {
            split: {
                "num_shards": len(shards),
                "num_rows": sum(shard.num_rows for shard in shards),
                "num_failed": sum(shard.num_failed for shard in shards),
                "num_records": sum(shard.num_records for shard in shards),
                **({"num_dropped": dropped} if (dropped := sum(shard.num_dropped for shard in shards)) else {}),
            }
            for split, shards in self.splits.items()
        }
        return {
            "datamat_manifest": _VERSION,
            "name": self.name,
            "format": self.format,
            "features": self.features.to_json(),
            "splits": splits,
            **({"statistics": statistics} if (statistics := self.statistics) else {}),
            "seed": self.seed,
            "copies": dict(self.copies),
            "augmented": list(self.augmented),
            "made_by": dict(self.made_by),
            "index": [{name: getattr(info, name) for name in _OF_INDEX} for info in self.index],
            "ingredients": dict(self.ingredients),
            **({"generations": [dict(counts) for counts in self.generations]} if self.generations else {}),
            **({"removed": list(self.removed)} if self.removed else {}),
            **({"edited": list(self.edited)} if self.edited else {}),
            **({"moving": dict(self.moving)} if self.moving else {}),
            **({"going": dict(self.going)} if self.going else {}),
            "shards": [shard.to_json() for shard in self.shards],
            # A list, since the order of formats matters, and keys are sorted.
            "also": [
                {"format": name, "shards": [shard.to_json() for shard in shards]} for name, shards in self.also.items()
            ],
        }

    def render(self) -> bytes:
        """Return the content of the file: the JSON values, and the digest of their lines.

        So any changed bit is detected.
        """
        content = render_json(self.to_json())
        line = _DIGEST_LINE % xxhash.xxh3_128_hexdigest(content).encode()
        place = content.index(b"\n", content.index(_LINE_BEFORE) + 1)
        return content[:place] + line + content[place:]

    def write(self, folder: pathlib.Path, *, through: pathlib.Path | None = None) -> None:
        """Write the manifest of `folder` atomically; `through` is as for `commit`."""
        with commit(folder / MANIFEST_FILE, through=through) as file:
            file.write(self.render())

    @classmethod
    def read(cls, folder: str | os.PathLike[str] | Folder, *, strict: bool = True) -> Manifest:
        """Return the manifest of a finished directory.

        Args:
            folder: path of the directory (`~` is your home folder), or an open folder.
            strict: refuse a manifest that was changed since it was written.

        Raises:
            AbsentError: there is no manifest, because the directory is not finished or not datamat's.
            OutputError: it cannot be read.
            CorruptDataError: it is damaged.

        Files that are not at their final names yet are listed with their present paths; see `placed`.
        """
        place = folder if isinstance(folder, Folder) else LocalFolder(pathlib.Path(expand_home(folder)))
        return cls.parse(content_of_manifest(place), place.place(MANIFEST_FILE), strict=strict).placed(place)

    @classmethod
    def parse(cls, content: bytes, path: str, *, strict: bool = True) -> Manifest:
        """Return the manifest from the content of its file, as `read` does; messages name `path`."""
        digest = xxhash.xxh3_128_digest(content)
        manifest = _PARSED.get(digest)
        if manifest is None:
            try:
                value = parse_json(content, path)
            except ValueError as error:
                raise CorruptDataError(f"{error}; restore it, or run the job again to rebuild it") from error
            manifest = _PARSED[digest] = cls._from_json(value, path)
        if strict and not _has_its_digest(content):
            raise CorruptDataError(
                f"{path} was changed since it was written: it does not have its digest; restore it, or run repair()"
            )
        return manifest

    @classmethod
    def _from_json(cls, value: Any, path: str) -> Manifest:
        try:
            if value["datamat_manifest"] != _VERSION:
                raise CorruptDataError(
                    f"{path} has version {value['datamat_manifest']!r}; this datamat reads {_VERSION}: make it again, "
                    "into another folder, or read it with the datamat that made it"
                )
            if not DATASET_NAME.match(value["name"]):
                raise ValueError(f"name {value['name']!r}")
            found = cls(
                name=value["name"],
                format=str(value["format"]),
                features=Features.from_json(value["features"]),
                shards=tuple(ShardInfo.from_json(shard) for shard in value["shards"]),
                seed=int(value["seed"]),
                copies={str(split): int(number) for split, number in value["copies"].items()},
                augmented=tuple(str(split) for split in value["augmented"]),
                made_by=dict(value["made_by"]),
                index=tuple(IndexInfo(**info) for info in value["index"]),
                ingredients={str(name): str(digest) for name, digest in value["ingredients"].items()},
                also={
                    str(other["format"]): tuple(ShardInfo.from_json(shard) for shard in other["shards"])
                    for other in value["also"]
                },
                generations=tuple(
                    {str(split): int(count) for split, count in counts.items()}
                    for counts in value.get("generations", ())
                ),
                removed=tuple(map(str, value.get("removed", ()))),
                edited=tuple(map(str, value.get("edited", ()))),
                moving={str(name): str(place) for name, place in value.get("moving", {}).items()},
                going={str(name): str(version) for name, version in value.get("going", {}).items()},
            )
            found._check_places()
        except (KeyError, TypeError, AttributeError, ValueError, SchemaError) as error:
            raise CorruptDataError(
                f"{path} is not a manifest of datamat ({error!r}); restore it or run again"
            ) from error
        return found

    def _check_places(self) -> None:
        """Raise `ValueError` for places that no run uses, since these files would be moved or deleted."""
        wrong = [name for name in (*self.moving, *self.going) if not _is_own_name(name)]
        wrong += [place for place in self.moving.values() if not _WAITING.match(place)]
        wrong += [info.place for info in self.index if info.place]
        if wrong:
            raise ValueError(f"moving or going {wrong[0]!r}")


def _is_own_name(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    kind = last.rpartition(".")[2]
    if folder:
        return folder == INDEX_FOLDER and kind in _INDEX_FILES
    return is_shard_file(name)


_PARSED: weakref.WeakValueDictionary[bytes, Manifest] = weakref.WeakValueDictionary()
"""Manifests in use, by digest of their content: a run over many shards reads its own several times."""

_LINE_BEFORE = b'\n "datamat_manifest": '
_DIGEST_LINE = b'\n "digest": "%b",'


def _has_its_digest(content: bytes) -> bool:
    """Return True if the content of a manifest's file is unchanged, without rendering it again."""
    start = content.find(b"\n", content.find(_LINE_BEFORE) + 1)
    end = start + len(_DIGEST_LINE % bytes(32))
    digest = xxhash.xxh3_128(content[:start])
    digest.update(content[end:])
    return content[start:end] == _DIGEST_LINE % digest.hexdigest().encode()


def is_manifest(content: bytes) -> bool:
    """Return True if the content of a file is or was a manifest of datamat, even if damaged."""
    return b'"datamat_manifest"' in content


def head_of(content: bytes) -> bytes:
    """Return the unique beginning of a manifest's file, up to its digest."""
    return content[: content.find(b"\n", content.find(_LINE_BEFORE) + 1) + len(_DIGEST_LINE % bytes(32))]


def content_of_manifest(folder: Folder) -> bytes:
    """Return the content of the manifest's file; raise as `Manifest.read` does."""
    try:
        found = folder.read_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES)
    except OutputError as error:
        if isinstance(error.__cause__, IsADirectoryError):  # this is damage, which `verify` reports and repair removes
            raise CorruptDataError(f"{folder.place(MANIFEST_FILE)} is a folder") from error
        raise
    if found is None:
        refuse_file(folder)
        remedy = "correct the path or URL, or finish its run"
        with contextlib.suppress(OutputError):  # permission to read may not include listing
            if folder.list(WORK, deep=True):
                remedy = "finish its run, which writes it last: run it again to resume"
        raise AbsentError(f"{folder} holds no {MANIFEST_FILE}; {remedy}")
    return found


def refuse_file(folder: Folder) -> None:
    """Raise `AbsentError` if a folder's path is a file or below one."""
    if (here := folder.local_path()) is not None:
        for path in (here, *here.parents):
            if path.is_file():
                raise AbsentError(f"{path} is a file, not a folder; give the folder that a run has written")


def manifest_bytes(folder: pathlib.Path) -> bytes:
    """Return the content of the manifest's file; raise `OSError`, or `ValueError` if it is far too large."""
    try:
        return read_regular(regular_path(folder, MANIFEST_FILE), max_bytes=MOST_MANIFEST_BYTES)
    except IsADirectoryError as error:
        raise CorruptDataError(f"{folder / MANIFEST_FILE} is a folder") from error


# ---------------------------------------------------------------- contents
#
# The shards of a finished directory for readers of one format, by split.


def formats_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the shards' formats."""
    return tuple(manifest.by_format)


def shards_of(manifest: Manifest, format_name: str) -> Mapping[str, tuple[ShardInfo, ...]]:
    """Return the files of a format, by split and in order; empty if the directory lacks the format."""
    return manifest.of_format(format_name).splits if format_name in manifest.by_format else {}


def shard_pattern(manifest: Manifest, split: str, shards: tuple[ShardInfo, ...]) -> str:
    """Return the shell pattern that matches the files of one split and one format, and no other file."""
    extension = shards[0].extension
    return f"{manifest.name}-{split}-*.{extension}"


# ---------------------------------------------------------------- shard entries
#
# Entries of finished shards that are not in a manifest yet.
#
# An entry, `SHARD.json`, lists the files of the shard, one for each format, like the manifest, and the version of each:
# a file with the same version was not written to since, and need not be read again. It is written atomically when all
# files are complete, before they get their names. It is in `.datamat/shards` if they get their names at once, and in
# the folder of the run, beside them, if they wait until a manifest is published.


def growing_path(entries: pathlib.Path, file: str) -> pathlib.Path:
    """Return the path of a shard's growing file, until its entry is written and it gets its name."""
    return entries / f"{file}.growing"


def run_folder(work: pathlib.Path) -> pathlib.Path:
    """Return the folder, in a `.datamat`, for files that wait to be published: that of an unfinished run, if any.

    It exists while a finished set is being changed.
    """
    return max(work.glob(_RUN_FOLDER), default=work / "run-00001")


def write_entry(entries: pathlib.Path, files: ShardFiles, place: Callable[[str], pathlib.Path] | None = None) -> None:
    """Write the entry of a shard atomically.

    Args:
        entries: folder of the entries.
        files: files of the shard.
        place: returns the present path of a complete and flushed file, given its name. None for files that must be read
            before they are trusted.
    """
    versions = {} if place is None else {info.file: version_of(place(info.file)) for info in files}
    value = {"files": [info.to_json() for info in files], "versions": versions}
    commit_json(entries / f"{files[0].name}.json", value)


def read_entry(path: str | os.PathLike[str]) -> ShardFiles | None:
    """Return the files in an entry; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # of JSON, and CorruptDataError, a subclass
        return tuple(ShardInfo.from_json(value) for value in read_json(path)["files"]) or None
    return None


def read_versions(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the version of each file in an entry; empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        return dict(read_json(path)["versions"])
    return {}


def read_entries(entries: pathlib.Path) -> dict[str, ShardFiles]:
    """Return the files of each shard with an entry in a folder, by name."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(entries) if name.endswith(".json"))
    found = (read_entry(os.path.join(entries, name)) for name in names)
    return {files[0].name: files for files in found if files}


def salvaged_shards(place: Folder) -> list[ShardInfo]:
    """Return the still readable file entries of a damaged manifest: the innermost objects of its text.

    Trust an entry only if the file has its checksum.
    """
    try:
        content = place.read_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES) or b""
    except (CorruptDataError, OutputError):  # it is no file, or cannot be read
        return []
    found = []
    for entry in re.findall(r"\{[^{}]*\}", content.decode(errors="replace")):
        with contextlib.suppress(ValueError):  # of JSON, and CorruptDataError, a subclass
            value = json.loads(entry)
            found += [ShardInfo.from_json(value)] if "key_digest" in value else []
    return found
