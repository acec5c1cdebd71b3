"""Tasks that share an output: each takes the shards that nobody has, and the last one writes the manifest.

    .datamat/slices/plan.json               what the tasks make: a task with another definition is refused
                    task-00003/             the folder of one task: an output of its own, with shards, parts and lock
                    leases/SHARD.00000      who took a shard first; SHARD.00001: who took it over, and so on
                    beats/TOKEN             a number that a task raises while it is alive
                    done/SHARD.json         of a finished shard: its files, and the folder that they are in

    task ── lease ──> run in its own folder ── shard complete ──> done/SHARD.json
                                                                       │ all are there
    manifest <── an ordinary run of the output, which finds them <─────┴─ moved, by who has the lease "manifest"

A lease is a file that only one process can create. Its holder is alive as long as its number rises. Whoever waits
watches that number by its own monotonic clock: no clock is compared between hosts. Where it stands still for too long,
the next generation of the lease is created, again by one alone.

A task writes below its own folder only. So one that was stopped, lost its leases and wakes up can damage nothing: at
worst a shard was made twice, with the same bytes, and either is as good.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.directory.files import (
    WORK,
    fsync_folder,
    lock_holder,
    look_anew,
    read_json,
    read_regular,
    render_json,
)
from datamat.directory.ledger import LEDGER_FILE
from datamat.directory.manifest import HELD, ShardInfo, growing_path, write_entry
from datamat.directory.sidecars.indexes import index_ahead
from datamat.errors import CorruptDataError, OptionError, OutputError, OutputLockedError
from datamat.plan.job import changed_digests
from datamat.run.quarantine import QUARANTINE_FOLDER
from datamat.run.shards import inputs_of_shard

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Sequence

    from datamat.directory.manifest import ShardFiles
    from datamat.plan.job import PlannedJob
    from datamat.plan.plan import ShardSpec


__all__ = [
    "LEASE_S",
    "TaskClaims",
    "TaskNumber",
    "adopt_slices",
    "is_shared",
    "remove_slices",
    "slices_folder",
    "task_folder",
    "unfinished_shards",
]

LEASE_S = 60.0
"""How long a task may seem dead, in seconds, before another takes its shards."""

_BEATS_PER_LEASE = 6
_POLLS_PER_LEASE = 30
_MOST_PLAN_BYTES = 1 << 24
_LEFT = b"left"
_END = "manifest"  # the lease of whoever writes the manifest; no shard has such a name


@dataclasses.dataclass(frozen=True, slots=True)
class TaskNumber:
    """Which of several tasks this is.

    Attributes:
        index: number of the task, from 0.
        count: number of all tasks.
        lease_s: how long a task may seem dead, in seconds, before another takes its shards.

    Raises:
        OptionError: there is no such task.
    """

    index: int
    count: int
    lease_s: float = LEASE_S

    def __post_init__(self) -> None:
        for name, value in (("task_index", self.index), ("num_tasks", self.count)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise OptionError(f"{name} is {value!r}; want an int")
        if not 0 <= self.index < self.count:
            raise OptionError(
                f"task_index is {self.index} of num_tasks={self.count}; want a number from 0 to {self.count - 1}"
            )

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"task-{self.index:05d}"


def slices_folder(work: pathlib.Path) -> pathlib.Path:
    """Return the folder, below the `.datamat` of an output, of what tasks share."""
    return work / "slices"


def is_shared(work: pathlib.Path) -> bool:
    """Return whether tasks have begun to make an output together, and are not done."""
    for folder in (work, slices_folder(work)):
        look_anew(folder)
    return (slices_folder(work) / "plan.json").exists()


def task_folder(work: pathlib.Path, task: TaskNumber) -> pathlib.Path:
    """Return the folder that one task writes to."""
    return slices_folder(work) / task.name


class TaskClaims:
    """What one task has taken, and what nobody has.

    Args:
        planned: the job of the whole output, with its rows and its plan.
        task: which task this is.
        shards: the shards that the output lacks.

    Raises:
        OutputError: the tasks at this output make something else.
    """

    def __init__(self, planned: PlannedJob, task: TaskNumber, shards: Sequence[ShardSpec]) -> None:
        self._folder = slices_folder(planned.job.work)
        self._task = task
        self._token = uuid.uuid4().hex
        self._number = 0
        self._beaten_at = -task.lease_s
        self._seen: dict[str, tuple[str, float]] = {}  # by lease: what its holder's number was, and since when
        self._mine: set[str] = set()
        first = task.index * len(shards) // task.count
        begun = planned.job.work / "slices" / task.name / WORK
        in_order = [*shards[first:], *shards[:first]]  # tasks begin apart, so that they rarely meet
        self._shards = sorted(in_order, key=lambda shard: not _is_begun(begun, shard.name))
        for name in ("leases", "beats", "done"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        _refuse_other_plan(self._folder, planned)
        self.beat()

    @property
    def pause_s(self) -> float:
        """Seconds after which to look again, and to call `beat`."""
        return min(1.0, self._task.lease_s / _POLLS_PER_LEASE)

    @property
    def is_over(self) -> bool:
        """Whether another task has written the manifest, and removed what the tasks shared."""
        return not (self._folder / "plan.json").exists()

    def beat(self) -> None:
        """Show that this task is alive; costs something only when it is time to."""
        now = time.monotonic()
        if now - self._beaten_at < self._task.lease_s / _BEATS_PER_LEASE:
            return
        self._beaten_at = now
        self._number += 1
        self._show(b"%020d\n" % self._number)

    def close(self) -> None:
        """Let others have at once what this task has taken and not completed."""
        self._show(_LEFT.ljust(20) + b"\n")
        self._beaten_at = -self._task.lease_s  # the next beat takes it back

    def _show(self, text: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):  # all is done, and somebody has cleared up
            # Opened and closed each time: that is what makes NFS show it to other hosts.
            descriptor = os.open(self._folder / "beats" / self._token, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(descriptor, text, 0)
            finally:
                os.close(descriptor)

    def take(self) -> ShardSpec | None:
        """Take a shard that nobody has, or whose holder seems dead; None where there is none now."""
        self.beat()
        if self.is_over:
            return None
        latest, done = self._latest(), self._done()
        for shard in self._shards:
            if shard.name not in done and shard.name not in self._mine and self._takes(shard.name, latest):
                self._mine.add(shard.name)
                return shard
        return None

    def finish(self, shard: str, files: ShardFiles) -> None:
        """Note that a shard is complete, in the folder of this task."""
        path = self._folder / "done" / f"{shard}.json"
        with contextlib.suppress(FileNotFoundError):  # all is done, and somebody has cleared up
            # A later one replaces an earlier one: each names files of its own, which are the same.
            _put(path, render_json({"folder": self._task.name, "files": [info.to_json() for info in files]}))

    @property
    def are_all_done(self) -> bool:
        """Whether every shard that the output lacked is complete, whoever made it."""
        done = self._done()
        return all(shard.name in done for shard in self._shards)

    def takes_end(self) -> bool:
        """Take the lease of whoever writes the manifest; return whether this task has it."""
        self.beat()
        return _END in self._mine or self._takes(_END, self._latest())

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Beat from a thread for the block, in which no process is started."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self.pause_s):
                self.beat()

        thread = threading.Thread(target=beat, name="datamat-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _done(self) -> set[str]:
        return {name.removesuffix(".json") for name in _names(self._folder / "done") if name.endswith(".json")}

    def _latest(self) -> dict[str, int]:
        """Return the last generation of each lease."""
        found: dict[str, int] = {}
        for name in _names(self._folder / "leases"):
            shard, _, number = name.rpartition(".")
            found[shard] = max(found.get(shard, 0), int(number))
        return found

    def _takes(self, name: str, latest: dict[str, int]) -> bool:
        """Create the first or the next generation of a lease; return whether this process did."""
        if name in latest and not self._is_free(f"{name}.{latest[name]:05d}"):
            return False
        lease = self._folder / "leases" / f"{name}.{latest.get(name, -1) + 1:05d}"
        try:
            descriptor = os.open(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except (FileExistsError, FileNotFoundError):  # another was first, or has cleared up
            return False
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{self._task.name} {self._token}\n")
        if name == _END:
            self._mine.add(name)
        return True

    def _is_free(self, lease: str) -> bool:
        """Return whether the holder of a lease has shown no sign of life for long enough."""
        holder = _text(self._folder / "leases" / lease)
        task, _, token = holder.strip().partition(" ")
        if token == self._token:
            return False
        if task == self._task.name:  # the process that had this number before: the lock of our folder was free
            return True
        shown = _text(self._folder / "beats" / token) if token else ""
        if shown.startswith(_LEFT.decode()):
            return True
        # The name counts, too: one that was killed before it wrote it shows no number.
        state, now = f"{holder} {shown}", time.monotonic()
        if self._seen.get(lease, ("", 0.0))[0] != state:
            self._seen[lease] = state, now
            return False
        return now - self._seen[lease][1] > self._task.lease_s


def _is_begun(work: pathlib.Path, shard: str) -> bool:
    return (work / "parts" / shard).is_dir() or (work / "shards" / f"{shard}.json").exists()


def _names(folder: pathlib.Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    return []


def _text(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError, CorruptDataError):
        return read_regular(path, max_bytes=1000).decode(errors="replace")
    return ""


def _refuse_other_plan(folder: pathlib.Path, planned: PlannedJob) -> None:
    """Write down what the tasks make, if this is the first of them; otherwise compare.

    Raises:
        OutputError: they make something else; says what differs.
    """
    path = folder / "plan.json"
    shards = [[shard.name, shard.fingerprint, shard.num_rows] for shard in planned.plan.shards]
    mine = {
        "name": planned.plan.name,
        "plan": xxhash.xxh3_128_hexdigest(json.dumps(shards).encode()),
        "ingredients": planned.manifest_digests,
    }
    temporary = folder / f".plan.{uuid.uuid4().hex}.tmp"
    temporary.write_bytes(render_json(mine))
    try:
        _name_first(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    there = _read_plan(path)
    if there is None or there.get("plan") == mine["plan"]:
        return
    changes = changed_digests(there["ingredients"], planned.manifest_digests, augmented=True)
    why = "; ".join(changes) or "its rows or the layout of its shards differ"
    raise OutputError(
        f"{folder.parent.parent} is being made by tasks of another definition than that of this one: {why}. Give all "
        "tasks the same source, code, options and versions of packages; or give this one another output. If what those "
        f"tasks made is no longer wanted, end them and remove {folder}"
    )


def _put(path: pathlib.Path, data: bytes) -> None:
    """Write a file that is complete or absent; its temporary name is nobody else's, on whatever host."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    with open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def _name_first(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Give a file its name unless another has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        with contextlib.suppress(FileExistsError), open(path, "xb") as file:
            file.write(temporary.read_bytes())


def _read_plan(path: pathlib.Path) -> dict[str, Any] | None:
    for attempt in range(50):  # where there are no links, another task may be writing it
        try:
            found: dict[str, Any] = read_json(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            if attempt == 49:
                raise OutputError(f"{path} is damaged: {error}; end all tasks, and remove {path.parent}") from error
            time.sleep(0.1)
        else:
            return found
    return None


# ---------------------------------------------------------------- the end
#
# What the tasks have made becomes what an ordinary run finds: complete shards that wait for their names.


def unfinished_shards(work: pathlib.Path, shards: Sequence[str]) -> list[str]:
    """Return those shards that no task has completed."""
    done = set(_names(slices_folder(work) / "done"))
    return [shard for shard in shards if f"{shard}.json" not in done]


def adopt_slices(output: pathlib.Path, *, is_last: bool) -> pathlib.Path | None:
    """Move what tasks have completed to where an ordinary run finds it; only while the output is locked.

    It may be killed at any point, and repeated.

    Args:
        output: folder of the finished shards.
        is_last: whether the caller is one of the tasks, and all of them are done. Otherwise none may be at work.

    Returns:
        The folder to remove once the manifest is written; None where no task has been here.

    Raises:
        OutputLockedError: a task is at work.
    """
    work = output / WORK
    folder = slices_folder(work)
    if not folder.is_dir():
        return None
    tasks = [folder / name for name in _names(folder) if name.startswith("task-")]
    if not is_last:
        for task in tasks:
            if holder := lock_holder(task / WORK / "lock"):
                raise OutputLockedError(
                    f"{output} is being written by tasks that share it: {task.name} is {holder}; wait for them, or end "
                    "them"
                )
    entries = work / "shards"
    (entries / HELD).mkdir(parents=True, exist_ok=True)
    for name in _names(folder / "done"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged: the run makes it again
            found = read_json(folder / "done" / name)
            if not str(found["folder"]).startswith("task-") or "/" in found["folder"]:
                raise ValueError(f"{name} names {found['folder']!r}")
            files = tuple(ShardInfo.from_json(info) for info in found["files"])
            _adopt(folder / found["folder"], entries, files)
    for task in tasks:
        _adopt_notes(task / WORK, work)
    return folder


def _adopt(task: pathlib.Path, entries: pathlib.Path, files: ShardFiles) -> None:
    """Move the files of one shard, flushed already, and write the entry of a shard that waits."""
    mine, shard = task / WORK / "shards", files[0].name
    has_moved = False
    for folder in (task, mine, entries):
        look_anew(folder)
    for info in files:
        for file in (info.index_file, info.file):
            for place in (task / file, growing_path(mine, file)):  # the second: killed before it had its name
                has_moved |= _moved(place, growing_path(entries, file))
        ahead = f"{shard}.{info.file.partition('.')[2]}", info.checksum
        _moved(index_ahead(mine, *ahead), index_ahead(entries, *ahead))
    _moved(inputs_of_shard(mine, shard), inputs_of_shard(entries, shard))
    fsync_folder(entries)
    is_there = all(growing_path(entries, info.file).exists() for info in files)
    if is_there and (has_moved or not (entries / HELD / f"{shard}.json").exists()):
        write_entry(entries / HELD, files)


def _moved(path: pathlib.Path, target: pathlib.Path) -> bool:
    try:
        os.replace(path, target)
    except FileNotFoundError:
        return False
    return True


def _adopt_notes(mine: pathlib.Path, work: pathlib.Path) -> None:
    """Append the ledger of a task to that of the output, and move what it has in quarantine."""
    ledger = mine / LEDGER_FILE
    with contextlib.suppress(FileNotFoundError):
        data = ledger.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        with open(work / LEDGER_FILE, "ab") as file:
            if file.tell() and _last_byte(work / LEDGER_FILE) != b"\n":
                file.write(b"\n")
            file.write(whole)
            file.flush()
            os.fsync(file.fileno())
        ledger.unlink()
    for split in _names(mine / QUARANTINE_FOLDER):
        target = work / QUARANTINE_FOLDER / split
        target.mkdir(parents=True, exist_ok=True)
        for sample in _names(mine / QUARANTINE_FOLDER / split):
            shutil.rmtree(target / sample, ignore_errors=True)
            os.rename(mine / QUARANTINE_FOLDER / split / sample, target / sample)


def _last_byte(path: pathlib.Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def remove_slices(folder: pathlib.Path) -> None:
    """Remove what tasks shared, in one step for whoever looks."""
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.done")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
    for path in folder.parent.glob(f"{folder.name}.*.done"):
        shutil.rmtree(path, ignore_errors=True)
