"""datamat beside other tools on one task: what there is to write, how long it takes, and what survives.

    python benchmarks/comparison/compare.py                            # all that are installed
    python benchmarks/comparison/compare.py --only datamat,datasets --count 400 --rounds 3

The task, in `task.py`, is the same function of the same pictures for all; `with_NAME.py` is the program of each tool,
written as its documentation shows it, with a guard where it needs one. What is measured:

    lines       of the program, without blank ones, comments and docstrings
    concepts    what a reader of it has to look up: distinct imported names, attributes and keyword arguments
    seconds     from a cold interpreter to the end of the program, with two workers: clock, and processor of the tree
    no guard    the same program without a guard: as a script, and as a module that is imported
    worker      one worker is killed (SIGKILL) once, in the middle of its pictures
    resume      all processes are killed once half of the pictures were worked on, and the program is called again: how
                many pictures it works on again, and whether it ends with all of them
    bytes       whether one worker and two give the same files

Every outcome is looked at by counting the pictures in the output with the tool's own reader. If torch is the build
for processors alone, put `tests/cpu_torchvision` on PYTHONPATH: MosaicML streaming imports torchvision.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
IDLE_S = 30  # a tree of processes that has done nothing for so long waits for ever
MOST_S = 60  # of the processor: none of the programs needs a third of it, so one that takes more never ends
TOOLS = {  # name -> (package, how many samples are in OUTPUT)
    "datamat": ("datamat", "import datamat; n = len(datamat.load(OUTPUT))"),
    "litdata": ("litdata", "import litdata; n = len({hash(s['image']) for s in litdata.StreamingDataset(OUTPUT)})"),
    "mosaic": (
        "mosaicml-streaming",
        "import streaming; n = len(list(streaming.StreamingDataset(local=OUTPUT, batch_size=1)))",
    ),
    "webdataset": (
        "webdataset",
        "import glob, tarfile as t; n = sum('.jpg' in m for f in glob.glob(OUTPUT + '/*') for m in t.open(f).getnames())",  # noqa: E501
    ),
    "datasets": ("datasets", "import datasets; n = len(datasets.load_from_disk(OUTPUT))"),
    "tfds": (
        "tensorflow-datasets",
        "import tensorflow_datasets as t; n = t.builder_from_directory(OUTPUT + BUILT).info.splits.total_num_examples",
    ),
    "pool": (
        "tensorflow",
        "import glob, tensorflow as t; n = sum(1 for _ in t.data.TFRecordDataset(glob.glob(OUTPUT + '/*.tfrecord')))",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=600, help="pictures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(TOOLS), help="names of tools, with commas")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if _version(TOOLS[name][0])]
    with tempfile.TemporaryDirectory(prefix="comparison-") as folder:
        place = Place(pathlib.Path(folder), options.count)
        times = {name: [] for name in names}
        for number in range(options.rounds):
            for name in names:  # interleaved, so that a busy moment of the machine hits all alike
                times[name].append(place.timed(name, f"{name}-{number}"))
        print("| tool | lines | concepts | seconds | processor, s | no guard | worker | resume | bytes |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for name in names:
            wall, processor = (statistics.median(column) for column in zip(*times[name], strict=True))
            cells = [name, *map(str, size_of(name)), f"{wall:.1f}", f"{processor:.1f}"]
            cells += [check(name) for check in (place.unguarded, place.worker, place.resumed, place.same_bytes)]
            print("| " + " | ".join(cells) + " |", flush=True)
    print("", *place.notes, sep="\n")
    versions = ", ".join(f"{TOOLS[name][0]} {_version(TOOLS[name][0])}" for name in names)
    print(f"\n{options.count} pictures, Python {platform.python_version()}, {os.cpu_count()} cores; {versions}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def size_of(name: str) -> tuple[int, int]:
    """Return lines and concepts of a program."""
    text = (HERE / f"with_{name}.py").read_text()
    tree = ast.parse(text)
    code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(("#", '"""'))]
    seen: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            seen |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            seen.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            seen.add(node.arg)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
            seen.add(node.name)  # a method that the tool wants by its name
    return len(code), len(seen - {"__name__", "sys", "argv", "task", "files", "sample", "CLASSES"})


class Place:
    """A folder with the pictures, where programs run."""

    def __init__(self, folder: pathlib.Path, count: int, python: str = sys.executable):
        self.folder, self.count, self.source = folder, count, folder / "pictures"
        self.python, self.notes = python, []
        sys.path.insert(0, str(HERE))
        from task import draw, files

        draw(self.source, count)
        self.middle = "/".join(files(str(self.source))[count // 2].split("/")[-2:])

    def start(self, name: str, run: str, workers: int = 2, guard: str = "as it is", kill: str = "") -> subprocess.Popen:
        """Start the program of a tool; runs of one name share output, cache and log."""
        home = self.folder / run
        home.mkdir(exist_ok=True)
        program = HERE / f"with_{name}.py"
        if guard != "as it is":
            text = program.read_text().replace('if __name__ == "__main__":', "if True:")
            program = home / "unguarded.py"
            program.write_text(text)
        arguments = [str(program), str(self.source), str(home / "out"), str(workers)]
        if guard == "imported":
            arguments = ["-c", f"import sys; sys.argv = {arguments}; import unguarded"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(home), os.environ.get("PYTHONPATH", "")]),
            "HF_HOME": str(home / "hf"),
            "TMPDIR": str(home),
            "DATA_OPTIMIZER_CACHE_FOLDER": str(home / "chunks"),
            "DATA_OPTIMIZER_DATA_CACHE_FOLDER": str(home / "data"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "COMPARISON_LOG": "log",  # a relative path, so that all runs have the same environment
            "COMPARISON_KILL": kill,
        }
        with open(home / "said", "ab") as said:
            return subprocess.Popen(
                [self.python, *arguments], env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL,
                cwd=home, start_new_session=True,
            )  # fmt: skip

    def ended(self, process: subprocess.Popen) -> str:
        """Return how a program ended: "", "error", "hangs" or "never ends".

        The limits are in processor time, so that a slow program on a busy machine is not taken for one that hangs.
        """
        last, since, outcome = 0.0, time.monotonic(), ""
        while process.poll() is None and not outcome:
            time.sleep(0.02)
            if time.monotonic() - since > IDLE_S:
                now = _processor_s(process.pid)
                outcome = "never ends" if now > MOST_S else "hangs" if now - last < 0.01 * IDLE_S else ""
                last, since = now, time.monotonic()
        _kill(process)
        return outcome or ("error" if process.returncode else "")

    def outcome(self, process: subprocess.Popen, name: str, run: str) -> str:
        """Return how a program ended or, where it ended well, how many pictures there are; keep what it said last."""
        if outcome := self.ended(process):
            said = (self.folder / run / "said").read_text(errors="replace").replace("\r", "\n").split("\n")
            self.notes.append(f"{run}, {outcome}: " + next((line for line in reversed(said) if line.strip()), ""))
        return outcome or self.found(name, run)

    def found(self, name: str, run: str) -> str:
        """Return how many pictures the output has, in words."""
        code = (
            TOOLS[name][1].replace("BUILT", "'/shapes/1.0.0'").replace("OUTPUT", repr(str(self.folder / run / "out")))
        )
        done = subprocess.run(
            [self.python, "-c", code + "\nprint('found', n)"], capture_output=True, text=True, check=False,
            cwd=self.folder / run, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip
        number = done.stdout.split()[-1] if done.returncode == 0 else "none"
        return "complete" if number == str(self.count) else f"{number} of {self.count}"

    def log(self, run: str) -> int:
        path = self.folder / run / "log"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def timed(self, name: str, run: str) -> tuple[float, float]:
        """Return seconds of the clock, and of the processor for the whole tree."""
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        outcome = self.ended(self.start(name, run))
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if outcome or self.found(name, run) != "complete":
            raise SystemExit(f"{name}: {outcome}\n" + (self.folder / run / "said").read_text()[-3000:])
        shutil.rmtree(self.folder / run)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def unguarded(self, name: str) -> str:
        outcomes = []
        for guard in ("none", "imported"):
            run = f"{name}-{guard}"
            outcomes.append(self.outcome(self.start(name, run, guard=guard), name, run))
        return " / ".join(outcomes)

    def worker(self, name: str) -> str:
        run = f"{name}-worker"
        return self.outcome(self.start(name, run, kill=self.middle), name, run)

    def resumed(self, name: str) -> str:
        run = f"{name}-resume"
        process = self.start(name, run)
        while process.poll() is None and self.log(run) < self.count // 2:
            time.sleep(0.01)
        _kill(process)
        before = self.log(run)
        outcome = self.outcome(self.start(name, run), name, run)
        if outcome != "complete":
            return outcome
        return f"complete, {max(self.log(run) - self.count, 0)} of {before} again"

    def same_bytes(self, name: str) -> str:
        digests = []
        for workers in (1, 2):
            run = f"{name}-bytes{workers}"
            if outcome := self.ended(self.start(name, run, workers)):
                return outcome
            files = sorted(path for path in (self.folder / run / "out").rglob("*") if path.is_file())
            shards = [path for path in files if ".datamat" not in path.parts]
            digests.append([(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in shards])
        return "same" if digests[0] == digests[1] else "differ"


def _processor_s(session: int) -> float:
    """Return the processor time of all processes of a session, and of children that they have waited for."""
    total = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
