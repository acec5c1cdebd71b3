"""Kill a run at random moments until it finishes, then compare every file with an undisturbed run: what must hold.

    python benchmarks/killloop.py [--kills 1000] [--seed 0] [--kills-per-round 5] [--rows 300] [--log FILE]

A round begins with an empty output and one of the formats. The run is started, and started again after each kill, each
time with another number of workers and another start method. Up to `--kills-per-round` times it is hit at a random
moment: SIGKILL, SIGTERM, SIGINT, or SIGSTOP (followed by SIGCONT), to its parent, to one of its children, or to all of
them. When a run ends well, the round's files are compared with those of an undisturbed run.

The last line counts what must be nothing: records lost, doubled (dup) and unknown (alien); files differing, missing and
too many (extra); files torn: under their final name after a kill, and not whole; runs hung: no end, or none within 5 s
(and a margin) of SIGTERM or SIGINT; processes orphaned: alive 2 s after their parent; runs that gave up although only
one of their workers was hit, and runs that ended with code 0 and something else than the output. `work` is the number
of samples drawn over the number needed, on average over the rounds, at most 1.25; `cpu` the same for processor time, in
which each new start of Python counts, too. The exit code is 0 only if all this holds.

The children of a killed process are inherited by this one (PR_SET_CHILD_SUBREAPER), so that none is overlooked.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil
from killloop_job import COPIES, make_source, usable_formats

from datamat import DatamatError, load, verify

STOPPED_S = 0.5  # how long SIGSTOP lasts
GRACE_S = 5.0  # what SIGTERM and SIGINT leave
MARGIN_S = 5.0  # and what a loaded machine may add to it
ORPHAN_S = 2.0
HUNG_S = 90.0
MOST_WORK = 1.25
DEFECTS = ("lost", "dup", "alien", "differing", "missing", "extra", "torn", "hung", "orphans", "gave_up", "unfinished")
SIGNALS = {"KILL": 4, "TERM": 2, "INT": 2, "STOP": 2}
TARGETS = {"parent": 4, "child": 4, "tree": 2}
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What an undisturbed run made.

    Attributes:
        folder: its output.
        digests: of its files, by name.
        num_draws: calls of `draw`.
        cpu_s: processor seconds of all its processes.
        wall_s: its duration.
    """

    folder: pathlib.Path
    digests: dict[str, str]
    num_draws: int
    cpu_s: float
    wall_s: float


class Killer:
    """Goes through the rounds.

    Args:
        folder: for outputs and logs.
        options: those of the command line.
    """

    def __init__(self, folder: pathlib.Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._options = options
        self._rng = random.Random(options.seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.work: list[float] = []
        self.cpu: list[float] = []

    def go(self) -> None:
        """Go round until enough kills have landed, or the time is over."""
        started = time.monotonic()
        make_source(self._folder / "source", self._options.rows)
        references = {name: self._reference(name) for name in self._options.formats}
        while self.counts["kills"] < self._options.kills and time.monotonic() - started < self._options.seconds:
            name = self._options.formats[self.counts["rounds"] % len(references)]
            self._round(name, references[name])
            self.counts["rounds"] += 1

    def _round(self, format_name: str, reference: Reference) -> None:
        output = self._folder / f"round{self.counts['rounds']}"
        tally = _beside(output, "tally")
        cpu_before, kills_before, runs = _cpu_s(), self.counts["kills"], 0
        code: int | None = 1
        while code != 0 and runs < self._options.kills_per_round + 20:
            left = min(
                self._options.kills_per_round - (self.counts["kills"] - kills_before),
                self._options.kills - self.counts["kills"],
            )
            code = self._run(output, format_name, tally, reference, most_kills=left)
            self.counts["torn"] += self._note("torn", _torn(output, reference))
            runs += 1
        found = compare(output, reference) if code == 0 else {"unfinished": 1}
        self.counts.update(found)
        self.counts["reruns"] += runs - 1
        self.work.append(tally.stat().st_size / reference.num_draws)
        self.cpu.append((_cpu_s() - cpu_before) / reference.cpu_s)
        self._tell(
            "round",
            format=format_name,
            runs=runs,
            kills=self.counts["kills"] - kills_before,
            work=self.work[-1],
            **found,
        )
        if not any(found.values()):
            shutil.rmtree(output)

    def _run(
        self, output: pathlib.Path, format_name: str, tally: pathlib.Path, reference: Reference, *, most_kills: int
    ) -> int | None:
        """Start the run and hit it up to so many times; return its exit code, None if it hung."""
        num_workers, method = self._rng.randint(1, 4), self._rng.choice(["fork", "forkserver", "spawn"])
        process = self._start(output, format_name, num_workers, method, tally)
        hits: list[tuple[str, str]] = []
        limit_s, code = HUNG_S, None
        while True:
            delay = self._delay(reference.wall_s) if len(hits) < most_kills else HUNG_S
            try:
                code = process.wait(min(delay, limit_s))
                break
            except subprocess.TimeoutExpired:
                if min(delay, limit_s) == limit_s:
                    break
            if hit := self._hit(process.pid):
                hits.append(hit)
                if hit[0] in {"TERM", "INT"} and hit[1] != "child":
                    limit_s, most_kills = GRACE_S + MARGIN_S, len(hits)
        if code is None:
            self.counts["hung"] += self._note("hung", [str(hits)])
        elif code and [target for _, target in hits if target != "child"] == [] and len(hits) < 2:
            self.counts["gave_up"] += self._note("gave_up", [f"code {code} after {hits}", _tail(output)])
        self._bury(process)
        self._tell("run", workers=num_workers, method=method, hits=hits, code=code)
        return code

    def _start(
        self, output: pathlib.Path, format_name: str, num_workers: int, method: str, tally: pathlib.Path
    ) -> subprocess.Popen[bytes]:
        source = self._folder / "source"
        job = pathlib.Path(__file__).with_name("killloop_job.py")
        command = [sys.executable, job, source, output, format_name, str(num_workers), method]
        with open(_beside(output, "log"), "ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "KILLLOOP_TALLY": str(tally)},
                start_new_session=True,
            )

    def _delay(self, wall_s: float) -> float:
        """Return a moment: half of them anywhere in a run, half early, where it starts, resumes and is short."""
        if self._rng.random() < 0.5:
            return self._rng.uniform(0, 1.1 * wall_s)
        return math.exp(self._rng.uniform(math.log(0.02), math.log(1.1 * wall_s)))

    def _hit(self, pid: int) -> tuple[str, str] | None:
        """Send a random signal to a random target; return both, or None where there is no such target just now."""
        name = self._rng.choices(list(SIGNALS), list(SIGNALS.values()))[0]
        target = self._rng.choices(list(TARGETS), list(TARGETS.values()))[0]
        parent = psutil.Process(pid)
        children = _living(parent.children(recursive=True))
        victims = {"parent": [parent], "child": children and [self._rng.choice(children)], "tree": [parent, *children]}
        if not victims[target]:
            return None
        _send(victims[target], getattr(signal, f"SIG{name}"))
        if name == "STOP":
            time.sleep(STOPPED_S)
            _send(victims[target], signal.SIGCONT)
        self.counts.update(["kills", name, target])
        return name, target

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the processes that the run left, kill what lives too long, and count it."""
        left = psutil.Process().children(recursive=True)
        _, alive = psutil.wait_procs([other for other in left if other.pid != process.pid], timeout=ORPHAN_S)
        if process.poll() is not None:
            self.counts["orphans"] += self._note("orphans", [" ".join(_command(other)) for other in alive])
        _send([*alive, *([psutil.Process(process.pid)] if process.poll() is None else [])], signal.SIGKILL)
        process.wait()
        while psutil.Process().children():
            os.waitpid(-1, 0)

    def _reference(self, format_name: str) -> Reference:
        folder = self._folder / f"reference-{format_name}"
        tally = _beside(folder, "tally")
        cpu, started = _cpu_s(), time.monotonic()
        process = self._start(folder, format_name, 2, "fork", tally)
        if process.wait():
            raise SystemExit(f"the undisturbed run of {format_name} failed: {_tail(folder)}")
        wall_s = time.monotonic() - started
        self._bury(process)
        if not (found := verify(folder)).ok or found.num_records != COPIES * self._options.rows:
            raise SystemExit(f"the undisturbed run of {format_name} is not right: {found}")
        return Reference(folder, digests(folder), tally.stat().st_size, _cpu_s() - cpu, wall_s)

    def _note(self, what: str, details: list[str]) -> int:
        """Log details of a defect; return how many there are."""
        if details:
            self._tell(what, details=details)
        return len(details)

    def _tell(self, what: str, **values: object) -> None:
        if self._options.log:
            with open(self._options.log, "a") as log:
                log.write(json.dumps({"what": what, "round": self.counts["rounds"], **values}) + "\n")


def digests(folder: pathlib.Path) -> dict[str, str]:
    """Return the digests of the files that a reader sees, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".datamat" not in path.parts
    }


def compare(output: pathlib.Path, reference: Reference) -> dict[str, int]:
    """Return how the files of a round differ from the reference, and which records do where files differ."""
    found = digests(output)
    differing = [name for name in found if name in reference.digests and found[name] != reference.digests[name]]
    missing, extra = set(reference.digests) - set(found), set(found) - set(reference.digests)
    counts = {"differing": len(differing), "missing": len(missing), "extra": len(extra)}
    if differing or missing or extra:
        wanted, got = _records(reference.folder), _records(output)
        more = got - wanted
        counts["lost"] = (wanted - got).total()
        counts["dup"] = sum(number for record, number in more.items() if record in wanted)
        counts["alien"] = more.total() - counts["dup"]
    return counts


def _records(output: pathlib.Path) -> collections.Counter[str]:
    """Return the records of all splits; what cannot be read counts as an unknown record."""
    records: collections.Counter[str] = collections.Counter()
    try:
        for sample in load(output):
            content = b"".join(name.encode() + np.asarray(value).tobytes() for name, value in sorted(sample.items()))
            records[hashlib.sha256(content).hexdigest()] += 1
    except DatamatError as error:
        records[repr(error)] += 1
    return records


def _torn(output: pathlib.Path, reference: Reference) -> list[str]:
    """Return the files that have a final name and not the content that belongs to it."""
    wanted = reference.digests
    return [name for name, digest in digests(output).items() if not _is_temporary(name) and wanted.get(name) != digest]


def _is_temporary(name: str) -> bool:
    return pathlib.PurePath(name).name.startswith(".")


def _beside(output: pathlib.Path, what: str) -> pathlib.Path:
    return output.parent / f"{output.name}.{what}"


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def _send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _command(process: psutil.Process) -> list[str]:
    try:
        return [str(process.pid), process.status(), *process.cmdline()]
    except psutil.Error:
        return [str(process.pid)]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tail(output: pathlib.Path) -> str:
    return _beside(output, "log").read_text(errors="replace")[-2000:]


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill runs at random moments; compare what they end with.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills-per-round", type=int, default=5)
    parser.add_argument("--rows", type=int, default=300, help="samples of the job, each drawn three times")
    parser.add_argument("--formats", nargs="+", help="those to go through; all that a run can write, if left out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round after so long")
    parser.add_argument("--log", help="JSON lines, one per run, round and defect")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    if not options.formats:
        told = usable_formats()
        options.formats = [name for name, reason in told.items() if not reason]
        print(*(f"without {name}: {reason}" for name, reason in told.items() if reason), sep="\n")
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, and so would the runs
    with tempfile.TemporaryDirectory(prefix="killloop-", ignore_cleanup_errors=True) as folder:
        killer = Killer(pathlib.Path(folder), options)
        killer.go()
    counts = killer.counts
    work = sum(killer.work) / len(killer.work)
    print(" ".join(f"{name}={counts[name]}" for name in (*SIGNALS, *TARGETS)), "formats:", *options.formats)
    print(
        f"kills={counts['kills']} rounds={counts['rounds']} reruns={counts['reruns']}",
        *(f"{name}={counts[name]}" for name in DEFECTS),
        f"work={work:.3f} cpu={sum(killer.cpu) / len(killer.cpu):.2f}",
    )
    return int(any(counts[name] for name in DEFECTS) or work > MOST_WORK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
