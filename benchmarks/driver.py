"""What the driver spends on each part and on each shard, whatever the parts hold: processor time and memory.

    python benchmarks/driver.py                      # 1,000 to 100,000 parts, and 10,000 shards
    python benchmarks/driver.py --parts 1000000      # one size
    python benchmarks/driver.py --by 2               # the parts made by two processes of datamat's own
    python benchmarks/driver.py --profile 10000      # where the time goes, by function

Every part is one row of one number. A thread stands in for the workers; what it spends is not counted, nor is any
waiting: all figures are processor time of the thread that called `run`.
With `--by NUMBER` the parts go to so many of datamat's own processes, and the figures are of this process, all threads:
that is what a user's run costs the driver, and has what it takes to send and receive.
Each size has a process of its own, and another one for the memory, which `tracemalloc` counts; the resident memory is
what the peak grows by, from that of a run of ten parts. The exponent is the slope of the total over the size, both by
logarithm: 1 means that twice the parts take twice as long.

The goal: 100 us and 1 KB for each part from 10^3 to 10^6, and a second for a run with nothing to do over 10,000 shards.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import pstats
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import datamat
from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, WorkerOptions
from datamat.directory.ledger import Ledger
from datamat.directory.manifest import Manifest

LARGE = 1 << 35  # of the one input file, a sparse one: it is never read, and each row of it fills a part
PARTS_PER_SHARD = 100
PART_BYTES = 64
SIZES = (1_000, 10_000, 100_000)
SHARDS = (100, 1_000, 10_000)


class Rows(DatasetWriter):
    """As many rows as the source has after its last dot, each of a part of its own."""

    name = "rows"
    features = Features({"label": Scalar("int64")})
    file_fields = ("file",)

    def index(self, source):
        for number in range(int(pathlib.Path(source).suffix[1:])):
            yield IndexRow(f"row-{number:07d}", "train", {"label": number, "file": "large"})

    def read(self, row):
        return {"label": row.fields["label"]}


class Phases:
    """Notes when each phase of a run ends.

    Args:
        clock: returns processor seconds.
    """

    def __init__(self, clock) -> None:
        self.at: dict[str, float] = {}
        self.clock = clock
        self.last = clock()

    def __call__(self, event) -> None:
        now = self.clock()
        names = {"PlanMade": "index, plan", "WorkersStarted": "look, hand out", "RunEnded": "finish"}
        name = names.get(type(event).__name__, "take receipts")
        self.at[name] = self.at.get(name, 0.0) + now - self.last
        self.last = now


class Spent:
    """Adds up what calls of a function take.

    Args:
        clock: returns processor seconds.
    """

    def __init__(self, clock) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}

    def watch(self, owner: type, name: str, label: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **options):
            begin = self.clock()
            try:
                return function(*args, **options)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + self.clock() - begin

        setattr(owner, name, timed)


def materializer(source: str, output: str, num_shards: int) -> Materializer:
    return Materializer(Rows(), source, output, shards=num_shards)


@contextlib.contextmanager
def who_works(by: str):
    """Give the options of a job that say who does its parts, and a clock of what the driver spends."""
    if by == "thread":
        with ThreadPoolExecutor(1) as pool:
            yield {"executor": pool}, time.thread_time
    else:
        yield {"workers": WorkerOptions(num_workers=int(by))}, time.process_time


def child(options: argparse.Namespace) -> dict[str, float]:
    """Do one thing in this process, and return what it took."""
    job = functools.partial(materializer, options.source, options.output, options.shards)
    if options.child != "open":
        with who_works(options.by) as (work, _), folders(10) as (source, output):
            materializer(str(source), str(output), 2).run(progress=False, **work)  # imports all that there is
    if options.child == "make":
        return make(job, options.by)
    if options.child == "memory":
        tracemalloc.start()
        with who_works(options.by) as (work, _):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            job().run(progress=False, **work)
        return {"memory": tracemalloc.get_traced_memory()[1] - before}
    if options.child == "profile":
        with who_works(options.by) as (work, clock):
            profile = cProfile.Profile(clock)
            profile.runcall(functools.partial(job().run, progress=False, **work))
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(60)
        return {}
    job().run(progress=False)  # cold
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {"nothing to do, cold": used.ru_utime + used.ru_stime}
    for name, call in {
        "nothing to do": lambda: job().run(progress=False),
        "status": lambda: job().status(),
        "load": lambda: datamat.load(options.output, split="train"),
        "verify": lambda: datamat.verify(options.output),
    }.items():
        if name in {"load", "verify"}:
            call()  # once for its imports
        begin = time.process_time()
        call()
        found[name] = time.process_time() - begin
    return found


def make(job, by: str) -> dict[str, float]:
    with who_works(by) as (work, clock):
        spent = Spent(clock)
        spent.watch(Ledger, "write", "  of it the ledger")
        spent.watch(Manifest, "write", "  of it the manifest")
        phases = Phases(clock)
        before, begin = resident_bytes(), clock()
        job().run(progress=False, hooks=[phases], **work)
        total = clock() - begin
        resident = resident_bytes() - before
    return {**phases.at, "all": total, **spent.seconds, "resident memory": resident}


def resident_bytes() -> int:
    """Return the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def in_child(kind: str, source: pathlib.Path, output: pathlib.Path, num_shards: int, by: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, "--source", str(source), "--output", str(output)]
    command += ["--shards", str(num_shards), "--by", by]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def folders(count: int):
    with tempfile.TemporaryDirectory(prefix="datamat-driver-", dir=os.environ.get("BENCH_DIR")) as folder:
        source = pathlib.Path(folder) / f"rows.{count}"
        source.mkdir()
        with open(source / "large", "wb") as file:
            file.truncate(LARGE)
        yield source, pathlib.Path(folder) / "out"


def exponent(sizes: list[int], values: list[float]) -> str:
    """Return the slope of values over sizes by logarithms, as text."""
    points = [(math.log(size), math.log(value)) for size, value in zip(sizes, values, strict=True) if value > 0]
    if len(points) < 2:
        return ""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return f"{sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points):.2f}"


def table(title: str, sizes: list[int], found: list[dict[str, float]]) -> None:
    print(f"\n{title:28}" + "".join(f"{size:>12,}" for size in sizes) + "    exponent")
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name, 0.0) for one in found]
        unit, scale = ("bytes", 1.0) if name.endswith("memory") else ("us", 1e6)
        cells = "".join(f"{value / size * scale:12.1f}" for size, value in zip(sizes, values, strict=True))
        print(f"{f'{name}, {unit}':28}{cells}{exponent(sizes, values):>12}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="*", default=SIZES, help="numbers of parts, 100 to a shard")
    parser.add_argument("--shards", type=int, nargs="*", default=SHARDS, help="numbers of shards, of one part each")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--profile", type=int, help="profile a run of so many parts instead")
    parser.add_argument("--by", default="thread", help="who makes parts: a thread, or so many processes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        (options.shards,) = options.shards
        print(json.dumps(child(options)))
        return
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "xxhash", "pyarrow"))
    print(f"{platform.platform()}, {os.cpu_count()} logical CPUs, Python {platform.python_version()}, {versions}")
    if options.profile:
        with folders(options.profile) as (source, output):
            in_child("profile", source, output, max(options.profile // PARTS_PER_SHARD, 1), options.by)
        return
    for title, sizes, per_shard, by in (
        (f"per part, {PARTS_PER_SHARD} to a shard", options.parts, PARTS_PER_SHARD, options.by),
        ("per shard, of one part", options.shards, 1, options.by),
    ):
        found = []
        for size in sizes:
            with folders(size) as (source, output):
                num_shards = max(size // per_shard, 1)
                found.append(in_child("make", source, output, num_shards, by))
                if per_shard == 1:
                    found[-1] |= in_child("open", source, output, num_shards, by)
                if not options.no_memory:
                    found[-1] |= in_child("memory", source, output.with_name("again"), num_shards, by)
        if found:
            table(title, list(sizes), found)


if __name__ == "__main__":
    main()
