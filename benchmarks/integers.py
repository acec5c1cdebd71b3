"""What lists of integers cost as numbers (varints) and as bytes in a `tf.train.Example`: size, writing, reading.

Each line is the median over interleaved rounds, in processor time of this process; docs/formats.md has the table.
"""

import argparse
import statistics
import time

import numpy as np

from datamat import Features, Tensor
from datamat.formats.example import decode_block, decode_example, encode_example

RECORDS = 256


def values_of(kind, length, rng):
    """Return `RECORDS` arrays (length,)."""
    draw = {
        "uniform tokens, int32": lambda: rng.integers(0, 50_000, length, np.int32),
        "uniform tokens, int64": lambda: rng.integers(0, 50_000, length, np.int64),
        "frequent tokens, int32": lambda: np.minimum(rng.zipf(1.1, length) - 1, 49_999).astype(np.int32),
        "frequent tokens, int64": lambda: np.minimum(rng.zipf(1.1, length) - 1, 49_999).astype(np.int64),
        "uniform uint32": lambda: rng.integers(0, 2**32, length, np.uint32),
        "uniform int64": lambda: rng.integers(-(2**63), 2**63 - 1, length, np.int64),
    }[kind]
    return [draw() for _ in range(RECORDS)]


def seconds(do):
    """Return the processor time of a call."""
    start = time.process_time()
    do()
    return time.process_time() - start


def measure(values, encoding, found):
    """Append one round of microseconds per record to `found`; return the mean size of a record."""
    feature = Tensor((None,), str(values[0].dtype), encoding)
    features = Features({"x": feature})
    kinds = features.columns

    def write():
        return [encode_example(features.encode({"key": "k", "x": value}), kinds) for value in values]

    records = write()
    data, sizes = b"".join(records), np.array([len(record) for record in records])
    ends = np.cumsum(sizes)
    jobs = {
        "write": write,
        "read": lambda: [features.decode(decode_example(record)) for record in records],
        "block": lambda: feature.decode_many(decode_block(data, ends - sizes, ends, kinds)),
    }
    for name, job in jobs.items():
        found.setdefault((name, encoding), []).append(seconds(job) / RECORDS * 1e6)
    return sizes.mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 64, 500, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    print(
        f"{'numbers':24} {'length':>6}  raw / list: bytes     write        read one     read a block   (µs, raw / list)"
    )
    for kind in ("uniform tokens, int32", "uniform tokens, int64", "frequent tokens, int32", "frequent tokens, int64",
                 "uniform uint32", "uniform int64"):  # fmt: skip
        for length in arguments.lengths:
            values, found = values_of(kind, length, np.random.default_rng(0)), {}
            for _ in range(arguments.rounds):
                sizes = {encoding: measure(values, encoding, found) for encoding in ("raw", "list")}
            line = f"{kind:24} {length:6}  {sizes['raw'] / sizes['list']:17.2f}"
            for name in ("write", "read", "block"):
                raw, numbers = (statistics.median(found[name, encoding]) for encoding in ("raw", "list"))
                line += f"   {raw / numbers:4.2f} ({raw:.0f} / {numbers:.0f})"
            print(line)


if __name__ == "__main__":
    main()
