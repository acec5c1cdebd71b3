"""Features: the schema of a dataset, declared once.

`Features` maps each field to a feature type. A type checks a value, encodes it into columns of three kinds (`bytes`,
`int64`, `float32`: what a `tf.train.Example` can hold) and decodes it again. Formats and clients that do not know the
feature go by the Arrow type of each column. Formats see only columns; users see only arrays.

    sample value  --encode-->  columns  --format-->  record bytes  --format-->  columns  --decode-->  sample value

Every mismatch between a sample and its declaration raises a `SchemaError` that names the field, the declaration and
what was found.

    base        Feature, ArrowType: the interface of a type, and the checks that types share    <- start reading here
    protocols   Geometry, Preview: optional protocols of types that move with an image, or are drawn
    statistics  Counts, Numbers: statistics of the values of a field
    pictures    Image, Mask, Depth, Video; Keypoints and Polygons in a picture
    values      ClassLabel, BBoxes, Text, Bytes, Json, Timestamp, Scalar, Tensor, Tokens, Audio
    composed    common code of types that are made of another one
    nullable    Nullable: values that may be missing
    list_of     ListOf
    nesting     samples that contain dicts
    registry    register_feature; types by their names in manifests
    inference   features inferred from a sample
    schema      Features: the whole schema
"""

from __future__ import annotations

from datamat.features.audio import Audio
from datamat.features.base import ArrowType, Feature, RaggedColumn
from datamat.features.list_of import ListOf
from datamat.features.nullable import Nullable
from datamat.features.pictures import Depth, Image, Keypoints, Mask, Polygons
from datamat.features.protocols import Geometry, Preview
from datamat.features.registry import register_feature
from datamat.features.schema import Features
from datamat.features.statistics import Counts, Numbers, Statistics
from datamat.features.values import (
    BBoxes,
    Bytes,
    ClassLabel,
    Json,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
)
from datamat.features.video import Video

__all__ = [
    "ArrowType",
    "Audio",
    "BBoxes",
    "Bytes",
    "ClassLabel",
    "Counts",
    "Depth",
    "Feature",
    "Features",
    "Geometry",
    "Image",
    "Json",
    "Keypoints",
    "ListOf",
    "Mask",
    "Nullable",
    "Numbers",
    "Polygons",
    "Preview",
    "RaggedColumn",
    "Scalar",
    "Statistics",
    "Tensor",
    "Text",
    "Timestamp",
    "Tokens",
    "Video",
    "register_feature",
]


def __dir__() -> list[str]:
    return __all__


OUTPUT_VERSION = 5
"""Incremented when samples are encoded to different columns; then all shards are rebuilt."""
