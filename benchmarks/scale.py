"""How a run grows: the driver over 10^4 to 10^6 parts, what a rerun costs to start, and the model of many machines.

    python benchmarks/scale.py                              # the table
    python benchmarks/scale.py --parts 10000                # one size

A thread stands in for the workers, and its time is not counted. 100 parts make a shard. Each figure has a process of
its own. First a run makes all shards but the last, as one that was killed shortly before its end. The next process
runs it again: what passes until it hands out the first part is the start of a rerun. A third finds nothing to do. All
seconds are of the processor, of the thread that called `run`; memory is what the peak of the resident size grows by.

The machines are a model, of the measured costs alone: see `Machines`. `python benchmarks/charts.py` draws both.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from driver import PARTS_PER_SHARD, folders, materializer, resident_bytes

from datamat.events import WorkersStarted

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
CORES = (8, 32, 128, 512, 2048, 8192)


class Counted(concurrent.futures.ThreadPoolExecutor):
    """Counts calls, by what is called."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls: collections.Counter[str] = collections.Counter()

    def submit(self, call, /, *args):
        self.calls[call.function.__name__] += 1
        return super().submit(call, *args)


class Start:
    """Notes when the first parts are handed out."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, event) -> None:
        if isinstance(event, WorkersStarted):
            self.at = time.thread_time()


def last_shard(num_shards: int) -> str:
    return f"train-{num_shards - 1:05d}"


def child(kind: str, source: pathlib.Path, output: pathlib.Path, num_shards: int) -> dict[str, float]:
    with folders(10) as (small, place):
        materializer(str(small), str(place), 2).run(executor=Counted(), progress=False)  # imports all that there is
    executor, start = Counted(), Start()
    exclude = last_shard(num_shards) if kind == "all but one" else None
    job = materializer(str(source), str(output), num_shards)
    before, begin = resident_bytes(), time.thread_time()
    job.run(executor=executor, hooks=[start], exclude=exclude, progress=False)
    found = {"seconds": time.thread_time() - begin, "memory": resident_bytes() - before, "start": start.at - begin}
    return found | {f"calls of {name}": count for name, count in executor.calls.items()}


def in_child(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(num_parts: int) -> dict[str, float]:
    num_shards = max(num_parts // PARTS_PER_SHARD, 2)
    with folders(num_parts) as (source, output):
        made = in_child("all but one", source, output, num_shards)
        again = in_child("again", source, output, num_shards)
        nothing = in_child("nothing to do", source, output, num_shards)
        requests = syscalls(source, output, num_shards)
        sizes = {
            "manifest": (output / "manifest.json").stat().st_size,
            "index": sum(path.stat().st_size for path in (output / "_index").iterdir()),
            "ledger": (output / ".datamat/ledger.jsonl").stat().st_size,
        }
    calls = sum(count for name, count in made.items() if name.startswith("calls"))
    return {
        "driver, s": made["seconds"],
        "driver, us a part": made["seconds"] / num_parts * 1e6,
        "memory, MB": made["memory"] / 1e6,
        "memory, bytes a part": made["memory"] / num_parts,
        "calls a part": calls / num_parts,
        "manifest, MB": sizes["manifest"] / 1e6,
        "manifest, bytes a shard": sizes["manifest"] / num_shards,
        "index files, bytes a row": sizes["index"] / num_parts,
        "ledger, bytes a part": sizes["ledger"] / num_parts,
        "rerun until the first part, s": again["start"],
        "rerun with nothing to do, s": nothing["seconds"],
        "its memory, MB": nothing["memory"] / 1e6,
        **{f"its {name} a shard": count / num_shards for name, count in requests.items()},
    }


def syscalls(source: pathlib.Path, output: pathlib.Path, num_shards: int) -> dict[str, float]:
    """Return how often a run with nothing to do asks the file system for something of the output, by kind."""
    with tempfile.NamedTemporaryFile("r") as log:
        names = "openat,newfstatat,statx,getdents64"
        command = ["strace", "-f", "-qq", "-y", "-e", f"trace={names}", "-o", log.name, sys.executable, __file__]
        command += ["--child", "nothing to do", str(source), str(output), str(num_shards)]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except FileNotFoundError:
            return {}
        kinds = {"openat": "opened files", "getdents64": "reads of a listing"}
        found: collections.Counter[str] = collections.Counter(dict.fromkeys((*kinds.values(), "looks"), 0))
        for line in log:
            if str(output) in line:
                call = line.split(maxsplit=1)[-1].partition("(")[0]
                found[kinds.get(call, "looks")] += 1
        return dict(found)


# ---------------------------------------------------------------- many machines


@dataclasses.dataclass(frozen=True)
class Machines:
    """Records a second over cores: as many as the slowest of what they share allows.

        records a second = min(cores / record_s, part_records / driver_s, bytes_s / record_bytes)

    Attributes:
        record_s: seconds of one core for a record.
        part_records: records of a part.
        record_bytes: bytes that are read and written for a record.
        driver_s: seconds of the one driver for a part; 0 where each machine has a driver of its own.
        bytes_s: bytes that the file system or store gives and takes in a second, for all; 0 for no bound.
    """

    record_s: float = 0.00386
    part_records: int = 126
    record_bytes: int = 135_000
    driver_s: float = 0.0
    bytes_s: float = 0.0

    def records_a_second(self, cores: int) -> float:
        found = cores / self.record_s
        if self.driver_s:
            found = min(found, self.part_records / self.driver_s)
        return min(found, self.bytes_s / self.record_bytes) if self.bytes_s else found

    def bend(self) -> float:
        """Return the number of cores from which more bring nothing."""
        return self.records_a_second(1 << 40) * self.record_s


MODELS = {
    "tasks, store without bound": Machines(),
    "an engine, one driver": Machines(driver_s=0.001),
    "tasks, store of 10 GB/s": Machines(bytes_s=10e9),
    "tasks, NFS of 1.1 GB/s": Machines(bytes_s=1.1e9),
}
"""The augmented pairs of docs/benchmarks.md: 3.86 ms of a core a record, of which 66 KB are read and 69 KB written; a
part of 32 MiB of cost has 31 rows of 264 KB with four records each."""


def table(sizes: list[int], found: list[dict[str, float]]) -> None:
    print(f"{'parts':32}" + "".join(f"{size:>12,}" for size in sizes))
    for name in found[0]:
        cells = "".join(f"{one[name]:12,.3g}" if one[name] < 1000 else f"{one[name]:12,.0f}" for one in found)
        print(f"{name:32}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="*", default=SIZES, help="numbers of parts, 100 to a shard")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, source, output, num_shards = options.child
        print(json.dumps(child(kind, pathlib.Path(source), pathlib.Path(output), int(num_shards))))
        return
    found = []
    for size in options.parts:
        found.append(measure(size))
        print(size, json.dumps(found[-1]), file=sys.stderr, flush=True)
    table(list(options.parts), found)
    for name, model in MODELS.items():
        print(f"{name}: bends at {model.bend():,.0f} cores" if model.bend() < 1e6 else f"{name}: does not bend")


if __name__ == "__main__":
    main()
