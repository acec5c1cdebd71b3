"""ArrayRecord shards, opened by the package's own reader."""

import numpy as np
import pytest
from real_clients import MARKS, shards

from datamat import Manifest
from datamat.formats.example import decode_example

pytest.importorskip("array_record", reason="the package array-record is not installed")
pytestmark = MARKS


def check_record(payload, samples, features):
    sample = features.decode(decode_example(payload))
    for name, value in samples[sample["key"]].items():
        np.testing.assert_array_equal(sample[name], value)
    return sample["key"]


def test_array_record_reads_groups_of_one(directory, samples):
    """The package's own reader gives the records in order, and reports each as a group of its own."""
    from array_record.python.array_record_module import ArrayRecordReader

    folder = directory("arrayrecord")
    features = Manifest.read(folder).features
    keys = []
    for path in shards(folder, "array_record"):
        reader = ArrayRecordReader(path)
        assert "group_size:1," in reader.writer_options_string()
        keys += [check_record(payload, samples, features) for payload in reader.read_all()]
        reader.close()

    assert keys == list(samples)
