"""What it costs to read a record that is not a picture: rows, embeddings, tokens; µs of processor each, in one run.

    python benchmarks/read_rows.py
    python benchmarks/read_rows.py --sets rows --rounds 3 --batch 256

    rows          key, int64 and float32                              embeddings    key and 256 float32
    tokens        key and 64 to 512 int64 token ids

Contestants read the same records, in the order of the files and shuffled, 4,096 at a time as tf.data does, and all at
once (`mixed`). Each runs in a process of its own, rounds are interleaved, ratios are taken within a round. Pipelines
are made, and give a first batch, before the clock starts.

    datamat-*     `to_numpy` over TFRecord, gzip TFRecord, Parquet; `to_tf` over TFRecord
    datamat-join  `to_numpy` of TFRecord, joined by key with itself: twice the bytes, so 2 is as fast as each alone
    datamat-columns               one field of TFRecord
    tf.data       TFRecordDataset of all shards, batch, parse_example, prefetch
    pyarrow       `ParquetFile.iter_batches` of each shard, columns as numpy arrays, checksums tested
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np
from read import cpu_seconds, print_machine

from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, ShardOptions, Tensor, load

SETS = {
    "rows": (200_000, {"number": Scalar("int64"), "value": Scalar("float32")}),
    "embeddings": (40_000, {"vector": Tensor((256,), "float32")}),
    "tokens": (20_000, {"tokens": Tensor((None,), "int64")}),
}
SHUFFLES = {"sequential": False, "shuffled": 4096, "mixed": True}
FORMATS = ("tfrecord", "tfrecord.gz", "parquet")
CONTESTANTS = (
    *(f"datamat-{one}" for one in (*FORMATS, "join", "columns", "tf")),
    *("tf.data", "pyarrow"),
)
# What a contestant is compared with; the others with tf.data.
BASE = {"datamat-parquet": "pyarrow", "datamat-join": "datamat-tfrecord", "datamat-columns": "datamat-tfrecord"}


class Rows(DatasetWriter):
    """Records of one of the sets."""

    name = "rows"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.features = Features(SETS[kind][1])

    def index(self, source):
        return [IndexRow(f"key{number}", "train", {"number": number}) for number in range(SETS[self.kind][0])]

    def read(self, row):
        number = int(row.fields["number"])
        if self.kind == "rows":
            return {"number": number * 37, "value": np.float32(number / 3)}
        rng = np.random.default_rng(number)
        if self.kind == "embeddings":
            return {"vector": rng.standard_normal(256, np.float32)}
        return {"tokens": rng.integers(0, 50_000, rng.integers(64, 512))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--contestant", nargs=4, metavar=("NAME", "SETS", "KIND", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        run_contestant(*options.contestant, options.batch)
        return
    print_machine()
    names = [name for name in CONTESTANTS if (name[-2:] != "tf" and name != "tf.data") or _has("tensorflow")]
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.sets.split(","):
            race(pathlib.Path(folder), kind, names, options)


def race(folder: pathlib.Path, kind: str, names: list[str], options: argparse.Namespace) -> None:
    for name in FORMATS:
        shards = ShardOptions(num_shards=4)
        Materializer(Rows(kind), None, folder / kind / name, format=name, shards=shards).run(progress=False)
    modes = {(name, mode): [] for name in names for mode in SHUFFLES if _is_mode(name, mode)}
    for _ in range(options.rounds):
        for (name, mode), found in modes.items():
            command = [sys.executable, "-W", "ignore", __file__, "--batch", str(options.batch)]
            command += ["--contestant", name, str(folder), kind, mode]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"\n{kind}: {SETS[kind][0]:,} records, batches of {options.batch}, {options.rounds} rounds")
    print(f"{'contestant':21}{'mode':12}{'CPU us':>8}{'wall us':>9}{'CPU / peer':>12}  peer")
    for (name, mode), found in modes.items():
        cpu, wall = (statistics.median(one[what] for one in found) for what in ("cpu", "wall"))
        peer = BASE.get(name, "tf.data")
        others = modes.get((peer, mode)) or modes.get((peer, "sequential"))
        ratio = (
            statistics.median(one["cpu"] / other["cpu"] for one, other in zip(found, others, strict=True))
            if others
            else 0
        )
        print(f"{name:21}{mode:12}{cpu:8.2f}{wall:9.2f}{ratio:12.2f}  {peer}")


def run_contestant(name: str, folder: str, kind: str, mode: str, batch: int) -> None:
    import time

    epochs = open_set(name, pathlib.Path(folder) / kind, kind, mode=mode, batch=batch)
    for _ in epochs():  # imports done, files in the page cache
        break
    cpu, started, count = cpu_seconds(), time.perf_counter(), 0
    for size in epochs():
        count += size
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - started
    assert count == SETS[kind][0], (name, mode, count)
    print(json.dumps({"cpu": cpu / count * 1e6, "wall": wall / count * 1e6}))


def open_set(name: str, folder: pathlib.Path, kind: str, *, mode: str, batch: int):
    """Return a function that yields the number of records of each batch of an epoch; what epochs share is made here."""
    if name == "pyarrow":
        return lambda: _pyarrow(sorted((folder / "parquet").glob("*.parquet")), batch)
    if name == "tf.data":
        files = sorted(map(str, (folder / "tfrecord").glob("*.tfrecord")))
        batches = _tf_data(files, kind, batch, shuffled=mode == "shuffled")
    elif name in ("datamat-join", "datamat-columns"):
        data = load(folder / "tfrecord", "train")
        view = data.join(data, prefix="other_") if name == "datamat-join" else data.columns(next(iter(SETS[kind][1])))
        batches = view.to_numpy(batch, shuffle=SHUFFLES[mode])
    elif name == "datamat-tf":
        batches = load(folder / "tfrecord", "train").to_tf(batch, shuffle=SHUFFLES[mode])
    else:
        batches = load(folder / name.removeprefix("datamat-"), "train").to_numpy(batch, shuffle=SHUFFLES[mode])
    return lambda: (len(one["key"]) for one in batches)


def _pyarrow(files: list[pathlib.Path], batch: int):
    import pyarrow.parquet as pq

    for file in files:
        for one in pq.ParquetFile(file, page_checksum_verification=True).iter_batches(batch, use_threads=False):
            arrays = [column.to_numpy(zero_copy_only=False) for column in one.columns]
            yield len(arrays[0])


def _tf_data(files: list[str], kind: str, batch: int, *, shuffled: bool):
    import tensorflow as tf

    value = {
        "rows": {"number": tf.io.FixedLenFeature([], tf.int64), "value": tf.io.FixedLenFeature([], tf.float32)},
        "embeddings": {"vector": tf.io.FixedLenFeature([256], tf.float32)},
        "tokens": {"tokens": tf.io.RaggedFeature(tf.int64)},
    }[kind]
    fields = {"key": tf.io.FixedLenFeature([], tf.string), **value}
    records = tf.data.TFRecordDataset(files)
    if shuffled:
        records = records.shuffle(4096)
    return records.batch(batch).map(lambda one: tf.io.parse_example(one, fields), tf.data.AUTOTUNE).prefetch(2)


def _is_mode(name: str, mode: str) -> bool:
    """Pyarrow leaves shuffling to the user, and TensorFlow does not mix all records."""
    return mode == "sequential" or (mode == "shuffled" and name != "pyarrow") or name.startswith("datamat-tfrecord")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    main()
