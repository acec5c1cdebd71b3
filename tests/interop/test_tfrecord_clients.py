"""TFRecord shards, opened by tf.data and grain."""

import pytest
from real_clients import MARKS, shards

from datamat import Manifest
from datamat.formats.example import decode_example

pytestmark = MARKS


@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz"])
def test_tf_data_parses_examples(directory, samples, name):
    """tf.data reads the files in order, and a parser of one line per column gives the values."""
    import tensorflow as tf

    files = shards(directory(name), name)
    records = tf.data.TFRecordDataset(files, compression_type="GZIP" if name.endswith("gz") else None)
    parsed = records.map(
        lambda record: tf.io.parse_single_example(
            record,
            {
                "image": tf.io.FixedLenFeature([], tf.string),
                "key": tf.io.FixedLenFeature([], tf.string),
                "label": tf.io.FixedLenFeature([], tf.int64),
                "objects/bbox": tf.io.RaggedFeature(tf.float32),
                "pose": tf.io.FixedLenFeature([2, 3], tf.float32),
            },
        )
    )

    found = list(parsed.as_numpy_iterator())

    assert [item["key"].decode() for item in found] == list(samples)
    for item in found:
        sample = samples[item["key"].decode()]
        assert (tf.io.decode_png(item["image"]).numpy() == sample["image"]).all()
        assert item["label"] == sample["label"]
        assert (item["pose"] == sample["pose"]).all()
        assert (item["objects/bbox"].reshape(-1, 4) == sample["objects/bbox"]).all()


def test_grain_iterates_over_tfrecords(directory, samples):
    """Grain's own reader of TFRecord gives each record once."""
    grain = pytest.importorskip("grain")

    features = Manifest.read(directory("tfrecord")).features
    payloads = [
        payload
        for path in shards(directory("tfrecord"), "tfrecord")
        for payload in grain.experimental.TFRecordIterDataset(path)
    ]

    assert [features.decode(decode_example(payload))["key"] for payload in payloads] == list(samples)
