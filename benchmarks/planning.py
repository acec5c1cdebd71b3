"""What it takes to plan a dataset from a partitioned Parquet index: seconds and memory, and that nothing loads it.

    python benchmarks/planning.py                                # one and ten million rows
    python benchmarks/planning.py --rows 100000000               # 3 GB of Parquet, and 13 GB of row files beside it

The index is a folder of Parquet files of a million rows, made beforehand: a key of 16 letters, the URL of an object, a
number of bytes and a class. `plan` reads it batch by batch, writes it as columns, and places each row in split, shard
and part; workers map these columns. Each size has a process of its own. Memory is the peak of the anonymous pages of
that process, sampled each 50 ms, less what it held before; pages of mapped files are the kernel's, which drops them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from datamat import DatasetWriter, Features, Index, Materializer, Scalar, ShardOptions

PER_FILE = 1_000_000
ROWS_PER_SHARD = 100_000
KINDS = 1000


class Table(DatasetWriter):
    """Rows of a folder of Parquet files."""

    name = "table"
    features = Features({"kind": Scalar("int64")})

    def index(self, source):
        from pyarrow import dataset

        return Index.from_table(dataset.dataset(source, format="parquet"))

    def read(self, row):
        return {"kind": row.fields["kind"]}


def make_index(folder: pathlib.Path, num_rows: int) -> int:
    """Write the index; return its bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    for number, start in enumerate(range(0, num_rows, PER_FILE)):
        rows = np.arange(start, min(start + PER_FILE, num_rows), dtype=np.uint64)
        mixed = rows * np.uint64(0x9E3779B97F4A7C15)
        digits = np.stack([(mixed >> np.uint64(shift)).astype(np.uint8) & 15 for shift in range(60, -4, -4)], axis=1)
        keys = np.frombuffer(b"0123456789abcdef", np.uint8)[digits]
        columns = {
            "key": texts(keys),
            "url": texts(letters(b"s3://raw/", len(rows)), keys[:, :2], letters(b"/", len(rows)), keys,
                         letters(b".jpg", len(rows))),
            "size": (mixed >> np.uint64(48)).astype(np.int64) + 20_000,
            "kind": (mixed % np.uint64(KINDS)).astype(np.int64),
            "split": pa.array(["train"] * len(rows)),
        }  # fmt: skip
        place = folder / f"part={number:05d}"
        place.mkdir(parents=True)
        parquet.write_table(pa.table(columns), place / "data.parquet", row_group_size=1 << 17)
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


def letters(text: bytes, count: int) -> np.ndarray:
    return np.tile(np.frombuffer(text, np.uint8), (count, 1))


def texts(*pieces: np.ndarray):
    """Return a column of texts of one length, of pieces that are uint8 (n, length)."""
    import pyarrow as pa

    whole = np.concatenate(pieces, axis=1)
    ends = np.arange(len(whole) + 1, dtype=np.int32) * np.int32(whole.shape[1])
    return pa.StringArray.from_buffers(len(whole), pa.py_buffer(ends.tobytes()), pa.py_buffer(whole.tobytes()))


class Memory:
    """The peak of the anonymous memory of this process during a block, and seconds of it."""

    def __enter__(self):
        self.before = self.peak = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self._begin = time.perf_counter(), time.process_time()
        return self

    def _watch(self):
        while not self._ended.wait(0.05):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *_):
        self.wall_s = time.perf_counter() - self._begin[0]
        self.cpu_s = time.process_time() - self._begin[1]
        self._ended.set()
        self._thread.join()


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def job(source: str, output: str, num_rows: int) -> Materializer:
    shards = ShardOptions(num_shards=max(num_rows // ROWS_PER_SHARD, 1))
    return Materializer(Table(), source, output, shards=shards)


def child(source: str, output: str, num_rows: int) -> dict[str, float]:

    small = pathlib.Path(output) / "small"
    make_index(small, 1000)
    job(str(small), output, 1000).plan()  # imports all that there is
    made = job(source, output, num_rows)
    with Memory() as memory:
        plan = made.plan()
    parts = sum(len(shard.parts) for shard in plan.shards)
    return {
        "rows": num_rows, "shards": len(plan.shards), "parts": parts, "wall_s": memory.wall_s, "cpu_s": memory.cpu_s,
        "memory": memory.peak - memory.before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        source, output, rows = options.child
        print(json.dumps(child(source, output, int(rows))))
        return
    print(
        f"{'rows':>12}{'index, MB':>11}{'shards':>8}{'parts':>8}{'cpu, s':>9}{'us/row':>8}"
        f"{'memory, MB':>12}{'B/row':>8}"
    )
    for num_rows in options.rows:
        with tempfile.TemporaryDirectory(prefix="datamat-planning-", dir=os.environ.get("BENCH_DIR")) as folder:
            source, output = pathlib.Path(folder, "index"), pathlib.Path(folder, "out")
            output.mkdir()
            size = make_index(source, num_rows)
            command = [sys.executable, __file__, "--child", str(source), str(output), str(num_rows)]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": folder}
            )
            found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{num_rows:12,}{size / 1e6:11,.0f}{found['shards']:8,}{found['parts']:8,}{found['cpu_s']:9.1f}"
            f"{found['cpu_s'] / num_rows * 1e6:8.2f}{found['memory'] / 1e6:12,.0f}{found['memory'] / num_rows:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
