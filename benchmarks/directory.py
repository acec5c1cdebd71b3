"""How fast a finished directory of yours is read on this machine, by reader and number of workers, beside its files.

    python benchmarks/directory.py out/camvid
    python benchmarks/directory.py out/camvid --split train --reader numpy --reader torch --num-workers 0 --seconds 5
    make bench BENCH=directory ARGS="out/camvid --split train"

`files` reads the shards and drops their bytes: no reader can be faster. The first time they come from the disk as far
as they are not in memory yet, the second time from memory, where the readers find what fits. Readers run in turn, in
file order; each is timed after its first batch, whose time is `start s`. `records` takes single records at random
positions. MB are those of the shards.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import time

import datamat

PACKAGES = {"numpy": "numpy", "torch": "torch", "tf": "tensorflow", "records": "numpy"}
BLOCK_BYTES = 1 << 20


def file_bytes(data, seconds):
    """Yield the sizes of the blocks of the shards."""
    buffer, began = bytearray(BLOCK_BYTES), time.perf_counter()
    for file in data.files:
        with open(file, "rb", buffering=0) as opened:
            while time.perf_counter() - began < seconds and (count := opened.readinto(buffer)):
                yield count


def batches(data, reader, batch_size, num_workers):
    """Return the batches of an epoch."""
    if reader == "records":
        order = random.sample(range(len(data)), len(data))
        return ([data[position]] for position in order)
    options = {} if reader == "tf" else {"num_workers": num_workers}
    return iter(getattr(data, f"to_{reader}")(batch_size, **options))


def num_records(batch):
    return len(batch) if isinstance(batch, list) else len(batch["key"])


def measure(data, reader, batch_size, num_workers, seconds):
    """Read epoch after epoch until the time is over; return records, seconds, and seconds until the first batch."""
    began, count = time.perf_counter(), 0
    epoch = batches(data, reader, batch_size, num_workers)
    next(epoch)
    first = time.perf_counter()
    while (spent := time.perf_counter() - first) < seconds:
        batch = next(epoch, None)
        if batch is None:
            epoch = batches(data, reader, batch_size, num_workers)
        else:
            count += num_records(batch)
    return count, spent, first - began


def line(reader, num_workers, count, num_bytes, seconds, start_s=0.0):
    rates = f"{count / seconds:11,.0f} {num_bytes / seconds / 1e6:9,.1f} {start_s:8.2f}"
    print(f"{reader:<12} {num_workers or '':>7} {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="the output of a run")
    parser.add_argument("--split", help="split to read (all)")
    parser.add_argument("--format", help="which format to read if there are several (the first)")
    parser.add_argument("--batch-size", type=int, default=32, help="records in a batch (32)")
    parser.add_argument("--reader", action="append", choices=PACKAGES, help="repeatable (those that are installed)")
    parser.add_argument(
        "--num-workers", action="append", type=int, help="of numpy and torch; repeatable (0, and cores)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement (2)")
    options = parser.parse_args()

    data = datamat.load(options.directory, options.split, format=options.format)
    total = sum(os.path.getsize(file) for file in data.files)
    print(f"{data.path}: {len(data):,} records, {total / 1e6:,.1f} MB as {data.manifest.format}")
    print(f"{'reader':<12} {'workers':>7} {'records/s':>11} {'MB/s':>9} {'start s':>8}")
    for name in ("files", "files again"):
        began = time.perf_counter()
        num_bytes = sum(file_bytes(data, options.seconds))
        line(name, 0, num_bytes / total * len(data), num_bytes, time.perf_counter() - began)
    for reader in options.reader or [name for name in PACKAGES if importlib.util.find_spec(PACKAGES[name])]:
        takes_workers = reader in ("numpy", "torch")
        for number in (options.num_workers or [0, len(datamat.physical_cores())]) if takes_workers else [0]:
            count, spent, start_s = measure(data, reader, options.batch_size, number, options.seconds)
            line(reader, number, count, count * total / len(data), spent, start_s)


if __name__ == "__main__":
    main()
