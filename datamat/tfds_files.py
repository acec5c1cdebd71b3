"""Directories that TensorFlow Datasets prepared, read without it: `dataset_info.json`, `features.json`, shards.

The fields of both files are those of tensorflow_datasets/core/proto (feature.proto, dataset_info.proto, 4.9): 64-bit
numbers are strings, -1 is a size that varies. Records are `tf.train.Example`; a nested feature is the column
`outer/inner`. Shards are TFRecord or ArrayRecord.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import CorruptDataError, SourceError
from datamat.features import BBoxes, ClassLabel, Image, Mask, Scalar, Tensor, Text
from datamat.formats import Offsets, get_format
from datamat.formats.example import decode_example
from datamat.formats.framing import FRAMING_BYTES, read_payload

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping

    from datamat.features import Feature
    from datamat.formats import ShardReader

__all__ = ["INFO_FILE", "TfdsFiles"]

INFO_FILE = "dataset_info.json"
_FEATURES_FILE = "features.json"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_FORMATS = ("tfrecord", "array_record")
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Shard:
    path: pathlib.Path
    split: str
    num_records: int


@final
class TfdsFiles:
    """Samples of a directory by position: split after split, shard after shard.

    Args:
        folder: that holds `dataset_info.json`.

    Attributes:
        features: of the samples.
        splits: number of samples in each.
        identity: what the files are: their sizes, and what the two JSON files say.

    Raises:
        SourceError: a file is missing or not as TFDS writes it, or a feature is of a kind that is not read here.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        info, declared = (_read_json(folder / name) for name in (INFO_FILE, _FEATURES_FILE))
        try:
            self._shards = list(_shards(folder, info))
            # A dict of features at the top is written in one way by TFDS, and read by it in two: as ours is written.
            outer = declared.get("featuresDict") or declared["content"]
            content = dict(_flattened(outer["features"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SourceError(f"{folder}: its JSON is not as TFDS 4.9 writes it ({error!r})") from error
        self.features = {name: _feature_of(folder, name, spec, many=many) for name, (spec, many) in content.items()}
        self._content = content
        self._ends = list(itertools.accumulate(shard.num_records for shard in self._shards))
        self._is_array_record = info.get("fileFormat") == "array_record"
        self._offsets: dict[int, np.ndarray] = {}
        self._readers: dict[int, ShardReader] = {}
        self.splits: dict[str, int] = {}
        for shard in self._shards:
            self.splits[shard.split] = self.splits.get(shard.split, 0) + shard.num_records
        self.identity = [info, declared, [_size_of(shard.path) for shard in self._shards]]

    def read(self, number: int) -> dict[str, Any]:
        """Return a sample; raises `CorruptDataError` where its record is damaged."""
        place = bisect.bisect_right(self._ends, number)
        shard, record = self._shards[place], number - (self._ends[place - 1] if place else 0)
        try:
            columns = self._columns(place, record)
            return {name: self._value(name, feature, columns) for name, feature in self.features.items()}
        except CorruptDataError as error:
            raise CorruptDataError(f"{shard.path}: record {record} is damaged: {error}; prepare it again") from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offsets": {}, "_readers": {}}

    def _columns(self, place: int, record: int) -> Mapping[str, Any]:
        shard = self._shards[place]
        if self._is_array_record:
            if place not in self._readers:
                unknown = np.zeros(shard.num_records, np.uint64)  # the package finds records by itself
                reader = get_format("arrayrecord").reader(shard.path, Offsets(unknown, unknown))
                self._readers = {place: reader}  # of one shard at a time: samples are asked for mostly in order
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
        column: Any = columns.get(name)
        if column is None and not isinstance(feature, (BBoxes, Tensor)):
            raise CorruptDataError(f"it has no {name!r}")
        if isinstance(feature, (Image, Mask)):
            return bytes(column[0])
        if isinstance(feature, Text):
            return bytes(column[0]).decode()
        return _numbers(feature, column, columns.get(f"{name}/shape"))


def _numbers(feature: Feature, column: Any, shape: Any) -> Any:
    dtype = "float32" if isinstance(feature, BBoxes) else getattr(feature, "dtype", "int64")
    if isinstance(column, list) and column:  # encoding "bytes"
        column = np.frombuffer(column[0], np.dtype(dtype).newbyteorder("<"))
    flat = np.asarray([] if column is None else column).astype(dtype)
    if isinstance(feature, BBoxes):
        return flat.reshape(-1, 4)
    if isinstance(feature, ClassLabel):
        return flat if feature.shape else int(flat[0])
    if isinstance(feature, Scalar):
        return flat[0]
    assert isinstance(feature, Tensor)
    sizes = feature.shape if shape is None else tuple(int(size) for size in shape)
    return flat.reshape([-1 if size is None else size for size in sizes])


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
            yield _Shard(folder / name, split["name"], length)


def _flattened(specs: Mapping[str, Any], prefix: str = "", *, many: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield name and (declaration, whether there are several) of each feature that is no dict of others."""
    for name, spec in specs.items():
        inner, several = spec, many
        if "sequence" in spec:
            inner, several = spec["sequence"]["feature"], True
        if "featuresDict" in inner:
            yield from _flattened(inner["featuresDict"]["features"], f"{prefix}{name}/", many=several)
        else:
            yield f"{prefix}{name}", (inner, several)


def _feature_of(folder: pathlib.Path, name: str, spec: Mapping[str, Any], *, many: bool) -> Feature:
    kind = str(spec.get("pythonClassName", "")).rpartition(".")[2]
    found = _single(folder, name, kind, spec)
    if many:
        found = _several(found)
    if found is None:
        raise SourceError(
            f"{folder}: feature {name!r} is {'a sequence of ' if many else ''}{kind or 'of no kind'}, which is not "
            "read here; open the directory with tfds, and give what tfds.data_source returns as the data set"
        )
    return found


def _single(folder: pathlib.Path, name: str, kind: str, spec: Mapping[str, Any]) -> Feature | None:
    if kind in {"Image", "LabeledImage"} and spec["image"].get("dtype", "uint8") == "uint8":
        shape = _shape(spec["image"]) or (None, None, 3)
        if kind == "LabeledImage":
            return Mask(shape[:2], _labels(folder, name))
        channels = shape[2] if shape[2] in {1, 3, 4} else 3
        return Image((*shape[:2], channels), "jpeg" if spec["image"].get("encodingFormat") == "jpeg" else "png")
    if kind == "ClassLabel":
        names = _labels(folder, name)
        return ClassLabel(names, None if names else int(spec["classLabel"]["numClasses"]))
    if kind == "BBoxFeature":
        return Tensor((4,), "float32")
    tensor = spec.get("tensor", {})
    if kind == "Text" or tensor.get("dtype") == "string":
        return None if _shape(tensor) else Text()
    if kind in {"Tensor", "Scalar"} and tensor.get("encoding", "none") in {"none", "bytes"}:
        shape = _shape(tensor)
        return Tensor(shape, tensor["dtype"]) if shape else Scalar(tensor["dtype"])
    return None


def _several(feature: Feature | None) -> Feature | None:
    if isinstance(feature, ClassLabel):
        return dataclasses.replace(feature, shape=(None,))
    if isinstance(feature, Scalar):
        return Tensor((None,), feature.dtype)
    if isinstance(feature, Tensor) and feature.shape == (4,) and feature.dtype == "float32":
        return BBoxes()
    return None


def _shape(spec: Mapping[str, Any]) -> tuple[int | None, ...]:
    sizes = [int(size) for size in spec.get("shape", {}).get("dimensions", ())]
    return tuple(None if size < 0 else size for size in sizes)


def _labels(folder: pathlib.Path, name: str) -> tuple[str, ...]:
    """Return the names of classes from the file beside the shards; TFDS writes `-` for the slash of nested names."""
    for stem in (name.replace("/", "-"), name.replace("/", ".")):
        path = folder / f"{stem}.labels.txt"
        if path.is_file():
            return tuple(path.read_text("utf-8").splitlines())
    return ()


def _offsets_of(shard: _Shard) -> np.ndarray:
    """Return where each record of a TFRecord file begins, int64 (n,), by its lengths alone."""
    offsets, place = [], 0
    with open(shard.path, "rb") as file:
        while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            offsets.append(place)
            place += int.from_bytes(head, "little") + FRAMING_BYTES
            file.seek(place)
    if len(offsets) != shard.num_records:
        raise CorruptDataError(f"the file holds {len(offsets)} records, {INFO_FILE} says {shard.num_records}")
    return np.array(offsets, np.int64)


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: {error}; prepare the data set again") from error


def _size_of(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; prepare the data set again") from error
