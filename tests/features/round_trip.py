"""A value through a record and back, and runs in the process of the test."""

from __future__ import annotations

import datamat
from datamat import Features
from datamat.formats.example import decode_example, encode_example
from datamat.testing import InlineExecutor


def through_a_record(feature, value):
    """Encode a value, write it as a `tf.train.Example`, and read it back."""
    features = Features({"x": feature})
    data = encode_example(features.encode({"key": "a", "x": value}), features.columns)
    return features.decode(decode_example(data))["x"]


def materialize(function, source, output, **options):
    """Materialize with no worker process."""
    return datamat.materialize(function, source, output, executor=InlineExecutor(), progress=False, **options)
