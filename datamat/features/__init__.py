"""What a sample holds: the schema of a dataset, declared once.

A `Features` maps each field to a feature type. A type checks a value, encodes it into columns of one of three
kinds (`bytes`, `int64`, `float32`: what a `tf.train.Example` can hold) and decodes it again. Formats see columns
only; users see arrays only.

    sample value  --encode-->  columns  --format-->  record bytes  --format-->  columns  --decode-->  sample value

Every mismatch between a sample and its declaration is a `SchemaError` that names the field, what is declared and
what was found.

    base        Feature: what a type must do; the checks they share
    pictures    Image, Mask
    values      ClassLabel, BBoxes, Text, Scalar, Tensor
    schema      Features
"""

from __future__ import annotations

from datamat.features.base import Column, Feature
from datamat.features.pictures import Image, Mask
from datamat.features.schema import Features
from datamat.features.values import BBoxes, ClassLabel, Scalar, Tensor, Text

__all__ = ["BBoxes", "ClassLabel", "Column", "Feature", "Features", "Image", "Mask", "Scalar", "Tensor", "Text"]
