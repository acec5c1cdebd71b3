"""What TensorFlow Datasets needs: `features.json`, `dataset_info.json`, and a file with the names of each label.

With them `tfds.builder_from_directory` opens TFRecord (`as_dataset`) and ArrayRecord (`as_data_source`) shards. The
fields are those of the protos behind these files (tensorflow_datasets/core/proto, feature.proto and
dataset_info.proto, 4.9): 64-bit numbers are strings there, and -1 is a size that varies.

What a feature of TFDS cannot hold as it is stored comes as what it is: bytes it has no numbers for, flat numbers
beside their shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datamat.features import BBoxes, ClassLabel, Image, Mask, Scalar, Tensor
from datamat.interop.contents import formats_of, shards_of
from datamat.storage import render_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.features import Feature, Features
    from datamat.manifest import Manifest

__all__ = ["tfds_sidecars"]

_FORMATS = {"tfrecord": "tfrecord", "arrayrecord": "array_record"}  # ours to theirs; others TFDS does not read
_FEATURES = "tensorflow_datasets.core.features."
_NOT_DECODED = {"uint32"}  # `tf.io.decode_raw` has no such type


def tfds_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the files that TFDS reads, by name; none where it reads no format of the directory."""
    formats = [name for name in _FORMATS if name in formats_of(manifest)]
    if not formats:
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
    columns: dict[str, Any] = {}
    for name, feature in features.items():
        columns[name] = _feature(feature)
        if isinstance(feature, Tensor) and feature.keeps_shape:
            columns[f"{name}/shape"] = _tensor((len(feature.shape),), "int64")
    return {
        "type": f"{_FEATURES}features_dict.FeaturesDict",
        "proto_cls": "tensorflow_datasets.FeaturesDict",
        "content": {"features": columns},
    }


def _feature(feature: Feature) -> dict[str, Any]:
    if isinstance(feature, Image):
        return _image(feature.shape, feature.encoding)
    if isinstance(feature, Mask):
        return _mask(feature)
    if isinstance(feature, ClassLabel):
        label = _named("class_label_feature.ClassLabel", classLabel={"numClasses": str(feature.num_classes)})
        return _sequence(label, feature.shape[0]) if feature.shape else label
    if isinstance(feature, BBoxes):
        box = {"shape": _shape((4,)), "dtype": "float32", "bboxFormat": "REL_YXYX"}
        return _sequence(_named("bounding_boxes.BBoxFeature", boundingBox=box), None)
    if isinstance(feature, Scalar):
        is_raw = feature.columns("")[""] == "bytes"
        return _tensor((), feature.dtype, is_raw=is_raw)
    if isinstance(feature, Tensor):
        is_raw = feature.columns("")[""] == "bytes"
        return _tensor((None,) if feature.keeps_shape else feature.shape, feature.dtype, is_raw=is_raw)
    return _named("text_feature.Text", text={})


def _named(kind: str, **content: Any) -> dict[str, Any]:
    return {"pythonClassName": f"{_FEATURES}{kind}", **content}


def _image(shape: Sequence[int | None], encoding: str) -> dict[str, Any]:
    return _named("image_feature.Image", image={"shape": _shape(shape), "dtype": "uint8", "encodingFormat": encoding})


def _mask(feature: Mask) -> dict[str, Any]:
    shape = (*feature.shape, 1)
    if not feature.names:
        return _image(shape, "png")
    image = {
        "shape": _shape(shape),
        "dtype": "uint8",
        "encodingFormat": "png",
        "label": {"numClasses": str(len(feature.names))},
    }
    return _named("labeled_image.LabeledImage", image=image)


def _sequence(feature: dict[str, Any], length: int | None) -> dict[str, Any]:
    return _named("sequence_feature.Sequence", sequence={"feature": feature, "length": str(_size(length))})


def _tensor(shape: Sequence[int | None], dtype: str, *, is_raw: bool = False) -> dict[str, Any]:
    if is_raw and dtype in _NOT_DECODED:
        return _named("text_feature.Text", text={})
    tensor = {"shape": _shape(shape), "dtype": dtype, "encoding": "bytes" if is_raw else "none"}
    return _named("tensor_feature.Tensor", tensor=tensor)


def _shape(shape: Sequence[int | None]) -> dict[str, Any]:
    return {"dimensions": [str(_size(size)) for size in shape]} if shape else {}


def _size(size: int | None) -> int:
    return -1 if size is None else size


def _label_files(features: Features) -> dict[str, bytes]:
    """Return the names of classes, one a line; without those that lines, or two fields in one file, cannot hold."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for name, feature in features.items():
        if isinstance(feature, (ClassLabel, Mask)):
            file = f"{name.replace('/', '.')}.labels.txt"  # as TFDS calls the file of a field
            found.setdefault(file, set()).add(feature.names)
    return {
        file: "".join(f"{label}\n" for label in names).encode()
        for file, (names, *others) in found.items()
        if names and not others and all(label == label.strip() and len(label.splitlines()) == 1 for label in names)
    }
