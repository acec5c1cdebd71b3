"""What TensorFlow Datasets needs: `features.json`, `dataset_info.json`, and a file with the names of each label.

With them `tfds.builder_from_directory` opens TFRecord (`as_dataset`) and ArrayRecord (`as_data_source`) shards. The
fields are those of the protos behind these files (tensorflow_datasets/core/proto, feature.proto and
dataset_info.proto, 4.9), in which 64-bit numbers are strings and -1 is a dimension that varies.

Where TFDS has no feature for what is stored, it reads the columns themselves: raw bytes, or flat numbers with their
shape in a column beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datamat.directory.files import render_json
from datamat.directory.manifest import formats_of, shards_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.directory.manifest import Manifest
    from datamat.features import Features


__all__ = ["tfds_sidecars"]

_FORMATS = {"tfrecord": "tfrecord", "arrayrecord": "array_record"}  # our name to theirs; TFDS reads no others
_FEATURES = "tensorflow_datasets.core.features."


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
    columns = {
        column: entry for name, feature in features.items() for column, entry in feature.tfds_entries(name).items()
    }
    return {
        "type": f"{_FEATURES}features_dict.FeaturesDict",
        "proto_cls": "tensorflow_datasets.FeaturesDict",
        "content": {"features": columns},
    }


def _label_files(features: Features) -> dict[str, bytes]:
    """Return a file with one class name a line for each label, unless a name spans lines or two fields share a file."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for name, feature in features.items():
        labels = feature.class_names()
        if labels is not None:
            file = f"{name.replace('/', '.')}.labels.txt"  # as TFDS calls the file of a field
            found.setdefault(file, set()).add(labels)
    return {
        file: "".join(f"{label}\n" for label in names).encode()
        for file, (names, *others) in found.items()
        if names and not others and all(label == label.strip() and len(label.splitlines()) == 1 for label in names)
    }
