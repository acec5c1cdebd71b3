"""Tasks that share an output: each claims free shards, and the last one writes the manifest.

    .datamat/slices/plan.json                the tasks' plan: a task with another definition is refused
                    SESSION/leases/SHARD.00000   the first owner of a shard; SHARD.00001: its next owner, and so on
                            heartbeats/HOLDER    a number that a task increments while it is alive
                            done/SHARD.json      a finished shard: its files, and the task that made it

    task ── lease ──> run in its own folder ── shard complete ──> done/SHARD.json
                                                                       │ all are there
    manifest <── an ordinary run of the output, which finds them <─────┴─ by who has the lease "manifest"

A lease is a file that only one process can create. Its holder is alive as long as its number rises. A waiting task
watches that number by its own monotonic clock: clocks are never compared between hosts, or with a store's. If the
number does not change for too long, the next generation of the lease is created, again by only one task. `done` is also
created once: if two tasks made a shard, the first counts, even if a row failed in only one of them.

A task writes only to its own folders. So a task that was stopped, lost its leases and wakes up can damage nothing: at
worst a shard is made twice. All of this is the same in every `Folder`. The final steps differ:

    on a disk    a task works in .datamat/slices/task-00003, its own output, whose lock tells whether it is alive; the
                 last one moves the shards to where an ordinary run finds them
    elsewhere    a task has a scratch folder on its host, and uploads its shards and its ledger to its own folder; the
                 last one makes an ordinary run in its scratch folder, which publishes the shards that count
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import platform
import shutil
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.directory.files import WORK, fsync_folder, lock_holder, parse_json, render_json
from datamat.directory.ledger import LEDGER_FILE
from datamat.directory.manifest import growing_path, run_folder, write_entry
from datamat.directory.sidecars.indexes import index_ahead
from datamat.errors import CorruptDataError, OptionError, OutputError, OutputLockedError
from datamat.folders import ExistsError, LocalFolder, UnsupportedError, create_once
from datamat.folders.base import each
from datamat.folders.local import look_anew
from datamat.plan.digests import changed_digests
from datamat.run.growing import inputs_of_shard
from datamat.run.outputs import StoredShard, slices_folder
from datamat.run.quarantine import QUARANTINE_FOLDER
from datamat.values import frozen

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from datamat.directory.manifest import ShardFiles
    from datamat.folders import Folder
    from datamat.plan.job import PlannedJob
    from datamat.plan.plan import ShardSpec

LEASE_S = 60.0
"""Seconds without a heartbeat after which another task takes over a task's shards."""

_BEATS_PER_LEASE = 6
_POLLS_PER_LEASE = 30
_MOST_PAUSE_S = 1.0
_MOST_PAUSE_AWAY_S = 5.0  # each check costs some requests
_SLICES = f"{WORK}/slices"
_PLAN = f"{_SLICES}/plan.json"
_PROBE = f"{_SLICES}/conditions"
_LEDGER_SENT = "ledger.sent"
_PROBES = 3
_END = "manifest"  # the lease for writing the manifest; no shard has this name
_MOST_BYTES = 1 << 28  # of the notes of tasks
_MOST_TEXT_BYTES = 1000  # of a lease or a heartbeat


@frozen()
class TaskNumber:
    """Which of several tasks this is.

    Attributes:
        index: number of the task, from 0.
        count: number of all tasks.
        lease_s: seconds without a heartbeat after which another task takes over a task's shards.

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


class TaskClaims:
    """The shards claimed by one task, and those that are free.

    Args:
        planned: the job of the whole output, with its rows and its plan.
        task: which task this is.
        shards: the shards that the output lacks.
        session: shared state of the tasks.
        work: the `.datamat` folder of this task, whose lock it holds.

    Raises:
        OutputError: the tasks of this output have another definition.
    """

    def __init__(
        self,
        planned: PlannedJob,
        task: TaskNumber,
        shards: Sequence[ShardSpec],
        session: TaskSession,
        work: pathlib.Path,
    ) -> None:
        self.session = session
        self._task = task
        self._work = work
        self._number = 0
        self._beaten_at = -task.lease_s
        self._seen: dict[str, tuple[str, float]] = {}  # by lease: its holder's heartbeat, and when it changed
        self._holders: dict[str, str] = {}  # by lease: its content, which never changes
        self._mine: set[str] = set()
        self._end = -1  # last generation of the manifest's lease that this task has created
        first = task.index * len(shards) // task.count
        in_order = [*shards[first:], *shards[:first]]  # tasks start at different shards, so that they rarely collide
        self._shards = sorted(in_order, key=lambda shard: not _is_begun(work, shard.name))
        self._num_leased = 0  # of the first shards, which are all claimed
        session.begin(planned, task.lease_s)
        self._holder = f"{task.name}.{_own_id(work)}"
        self.beat()
        self._leases = self._latest()  # as of this task's last check

    @property
    def pause_s(self) -> float:
        """Seconds until the next check, and call of `beat`."""
        return min(self.session.most_pause_s, self._task.lease_s / _POLLS_PER_LEASE)

    @property
    def is_over(self) -> bool:
        """Whether another task has written the manifest and removed the shared folder."""
        return self.session.is_over

    def beat(self) -> None:
        """Renew the heartbeat of this task if it is due."""
        now = time.monotonic()
        if now - self._beaten_at < self._task.lease_s / _BEATS_PER_LEASE:
            return
        self._beaten_at = now
        self._number += 1
        self.session.show(self._holder, f"{self._number:020d} process {os.getpid()} on {platform.node()}\n")

    def close(self) -> None:
        """Release the unfinished shards of this task to other tasks immediately."""
        self.session.leave(self._holder)
        self.session.remove_late()
        self._beaten_at = -self._task.lease_s  # the next beat creates it again

    def take(self) -> ShardSpec | None:
        """Claim a shard that is free, or whose holder seems dead; None if there is none now."""
        self.beat()
        if self.is_over:
            return None
        while self._num_leased < len(self._shards):
            shard = self._shards[self._num_leased]
            if shard.name not in self._leases:
                # Without checking first, which costs requests: creating a lease fails if there is one.
                if self._creates(shard.name, 0):
                    return shard
                break
            self._num_leased += 1
        self._leases, heartbeats = self._latest(), self.session.heartbeats()
        done = self._done()  # after the heartbeats: a task that left has recorded its finished shards before
        for shard in self._shards:
            self.beat()
            if shard.name not in done and shard.name not in self._mine and self._takes(shard.name, heartbeats):
                return shard
        return None

    def finish(self, shard: str, stored: StoredShard) -> None:
        """Record that a shard is complete, unless another task was first, after storing the ledger of this task."""
        self.session.finish(shard, self._task.name, stored, self._work)

    @property
    def are_all_done(self) -> bool:
        """Whether every missing shard of the output is complete, made by any task."""
        return self.are_done(shard.name for shard in self._shards)

    def are_done(self, shards: Iterable[str]) -> bool:
        """Return True if shards are complete, made by any task."""
        return self._done().issuperset(shards)

    def takes_end(self) -> bool:
        """Try to take the lease for writing the manifest; return True if this task has it."""
        self.beat()
        self._leases = self._latest()
        if _END in self._mine:
            # By its name: one that is not listed yet counts, too. Its holder continues where this one was.
            if not self.session.text(f"leases/{_END}.{self._end + 1:05d}"):
                return True
            self._mine.discard(_END)
            self._leases[_END] = max(self._leases.get(_END, 0), self._end + 1)
        if not self._takes(_END, self.session.heartbeats()):
            return False
        self._end = self._leases[_END]
        return True

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Renew the heartbeat from a thread during the block, which must not start processes."""
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
        return {name.removesuffix(".json") for name in self.session.names("done")}

    def _latest(self) -> dict[str, int]:
        """Return the last generation of each lease."""
        found: dict[str, int] = {}
        for name in self.session.names("leases"):
            shard, _, number = name.rpartition(".")
            found[shard] = max(found.get(shard, 0), int(number))
        return found

    def _takes(self, name: str, heartbeats: Mapping[str, str]) -> bool:
        """Try to create the next generation of a lease; return True if this process did."""
        if name not in self._leases:
            return self._creates(name, 0)
        lease = f"{name}.{self._leases[name]:05d}"
        if not self._is_free(lease, heartbeats) or not self._creates(name, self._leases[name] + 1):
            return False
        if (holder := self._holders.get(lease, "").strip()) not in {"", self._holder}:
            self.session.leave(holder)  # its other leases become free, too
        return True

    def _creates(self, name: str, generation: int) -> bool:
        if not self.session.create(f"leases/{name}.{generation:05d}", f"{self._holder}\n"):
            return False
        self._leases[name] = generation
        self._mine.add(name)
        return True

    def _is_free(self, lease: str, heartbeats: Mapping[str, str]) -> bool:
        """Return True if the holder of a lease has left, or has not renewed its heartbeat for long enough."""
        holder = self._holders.get(lease) or self.session.text(f"leases/{lease}")
        if holder.endswith("\n"):
            self._holders[lease] = holder
        if holder.strip() == self._holder:  # this task's previous process: the lock of our folder was free
            return True
        heartbeat = heartbeats.get(holder.strip(), "")
        if holder and not heartbeat:
            return True
        # On a disk without hard links, a task killed before it wrote its name has none.
        state, now = f"{holder} {heartbeat}", time.monotonic()
        if self._seen.get(lease, ("", 0.0))[0] != state:
            self._seen[lease] = state, now
            return False
        return now - self._seen[lease][1] > self._task.lease_s


def _is_begun(work: pathlib.Path, shard: str) -> bool:
    return (work / "parts" / shard).is_dir() or (work / "shards" / f"{shard}.json").exists()


# ---------------------------------------------------------------- shared state


class TaskSession:
    """The shared state of the tasks of one output, if any; an outdated listing only causes delays.

    Each session has its own folder, so that a task which wakes after the end of its session affects nothing.
    """

    def __init__(self, output: Folder) -> None:
        self._output = output
        self._path = output.local_path()  # None: the tasks' folders and locks are on other hosts
        self._plan = self._read() or {}

    def __str__(self) -> str:
        return self._output.place(_SLICES)

    def _read(self) -> dict[str, Any] | None:
        num_left = 50
        while (content := self._output.read_if_there(_PLAN, _MOST_BYTES)) == b"" and num_left:
            num_left -= 1
            time.sleep(0.1)  # on a disk without hard links it is empty for a moment
        if content is None:
            return None
        try:
            found: dict[str, Any] = parse_json(content, self._output.place(_PLAN))
            return {**found, "session": str(found["session"]), "lease_s": float(found["lease_s"])}
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"{self._output.place(_PLAN)} is damaged: {error}; end all tasks, and delete {self}"
            ) from error

    def check(self) -> None:
        """Refuse a store that lets two processes create one name: some accept a condition and ignore it.

        Raises:
            OptionError: the store does so, or this cannot be determined.
        """
        if self.is_local:
            return
        if "create" in self._output.keeps and not self._output.is_private:
            with contextlib.suppress(UnsupportedError):
                for _ in range(_PROBES):  # if another process deletes it in between, creation seems to succeed twice
                    create_once(self._output, _PROBE, uuid.uuid4().bytes)
                    if not create_once(self._output, _PROBE, uuid.uuid4().bytes):
                        return
                self._output.delete(_PROBE)
        raise OptionError(
            f"{self._output} is in a store that is not known to support conditional writes (If-None-Match: *), which "
            "tasks need to share an output; call run() without task_index, or give the tasks a folder on a shared "
            "file system"
        )

    @property
    def is_local(self) -> bool:
        """Whether the tasks work in folders of the output, whose locks and shards are visible here."""
        return self._path is not None

    @property
    def is_there(self) -> bool:
        """Whether tasks had begun to make the output together, and were not done, when this object was made."""
        return bool(self._plan)

    @property
    def is_over(self) -> bool:
        """Whether the shared folder has been removed."""
        there = self._read()
        return there is None or there["session"] != self._plan.get("session")

    def begin(self, planned: PlannedJob, lease_s: float) -> None:
        """Record the plan if this is the first task; otherwise compare with it.

        Raises:
            OutputError: the plans differ; says how.
        """
        shards = [[shard.name, shard.fingerprint, shard.num_rows] for shard in planned.plan.shards]
        mine: dict[str, Any] = {
            "name": planned.plan.name,
            "plan": xxhash.xxh3_128_hexdigest(json.dumps(shards).encode()),
            "ingredients": planned.manifest_digests,
            "lease_s": lease_s,
            "session": uuid.uuid4().hex,
        }
        if not self._plan:
            with contextlib.suppress(ExistsError):
                self._output.write(_PLAN, render_json(mine), "create")
            self._plan = self._read() or mine  # the second if another task has cleaned up
        if self._plan.get("plan") != mine["plan"]:
            changes = changed_digests(dict(self._plan["ingredients"]), planned.manifest_digests, augmented=True)
            why = "; ".join(changes) or "its rows or the layout of its shards differ"
            raise OutputError(
                f"{planned.job.place} is being made by tasks of another definition than that of this one: {why}. Give "
                "all tasks the same source, code, options and versions of packages; or give this one another output. "
                f"If what those tasks made is no longer wanted, end them and remove {self}"
            )

    def _of(self, name: str) -> str:
        return f"{_SLICES}/{self._plan['session']}/{name}"

    def names(self, folder: str) -> Iterable[str]:
        """Return the names in a folder of the session."""
        return self._output.list(self._of(folder)) or {}

    def text(self, name: str) -> str:
        """Return the content of a small file; "" if there is none or it is unreadable."""
        with contextlib.suppress(CorruptDataError):
            return (self._output.read_if_there(self._of(name), _MOST_TEXT_BYTES) or b"").decode(errors="replace")
        return ""

    def create(self, name: str, text: str) -> bool:
        """Create a file with unique content; return False if another process was first."""
        return create_once(self._output, self._of(name), text.encode())

    def show(self, holder: str, text: str) -> None:
        """Write the heartbeat of a task, unless all is done; an unreachable place is retried next time."""
        with contextlib.suppress(OutputError):
            if not self.is_over:
                self._output.write(self._of(f"heartbeats/{holder}"), text.encode())

    def leave(self, holder: str) -> None:
        """Remove the heartbeat of a task that has left or died."""
        with contextlib.suppress(OutputError):
            self._output.delete(self._of(f"heartbeats/{holder}"))

    def heartbeats(self) -> dict[str, str]:
        """Return a text for each task that has not left, which changes with its heartbeat, from a single listing."""
        listed = self._output.list(self._of("heartbeats")) or {}
        # In Google's store, listings have no versions.
        return {holder: stat.version or self.text(f"heartbeats/{holder}") for holder, stat in listed.items()}

    def finish(self, shard: str, task: str, stored: StoredShard, work: pathlib.Path) -> None:
        """Record that a shard is complete, unless another task was first."""
        self.send_ledger(work)  # before the shard counts
        with contextlib.suppress(ExistsError):
            self._output.write(
                self._of(f"done/{shard}.json"), render_json({"task": task, **stored.to_json()}), "create"
            )

    def made(self) -> dict[str, StoredShard]:
        """Return the shards that tasks have finished, by name."""
        return {shard: stored for shard, (_, stored) in self._notes().items()}

    def _notes(self) -> dict[str, tuple[str, StoredShard]]:
        """Return the first task to finish each shard, and the shard's location, by name of the shard."""
        if not self._plan:
            return {}
        found = {}
        for name, content in self._contents("done").items():
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, CorruptDataError):
                note = parse_json(content, name)  # it may be damaged
                found[name.removesuffix(".json")] = str(note["task"]), StoredShard.from_json(note)
        return found

    def _contents(self, folder: str) -> dict[str, bytes]:
        """Return the contents of the files in a folder of the session, by their names."""
        names = list(self.names(folder))
        contents = each(lambda name: self._output.read_if_there(self._of(f"{folder}/{name}"), _MOST_BYTES), names)
        return {name: content for name, content in zip(names, contents, strict=True) if content is not None}

    # ------------------------------------------------------------ active tasks

    def tasks(self) -> tuple[tuple[tuple[str, str, int], ...], dict[str, ShardFiles]]:
        """Return the name, active process and number of finished shards of each task, and the finished shards by name.

        Without locks, a process counts as active until it leaves, or another task takes over its shards.
        """
        if not self._plan:
            return (), {}
        if self.is_local:
            at_work = {folder.name: lock_holder(folder / WORK / "lock") for folder in self._task_folders()}
        else:
            at_work = dict(map(self._who, self.names("heartbeats")))
        notes = self._notes()
        made = collections.Counter(task for task, _ in notes.values())
        rows = tuple((name, at_work.get(name, ""), made[name]) for name in sorted({*at_work, *made}))
        return rows, {shard: stored.files for shard, (_, stored) in notes.items()}

    def _who(self, holder: str) -> tuple[str, str]:
        """Return the name and the process of a task, by its heartbeat."""
        return holder.partition(".")[0], self.text(f"heartbeats/{holder}").partition(" ")[2].strip()

    def _task_folders(self) -> list[pathlib.Path]:
        return [] if self._path is None else sorted(slices_folder(self._path / WORK).glob("task-*"))

    def refuse_if_alive(self, logger: logging.Logger) -> None:
        """Raise if a task is active, by the locks of their folders, or by a heartbeat within the time of a lease.

        Raises:
            OutputLockedError: names the task.
        """
        for folder in self._task_folders():
            if holder := lock_holder(folder / WORK / "lock"):
                raise OutputLockedError(
                    f"{self._output} is being written by tasks that share it: {folder.name} is {holder}; wait for "
                    "them, or end them"
                )
        if self.is_local or not self._plan:
            return
        before, began, lease_s = self.heartbeats(), time.monotonic(), self._plan["lease_s"]
        if before:
            logger.info("%s: tasks share it; waiting up to %g s for a heartbeat of one", self._output, lease_s)
        while before and time.monotonic() - began <= lease_s:
            time.sleep(min(self.most_pause_s, lease_s / _POLLS_PER_LEASE))
            now = self.heartbeats()
            for holder, heartbeat in now.items():
                if heartbeat != before.get(holder):
                    raise OutputLockedError(
                        f"{self._output} is shared by tasks, and one is alive ({', '.join(self._who(holder))}); wait "
                        "for them, or end them"
                    )
            before = now

    @property
    def most_pause_s(self) -> float:
        """Maximum seconds between two checks of other tasks."""
        return _MOST_PAUSE_S if self.is_local else _MOST_PAUSE_AWAY_S

    # ------------------------------------------------------------ the end
    #
    # Shards made by tasks are moved to where an ordinary run finds them; for a store, see `RemoteOutput.adopt`.

    def adopt(self) -> None:
        """On a disk, move the tasks' finished shards to where an ordinary run finds them, waiting for their names.

        Requires that the output is locked and that all tasks are done or gone. It may be killed at any point and
        repeated.
        """
        if self._path is None or not (folder := slices_folder(self._path / WORK)).is_dir():
            return
        work = self._path / WORK
        entries = work / "shards"
        waiting = run_folder(work)
        waiting.mkdir(parents=True, exist_ok=True)
        entries.mkdir(exist_ok=True)
        for task, stored in self._notes().values():
            if task.startswith("task-") and "/" not in task:
                with contextlib.suppress(OSError):  # the run rebuilds it
                    _adopt(folder / task, entries, waiting, stored.files)
        for path in self._task_folders():
            _adopt_notes(path / WORK, work)

    def send_ledger(self, work: pathlib.Path) -> None:
        """Upload the new lines of a task's ledger, since its scratch folder may be lost."""
        if self.is_local:
            return
        scratch = LocalFolder(work)
        begin = int(scratch.read_if_there(_LEDGER_SENT, _MOST_TEXT_BYTES) or b"0")
        with contextlib.suppress(FileNotFoundError), open(work / LEDGER_FILE, "rb") as file:
            file.seek(begin)
            data = file.read()
            if piece := data[: data.rfind(b"\n") + 1]:
                # Named by position: a piece that was sent but not recorded before a kill is sent again, with the newer
                # lines.
                self._output.write(self._of(f"ledgers/{_own_id(work)}.{begin:015d}"), piece)
                scratch.write(_LEDGER_SENT, str(begin + len(piece)).encode())

    def take_ledgers(self, work: pathlib.Path) -> None:
        """Prepend the store's ledger, and the ledgers that other tasks have uploaded, to that of this run."""
        if self.is_local or not self.is_there:
            return
        mine = (work / LEDGER_FILE).read_bytes()
        before = self._output.read_if_there(f"{WORK}/{LEDGER_FILE}", _MOST_BYTES) or b""
        sent = self._contents("ledgers")
        pieces = [piece for name, piece in sent.items() if piece and not name.startswith(_own_id(work))]
        if pieces and (pieces[0] in mine or pieces[0] in before):  # already done by a run that was killed later
            pieces = []
        if not mine.startswith(before):
            pieces.insert(0, before)
        if pieces:
            LocalFolder(work).write(LEDGER_FILE, b"".join([*pieces, mine]))

    def remove_late(self) -> None:
        """Remove files that a task has written after another had removed the shared folder."""
        if not self.is_over:
            return
        if self._path is None:
            self.remove()
            return
        folder = slices_folder(self._path / WORK)
        if self._plan:
            shutil.rmtree(folder / self._plan["session"], ignore_errors=True)
        with contextlib.suppress(OSError):  # it is gone, or tasks have started again
            folder.rmdir()

    def remove(self) -> None:
        """Remove the shared files, the plan first, since its absence tells tasks that all is done; and leftovers."""
        if self._path is not None:
            _remove_folder(slices_folder(self._path / WORK))
            return
        if "create" not in self._output.keeps:
            return
        with contextlib.suppress(OutputError):  # harmless, and the next run does it
            if not self.is_over:
                self._output.delete(_PLAN)
            names = self._output.list(_SLICES, deep=True) or {}
            # After the listing, so that files of a session that begins now are not in it, or are spared.
            spared = {os.path.basename(_PLAN), (self._read() or {}).get("session")}
            stale = [f"{_SLICES}/{name}" for name in names if name.partition("/")[0] not in spared]
            each(self._output.delete, stale)


def _own_id(work: pathlib.Path) -> str:
    """Return an id for the folder of a task, whose lock other hosts cannot see."""
    folder = LocalFolder(work)
    found = folder.read_if_there("holder", _MOST_TEXT_BYTES)
    if not found:
        found = uuid.uuid4().hex.encode()
        folder.write("holder", found)
    return found.decode("ascii")


def _adopt(task: pathlib.Path, entries: pathlib.Path, waiting: pathlib.Path, files: ShardFiles) -> None:
    """Move the flushed files of one shard, and write its entry as a waiting shard."""
    mine, shard = task / WORK / "shards", files[0].name
    has_moved = False
    for folder in (task, mine, entries):
        look_anew(folder)
    for info in files:
        for file in (info.index_file, info.file):
            for place in (task / file, growing_path(mine, file)):  # the second: killed before it had its name
                has_moved |= _moved(place, waiting / file)
        ahead = f"{shard}.{info.extension}", info.checksum
        _moved(index_ahead(mine, *ahead), index_ahead(entries, *ahead))
    _moved(inputs_of_shard(mine, shard), inputs_of_shard(entries, shard))
    fsync_folder(waiting)
    is_there = all((waiting / info.file).exists() for info in files)
    if is_there and (has_moved or not (waiting / f"{shard}.json").exists()):
        write_entry(waiting, files, lambda file: waiting / file)


def _moved(path: pathlib.Path, target: pathlib.Path) -> bool:
    try:
        os.replace(path, target)
    except FileNotFoundError:
        return False
    return True


def _adopt_notes(mine: pathlib.Path, work: pathlib.Path) -> None:
    """Append the ledger of a task to that of the output, and move its quarantine."""
    ledger = mine / LEDGER_FILE
    with contextlib.suppress(FileNotFoundError):
        data = ledger.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        with open(work / LEDGER_FILE, "a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(whole)
            file.flush()
            os.fsync(file.fileno())
        ledger.unlink()
    for sample in sorted((mine / QUARANTINE_FOLDER).glob("[!.]*/[!.]*")):
        target = work / QUARANTINE_FOLDER / sample.parent.name / sample.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(sample, target)


def _remove_folder(folder: pathlib.Path) -> None:
    """Remove the shared folder, atomically for observers."""
    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.done")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
    for path in folder.parent.glob(f"{folder.name}.*.done"):
        shutil.rmtree(path, ignore_errors=True)
