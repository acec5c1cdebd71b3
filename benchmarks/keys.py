"""What the first look-up by key costs a process: seconds and memory, with the file of hashes and without.

    python benchmarks/keys.py
    python benchmarks/keys.py --rows 200000 --rounds 3

A set of rows with one number each is made once. Each measurement is a process of its own that loads it, reads samples
of every shard by position, and then one by its key; `index` has the file of hashes taken away, which was the only way
before there was one. Rounds are interleaved. Memory is what the process holds after the look-up, less what it held
before, without pages of files, which processes share.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import psutil
from read import print_machine

from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, ShardOptions, load


class Numbers(DatasetWriter):
    """Rows with one number each."""

    name = "numbers"
    features = Features({"number": Scalar("int64")})

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def index(self, source):
        return (IndexRow(f"street/{number:09d}", "train", {"number": number}) for number in range(self.num_rows))

    def read(self, row):
        return {"number": row.fields["number"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "KEY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        with_hashes, without = pathlib.Path(folder, "hashes"), pathlib.Path(folder, "index")
        started = time.perf_counter()
        Materializer(Numbers(options.rows), None, with_hashes, shards=ShardOptions(num_shards=4)).run(progress=False)
        print(f"{options.rows:,} rows, written in {time.perf_counter() - started:.1f} s")
        size = (with_hashes / "_index" / "train.keys").stat().st_size
        print(f"_index/train.keys has {size:,} bytes: {size / options.rows:g} a row")
        shutil.copytree(with_hashes, without, copy_function=os.link)
        (without / "_index" / "train.keys").unlink()
        found: dict[str, list[dict[str, float]]] = {"hashes": [], "index": []}
        for number in range(options.rounds):
            key = f"street%2F{number * options.rows // options.rounds:09d}"
            for name, place in (("hashes", with_hashes), ("index", without)):
                found[name].append(measured(place, key))
    for name, rounds in found.items():
        first, later, memory = (statistics.median(one[what] for one in rounds) for what in ("first", "later", "memory"))
        print(f"{name:8} first key {first * 1e3:9.2f} ms    {memory / 1e6:7.1f} MB    later keys {later * 1e6:7.1f} us")
    ratios = [b["first"] / a["first"] for a, b in zip(found["hashes"], found["index"], strict=True)]
    print(f"first key: {statistics.median(ratios):.0f} times as fast")


def measured(folder: pathlib.Path, key: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", str(folder), key]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def own_memory(process: psutil.Process) -> int:
    """Return the bytes that a process holds, but for pages of files, which all processes share."""
    found = process.memory_info()
    return found.rss - found.shared


def measure(folder: str, key: str) -> None:
    data = load(folder, "train")
    for position in range(0, len(data), len(data) // 16):  # opens every shard, with the offsets of its records
        assert data[position]["key"]
    process = psutil.Process()
    before, started = own_memory(process), time.perf_counter()
    assert data[key]["key"] == key
    first, memory = time.perf_counter() - started, own_memory(process) - before
    keys = [f"street%2F{number * 7919 % len(data):09d}" for number in range(1000)]
    started = time.perf_counter()
    for one in keys:
        assert data[one]["key"] == one
    later = (time.perf_counter() - started) / len(keys)
    print(json.dumps({"first": first, "memory": memory, "later": later}))


if __name__ == "__main__":
    main()
