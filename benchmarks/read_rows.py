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
    pyarrow       `ParquetFile.iter_batches(65536)` of each shard, cut into batches, columns as numpy arrays, checksums
                  tested; shuffled within those 65,536 rows by `take`
    polars        `read_parquet` of each shard, `iter_slices`, columns as numpy arrays; shuffled within the shard
    hf            Hugging Face `datasets` over the Parquet shards, numpy format, `iter`; mixed by `shuffle`
    grain         ArrayRecord of packed bytes, parsed by `struct` and numpy, two reading threads; mixed by `shuffle`
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
    *("tf.data", "pyarrow", "polars", "hf", "grain"),
)
NEEDS = {"datamat-tf": "tensorflow", "tf.data": "tensorflow", "polars": "polars", "hf": "datasets", "grain": "grain"}
# What a contestant is compared with; the others with tf.data.
BASE = {
    "datamat-join": "datamat-tfrecord",
    "datamat-columns": "datamat-tfrecord",
    **dict.fromkeys(("datamat-parquet", "polars", "hf", "grain"), "pyarrow"),
}


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
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    parser.add_argument("--contestant", nargs=4, metavar=("NAME", "SETS", "KIND", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        run_contestant(*options.contestant, options.batch)
        return
    print_machine()
    asked = options.only.split(",")
    names = [name for name in CONTESTANTS if name in asked and (name not in NEEDS or _has(NEEDS[name]))]
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.sets.split(","):
            race(pathlib.Path(folder), kind, names, options)


def race(folder: pathlib.Path, kind: str, names: list[str], options: argparse.Namespace) -> None:
    for name in FORMATS:
        shards = ShardOptions(num_shards=4)
        Materializer(Rows(kind), None, folder / kind / name, format=name, shards=shards).run(progress=False)
    if "grain" in names:
        make_grain(folder / kind, kind)
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
    parquet = sorted((folder / "parquet").glob("*.parquet"))
    if name in ("pyarrow", "polars"):
        return lambda: (_pyarrow if name == "pyarrow" else _polars)(parquet, batch, shuffled=mode == "shuffled")
    if name == "hf":
        return _hf(parquet, batch, mixed=mode == "mixed")
    if name == "grain":
        return _grain(folder / "rows.array_record", kind, batch, mixed=mode == "mixed")
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


def _pyarrow(files: list[pathlib.Path], batch: int, *, shuffled: bool):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    for file in files:
        for window in pq.ParquetFile(file, page_checksum_verification=True).iter_batches(65_536, use_threads=False):
            rows = window.take(pa.array(rng.permutation(len(window)))) if shuffled else window
            for start in range(0, len(rows), batch):
                columns = rows.slice(start, batch).columns
                arrays = [column.to_numpy(zero_copy_only=False) for column in columns]
                yield len(arrays[0])


def _polars(files: list[pathlib.Path], batch: int, *, shuffled: bool):
    import polars

    for file in files:
        rows = polars.read_parquet(file)
        rows = rows.sample(fraction=1, shuffle=True, seed=0) if shuffled else rows
        for some in rows.iter_slices(batch):
            arrays = [column.to_numpy() for column in some]
            yield len(arrays[0])


def _hf(files: list[pathlib.Path], batch: int, *, mixed: bool):
    import datasets

    cache = str(files[0].parent.parent / "hf")
    data = datasets.load_dataset("parquet", data_files=list(map(str, files)), split="train", cache_dir=cache)
    data = (data.shuffle(seed=0) if mixed else data).with_format("numpy")
    return lambda: (len(one["key"]) for one in data.iter(batch))


def make_grain(folder: pathlib.Path, kind: str) -> None:
    """Write the records as key, 16 bytes, and numbers."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer, rows = ArrayRecordWriter(str(folder / "rows.array_record"), "group_size:1,uncompressed"), Rows(kind)
    for row in rows.index(None):
        values = [np.asarray(value).tobytes() for value in rows.read(row).values()]
        writer.write(row.key.encode().ljust(16) + b"".join(values))
    writer.close()


def _grain(path: pathlib.Path, kind: str, batch: int, *, mixed: bool):
    import struct

    import grain

    def parse(record: bytes) -> dict:
        key = record[:16].rstrip().decode()
        if kind == "rows":
            number, value = struct.unpack_from("<qf", record, 16)
            return {"key": key, "number": np.int64(number), "value": np.float32(value)}
        if kind == "tokens":
            return {"key": key, "tokens": np.frombuffer(record, np.int64, offset=16)}
        return {"key": key, "vector": np.frombuffer(record, np.float32, offset=16)}

    data = grain.MapDataset.source(grain.sources.ArrayRecordDataSource([str(path)])).map(parse)
    data = data.seed(0).shuffle() if mixed else data
    batches = data.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=2 * batch))
    ragged = {"batch_fn": list} if kind == "tokens" else {}
    return lambda: (len(one) if isinstance(one, list) else len(one["key"]) for one in batches.batch(batch, **ragged))


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
    """Shuffle within a window where a library does, and all records where it does or nobody else would."""
    mixes = name in ("hf", "grain")
    return mode == "sequential" or (mode == "shuffled" and not mixes) or mixes or name.startswith("datamat-tfrecord")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    main()
