"""Reads directories prepared by TensorFlow Datasets: `dataset_info.json`, `features.json` and shards.

The fields of both files are those of tensorflow_datasets/core/proto (feature.proto, dataset_info.proto, 4.9): 64-bit
numbers are strings, -1 is a size that varies. Records are `tf.train.Example`; a nested feature is the column
`outer/inner`. Shards are TFRecord or ArrayRecord.
"""

# Own code reads them even where TFDS is installed: workers read by position, which TFDS 4.9.10 offers for ArrayRecord
# only. Measured on 2,000 JPEG images, ArrayRecord / TFRecord: before its first sample each worker took 0.7 / 0.6 s and
# 26 / 19 MB here, 1.9 / 10 s and 66 / 650 MB with TFDS, which loads TensorFlow for TFRecord; then a sample took 0.24 /
# 0.15 ms here, 0.40 / 0.35 ms with TFDS. For kinds of features that this does not read, an error points to TFDS.

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.files import path_inside
from datamat.errors import CorruptDataError, SourceError, count_of
from datamat.features import Audio, BBoxes, Bytes, ClassLabel, Image, ListOf, Mask, Scalar, Tensor, Text, Video
from datamat.features.pictures import PictureFile
from datamat.formats import Offsets, get_format
from datamat.formats.example import decode_example
from datamat.formats.tfrecord import read_payload
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile
from datamat.writers.records import RecordForm, RecordsSource, read_document
from datamat.writers.splits import SplitSource
from datamat.writers.tfrecord import record_offsets
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    from datamat.features import Feature
    from datamat.formats import ShardReader


INFO_FILE = "dataset_info.json"
_FEATURES_FILE = "features.json"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_FORMATS = ("tfrecord", "array_record")
_STORED_AS_GIVEN = (PictureFile, Audio, Video, Bytes, Text)
"""Features whose only column holds what a sample may give: text, or a file."""


@final
class TfdsForm(RecordForm):
    """The shards of one split.

    Args:
        paths: the shards.
        counts: number of records in each.
        outer: declarations of the features, as `features.json` has them.
        is_array_record: whether the shards are ArrayRecord.
    """

    counts_on = True

    def __init__(
        self, paths: Sequence[pathlib.Path], counts: Sequence[int], outer: Mapping[str, Any], *, is_array_record: bool
    ) -> None:
        self._paths, self._counts = paths, counts
        content = dict(_flattened(outer))
        folder = paths[0].parent
        self.features = {name: _feature_of(folder, name, spec, many=many) for name, (spec, many) in content.items()}
        self.dicts = frozenset(_dict_names(outer))
        self._deflated = {name for name, (spec, _) in content.items() if _encoding_of(spec) == "zlib"}
        self._stored = dict(self.features)
        self._is_array_record = is_array_record
        self._offsets: dict[int, np.ndarray] = {}
        self._readers: dict[int, ShardReader] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offsets": {}, "_readers": {}}

    def field_names(self) -> list[str]:
        return list(self._stored)

    def counts(self) -> Sequence[int]:
        return self._counts

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        columns = self._columns(file, number)
        return {name: self._value(name, self._stored[name], columns) for name in names}

    def _columns(self, file: int, number: int) -> Mapping[str, Any]:
        path, count = self._paths[file], self._counts[file]
        if self._is_array_record:
            if file not in self._readers:
                unknown = np.zeros(count, np.uint64)  # the package locates records on its own
                reader = get_format("arrayrecord").reader(path, Offsets(unknown, unknown))
                self._readers = {file: reader}  # one shard at a time: most samples are read in order
            return self._readers[file].read(number)
        if file not in self._offsets:
            self._offsets[file] = _offsets_of(path, count)
        with open(path, "rb") as opened:
            opened.seek(int(self._offsets[file][number]))
            payload = read_payload(opened)
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
            return feature.encoded_value(columns[name])
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


def _shards(folder: pathlib.Path, info: Mapping[str, Any]) -> Iterator[tuple[str, pathlib.Path, int]]:
    """Yield split, path and number of records of each shard."""
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
            yield split["name"], path_inside(folder, name, folder / INFO_FILE), length


def _flattened(specs: Mapping[str, Any], prefix: str = "", *, many: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield name and (declaration, how many sequences it is in) of each feature that is not a dict of others."""
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
    """Return the declarations in a dict of features, such as the languages of a translation; None for others."""
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
    for depth in range(many):  # four numbers are a box only where they are declared to be
        found = BBoxes() if kind == "BBoxFeature" and not depth else _several(found)
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


def _offsets_of(path: pathlib.Path, count: int) -> np.ndarray:
    """Return the offset of each record of a shard, int64 (n,)."""
    offsets = record_offsets(str(path), str(path))
    if len(offsets) != count:
        raise CorruptDataError(f"the file holds {count_of(len(offsets), 'record')}, {INFO_FILE} says {count}")
    return offsets


def open_folder(folder: pathlib.Path, spool: SpoolOptions) -> DataSource:
    """Return the samples of a directory that TFDS prepared, split after split.

    Raises:
        SourceError: a file is missing or not in TFDS' format, or a feature is of a kind that is not read here.
    """
    del spool
    info, declared = (read_document(folder / name) for name in (INFO_FILE, _FEATURES_FILE))
    try:
        shards = list(_shards(folder, info))
        # TFDS writes the outermost dict of features in one way, and reads two: the other is what datamat writes.
        outer = (declared.get("featuresDict") or declared["content"])["features"]
        dict(_flattened(outer))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"{folder}: its JSON is not as TFDS 4.9 writes it ({error!r}); prepare it again with that version"
        ) from error
    if not shards:
        raise SourceError(f"{folder} has no samples; pass a folder that has some")
    for _, path, _ in shards:
        if not path.is_file():
            raise SourceError(f"{path} does not exist; copy the shard, or prepare the dataset again")
    parts: dict[str, DataSource] = {}
    for split, found in itertools.groupby(shards, key=lambda shard: shard[0]):
        _, paths, counts = zip(*found, strict=True)
        form = TfdsForm(paths, counts, outer, is_array_record=info.get("fileFormat") == "array_record")
        parts[split] = RecordsSource([SourceFile(path.name, str(path)) for path in paths], form)
    return SplitSource(parts)
