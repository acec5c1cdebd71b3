"""Reads what other libraries wrote, without them: TFDS, WebDataset, TFRecord, MosaicML's MDS, litdata.

Directories that TensorFlow Datasets prepared hold `dataset_info.json`, `features.json` and shards. The fields of both
files are those of tensorflow_datasets/core/proto (feature.proto, dataset_info.proto, 4.9): 64-bit numbers are strings,
-1 is a size that varies. Records are `tf.train.Example`; a nested feature is the column `outer/inner`. Shards are
TFRecord or ArrayRecord.
"""

# Own code reads them even where TFDS is installed: workers read by position, which TFDS 4.9.10 offers for ArrayRecord
# only. Measured on 2,000 JPEG images, ArrayRecord / TFRecord: before its first sample each worker took 0.7 / 0.6 s and
# 26 / 19 MB here, 1.9 / 10 s and 66 / 650 MB with TFDS, which loads TensorFlow for TFRecord; then a sample took 0.24 /
# 0.15 ms here, 0.40 / 0.35 ms with TFDS. For kinds of features that this does not read, an error points to TFDS.

from __future__ import annotations

import bisect
import bz2
import contextlib
import dataclasses
import errno
import glob
import importlib
import io
import itertools
import json
import lzma
import os
import struct
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import xxhash

from datamat.directory.describe import ColumnProfiler, parse_payload
from datamat.directory.files import path_inside, temporary_folder
from datamat.errors import (
    CorruptDataError,
    DatamatError,
    MissingDependencyError,
    OptionError,
    OutputError,
    SourceError,
    count_of,
    want_of_resources,
)
from datamat.features import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Image,
    Json,
    ListOf,
    Mask,
    Nullable,
    Scalar,
    Tensor,
    Text,
    Video,
)
from datamat.features.base import dtype_of
from datamat.features.pictures import PictureFile
from datamat.folders.local import expand_home
from datamat.formats import Offsets, get_format
from datamat.formats.example import decode_example
from datamat.formats.tfrecord import FRAMING_BYTES, read_payload, record_size
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import BinaryIO

    from datamat.directory.describe import ColumnProfile, Values
    from datamat.features import Feature
    from datamat.formats import ShardReader


__all__ = [
    "DAMAGES",
    "INFO_FILE",
    "FilesForm",
    "LitdataForm",
    "MdsForm",
    "RecordForm",
    "SpoolOptions",
    "StoredFile",
    "TFRecordForm",
    "TarForm",
    "TarRows",
    "TfdsFiles",
    "UnpackedFiles",
    "litdata_chunks",
    "litdata_table",
    "mds_shards",
]

INFO_FILE = "dataset_info.json"
_FEATURES_FILE = "features.json"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_FORMATS = ("tfrecord", "array_record")
_LENGTH_BYTES = 8
_STORED_AS_GIVEN = (PictureFile, Audio, Video, Bytes, Text)
"""Features whose only column holds what a sample may give: text, or a file."""


@frozen()
class _Shard:
    path: pathlib.Path
    split: str
    num_records: int


@final
class TfdsFiles:
    """Samples of a directory by position: split after split, shard after shard.

    Args:
        folder: folder that holds `dataset_info.json`, `features.json` and the shards.

    Attributes:
        features: features of the samples, by name.
        dicts: names of the features that are dicts of others, whose names begin with theirs and `/`.
        splits: number of samples in each split.
        identity: value that identifies the files: their sizes, and the content of the two JSON files.
        files: paths of the shards by name; their content counts, too.

    Raises:
        SourceError: a file is missing or not in TFDS' format, or a feature is of a kind that is not read here.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        info, declared = (_read_json(folder / name) for name in (INFO_FILE, _FEATURES_FILE))
        try:
            self._shards = list(_shards(folder, info))
            # TFDS writes the outermost dict of features in one way, and reads two: the other is what datamat writes.
            outer = declared.get("featuresDict") or declared["content"]
            content = dict(_flattened(outer["features"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SourceError(
                f"{folder}: its JSON is not as TFDS 4.9 writes it ({error!r}); prepare it again with that version"
            ) from error
        self.features = {name: _feature_of(folder, name, spec, many=many) for name, (spec, many) in content.items()}
        self.dicts = frozenset(_dict_names(outer["features"]))
        self._content = content
        self._deflated = {name for name, (spec, _) in content.items() if _encoding_of(spec) == "zlib"}
        self._ends = list(itertools.accumulate(shard.num_records for shard in self._shards))
        self._is_array_record = info.get("fileFormat") == "array_record"
        self._offsets: dict[int, np.ndarray] = {}
        self._readers: dict[int, ShardReader] = {}
        self.splits: dict[str, int] = {}
        for shard in self._shards:
            self.splits[shard.split] = self.splits.get(shard.split, 0) + shard.num_records
        self.identity = [info, declared, [_size_of(shard.path) for shard in self._shards]]
        self.files = {shard.path.name: str(shard.path) for shard in self._shards}

    def read_sample(self, number: int) -> dict[str, Any]:
        """Return one sample.

        Args:
            number: position of the sample, from 0, over all splits in their order.

        Raises:
            CorruptDataError: its record is damaged.
        """
        place = bisect.bisect_right(self._ends, number)
        shard, record = self._shards[place], number - (self._ends[place - 1] if place else 0)
        try:
            columns = self._columns(place, record)
            return {name: self._value(name, feature, columns) for name, feature in self.features.items()}
        except DAMAGES as error:
            if isinstance(error, DatamatError) and not isinstance(error, CorruptDataError):
                raise
            raise CorruptDataError(f"{shard.path}: record {record} is damaged: {error}; prepare it again") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offsets": {}, "_readers": {}}

    def _columns(self, place: int, record: int) -> Mapping[str, Any]:
        shard = self._shards[place]
        if self._is_array_record:
            if place not in self._readers:
                unknown = np.zeros(shard.num_records, np.uint64)  # the package locates records on its own
                reader = get_format("arrayrecord").reader(shard.path, Offsets(unknown, unknown))
                self._readers = {place: reader}  # one shard at a time: most samples are read in order
            return self._readers[place].read(record)
        if place not in self._offsets:
            self._offsets[place] = _offsets_of(shard)
        with open(shard.path, "rb") as file:
            file.seek(int(self._offsets[place][record]))
            payload = read_payload(file)
        if payload is None:
            raise CorruptDataError("the file ends before it")
        return decode_example(payload)

    def _value(self, name: str, feature: Feature, columns: Mapping[str, Any]) -> Any:
        dtype, shape = feature.value_type()
        column: Any = columns.get(name)
        if column is None and not shape:
            raise CorruptDataError(f"it has no {name!r}, which {_FEATURES_FILE} declares")
        if (items := getattr(feature, "feature", None)) is not None:
            return _items_of(name, items, columns)
        if isinstance(feature, _STORED_AS_GIVEN):
            return feature.encoded_value(name, columns)
        if isinstance(column, list) and column:
            data = zlib.decompress(column[0]) if name in self._deflated else column[0]
            column = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
        flat = np.asarray([] if column is None else column).astype(dtype)
        sizes = columns.get(f"{name}/shape", shape)
        return flat.reshape([-1 if size is None else int(size) for size in sizes]) if shape else flat[0]


def _items_of(name: str, feature: Any, columns: Mapping[str, Any]) -> list[Any]:
    """Return the items of a list: texts, encoded pictures, or lists that differ in length.

    TFDS stores the latter as `tf.RaggedTensor` does: all values, one after another, and how many each list has.
    """
    dtype, shape = feature.value_type()
    inner = getattr(feature, "feature", None)
    if inner is None and isinstance(feature, _STORED_AS_GIVEN):
        found = columns.get(name)
        items: list[bytes] = [] if found is None else list(found)
        return items if shape else [item.decode() for item in items]
    values, counts = columns.get(f"{name}/ragged_flat_values"), columns.get(f"{name}/ragged_row_lengths_0")
    ends = np.cumsum([] if counts is None else counts, dtype=np.int64)
    if inner is None:
        values = np.asarray([] if values is None else values).astype(dtype).reshape(-1, *shape[1:])
    else:
        values = _items_of(name, inner, {name: values})
    if len(values) != (ends[-1] if len(ends) else 0):
        raise CorruptDataError(f"its lists in {name!r} have another number of values than their lengths say")
    return [values[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]


def _encoding_of(spec: Mapping[str, Any]) -> str:
    return str(spec.get("tensor", spec.get("audio", {})).get("encoding", "none")).lower()


def _shards(folder: pathlib.Path, info: Mapping[str, Any]) -> Iterator[_Shard]:
    kind = info.get("fileFormat", "tfrecord")
    if kind not in _FORMATS:
        raise SourceError(f"{folder}: its shards are {kind}; want {' or '.join(_FORMATS)}")
    for split in info["splits"]:
        lengths = [int(length) for length in split["shardLengths"]]
        template = (split.get("filepathTemplate") or _TEMPLATE).rpartition("/")[2]
        for number, length in enumerate(lengths):
            name = template.format(
                DATASET=info["name"],
                SPLIT=split["name"],
                FILEFORMAT=kind,
                SHARD_INDEX=f"{number:05d}",
                NUM_SHARDS=f"{len(lengths):05d}",
                SHARD_X_OF_Y=f"{number:05d}-of-{len(lengths):05d}",
            )
            yield _Shard(path_inside(folder, name, folder / INFO_FILE), split["name"], length)


def _flattened(specs: Mapping[str, Any], prefix: str = "", *, many: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield name and (declaration, how many sequences it is in) of each feature that is no dict of others."""
    for name, spec in specs.items():
        inner, several = spec, many
        while "sequence" in inner:
            inner, several = inner["sequence"]["feature"], several + 1
        if (fields := _dict_of(inner)) is not None:
            yield from _flattened(fields, f"{prefix}{name}/", many=several)
        else:
            yield f"{prefix}{name}", (inner, several)


def _dict_names(specs: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the name of each feature that is a dict of others, or a sequence of such."""
    for name, spec in specs.items():
        inner = spec
        while "sequence" in inner:
            inner = inner["sequence"]["feature"]
        if (fields := _dict_of(inner)) is not None:
            yield f"{prefix}{name}"
            yield from _dict_names(fields, f"{prefix}{name}/")


def _dict_of(spec: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the declarations in a dict of features, such as the languages of a translation; None where it is none."""
    if "featuresDict" in spec:
        found: Mapping[str, Any] = spec["featuresDict"]["features"]
        return found
    if "translation" not in spec:
        return None
    text = {"pythonClassName": "Text"}
    if spec["translation"].get("variableLanguagesPerExample"):  # which language each text is in
        return {part: {"sequence": {"feature": text}} for part in ("language", "translation")}
    return dict.fromkeys(spec["translation"]["languages"], text)


def _feature_of(folder: pathlib.Path, name: str, spec: Mapping[str, Any], *, many: int) -> Feature:
    kind = str(spec.get("pythonClassName", "")).rpartition(".")[2]
    found = _single(folder, name, kind, spec)
    for _ in range(many):
        found = _several(found)
    if found is None or (many and _encoding_of(spec) != "none"):
        raise SourceError(
            f"{folder}: feature {name!r} is {'a sequence of ' * many}{kind or 'of no kind'}, which is not "
            "read here; open the directory with tfds, and pass what tfds.data_source returns as the dataset"
        )
    return found


def _single(folder: pathlib.Path, name: str, kind: str, spec: Mapping[str, Any]) -> Feature | None:
    if kind in {"Image", "LabeledImage"} and (dtype := spec["image"].get("dtype", "uint8")) in {"uint8", "uint16"}:
        shape = _shape(spec["image"]) or (None, None, 3)
        return Mask(shape[:2], _labels(folder, name), dtype=dtype) if kind == "LabeledImage" else _picture(
            shape, spec["image"]
        )  # fmt: skip
    if kind == "Video" and spec.get("video", {}).get("dtype") == "uint8":  # its frames, each a file
        return ListOf(_picture(_shape(spec["video"])[1:], spec["video"]))
    if kind == "ClassLabel":
        names = _labels(folder, name)
        return ClassLabel(names, None if names else int(spec["classLabel"]["numClasses"]))
    if kind == "BBoxFeature":
        return Tensor((4,), "float32")
    tensor = spec.get("audio" if kind == "Audio" else "tensor", {})
    shape = _shape(tensor)
    if kind == "Text" or tensor.get("dtype") == "string":
        return {0: Text(), 1: ListOf(Text())}.get(len(shape)) if kind != "Audio" else None
    is_stored = "dtype" in tensor and not tensor.get("lazyDecode")  # else it is a file of sound
    if kind in {"Tensor", "Scalar", "Audio"} and is_stored and _encoding_of(spec) in {"none", "bytes", "zlib"}:
        return Tensor(shape, tensor["dtype"]) if shape else Scalar(tensor["dtype"])
    return None


def _picture(shape: tuple[int | None, ...], spec: Mapping[str, Any]) -> Image:
    encoding: Any = "jpeg" if spec.get("encodingFormat") == "jpeg" else "png"
    return Image((*shape[:2], shape[2] or 3), encoding, dtype=spec.get("dtype", "uint8"))


def _several(feature: Feature | None) -> Feature | None:
    match feature:
        case ClassLabel(shape=()):
            return dataclasses.replace(feature, shape=(None,))
        case Scalar():
            return Tensor((None,), feature.dtype)
        case Tensor(shape=(4,), dtype="float32"):
            return BBoxes()
        case Tensor(shape=shape) if None not in shape:
            return Tensor((None, *shape), feature.dtype)
        case Tensor(shape=(None, *sizes)) if None not in sizes:
            return ListOf(feature)
        case Text() | Image() | Mask() | ListOf(feature=Text()):
            return ListOf(feature)
    return None


def _shape(spec: Mapping[str, Any]) -> tuple[int | None, ...]:
    sizes = [int(size) for size in spec.get("shape", {}).get("dimensions", ())]
    return tuple(None if size < 0 else size for size in sizes)


def _labels(folder: pathlib.Path, name: str) -> tuple[str, ...]:
    """Return the class names from the file beside the shards; in its name TFDS writes `-` for a slash."""
    for stem in (name.replace("/", "-"), name.replace("/", ".")):
        path = folder / f"{stem}.labels.txt"
        if path.is_file():
            return tuple(path.read_text("utf-8").splitlines())
    return ()


def _offsets_of(shard: _Shard) -> np.ndarray:
    """Return the offset of each record of a shard, int64 (n,)."""
    offsets = _record_offsets(str(shard.path), str(shard.path))
    if len(offsets) != shard.num_records:
        raise CorruptDataError(
            f"the file holds {count_of(len(offsets), 'record')}, {INFO_FILE} says {shard.num_records}"
        )
    return offsets


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}); copy or write the dataset again") from error


def _size_of(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; copy the shard, or prepare the dataset again") from error


# ---------------------------------------------------------------- compressed files
#
# Records in a compressed file have no places to be read from. Such a file is unpacked to disk, once, by the first who
# needs it, and read as if it had lain there so:
#
#     driver    tars and TFRecords, whose records it lists: all of them, several at a time
#     worker    shards of MDS and litdata, whose index counts the samples: the file of its row, if nobody has; whoever
#               wants the same one meanwhile waits at a lock
#
# The unpacked file is called after path, size and time of the compressed one, and appears complete or not at all. The
# folder is temporary, and shared by all sources of a process; one that the user names is kept, and serves the next run.


_PIECE = 1 << 20
_THREADS = 4
_LONGEST_HEAD = 512  # a header of tar
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAGIC = {b"\x1f\x8b\x08": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", _ZSTD_MAGIC: "zst"}
_ZLIB_METHOD = 8
_OF_ARROW = {"zst": "zstd", "br": "brotli"}
_CODECS = {"gz": "gz", "bz2": "bz2", "zstd": "zst", "br": "br", "snappy": "snappy"}  # by MosaicML's and litdata's names


def compression_of(path: str, is_plain: Callable[[bytes], bool]) -> str | None:
    """Return how a file is compressed, by its first bytes, whatever it is called; None where it is not.

    Args:
        path: path of the file.
        is_plain: tells from the first 512 bytes whether the file is what it would be without compression.
    """
    with open(path, "rb") as file:
        head = file.read(_LONGEST_HEAD)
    if is_plain(head):
        return None
    found = next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None)
    # RFC 1950: method, and a check of the first two bytes.
    is_zlib = len(head) > 1 and head[0] & 15 == _ZLIB_METHOD and (head[0] << 8 | head[1]) % 31 == 0
    return "zlib" if found is None and is_zlib else found


class _SharedFolder:
    """A temporary folder that lives as long as a source of this process uses it."""

    def __init__(self) -> None:
        self.path = temporary_folder(self)


_shared: weakref.ReferenceType[_SharedFolder] | None = None


def _shared_folder() -> _SharedFolder:
    global _shared  # noqa: PLW0603 -- one for the process: a source that is opened again finds what is unpacked
    found = None if _shared is None else _shared()
    if found is None or not os.path.isdir(found.path):
        found = _SharedFolder()
        _shared = weakref.ref(found)
    return found


DAMAGES = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error)
"""What reading damaged bytes raises, besides errors of the codecs."""

_FREE_BYTES = 8 << 20
"""A file of this size may be packed at any ratio: blocks of zeros between small members are most of a small archive."""


@frozen()
class SpoolOptions:
    """Where a source writes to disk what cannot be read in place: rows of an iterator, and what files unpack to.

    Args:
        folder: folder of both, which is kept; None takes a temporary one, for as long as the source is in use.
        max_ratio: how many times its own size a file may unpack to.

    Raises:
        OptionError: `folder` is no folder, or the ratio is below 1.
    """

    folder: str | None = None
    max_ratio: float = 500

    def __post_init__(self) -> None:
        if self.folder is not None and os.path.lexists(path := expand_home(self.folder)) and not os.path.isdir(path):
            raise OptionError(f"spool is {self.folder!r}, which is a file; want a folder, or the path of a new one")
        if not self.max_ratio >= 1:
            raise OptionError(f"max_unpack_ratio is {self.max_ratio!r}; want a number of 1 or more, such as 500")

    def below(self, name: str) -> SpoolOptions:
        """Return the options of one of several sources."""
        return dataclasses.replace(self, folder=self.folder and os.path.join(self.folder, name))

    def limited(self, pieces: Iterable[bytes], num_packed: int) -> Iterator[bytes]:
        """Yield pieces of what a file of so many bytes unpacks to; raises `ValueError` where they become too many."""
        most, found = max(_FREE_BYTES, self.max_ratio * num_packed), 0
        for piece in pieces:
            found += len(piece)
            if found > most:
                raise ValueError(
                    f"it holds more than {self.max_ratio:g} times its {num_packed:,} bytes, as files do that are made "
                    "to fill disks; if you trust it, pass ImportWriter(max_unpack_ratio=...)"
                )
            yield piece


@final
class UnpackedFiles:
    """Files by their number, of which those that are compressed are unpacked when they are needed.

    Args:
        paths: the files.
        codecs: how each is compressed; None where it is not.
        spool: where unpacked files go.
    """

    def __init__(self, paths: Sequence[str], codecs: Sequence[str | None], spool: SpoolOptions) -> None:
        self.paths = paths
        self.spool = spool
        self._codecs = codecs
        self._folder = None if spool.folder is None else os.path.abspath(expand_home(spool.folder))
        self._shared = _shared_folder() if spool.folder is None and any(codecs) else None
        self._place = "" if self._shared is None else self._shared.path
        self._known: dict[int, str] = {}
        self._damaged: dict[int, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": None, "_known": {}, "_damaged": {}}

    def path(self, number: int) -> str:
        """Return the path that the records of a file are read from.

        Args:
            number: position of the file.

        Raises:
            CorruptDataError: the file does not unpack.
            OutputError: there is no room for it.
            MissingDependencyError: pyarrow was built without the codec.
        """
        codec = self._codecs[number]
        if codec is None:
            return self.paths[number]
        if number in self._damaged:  # not for each of its rows
            raise CorruptDataError(self._damaged[number])
        if number not in self._known:
            try:
                self._known[number] = self._unpacked(self.paths[number], codec)
            except CorruptDataError as error:
                self._damaged[number] = str(error)
                raise
        return self._known[number]

    def unpack_all(self) -> None:
        """Unpack all files that are compressed, several at a time; raises as `path` does."""
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(self.path, [number for number, codec in enumerate(self._codecs) if codec]):
                pass

    def _unpacked(self, path: str, codec: str) -> str:
        state = os.stat(path)
        stem = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.abspath(path)))
        name = os.path.join(self._made_folder(), f"{stem}-{state.st_size}-{state.st_mtime_ns}")
        if os.path.exists(name):
            return name
        with _alone(os.path.join(os.path.dirname(name), f"{stem}.lock")) as is_alone:
            if os.path.exists(name):
                return name
            if is_alone:  # what kills have left, and the file as it was before it changed
                for former in glob.glob(os.path.join(glob.escape(os.path.dirname(name)), f"{stem}-*")):
                    os.unlink(former)
            self._unpack(path, codec, name)
        return name

    def _made_folder(self) -> str:
        """Return the folder, made where it is missing: on another machine, a temporary one of this process."""
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
            return self._folder
        if not os.path.isdir(self._place):
            self._shared = _shared_folder()
            self._place = self._shared.path
        return self._place

    def _unpack(self, path: str, codec: str, name: str) -> None:
        descriptor, temporary = tempfile.mkstemp(".tmp", f"{os.path.basename(name)}-", os.path.dirname(name))
        try:
            with open(descriptor, "wb") as file:
                for piece in _pieces(path, codec, self.spool):
                    file.write(piece)
                if self._folder is not None:  # a power cut leaves no empty file under a complete one's name
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, name)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            if isinstance(error, OSError):
                want = want_of_resources(path, error)
                raise want or OutputError(
                    f"{path} cannot be unpacked into {os.path.dirname(name)}: {error.strerror}; make room there, name "
                    "another folder with ImportWriter(spool=...) or TMPDIR, or unpack the files yourself"
                ) from error
            raise


@contextlib.contextmanager
def _alone(path: str) -> Iterator[bool]:
    """Wait until no other process or thread holds a lock file, and hold it; yield whether the file system has locks."""
    import fcntl

    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise
            yield False  # then two may unpack the same file, each under a name of its own
            return
        yield True


def _pieces(path: str, codec: str, spool: SpoolOptions) -> Iterator[bytes]:
    """Yield what a compressed file holds, in pieces of 1 MiB at most; raises `CorruptDataError`."""
    size = os.path.getsize(path)
    try:
        if codec in _WHOLE:
            with open(path, "rb") as file:
                yield from spool.limited(_WHOLE[codec](file, spool), size)
            return
        with _opened(path, codec) as stream:
            yield from spool.limited(iter(lambda: stream.read(_PIECE), b""), size)
    except MissingDependencyError:
        raise
    except Exception as error:  # each codec has its own class of error for damage; gzip and Arrow also use OSError
        is_of_system = isinstance(error, OSError) and error.errno in {errno.ENOENT, errno.EACCES}
        if is_of_system or (isinstance(error, OSError) and want_of_resources(path, error)):
            raise
        raise _damage(path, codec, error) from error


def _damage(path: str, codec: str, error: Exception) -> CorruptDataError:
    text = str(error).partition("\n")[0]
    return CorruptDataError(f"{path} does not unpack ({codec}): {text}; copy or write it again")


def _opened(path: str, codec: str) -> Any:
    if codec == "gz":
        try:
            module = importlib.import_module("isal.igzip")  # three times as fast
        except ImportError:
            module = importlib.import_module("gzip")
        return module.open(path, "rb")
    if codec in {"bz2", "xz"}:
        return (bz2 if codec == "bz2" else lzma).open(path, "rb")
    import pyarrow as pa

    return _arrow_stream(pa.OSFile(path), _OF_ARROW[codec])


def _arrow_stream(file: Any, name: str) -> Any:
    import pyarrow as pa

    _need_codec(name)
    return pa.CompressedInputStream(file, name)


def _need_codec(name: str) -> None:
    import pyarrow as pa

    if not pa.Codec.is_available(name):
        raise MissingDependencyError(
            f"the source is compressed by {name}, which this build of pyarrow ({pa.__version__}) lacks; install the "
            "wheel of PyPI: pip install --force-reinstall pyarrow; or unpack the files"
        )


def _unpacked_item(data: bytes, spool: SpoolOptions) -> bytes:
    """Return the item that a zstd frame holds; raises `CorruptDataError`."""
    import pyarrow as pa

    try:
        with _arrow_stream(pa.BufferReader(data), "zstd") as stream:
            return b"".join(spool.limited(iter(lambda: stream.read(_PIECE), b""), len(data)))
    except (ValueError, OSError) as error:
        raise CorruptDataError(f"it does not unpack: {error}") from error


def _inflated(file: BinaryIO, _: SpoolOptions) -> Iterator[bytes]:
    inflate = zlib.decompressobj()
    while not inflate.eof:
        data = inflate.unconsumed_tail or file.read(_PIECE)
        if not data:
            raise EOFError("it ends before its last byte")
        if piece := inflate.decompress(data, _PIECE):
            yield piece
    if inflate.unused_data or file.read(1):
        raise ValueError("other bytes follow its end")


_SNAPPY_RATIO = 64  # an element of three bytes copies 64 at most


def _unsnapped(file: BinaryIO, _: SpoolOptions) -> Iterator[bytes]:
    """Yield what one block of Snappy holds, which is unpacked as a whole: its format has no frames.

    Its size stands before it, seven bits to a byte, the lowest first.
    """
    import pyarrow as pa

    data = file.read()
    _need_codec("snappy")
    size, shift = 0, 0
    for byte in data[:5]:  # sizes below 2**32
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    else:
        raise ValueError("it does not begin with its size")
    if size > _SNAPPY_RATIO * len(data):
        raise ValueError(f"its {count_of(len(data), 'byte')} cannot hold the {size:,} that they say they do")
    whole = pa.Codec("snappy").decompress(data, size)
    for start in range(0, size, _PIECE):
        yield whole[start : start + _PIECE].to_pybytes()


_FRAMED_HEAD, _FRAMED_ENTRY = struct.Struct("<8sHHIII"), struct.Struct("<IIQII")
_FRAMED_MAGIC = b"LDFZ01\0\0"


def _unframed(file: BinaryIO, spool: SpoolOptions) -> Iterator[bytes]:
    """Yield a chunk of litdata as it is without compression, from one with a zstd frame for each 256 items or so.

    litdata 0.2.76, streaming/framed_zstd.py: head, offsets of items behind each other, a table of frames, the frames.
    """
    magic, version, _, num_items, _, num_frames = _FRAMED_HEAD.unpack(_exactly(file, _FRAMED_HEAD.size))
    if (magic, version) != (_FRAMED_MAGIC, 1):
        raise ValueError(f"it begins with {magic!r}, version {version}; want {_FRAMED_MAGIC!r}, version 1")
    offsets = np.frombuffer(_exactly(file, 4 * (num_items + 1)), "<u4")
    entries = _exactly(file, _FRAMED_ENTRY.size * num_frames)
    yield np.uint32(num_items).tobytes() + (offsets + np.uint32(4 * (num_items + 2))).tobytes()
    for _, _, place, size, num_bytes in _FRAMED_ENTRY.iter_unpack(entries):
        file.seek(place)
        data = _unpacked_item(_exactly(file, size), spool)
        if len(data) != num_bytes:
            raise ValueError(f"a frame holds {count_of(len(data), 'byte')}, and its table says {num_bytes:,}")
        yield data


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError("it ends before its last byte")
    return data


_WHOLE: dict[str, Callable[[BinaryIO, SpoolOptions], Iterator[bytes]]] = {
    "zlib": _inflated,
    "snappy": _unsnapped,
    "framed": _unframed,
}


# ---------------------------------------------------------------- records of other libraries
#
# Each form knows how one library lays out records in its files. The driver lists them: headers of tar archives, lengths
# of TFRecords, tables of offsets. A worker reads a record by its place, and nothing is ever unpickled.


_KNOWN_BYTES = frozenset(
    [
        "jpg",
        "jpeg",
        "png",
        "webp",
        "bmp",
        "gif",
        "tif",
        "tiff",
        "ppm",
        "pgm",
        "wav",
        "flac",
        "mp3",
        "ogg",
        "opus",
        "m4a",
        "mp4",
        "avi",
        "mov",
        "mkv",
        "webm",
        "pdf",
        "bin",
        "npz",
    ]
)
_KNOWN_TEXT = frozenset(["txt", "text", "transcript", "caption", "md", "html", "xml", "csv"])
_KNOWN_NUMBER = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id"])
_KNOWN_JSON = frozenset({"json", "jsn"})
_NEVER_DECODED = frozenset({"bin", "npz", "pdf"})
_MOST_PROFILED = 1000  # records of a TFRecord file whose fields are looked into


class RecordForm(Protocol):
    """How a library lays out records in its files: what one source of files is read by.

    Attributes:
        features: features of the fields, as far as the files declare them.
        refused: fields that no feature stores, each with the reason and what to write.
        dicts: names of the fields that are dicts in a sample, whose fields are `DICT/FIELD` here.
    """

    features: Mapping[str, Feature]
    refused: Mapping[str, str]
    dicts: Collection[str] = frozenset()

    def field_names(self) -> Sequence[str]:
        """Return the names of the fields."""

    def counts(self) -> Sequence[int]:
        """Return the number of records of each file."""

    def keys(self, file: int) -> Sequence[str] | None:
        """Return the names of the records of a file; None where they have none."""

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares."""

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        """Return fields of a record."""


@final
class TarForm(RecordForm):
    """WebDataset: members of a tar archive that stand together and share the name before the first dot.

    Args:
        paths: the archives.
        spool: where those are unpacked that are compressed.
    """

    def __init__(self, paths: Sequence[str], spool: SpoolOptions) -> None:
        self._paths = paths
        self._files = _unpacked_by_content(paths, _is_tar, spool)
        self._raw: frozenset[str] = frozenset()
        self._may_miss: frozenset[str] = frozenset()
        found = [self._samples(path, self._files.path(number)) for number, path in enumerate(paths)]
        names = list(dict.fromkeys(name for samples in found for _, members in samples for name in members))
        self._places = {name: place for place, name in enumerate(names)}
        self._keys = [[key for key, _ in samples] for samples in found]
        self._spans = [
            np.array([[members.get(name, (-1, 0)) for name in names] for _, members in samples], np.int64).reshape(
                len(samples), len(names), 2
            )
            for samples in found
        ]
        self.features: Mapping[str, Feature] = {name: feature for name in names if (feature := _of_ending(name))}
        self.refused: Mapping[str, str] = {name: reason for name in names if (reason := self._why_not(name))}

    def field_names(self) -> list[str]:
        return list(self._places)

    def counts(self) -> list[int]:
        return [len(keys) for keys in self._keys]

    def keys(self, file: int) -> Sequence[str] | None:
        return self._keys[file]

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._raw, self._may_miss = _declared_members(features)

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with open(self._files.path(file), "rb") as archive:
            for name in names:
                start, size = self._spans[file][number, self._places[name]].tolist()
                if start < 0:
                    if name not in self._may_miss:
                        raise CorruptDataError(_missing(self._paths[file], self._keys[file][number], name))
                    found[name] = None
                    continue
                archive.seek(start)
                data = archive.read(size)
                if len(data) != size:
                    raise CorruptDataError(
                        f"{self._paths[file]}: member {name!r} of sample {self._keys[file][number]!r} is cut off: "
                        f"{len(data):,} of {size:,} bytes"
                    )
                found[name] = data if name in self._raw else _of_member(name, data)
        return found

    def _samples(self, path: str, unpacked: str) -> list[tuple[str, dict[str, tuple[int, int]]]]:
        samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
        try:
            with tarfile.open(unpacked, "r:") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # else the archive keeps them all
                    folder, slash, base = member.name.removeprefix("./").rpartition("/")
                    stem, dot, ending = base.partition(".")
                    if not member.isfile() or not stem or folder.partition("/")[0] == "__MACOSX":
                        continue  # folders and hidden files
                    if not dot:
                        raise SourceError(
                            f"{path}: member {member.name!r} has no extension, which would name its field; write the "
                            "archive without it, or with names such as '0001.jpg'"
                        )
                    key, ending = folder + slash + stem, ending.lower()
                    if not samples or samples[-1][0] != key:
                        samples.append((key, {}))
                    if ending in samples[-1][1]:
                        raise SourceError(f"{path}: sample {key!r} has two members {ending!r}; give each its own name")
                    samples[-1][1][ending] = member.offset_data, member.size
                end = archive.offset
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:  # of Python's own, too: sizes below zero
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{path} cannot be read as a tar archive: {error}; copy or write it again") from error
        if (damage := _after_the_end(unpacked, end)) is not None:
            raise SourceError(f"{path} {damage}; copy or write it again")
        return samples

    def _why_not(self, name: str) -> str:
        drop = f"leave it out with drop=[{name!r}]"
        place = self._places[name]
        without = [
            keys[number]
            for keys, spans in zip(self._keys, self._spans, strict=True)
            for number in np.flatnonzero(spans[:, place, 0] < 0).tolist()
        ]
        if without:
            return (
                f"{len(without)} samples have no member {name!r}, the first {without[0]!r}; add it, declare it with "
                f"features={{{name!r}: Nullable(...)}}, or {drop}"
            )
        return _unknown(name)


@final
class FilesForm(RecordForm):
    """A folder of files, read as WebDataset reads a tar: those with one name before the first dot are a sample.

    Args:
        files: absolute path of each file, by its path below the folder.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        samples: dict[str, dict[str, str]] = {}
        for name, path in files.items():
            folder, slash, base = name.rpartition("/")
            stem, dot, ending = base.partition(".")
            if not dot:
                raise SourceError(
                    f"{path} has no extension, which would name its field and say what it holds; rename it, as in "
                    f"{base}.txt, or give a pattern of files as the source, as in '*.jpg'"
                )
            members = samples.setdefault(folder + slash + stem, {})
            if ending.lower() in members:
                raise SourceError(f"{path} and {members[ending.lower()]} are the same field of one sample; rename one")
            members[ending.lower()] = path
        self._samples = list(samples.items())
        self._raw: frozenset[str] = frozenset()
        self._may_miss: frozenset[str] = frozenset()
        self._names = list(dict.fromkeys(name for members in samples.values() for name in members))
        self.features: Mapping[str, Feature] = {name: found for name in self._names if (found := _of_ending(name))}
        self.refused: Mapping[str, str] = {name: reason for name in self._names if (reason := self._why_not(name))}

    def field_names(self) -> list[str]:
        return self._names

    def counts(self) -> list[int]:
        return [len(self._samples)]

    def keys(self, file: int) -> Sequence[str] | None:
        del file
        return [key for key, _ in self._samples]

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._raw, self._may_miss = _declared_members(features)

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        del file
        key, members = self._samples[number]
        found: dict[str, Any] = {}
        for name in names:
            if name not in members:
                if name not in self._may_miss:
                    raise CorruptDataError(_missing("the folder", key, name))
                found[name] = None
                continue
            with open(members[name], "rb") as opened:
                data = opened.read()
            try:
                found[name] = data if name in self._raw else _of_member(name, data)
            except CorruptDataError as error:
                raise CorruptDataError(f"{members[name]}: {error}") from error
        return found

    def _why_not(self, name: str) -> str:
        without = [key for key, members in self._samples if name not in members]
        if without:
            return (
                f"{len(without)} samples have no file that ends in .{name}, the first {without[0]!r}; add it, "
                f"declare it with features={{{name!r}: Nullable(...)}}, leave the field out with drop=[{name!r}], or "
                f"give a pattern of files as the source, as in '*.{name}'"
            )
        return _unknown(name)


def _unpacked_by_content(paths: Sequence[str], is_plain: Callable[[bytes], bool], spool: SpoolOptions) -> UnpackedFiles:
    """Return the files, those that are compressed unpacked; raises `SourceError` where one does not unpack."""
    try:
        files = UnpackedFiles(paths, [compression_of(path, is_plain) for path in paths], spool)
        files.unpack_all()
    except CorruptDataError as error:
        raise SourceError(str(error)) from error
    return files


def _is_tar(head: bytes) -> bool:
    with contextlib.suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head, tarfile.ENCODING, "surrogateescape")
        return True
    return False


def _after_the_end(path: str, end: int) -> str | None:
    """Return what is wrong with what follows the last member that `tarfile` gives; None if that is the archive's end.

    It takes whatever is no header for the end, also where an archive was cut off or is damaged. By POSIX, an archive
    ends with blocks of zeros.
    """
    with open(path, "rb") as file:
        file.seek(end)
        if not (piece := file.read(_PIECE)):
            return f"has no end: it was cut off behind byte {end:,}, or whoever wrote it was stopped"
        while piece:
            if piece.count(0) < len(piece):
                return f"is damaged behind byte {end:,}, or another archive was joined to it"
            piece = file.read(_PIECE)
    return None


def _is_tfrecord(head: bytes) -> bool:
    with contextlib.suppress(CorruptDataError):
        return record_size(head, 0) > 0
    return False


def _declared_members(features: Mapping[str, Feature]) -> tuple[frozenset[str], frozenset[str]]:
    """Return which fields are stored as their bytes, and which may be missing."""
    raw = {name for name, feature in features.items() if feature in (Bytes(), Nullable(Bytes()))}
    return frozenset(raw), frozenset(name for name, feature in features.items() if feature.takes_none)


def _missing(place: str, key: str, name: str) -> str:
    return (
        f"{place}: sample {key!r} has no {name!r}; add it, declare it with features={{{name!r}: Nullable(...)}}, or "
        f"leave the field out with drop=[{name!r}]"
    )


def _unknown(name: str) -> str:
    """Return what to write where an extension does not say what a file holds; "" where it does."""
    if _ending(name) in _KNOWN_BYTES | _KNOWN_TEXT | _KNOWN_NUMBER | _KNOWN_JSON | {"npy"}:
        return ""
    return (
        f"nobody knows the extension of the members {name!r}, or what it holds is never unpickled; pass "
        f"features={{{name!r}: Bytes()}} to store its bytes, or leave it out with drop=[{name!r}]"
    )


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _of_ending(name: str) -> Feature | None:
    ending = _ending(name)
    if ending in _KNOWN_TEXT:
        return Text()
    if ending in _KNOWN_JSON:
        return Json()
    if ending in _NEVER_DECODED:
        return Bytes()
    return Scalar("int64") if ending in _KNOWN_NUMBER else None


def _of_member(name: str, data: bytes) -> Any:
    """Return the content of a member by its extension, as WebDataset decodes it; pictures stay encoded."""
    ending = _ending(name)
    try:
        if ending in _KNOWN_TEXT:
            return data.decode()
        if ending in _KNOWN_NUMBER:
            return int(data)
        if ending in _KNOWN_JSON:
            return json.loads(data)
        return np.load(io.BytesIO(data), allow_pickle=False) if ending == "npy" else data
    except ValueError as error:
        raise CorruptDataError(f"member {name!r} does not hold what its extension says: {error}") from error


@final
class TarRows:
    """Samples as the objects of WebDataset give them: dicts of members, decoded or not, and notes such as `__url__`.

    Members that are still bytes are decoded as those of tars are. The notes are no fields: they hold absolute paths.
    """

    def __init__(self) -> None:
        self.features: dict[str, Feature] = {}
        self.refused: dict[str, str] = {}
        self._raw: frozenset[str] = frozenset()
        self._may_miss: frozenset[str] = frozenset()

    @staticmethod
    def are(row: Any) -> bool:
        """Tell whether a row of an iterator is such a sample."""
        return isinstance(row, Mapping) and "__key__" in row

    def show(self, row: Mapping[str, Any]) -> None:
        """Take features, and what cannot be stored without one, from the first row."""
        for name, value in _members(row).items():
            feature = _of_ending(name)
            if isinstance(value, bytes):
                self.features |= {} if feature is None else {name: feature}
                self.refused |= {name: reason} if (reason := _unknown(name)) else {}
            elif feature == Json() and isinstance(value, (Mapping, list)):
                self.features[name] = feature  # its keys may vary from sample to sample

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares."""
        self._raw, self._may_miss = _declared_members(features)

    def nested(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a row but those that are stored as JSON."""
        return {name: value for name, value in _members(row).items() if name not in self.features}

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a row by name; None for those that are declared to be missing at times."""
        found = {
            name: _of_member(name, value) if isinstance(value, bytes) and name not in self._raw else value
            for name, value in _members(row).items()
        }
        return found | dict.fromkeys(self._may_miss - found.keys())


def _members(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not (name.startswith("__") and name.endswith("__"))}


@final
class TFRecordForm(RecordForm):
    """TFRecord files of `tf.train.Example` by any writer; the first records show the fields.

    Args:
        paths: the files.
        spool: where those are unpacked that are compressed.
    """

    def __init__(self, paths: Sequence[str], spool: SpoolOptions) -> None:
        self._paths = paths
        self._files = _unpacked_by_content(paths, _is_tfrecord, spool)
        self._offsets = [_record_offsets(path, self._files.path(number)) for number, path in enumerate(paths)]
        profilers: dict[str, ColumnProfiler] = {}
        count = 0
        for file, number in itertools.islice(self._all(), _MOST_PROFILED):
            count += 1
            for name, values in self._values(file, number).items():
                profilers.setdefault(name, ColumnProfiler(name)).add(values)
        found = {name: profiler.found() for name, profiler in profilers.items()}
        self._names = {name or "payload": name for name in found}
        features = {name: _profiled(found[field], count) for name, field in self._names.items()}
        self.features: Mapping[str, Feature] = {
            name: feature for name, feature in features.items() if not isinstance(feature, str)
        }
        self.refused: Mapping[str, str] = {name: reason for name, reason in features.items() if isinstance(reason, str)}

    def field_names(self) -> list[str]:
        return list(self._names)

    def counts(self) -> list[int]:
        return [len(offsets) for offsets in self._offsets]

    def keys(self, file: int) -> Sequence[str] | None:
        del file
        return None

    def declare(self, features: Mapping[str, Feature]) -> None:
        self.features = {**self.features, **features}

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        values = self._values(file, number)
        found: dict[str, Any] = {}
        for name in names:
            value = values.get(self._names[name])
            feature = self.features.get(name)
            if isinstance(feature, Nullable):
                if value is None or not len(value):
                    found[name] = None
                    continue
                feature = feature.feature
            if value is None:
                raise CorruptDataError(
                    f"{self._paths[file]}: record {number} has no field {name!r}; declare it with "
                    f"features={{{name!r}: Nullable(...)}}, or leave it out with drop=[{name!r}]"
                )
            is_array, is_json = isinstance(value, np.ndarray), isinstance(feature, Json)
            may_be_many = feature and (feature.value_type()[1] if is_array else is_json)
            if not may_be_many and len(value) != 1:
                raise CorruptDataError(
                    f"{self._paths[file]}: record {number} has {len(value)} values of field {name!r}, the first "
                    f"records have one; write one in each, or leave it out with drop=[{name!r}]"
                )
            if is_array:
                found[name] = value if may_be_many else value[0]
            elif is_json:
                found[name] = [item.decode() for item in value]
            else:
                data = value[0]
                is_text = feature is not None and feature.value_type() == ("string", ())
                found[name] = data.decode() if is_text else data
        return found

    def _all(self) -> Iterator[tuple[int, int]]:
        for file, offsets in enumerate(self._offsets):
            for number in range(len(offsets)):
                yield file, number

    def _values(self, file: int, number: int) -> Mapping[str, Values]:
        path = self._files.path(file)
        try:
            with open(path, "rb") as opened:
                opened.seek(int(self._offsets[file][number]))
                payload = read_payload(opened)
        except CorruptDataError as error:
            raise CorruptDataError(
                f"{self._paths[file]}: record {number} is damaged: {error}; copy or write the file again"
            ) from error
        return parse_payload(payload or b"")[1]


def _profiled(profile: ColumnProfile, count: int) -> Feature | str:
    """Return the feature of a field, or why there is none."""
    drop = f"leave it out with drop=[{profile.name!r}]"
    if profile.num_records < count:
        return f"{count - profile.num_records} of the first {count} records have no field {profile.name!r}; {drop}"
    if profile.feature is not None:
        return profile.feature
    if profile.kind == "bytes" and profile.lengths == (1, 1):
        return Bytes()
    if profile.kind == "text":
        return Json()
    return (
        f"field {profile.name!r} holds {profile.kind}, {profile.lengths[0]} to {profile.lengths[1]} per record; {drop}"
    )


def _record_offsets(path: str, unpacked: str) -> np.ndarray:
    """Return the offset of each record of a TFRecord file, int64 (n,), by following the lengths."""
    offsets, place, size = [], 0, os.path.getsize(unpacked)
    with open(unpacked, "rb") as file:
        while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            offsets.append(place)
            place += int.from_bytes(head, "little") + FRAMING_BYTES
            if place > size:
                raise SourceError(
                    f"{path} is no TFRecord, or was cut off: record {len(offsets) - 1} would end at byte {place:,} of "
                    f"{size:,}; copy or write it again"
                )
            file.seek(place)
    return np.array(offsets, np.int64)


_MDS_NUMBERS = frozenset(
    ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
_MDS_ARRAY_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


@final
class MdsForm(RecordForm):
    """MosaicML's MDS, as streaming 0.x writes it: a table of offsets, then sizes and values of each sample.

    Args:
        files: the shards.
        shards: what `index.json` says of each.
    """

    def __init__(self, files: UnpackedFiles, shards: Sequence[Mapping[str, Any]]) -> None:
        self._files = files
        self._counts = [int(shard["samples"]) for shard in shards]
        first = shards[0]
        self._columns = list(zip(first["column_names"], first["column_encodings"], first["column_sizes"], strict=True))
        features = {name: _of_encoding(name, encoding) for name, encoding, _ in self._columns}
        self.features: Mapping[str, Feature] = {
            name: feature for name, feature in features.items() if feature is not None and not isinstance(feature, str)
        }
        self.refused: Mapping[str, str] = {name: reason for name, reason in features.items() if isinstance(reason, str)}

    def field_names(self) -> list[str]:
        return [name for name, _, _ in self._columns]

    def counts(self) -> list[int]:
        return self._counts

    def keys(self, file: int) -> Sequence[str] | None:
        del file
        return None

    def declare(self, features: Mapping[str, Feature]) -> None:
        self.features = {**self.features, **features}

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        with open(self._files.path(file), "rb") as opened:
            data = _numbered_item(opened, self._files.paths[file], number)
        sizes, place = [], 0
        for _, _, size in self._columns:
            if size is None:
                size = int.from_bytes(data[place : place + 4], "little")  # noqa: PLW2901 -- as the file has it
                place += 4
            sizes.append(size)
        found = {}
        for (name, encoding, _), size in zip(self._columns, sizes, strict=True):
            if name in names:
                found[name] = _mds_value(encoding, data[place : place + size])
            place += size
        return found


def _numbered_item(file: BinaryIO, path: str, number: int) -> bytes:
    """Return an item of a file that begins with a count and the offsets of its items, uint32 each, and their end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(4 * (1 + number))
    place = file.read(8)
    begin, end = np.frombuffer(place, "<u4").tolist() if len(place) == 8 else (1, 0)
    if not begin <= end <= size:
        raise CorruptDataError(f"{path}: item {number} is cut off, or has no place in its {size:,} bytes")
    file.seek(begin)
    return file.read(end - begin)


_MDS_LISTS = {"jpeg_array": 0, "jpegarray": 0, "list[jpeg]": 4, "list[png]": 4, "list[pil]": 4}
"""Lists of pictures, and the bytes before their number (streaming 0.13, base/format/mds/encodings.py)."""


def _of_encoding(name: str, encoding: str) -> Feature | str | None:
    kind, _, arguments = encoding.partition(":")
    if kind in _MDS_NUMBERS | {"int"}:
        return Scalar("int64" if kind == "int" else kind)
    simple: dict[str, Feature | None] = {
        "str": Text(), "str_int": Scalar("int64"), "str_float": Scalar("float64"), "json": Json(),
        "bytes": None, "jpeg": None, "png": None, "pil": None, **dict.fromkeys(_MDS_LISTS, ListOf(Image())),
    }  # fmt: skip
    if kind in simple:
        return simple[kind]
    if kind == "ndarray":
        dtype, _, shape = arguments.partition(":")
        return Tensor(tuple(map(int, shape.split(","))), dtype) if shape else None
    what = "is never unpickled" if kind == "pkl" else "is not read here"
    return f"column {name!r} is {encoding} of MDS, which {what}; leave it out with drop=[{name!r}]"


def _mds_value(encoding: str, data: bytes) -> Any:
    kind, _, arguments = encoding.partition(":")
    if kind in _MDS_NUMBERS | {"int"}:
        return np.frombuffer(data, "int64" if kind == "int" else kind)[0]
    if kind == "ndarray":
        return _mds_array(arguments, data)
    if kind == "pil":
        return _raw_picture(data)
    if kind in _MDS_LISTS:
        return _mds_list(kind, data)
    parsers: dict[str, Callable[[bytes], Any]] = {
        "str": bytes.decode, "str_int": int, "str_float": float, "json": json.loads,
    }  # fmt: skip
    return parsers.get(kind, bytes)(data)


def _mds_list(kind: str, data: bytes) -> list[Any]:
    """Return the pictures of a list: how many there are, the size of each, the files; before that, perhaps, a zero."""
    head = _MDS_LISTS[kind]
    count = int.from_bytes(data[head : head + 4], "little")
    place = head + 4 * (1 + count)
    ends = np.cumsum([place, *np.frombuffer(data, "<u4", count, head + 4).tolist()]).tolist()
    if ends[-1] != len(data):
        raise CorruptDataError(
            f"a list of {count_of(count, 'picture')} takes {ends[-1]:,} bytes, but {len(data):,} are there"
        )
    pictures = [data[start:end] for start, end in itertools.pairwise(ends)]
    return list(map(_raw_picture, pictures)) if kind == "list[pil]" else pictures


def _mds_array(arguments: str, data: bytes) -> np.ndarray:
    dtype, _, sizes = arguments.partition(":")
    place = 0
    if not dtype:
        dtype, place = _MDS_ARRAY_DTYPES[data[0]], 1
    if sizes:
        shape = tuple(map(int, sizes.split(",")))
    else:
        num_axes, width = data[place] >> 2, 1 << (data[place] & 3)
        place += 1
        shape = tuple(np.frombuffer(data, f"<u{width}", num_axes, place).tolist())
        place += num_axes * width
    return np.frombuffer(data, dtype, offset=place).reshape(shape)


_MODES = {"L": 1, "RGB": 3, "RGBA": 4}


def _raw_picture(data: bytes) -> np.ndarray:
    """Return the pixels of a picture of Pillow: width, height and length of the mode, the mode, the raw pixels."""
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + length].decode()
    if mode not in _MODES:
        raise CorruptDataError(f"a picture is of Pillow's mode {mode!r}; want {', '.join(_MODES)}")
    return np.frombuffer(data, np.uint8, offset=12 + length).reshape(height, width, _MODES[mode])


@frozen()
class StoredFile:
    """A file that an `index.json` lists.

    Attributes:
        name: its name without compression.
        path: its path, as it is there.
        codec: how it is compressed; None where it is not.
    """

    name: str
    path: str
    codec: str | None


def mds_shards(folder: pathlib.Path) -> tuple[list[StoredFile], list[Mapping[str, Any]]]:
    """Return the shards of an MDS folder, and what its `index.json` says of each.

    Args:
        folder: folder that holds `index.json`.

    Raises:
        SourceError: it is no MDS, or a shard is missing, of other columns, or compressed by what is not read here.
    """
    try:
        shards = [shard for shard in _read_json(folder / "index.json")["shards"] if shard["samples"]]
        files = [_mds_file(folder, shard) for shard in shards]
        columns = [[shard[f"column_{part}"] for part in ("names", "encodings", "sizes")] for shard in shards]
    except (KeyError, TypeError) as error:
        raise SourceError(
            f"{folder / 'index.json'} is none of MDS ({error!r}); restore it, or write the set again"
        ) from error
    if not files:
        raise SourceError(f"{folder} has no samples; pass a folder that has some")
    for file, theirs in zip(files, columns, strict=True):
        if theirs != columns[0]:
            raise SourceError(f"{file.path} has other columns than {files[0].name}; write them to two folders")
    return files, shards


def _mds_file(folder: pathlib.Path, shard: Mapping[str, Any]) -> StoredFile:
    """Return a shard as it is there: as it is read, or as it was uploaded."""
    index, name = folder / "index.json", shard["raw_data"]["basename"]
    plain = path_inside(folder, name, index)
    if plain.is_file():
        return StoredFile(name, str(plain), None)
    packed = (shard.get("zip_data") or {}).get("basename")
    if packed is None or not path_inside(folder, packed, index).is_file():
        also = f", nor does {packed}" if packed else ""
        raise SourceError(f"{plain} does not exist{also}; copy the shard to the folder")
    codec = _CODECS.get(str(shard["compression"]).partition(":")[0])
    if codec is None:
        raise SourceError(
            f"{folder / packed} is compressed by {shard['compression']}, which is not read here (want "
            f"{', '.join(_CODECS)}); pass the object that reads it, streaming.StreamingDataset(local=...), as the "
            "source"
        )
    return StoredFile(name, str(folder / packed), codec)


_NUMPY_DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bool",
)  # fmt: skip
_TORCH_DTYPES = (
    "float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128", "float16",
    "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16",
)  # fmt: skip
"""Dtypes of litdata 0.2 by their numbers: those of numpy, and those of torch, where some have two."""

_LIT_FEATURES: dict[str, Feature | None] = {
    "str": Text(), "text": Text(), "int": Scalar("int64"), "float": Scalar("float64"), "bool": Scalar("bool"),
    "bytes": None, "jpeg": None, "image": None, "pil": None, "numpy": None, "tensor": None,
}  # fmt: skip


@final
class LitdataForm(RecordForm):
    """litdata's chunks: a table of offsets, then sizes and values of the leaves of each item.

    An item that was written for its `TokensLoader` is one array of tokens, without a size. That loader cuts all tokens
    of a chunk into blocks; here, each item is as it was written.

    Args:
        files: the chunks.
        counts: number of items in each.
        config: what `index.json` says of all of them.
    """

    def __init__(self, files: UnpackedFiles, counts: Sequence[int], config: Mapping[str, Any]) -> None:
        self._files = files
        self._counts = counts
        self._may_pack_items = _lit_compression(config)[1] == "sample"
        self._has_sizes = config.get("item_loader") != _OF_TOKENS
        spec = json.loads(config["data_spec"])[1]
        self._columns = dict(zip(_leaf_names(spec, ""), config["data_format"], strict=True))
        self.dicts = frozenset(_spec_dicts(spec, ""))
        features = {name: _of_lit_format(name, kind) for name, kind in self._columns.items()}
        self.features: Mapping[str, Feature] = {
            name: feature for name, feature in features.items() if feature is not None and not isinstance(feature, str)
        }
        self.refused: Mapping[str, str] = {name: reason for name, reason in features.items() if isinstance(reason, str)}

    def field_names(self) -> list[str]:
        return list(self._columns)

    def counts(self) -> Sequence[int]:
        return self._counts

    def keys(self, file: int) -> Sequence[str] | None:
        del file
        return None

    def declare(self, features: Mapping[str, Feature]) -> None:
        self.features = {**self.features, **features}

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        with open(self._files.path(file), "rb") as opened:
            data = _numbered_item(opened, self._files.paths[file], number)
        # Not where Arrow holds the same rows behind them. Else the size of a first value begins them, below 4 GB.
        if self._may_pack_items and data.startswith(_ZSTD_MAGIC):
            try:
                data = _unpacked_item(data, self._files.spool)
            except CorruptDataError as error:
                raise CorruptDataError(
                    f"{self._files.paths[file]}: item {number} is damaged: {error}; copy the chunk again"
                ) from error
        sizes, place = [len(data)], 0
        if self._has_sizes:
            sizes, place = np.frombuffer(data, "<u4", len(self._columns)).tolist(), 4 * len(self._columns)
        found = {}
        for (name, kind), size in zip(self._columns.items(), sizes, strict=True):
            if name in names:
                found[name] = _lit_value(kind, data[place : place + size])
            place += size
        return found


def _leaf_names(spec: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the names of the leaves of an item: keys of dicts and positions in lists, with `/` between."""
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        return [prefix or "x"]
    if not kind.endswith(("dict", "OrderedDict", "list", "tuple")):
        raise SourceError(f"items of litdata hold a {kind}; want dicts, lists and tuples")
    keys = json.loads(spec["context"]) if "ict" in kind else range(len(children))
    below = [
        _leaf_names(child, f"{prefix}/{key}" if prefix else str(key)) for key, child in zip(keys, children, strict=True)
    ]
    return [name for names in below for name in names]


def _spec_dicts(spec: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the names of the dicts in dicts; a list between two of them leaves the inner one as it is called."""
    if "ict" not in (spec["type"] or ""):
        return
    if prefix:
        yield prefix
    for key, child in zip(json.loads(spec["context"]), spec["children_spec"], strict=True):
        yield from _spec_dicts(child, f"{prefix}/{key}" if prefix else str(key))


def _of_lit_format(name: str, kind: str) -> Feature | str | None:
    base, _, number = kind.partition(":")
    if base in {"no_header_numpy", "no_header_tensor"}:
        dtypes = _NUMPY_DTYPES if base.endswith("numpy") else _TORCH_DTYPES
        return Tensor((None,), dtypes[int(number)])
    if base in _LIT_FEATURES:
        return _LIT_FEATURES[base]
    what = "is never unpickled" if base == "pickle" else "is not read here"
    return (
        f"field {name!r} is {kind} of litdata, which {what}; leave it out with drop=[{name!r}], or pass "
        "litdata.StreamingDataset(...) as the source"
    )


def _lit_value(kind: str, data: bytes) -> Any:
    base, _, number = kind.partition(":")
    if base == "pil":
        return _raw_picture(data)
    if base == "numpy":
        dtype, rank = np.frombuffer(data, "<u4", 2).tolist()
        shape = np.frombuffer(data, "<u4", rank, 8).tolist()
        return np.frombuffer(data, _NUMPY_DTYPES[dtype], offset=8 + 4 * rank).reshape(shape)
    if base == "tensor":
        dtype, rank = np.frombuffer(data, ">u4", 2).tolist()
        shape = np.frombuffer(data, ">u4", rank, 8).tolist()
        return np.frombuffer(data, dtype_of(_TORCH_DTYPES[dtype]), offset=8 + 4 * rank).reshape(shape)
    if base in {"no_header_numpy", "no_header_tensor"}:
        dtypes = _NUMPY_DTYPES if base.endswith("numpy") else _TORCH_DTYPES
        return np.frombuffer(data, dtype_of(dtypes[int(number)]))
    parsers: dict[str, Callable[[bytes], Any]] = {
        "str": bytes.decode,
        "text": bytes.decode,
        "int": lambda data: np.frombuffer(data, "<i8")[0],
        "float": lambda data: np.frombuffer(data, "<f8")[0],
        "bool": lambda data: np.bool_(data != b"\0"),
    }
    return parsers.get(base, bytes)(data)


def litdata_chunks(folder: pathlib.Path) -> tuple[list[StoredFile], list[int], Mapping[str, Any]]:
    """Return the chunks of a litdata folder, the number of items in each, and its configuration.

    Args:
        folder: folder that holds `index.json`.

    Raises:
        SourceError: it is no litdata, or its chunks are encrypted, of an unknown loader, or compressed by what is not
            read.
    """
    index = _read_json(folder / "index.json")
    try:
        config, chunks = index["config"], index["chunks"]
        names, counts = [chunk["filename"] for chunk in chunks], [int(chunk["chunk_size"]) for chunk in chunks]
        compression, level = _lit_compression(config)
        packed = (compression != "zstd" and compression) or config.get("encryption")
        loader = config.get("item_loader") or "PyTreeLoader"
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{folder / 'index.json'} is none of litdata ({error!r}); restore it, or write the set again"
        ) from error
    if packed or loader not in {"PyTreeLoader", _OF_TOKENS}:
        raise SourceError(
            f"{folder} holds chunks {'packed by ' + str(packed) if packed else 'of the item loader ' + loader}, which "
            "are not read here; pass the object that reads them, litdata.StreamingDataset(...), as the source"
        )
    paths = [path_inside(folder, name, folder / "index.json") for name in names]
    return [_lit_file(path, compression and level) for path in paths], counts, config


_OF_TOKENS = "TokensLoader"
_TABLE_MAGIC = b"LDARW01\0"


def litdata_table(path: str) -> tuple[int, int] | None:
    """Return where the table of Arrow begins in a chunk of litdata, and its bytes; None where the chunk has none.

    Rows of texts, numbers, bytes, lists and dicts alone are one Arrow file behind the offsets, which are all the same;
    then come its size, uint32, and a magic number (litdata 0.2.76, streaming/item_loader.py).

    Args:
        path: the chunk.

    Raises:
        SourceError: it cannot be opened.
    """
    tail = 4 + len(_TABLE_MAGIC)
    try:
        with open(path, "rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(num_bytes - tail, 0))
            end = file.read()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; copy the chunk to the folder") from error
    size = int.from_bytes(end[:4], "little")
    if not end.endswith(_TABLE_MAGIC) or len(end) < tail or size > num_bytes - tail:
        return None
    return num_bytes - tail - size, size


def _lit_file(path: pathlib.Path, level: str) -> StoredFile:
    """Return a chunk; of those that are compressed by the batch, some are not, as their first bytes say."""
    codec = "zst" if level == "chunk" else None
    if level == "batch":
        try:
            with open(path, "rb") as file:
                codec = "framed" if file.read(len(_FRAMED_MAGIC)) == _FRAMED_MAGIC else None
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}; copy the chunk to the folder") from error
    return StoredFile(path.name, str(path), codec)


def _lit_compression(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the codec of a litdata folder, "" for none, and what is compressed as one: chunk, batch or sample."""
    name = str(config.get("compression") or "").partition(":")[0]
    return name.removesuffix("_framed"), str(config.get("compression_level") or "chunk")
