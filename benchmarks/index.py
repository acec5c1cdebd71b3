"""Ten million rows: index, check, plan and fingerprint; seconds and peak memory.

    python benchmarks/index.py                # ten million rows
    python benchmarks/index.py --rows 1000000

The rows come from a Python generator, as those of a writer do (its own cost is measured apart, in the same run),
each with a key, a path-like string and a number; no files are looked at. What is timed is what `Materializer.run`
does before the first worker starts. The goal: ten million within 60 s and 1.5 GB on two cores.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import resource
import tempfile
import time

from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, ShardOptions


class Rows(DatasetWriter):
    """As many rows as the source says."""

    name = "rows"
    features = Features({"label": Scalar("int64")})
    file_fields = ()

    def index(self, source):
        for number in range(int(source)):
            path = f"images/{number % 1000:04d}/{number:09d}.jpg"
            yield IndexRow(f"row-{number:09d}", None, {"path": path, "label": number % 10})

    def read(self, row):
        return {"label": row.fields["label"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    num_rows = parser.parse_args().rows
    started = time.perf_counter()
    for _ in Rows().index(num_rows):
        pass
    generator_s = time.perf_counter() - started
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        job = Materializer(
            Rows(),
            num_rows,
            pathlib.Path(folder) / "out",
            splits={"train": 0.8, "val": 0.1, "test": 0.1},
            shards=ShardOptions(num_shards=64),
        )
        started = time.perf_counter()
        plan = job.plan()
        elapsed_s = time.perf_counter() - started
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{platform.platform()}, {os.cpu_count()} logical CPUs, Python {platform.python_version()}")
    print(plan)
    print(
        f"{num_rows:,} rows indexed, planned and fingerprinted in {elapsed_s:.1f} s, of which the generator of the "
        f"rows takes {generator_s:.1f} s; peak memory {peak_mb:,.0f} MB"
    )


if __name__ == "__main__":
    main()
