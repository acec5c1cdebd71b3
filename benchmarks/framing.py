"""Cost of turning encoded values into TFRecord bytes, per record: ours beside TensorFlow's.

    python benchmarks/framing.py [--rounds 5]

The contenders take turns, and the best and the median of each are printed. Files go to /dev/null, so that no disk is
measured. "floor" is the CRC32C of the large values and one copy of them: what no writer can do without.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from typing import TYPE_CHECKING

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import google_crc32c
import numpy as np
import tensorflow as tf

from datamat.formats import get_format
from datamat.formats.example import decode_example, encode_example

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from datamat.features.base import Kind

IMAGE_COLUMNS: dict[str, Kind] = {"image": "bytes", "mask": "bytes", "key": "bytes"}
ROW_COLUMNS: dict[str, Kind] = {"key": "bytes", "x": "float32", "y": "float32", "label": "int64", "id": "int64"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{platform.machine()}, {os.cpu_count()} logical cores, Python {platform.python_version()}")
    print(f"numpy {np.__version__}, google-crc32c {google_crc32c.implementation}, tensorflow {tf.__version__}")
    report("image record: 36 KB + 5 KB + key", image_contenders(2_000), 2_000, rounds)
    report("tiny row: key, 2 float32, 2 int64", row_contenders(20_000), 20_000, rounds)


def report(title: str, contenders: Mapping[str, Callable[[], None]], num_records: int, rounds: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            taken[name].append((time.perf_counter() - start) / num_records * 1e6)
    print(f"\n{title}\n{'us per record':32} {'best':>8} {'median':>8}")
    for name, costs in taken.items():
        print(f"{name:32} {min(costs):8.2f} {statistics.median(costs):8.2f}")


def image_contenders(num_records: int) -> dict[str, Callable[[], None]]:
    rng = np.random.default_rng(0)
    records = [
        {"image": rng.bytes(36_000), "mask": rng.bytes(5_000), "key": b"0016E5_%05d" % index}
        for index in range(num_records)
    ]

    def floor() -> None:
        for record in records:
            google_crc32c.extend(google_crc32c.value(record["image"]), record["mask"])
            b"".join((record["image"], record["mask"]))

    return {
        "floor": floor,
        "append": lambda: append_all(records, IMAGE_COLUMNS),
        "tf.train.Example + TFRecordWriter": lambda: append_tensorflow(records, IMAGE_COLUMNS),
    }


def row_contenders(num_records: int) -> dict[str, Callable[[], None]]:
    rng = np.random.default_rng(0)
    block = {
        "key": [b"row-%07d" % index for index in range(num_records)],
        "x": rng.random(num_records, np.float32),
        "y": rng.random(num_records, np.float32),
        "label": rng.integers(0, 10, num_records),
        "id": np.arange(num_records),
    }
    records = [
        {
            name: np.ravel(values[index]) if isinstance(values, np.ndarray) else values[index]
            for name, values in block.items()
        }
        for index in range(num_records)
    ]
    encoded = [encode_example(record, ROW_COLUMNS) for record in records]
    varied = block | {"key": [b"row-%d" % index for index in range(num_records)]}
    return {
        "append_block": lambda: append_block(block, ROW_COLUMNS),
        "append_block, keys of any length": lambda: append_block(varied, ROW_COLUMNS),
        "append": lambda: append_all(records, ROW_COLUMNS),
        "tf.train.Example + TFRecordWriter": lambda: append_tensorflow(records, ROW_COLUMNS),
        "decode_example": lambda: [None for data in encoded if decode_example(data) is None],
        "tf.train.Example.FromString": lambda: [None for data in encoded if tf.train.Example.FromString(data) is None],
    }


def append_all(records, columns) -> None:
    with open(os.devnull, "wb", buffering=0) as file:
        writer = get_format("tfrecord").writer(file, columns)
        for record in records:
            writer.append(record)
        writer.finish()


def append_block(block, columns) -> None:
    with open(os.devnull, "wb", buffering=0) as file:
        writer = get_format("tfrecord").writer(file, columns)
        writer.append_block(block)
        writer.finish()


def append_tensorflow(records, columns) -> None:
    with tf.io.TFRecordWriter(os.devnull) as writer:
        for record in records:
            features = {name: tensorflow_feature(value, columns[name]) for name, value in record.items()}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString(deterministic=True))


def tensorflow_feature(value, kind):
    if kind == "bytes":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    if kind == "int64":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value))


if __name__ == "__main__":
    main()
