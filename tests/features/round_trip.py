"""A value through a record and back."""

from __future__ import annotations

from datamat import Features
from datamat.formats.example import decode_example, encode_example


def through_a_record(feature, value):
    """Encode a value, write it as a `tf.train.Example`, and read it back."""
    features = Features({"x": feature})
    data = encode_example(features.encode({"key": "a", "x": value}), features.columns)
    return features.decode(decode_example(data))["x"]
