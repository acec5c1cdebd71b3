"""What a finished directory says of itself: `manifest.json`, written last and read first.

JSON only. It holds no time, host or number of workers: the same data gives the same manifest, byte for byte.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from datamat.errors import CorruptDataError, OptionError, OutputError, SchemaError, want_of_resources
from datamat.features import Features
from datamat.storage import commit, digest_file, parse_json, read_regular, render_json

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

__all__ = [
    "MANIFEST_FILE",
    "MOST_MANIFEST_BYTES",
    "IndexInfo",
    "KeyDigest",
    "Manifest",
    "ShardFiles",
    "ShardInfo",
    "by_shard",
    "file_names",
    "manifest_bytes",
]

MANIFEST_FILE = "manifest.json"
MOST_MANIFEST_BYTES = 1 << 28  # half a million shards; more is no file of ours
_VERSION = 1
# What names of files are made of: a manifest is read from wherever people got it, and nothing in it may lead elsewhere.
_NAME = re.compile(r"\w+(?:-\w+)*\Z")
_SPLIT = re.compile(r"\w+\Z")
_SHARD_FILE = re.compile(r"\w+(?:-\w+)*-\d{5}-of-\d{5}(?:\.\w+)+\Z")
_CHECKSUM = re.compile(r"[0-9a-f]{32}\Z")  # names copies of files
_MOST = 1 << 62  # of any number: larger ones overflow where they are computed with


@dataclasses.dataclass(frozen=True, slots=True)
class ShardInfo:
    """One finished file.

    Attributes:
        file: its name in the directory.
        split: the split that it belongs to.
        num_rows: input rows that are accounted for in it: those that gave records, and those that failed.
        num_records: records in it.
        num_bytes: its size.
        checksum: XXH3-128 of the whole file, 32 hex digits.
        key_digest: `KeyDigest` of the keys of its records, in order.
        fingerprint: digest of all that decides its bytes.
        num_failed: input rows that gave no record; the ledger says why.
        index_file: name of the file with the offsets of its records; "" stands for NAME.idx. Where the same records
            are there in several formats, files of the second and later ones have FILE.offsets.
    """

    file: str
    split: str
    num_rows: int
    num_records: int
    num_bytes: int
    checksum: str
    key_digest: str
    fingerprint: str
    num_failed: int = 0
    index_file: str = ""

    def __post_init__(self) -> None:
        wrong = _wrong_fields(self)
        if not wrong and not _SHARD_FILE.match(self.file):
            wrong = ["file"]
        if not wrong and not self.index_file:
            object.__setattr__(self, "index_file", f"{self.name}.idx")
        if not wrong and self.index_file not in (f"{self.name}.idx", f"{self.file}.offsets"):
            wrong = ["index_file"]
        if wrong or not _SPLIT.match(self.split):
            raise CorruptDataError(
                f"shard entry {self.file!r}: {', '.join(wrong) or 'split'} is not as datamat writes it"
            )

    @property
    def name(self) -> str:
        """The file's name without its extension: NAME-SPLIT-XXXXX-of-YYYYY."""
        return self.file.partition(".")[0]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> ShardInfo:
        """Return the entry that `to_json` wrote; raises `CorruptDataError` for anything else."""
        try:
            return cls(**value)
        except TypeError as error:
            raise CorruptDataError(f"shard entry {value!r}: {error}") from error


ShardFiles: TypeAlias = tuple[ShardInfo, ...]
"""The files of one shard, one for each format of the run: they hold the same records, and tell the same of them."""


def file_names(shard: str, extensions: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of the files of a shard and of their offsets, in the order of the formats.

    The first has the name that DALI is told for TFRecord; FILE.idx would be DALI's own index of a tar file.

    Args:
        shard: name without extension.
        extensions: of the formats.

    Example:
        >>> file_names("set-train-00000-of-00001", ["tfrecord", "tar"])[1]
        ('set-train-00000-of-00001.tar', 'set-train-00000-of-00001.tar.offsets')
    """
    files = [f"{shard}.{extension}" for extension in extensions]
    return [(file, f"{file}.offsets" if number else f"{shard}.idx") for number, file in enumerate(files)]


def by_shard(infos: Iterable[ShardInfo]) -> dict[str, ShardFiles]:
    """Return the files of each shard, by its name."""
    found: dict[str, list[ShardInfo]] = {}
    for info in infos:
        found.setdefault(info.name, []).append(info)
    return {name: tuple(files) for name, files in found.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class IndexInfo:
    """One file of the index: `index/SPLIT.parquet`.

    Attributes:
        split: whose rows it holds.
        num_bytes: its size.
        checksum: XXH3-128 of the whole file, 32 hex digits.
    """

    split: str
    num_bytes: int
    checksum: str

    def __post_init__(self) -> None:
        wrong = _wrong_fields(self)
        if wrong or not _SPLIT.match(self.split):
            raise CorruptDataError(
                f"index entry {self.split!r}: {', '.join(wrong) or 'split'} is not as datamat writes it"
            )

    @property
    def file(self) -> str:
        """Its path below the directory."""
        return f"index/{self.split}.parquet"

    @classmethod
    def of_file(cls, path: pathlib.Path) -> IndexInfo:
        """Return the entry of a file that is there."""
        return cls(path.stem, path.stat().st_size, digest_file(path))


def _wrong_fields(entry: ShardInfo | IndexInfo) -> list[str]:
    """Return the fields that are not of their type, numbers out of range, or no checksum."""
    values = {field.name: (getattr(entry, field.name), field.type) for field in dataclasses.fields(entry)}
    wrong = [
        name
        for name, (value, kind) in values.items()
        if (type(value) is not str if kind == "str" else type(value) is not int or not 0 <= value < _MOST)
    ]
    return wrong or ([] if _CHECKSUM.match(entry.checksum) else ["checksum"])


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All there is to know of a finished directory before a shard is opened.

    Attributes:
        name: of the data set.
        format: name of the shard format: of several, the one that readers take who do not ask for another.
        features: the schema.
        shards: every file of that format, in the order of splits and numbers.
        seed: of the run.
        copies: records per row, by split.
        augmented: the splits whose keys are KEY#COPY because a transform drew their records.
        made_by: what decided the output beside the rows: writer, transform, and the packages, as text.
        index: the files of the index, by split.
        ingredients: digests of what decided the output beside the rows; see `datamat.ingredients`.
        also: the files that hold the same records in further formats, by name of the format, in the same order.
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

    @property
    def by_format(self) -> dict[str, tuple[ShardInfo, ...]]:
        """Every file, by name of the format; the first is the one that readers take."""
        return {self.format: self.shards, **self.also}

    @property
    def all_files(self) -> tuple[ShardInfo, ...]:
        """Every file of every format."""
        return tuple(info for infos in self.by_format.values() for info in infos)

    def of_format(self, name: str) -> Manifest:
        """Return what the manifest would be if the directory held one of its formats alone.

        Raises:
            OptionError: the directory does not hold that format.
        """
        if name not in self.by_format:
            raise OptionError(f"{self.name!r} is not there in the format {name!r}, only in {', '.join(self.by_format)}")
        return dataclasses.replace(self, format=name, shards=self.by_format[name], also={})

    @property
    def splits(self) -> dict[str, tuple[ShardInfo, ...]]:
        """The files of each split, in order."""
        found: dict[str, list[ShardInfo]] = {}
        for shard in self.shards:
            found.setdefault(shard.split, []).append(shard)
        return {split: tuple(shards) for split, shards in found.items()}

    @property
    def num_records(self) -> int:
        """Number of records of all splits."""
        return sum(shard.num_records for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of all shards, of all formats."""
        return sum(shard.num_bytes for shard in self.all_files)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        splits = {
            split: {
                "num_shards": len(shards),
                "num_rows": sum(shard.num_rows for shard in shards),
                "num_failed": sum(shard.num_failed for shard in shards),
                "num_records": sum(shard.num_records for shard in shards),
            }
            for split, shards in self.splits.items()
        }
        return {
            "datamat_manifest": _VERSION,
            "name": self.name,
            "format": self.format,
            "features": self.features.to_json(),
            "splits": splits,
            "seed": self.seed,
            "copies": dict(self.copies),
            "augmented": list(self.augmented),
            "made_by": dict(self.made_by),
            "index": [dataclasses.asdict(info) for info in self.index],
            "ingredients": dict(self.ingredients),
            "shards": [shard.to_json() for shard in self.shards],
            # A list, because the order of the formats counts, and that of keys is not kept.
            "also": [
                {"format": name, "shards": [shard.to_json() for shard in shards]} for name, shards in self.also.items()
            ],
        }

    def render(self) -> bytes:
        """Return the content of the file: the JSON values and their digest, in the one form in which they are written.

        So a file that differs from this in any bit was not written so.
        """
        values = self.to_json()
        return render_json({**values, "digest": xxhash.xxh3_128_hexdigest(render_json(values))})

    def write(self, folder: pathlib.Path, *, through: pathlib.Path | None = None) -> None:
        """Write the manifest of `folder`, in one step; `through` is as for `commit`."""
        with commit(folder / MANIFEST_FILE, through=through) as file:
            file.write(self.render())

    @classmethod
    def read(cls, folder: str | os.PathLike[str], *, strict: bool = True) -> Manifest:
        """Return the manifest of a finished directory.

        Args:
            folder: the directory.
            strict: refuse a manifest that was changed since it was written, whatever it says now.

        Raises:
            OutputError: there is none: the directory is not finished, or not datamat's; or it cannot be read.
            CorruptDataError: there is one, and it is not as datamat writes it.
        """
        path = pathlib.Path(folder) / MANIFEST_FILE
        try:
            content = manifest_bytes(path.parent)
        except FileNotFoundError as error:
            begun = (path.parent / ".datamat").is_dir()
            state = "its run is not finished: run it again to go on" if begun else "datamat did not write there"
            raise OutputError(f"{path.parent} holds no {MANIFEST_FILE}; {state}") from error
        except OSError as error:
            raise want_of_resources(path, error) or OutputError(
                f"{path} cannot be read: {error.strerror or error}; let this process read it"
            ) from error
        except ValueError as error:
            raise CorruptDataError(f"{error}; restore it, or run the job again to write it anew") from error
        return cls.parse(content, str(path), strict=strict)

    @classmethod
    def parse(cls, content: bytes, path: str, *, strict: bool = True) -> Manifest:
        """Return the manifest that a file holds, as `read` does; `path` is where it lies, for messages."""
        try:
            value = parse_json(content, path)
        except ValueError as error:
            raise CorruptDataError(f"{error}; restore it, or run the job again to write it anew") from error
        manifest = cls._from_json(value, path)
        if strict and manifest.render() != content:
            raise CorruptDataError(
                f"{path} was changed since it was written: it does not have its digest; restore it, or run repair()"
            )
        return manifest

    @classmethod
    def _from_json(cls, value: Any, path: str) -> Manifest:
        try:
            if value["datamat_manifest"] != _VERSION:
                raise CorruptDataError(
                    f"{path} has version {value['datamat_manifest']!r}; this datamat reads {_VERSION}"
                )
            if not _NAME.match(value["name"]):
                raise ValueError(f"name {value['name']!r}")
            return cls(
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
            )
        except (KeyError, TypeError, AttributeError, ValueError, SchemaError) as error:
            raise CorruptDataError(
                f"{path} is not a manifest of datamat ({error!r}); restore it or run again"
            ) from error


def manifest_bytes(folder: pathlib.Path) -> bytes:
    """Return the manifest's file as it is; raises `OSError`, or `ValueError` where it is far too large for one."""
    return read_regular(folder / MANIFEST_FILE, max_bytes=MOST_MANIFEST_BYTES)


class KeyDigest:
    """A digest of a sequence of keys that can be put together from the digests of its runs.

    The keys' 128-bit XXH3 hashes are the coefficients of a polynomial over the prime field of 2**127 - 1, evaluated at
    a fixed point: it tells a lost, doubled, changed or moved key, and parts can be computed apart.

    Example:
        >>> whole, first, second = KeyDigest(["a", "b", "c"]), KeyDigest(["a"]), KeyDigest(["b", "c"])
        >>> (first + second).hexdigest() == whole.hexdigest()
        True
    """

    _PRIME = (1 << 127) - 1
    _POINT = 0x5851F42D4C957F2D14057B7EF767814F  # any fixed point; this is Knuth's and PCG's multiplier, joined

    __slots__ = ("count", "value")

    def __init__(self, keys: Iterable[str] = (), *, value: int = 0, count: int = 0) -> None:
        self.value = value
        self.count = count
        for key in keys:
            self.add(key)

    def add(self, key: str) -> None:
        """Append one key."""
        self.value = (self.value * self._POINT + xxhash.xxh3_128_intdigest(key.encode())) % self._PRIME
        self.count += 1

    def __add__(self, other: KeyDigest) -> KeyDigest:
        """Return the digest of these keys followed by the other's."""
        moved = self.value * pow(self._POINT, other.count, self._PRIME)
        return KeyDigest(value=(moved + other.value) % self._PRIME, count=self.count + other.count)

    def hexdigest(self) -> str:
        """Return 32 hex digits."""
        return f"{self.value:032x}"
