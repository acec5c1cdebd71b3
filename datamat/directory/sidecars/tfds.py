"""Sidecars of TensorFlow Datasets: `features.json`, `dataset_info.json`, and a file with the names of each label.

With them `tfds.builder_from_directory` opens TFRecord (`as_dataset`) and ArrayRecord (`as_data_source`) shards. The
fields are those of the protos behind these files (tensorflow_datasets/core/proto, feature.proto and
dataset_info.proto, 4.9), in which 64-bit numbers are strings and -1 is a dimension that varies.

If TFDS has no feature for the stored values, it reads the columns themselves: raw bytes, or flat numbers with their
shape in another column.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from datamat.directory.files import render_json
from datamat.directory.manifest import formats_of, shards_of
from datamat.features import ListOf, Nullable
from datamat.features.pictures import Depth, Image, Mask, Polygons
from datamat.features.values import BBoxes, ClassLabel, Scalar, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.directory.manifest import Manifest
    from datamat.features import Feature, Features
    from datamat.features.base import ArrowType, Shape

_FORMATS = {"tfrecord": "tfrecord", "arrayrecord": "array_record"}  # our names to theirs; TFDS reads no others
_FEATURES = "tensorflow_datasets.core.features."
_NOT_DECODED = {"uint32"}  # not supported by `tf.io.decode_raw`


def tfds_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the files for TFDS, by name; none if it reads no format of the directory, or not its names."""
    formats = [name for name in _FORMATS if name in formats_of(manifest)]
    if not formats or not manifest.has_one_count:
        return {}
    return {
        "features.json": render_json(_features(manifest.features)),
        "dataset_info.json": render_json(_dataset_info(manifest, formats)),
        **_label_files(manifest.features),
    }


def _dataset_info(manifest: Manifest, formats: Sequence[str]) -> dict[str, Any]:
    info: dict[str, Any] = {
        "name": manifest.name,
        "version": "1.0.0",
        "fileFormat": _FORMATS[formats[0]],
        "splits": [
            {
                "name": split,
                "shardLengths": [str(shard.num_records) for shard in shards],
                "numBytes": str(sum(shard.num_bytes for shard in shards)),
                "filepathTemplate": "{DATASET}-{SPLIT}-{SHARD_X_OF_Y}.{FILEFORMAT}",
            }
            for split, shards in shards_of(manifest, formats[0]).items()
        ],
    }
    if formats[1:]:
        info["alternativeFileFormats"] = [_FORMATS[name] for name in formats[1:]]
    return info


def _features(features: Features) -> dict[str, Any]:
    columns = {
        column: entry for name, feature in features.items() for column, entry in tfds_entries(feature, name).items()
    }
    return {
        "type": f"{_FEATURES}features_dict.FeaturesDict",
        "proto_cls": "tensorflow_datasets.FeaturesDict",
        "content": {"features": columns},
    }


@functools.singledispatch
def tfds_entries(feature: Feature, name: str) -> dict[str, dict[str, Any]]:
    """Return an entry of `features.json` for each column of a field, in the form of TFDS's feature.proto.

    The default describes the stored columns, by their Arrow types. A package may register a function for its own
    feature type if TFDS has a feature for it: `tfds_entries.register(Waveform)`.

    Args:
        feature: feature of the field.
        name: name of the field, as prefix of its columns.
    """
    return {column: _stored(stored) for column, stored in feature.columns(name).items()}


def _stored(stored: ArrowType) -> dict[str, Any]:
    """Return the entry of a column."""
    if stored.kind == "bytes_list":
        return _sequence(_TEXT, None)
    if not stored.holds_numbers:
        return _TEXT
    dtype = "int64" if stored.dtype.startswith("timestamp") else stored.dtype
    return _tensor(stored.sizes, dtype, is_raw=stored.kind == "bytes")


@tfds_entries.register(Nullable)
@tfds_entries.register(ListOf)
def _(feature: Nullable | ListOf, name: str) -> dict[str, dict[str, Any]]:
    types, of_one = feature.columns(name), feature.stored.columns(name)
    found = tfds_entries(feature.stored, name)
    for column in () if isinstance(feature, ListOf) and feature.array else of_one:
        if of_one[column].kind != "bytes_list" and f"{column}/lengths" in types:
            found[column] = _stored(types[column])
        elif of_one[column].kind != "bytes_list":
            found[column] = _sequence(_TEXT if types[column].kind == "bytes_list" else found[column], None)
    return found | {column: _tensor((None,), "int64") for column in types if column not in of_one}


@tfds_entries.register(Scalar)
@tfds_entries.register(Tensor)
def _(feature: Scalar | Tensor, name: str) -> dict[str, dict[str, Any]]:
    (dtype, shape), types = feature.value_type(), feature.columns(name)
    if f"{name}/shape" not in types:
        return {name: _tensor(shape, dtype, is_raw=types[name].kind == "bytes")}
    return {
        name: _tensor((None,), dtype, is_raw=types[name].kind == "bytes"),
        f"{name}/shape": _tensor((len(shape),), "int64"),
    }


@tfds_entries.register(ClassLabel)
def _(feature: ClassLabel, name: str) -> dict[str, dict[str, Any]]:
    label = _entry("class_label_feature.ClassLabel", classLabel={"numClasses": str(feature.num_classes)})
    return {name: _sequence(label, feature.shape[0]) if feature.shape else label}


@tfds_entries.register(BBoxes)
def _(feature: BBoxes, name: str) -> dict[str, dict[str, Any]]:
    if feature.rotated:
        return {name: _tensor((None, 5), "float32")}
    box = {"shape": _dimensions((4,)), "dtype": "float32", "bboxFormat": "REL_YXYX"}
    return {name: _sequence(_entry("bounding_boxes.BBoxFeature", boundingBox=box), None)}


@tfds_entries.register(Polygons)
def _(feature: Polygons, name: str) -> dict[str, dict[str, Any]]:
    return {column: _tensor((None,), stored.dtype) for column, stored in feature.columns(name).items()}


@tfds_entries.register(Image)
def _(feature: Image, name: str) -> dict[str, dict[str, Any]]:
    # TFDS does not decode two channels.
    return {name: _TEXT if feature.channels == 2 else _image(feature.shape, feature.encoding, feature.dtype)}


@tfds_entries.register(Mask)
@tfds_entries.register(Depth)
def _(feature: Mask | Depth, name: str) -> dict[str, dict[str, Any]]:
    entry, labels = _image((*feature.shape, 1), "png", feature.dtype), feature.class_names()
    if labels:
        entry = _entry(
            "labeled_image.LabeledImage", image={**entry["image"], "label": {"numClasses": str(len(labels))}}
        )
    return {name: entry}


def _entry(kind: str, **content: Any) -> dict[str, Any]:
    """Return an entry of `features.json`, given the module and class of a TFDS feature."""
    return {"pythonClassName": f"{_FEATURES}{kind}", **content}


_TEXT = _entry("text_feature.Text", text={})


def _tensor(shape: Shape, dtype: str, *, is_raw: bool = False) -> dict[str, Any]:
    """Return the entry of an array of numbers, or of its little-endian bytes."""
    if is_raw and dtype in _NOT_DECODED:
        return _TEXT
    tensor = {"shape": _dimensions(shape), "dtype": dtype, "encoding": "bytes" if is_raw else "none"}
    return _entry("tensor_feature.Tensor", tensor=tensor)


def _image(shape: Shape, encoding: str, dtype: str) -> dict[str, Any]:
    image = {"shape": _dimensions(shape), "dtype": dtype, "encodingFormat": encoding}
    return _entry("image_feature.Image", image=image)


def _sequence(feature: dict[str, Any], length: int | None) -> dict[str, Any]:
    """Return the entry of a list of features."""
    return _entry("sequence_feature.Sequence", sequence={"feature": feature, "length": _size(length)})


def _dimensions(shape: Shape) -> dict[str, Any]:
    """Return a shape as in protobuf's JSON: 64-bit numbers as strings, -1 for a varying size."""
    return {"dimensions": [_size(size) for size in shape]} if shape else {}


def _size(size: int | None) -> str:
    return "-1" if size is None else str(size)


def _label_files(features: Features) -> dict[str, bytes]:
    """Return a file with one class name per line for each label, unless names span lines or fields share a file."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for name, feature in features.items():
        labels = feature.class_names()
        if labels is not None:
            file = f"{name.replace('/', '.')}.labels.txt"  # the file name that TFDS uses for a field
            found.setdefault(file, set()).add(labels)
    return {
        file: "".join(f"{label}\n" for label in names).encode()
        for file, (names, *others) in found.items()
        if names and not others and all(label == label.strip() and len(label.splitlines()) == 1 for label in names)
    }
