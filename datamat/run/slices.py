"""Tasks that share an output: each takes the shards that nobody has, and the last one writes the manifest.

    .datamat/slices/plan.json               what the tasks make: a task with another definition is refused
                    task-00003/             the folder of one task: an output of its own, with shards, parts and lock
                    leases/SHARD.00000      who took a shard first; SHARD.00001: who took it over, and so on
                    beats/TOKEN             a number that a task raises while it is alive
                    done/SHARD.json         of a finished shard: its files, and the task in whose folder they are

    task ── lease ──> run in its own folder ── shard complete ──> done/SHARD.json
                                                                       │ all are there
    manifest <── an ordinary run of the output, which finds them <─────┴─ moved, by who has the lease "manifest"

A lease is a file that only one process can create. Its holder is alive as long as its number rises. Whoever waits
watches that number by its own monotonic clock: no clock is compared between hosts. Where it stands still for too long,
the next generation of the lease is created, again by one alone.

A task writes below its own folder only. So one that was stopped, lost its leases and wakes up can damage nothing: at
worst a shard was made twice, with the same bytes, and either is as good.

Where the output is in a bucket, leases, numbers and `done` are objects below `.datamat/slices/SESSION`, and a lease is
an object that is put on the condition that there is none. Each task has a scratch folder of its own, from which it
uploads its shards to a folder of its own in the bucket, `made/HOLDER`. There, `done` is put on that condition, too: of
two tasks that made a shard, the first counts, also where a row failed in one of them only. The last task makes an
ordinary run in its scratch folder; the store copies what counts to where readers look for it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import platform
import shutil
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from datamat.directory.files import WORK, fsync_folder, lock_holder, look_anew, parse_json, read_json, render_json
from datamat.directory.ledger import LEDGER_FILE
from datamat.directory.manifest import HELD, MANIFEST_FILE, ShardInfo, growing_path, write_entry
from datamat.directory.sidecars.indexes import index_ahead
from datamat.errors import CorruptDataError, OptionError, OutputError, OutputLockedError
from datamat.folders.local import read_regular
from datamat.plan.job import changed_digests
from datamat.run.quarantine import QUARANTINE_FOLDER
from datamat.run.shards import inputs_of_shard
from datamat.run.upload import StoredShard
from datamat.values import frozen

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from datamat.directory.manifest import ShardFiles
    from datamat.directory.stores import ObjectStore
    from datamat.plan.job import PlannedJob
    from datamat.plan.plan import ShardSpec


__all__ = [
    "LEASE_S",
    "TaskBucket",
    "TaskClaims",
    "TaskFolder",
    "TaskNumber",
    "adopt_slices",
    "is_shared",
    "remove_slices",
    "slices_folder",
    "task_folder",
]

LEASE_S = 60.0
"""How long a task may seem dead, in seconds, before another takes its shards."""

_BEATS_PER_LEASE = 6
_POLLS_PER_LEASE = 30
_MOST_PAUSE_S = 1.0
_AT_ONCE = 16
_PLAN = "plan.json"
_BUCKET = f"{WORK}/slices"
_LEFT = "left"
_END = "manifest"  # the lease of whoever writes the manifest; no shard has such a name

Signs: TypeAlias = "Callable[[str], str | None]"
"""What a task shows, by its token: something else whenever it is alive; None where it has left."""


@frozen()
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
    return (slices_folder(work) / _PLAN).exists()


def task_folder(work: pathlib.Path, task: TaskNumber) -> pathlib.Path:
    """Return the folder that one task writes to."""
    return slices_folder(work) / task.name


class TaskClaims:
    """What one task has taken, and what nobody has.

    Args:
        planned: the job of the whole output, with its rows and its plan.
        task: which task this is.
        shards: the shards that the output lacks.
        place: where the tasks see what each has taken.
        work: the `.datamat` folder of this task.

    Raises:
        OutputError: the tasks at this output make something else.
    """

    def __init__(
        self,
        planned: PlannedJob,
        task: TaskNumber,
        shards: Sequence[ShardSpec],
        place: TaskFolder | TaskBucket,
        work: pathlib.Path,
    ) -> None:
        self._place = place
        self._task = task
        self._work = work
        self._token = uuid.uuid4().hex
        self._number = 0
        self._beaten_at = -task.lease_s
        self._seen: dict[str, tuple[str, float]] = {}  # by lease: what its holder's number was, and since when
        self._holders: dict[str, str] = {}  # by lease: what is written in it, which stays
        self._mine: set[str] = set()
        self._end = -1  # generation of the lease of whoever writes the manifest that this task has last created
        first = task.index * len(shards) // task.count
        in_order = [*shards[first:], *shards[:first]]  # tasks begin apart, so that they rarely meet
        self._shards = sorted(in_order, key=lambda shard: not _is_begun(work, shard.name))
        self._num_leased = 0  # of the first shards, each of which somebody has taken
        self._plan = _refuse_other_plan(place, planned, task.lease_s)
        self._holder = place.holder(task, work)
        self.beat()
        self._leases = self._latest()  # as they were when this task looked last

    @property
    def run(self) -> str:
        """What stands for all tasks of a session in the mark of a store."""
        return f"tasks of session {self._plan.get('session')}"

    @property
    def replaces(self) -> bool:
        """Whether shards wait until all are there, and those that they replace are gone."""
        return bool(self._plan.get("replaces"))

    @property
    def pause_s(self) -> float:
        """Seconds after which to look again, and to call `beat`."""
        return min(self._place.most_pause_s, self._task.lease_s / _POLLS_PER_LEASE)

    @property
    def is_over(self) -> bool:
        """Whether another task has written the manifest, and removed what the tasks shared."""
        return self._place.is_over

    def beat(self) -> None:
        """Show that this task is alive; costs something only when it is time to."""
        now = time.monotonic()
        if now - self._beaten_at < self._task.lease_s / _BEATS_PER_LEASE:
            return
        self._beaten_at = now
        self._number += 1
        who = f"{self._task.name}, process {os.getpid()} on {platform.node()}"
        self._place.show(self._token, f"{self._number:020d} {who}\n")

    def close(self) -> None:
        """Let others have at once what this task has taken and not completed."""
        self._place.leave(self._token)
        self._beaten_at = -self._task.lease_s  # the next beat takes it back

    def take(self) -> ShardSpec | None:
        """Take a shard that nobody has, or whose holder seems dead; None where there is none now."""
        self.beat()
        if self.is_over:
            return None
        while self._num_leased < len(self._shards):
            shard = self._shards[self._num_leased]
            if shard.name not in self._leases:
                # Without a look, which costs requests: whoever creates a lease learns if there is one.
                if self._creates(shard.name, 0):
                    return shard
                break
            self._num_leased += 1
        self._leases, signs = self._latest(), self._place.signs()
        done = self._done()  # after the signs: who has left has noted before what is done
        for shard in self._shards:
            self.beat()
            if shard.name not in done and shard.name not in self._mine and self._takes(shard.name, signs):
                return shard
        return None

    def finish(self, shard: str, files: ShardFiles, stored: StoredShard | None) -> None:
        """Note that a shard is complete, in the folder of this task or in the bucket.

        Args:
            shard: name of the shard.
            files: its entry in each format.
            stored: where it is in the bucket; None if it is in the folder of this task.
        """
        entry = {"files": [info.to_json() for info in files]} if stored is None else stored.to_json()
        self._place.finish(shard, render_json({"task": self._task.name, **entry}), self._work)

    @property
    def are_all_done(self) -> bool:
        """Whether every shard that the output lacked is complete, whoever made it."""
        return self.are_done(shard.name for shard in self._shards)

    def are_done(self, shards: Iterable[str]) -> bool:
        """Return whether shards are complete, whoever made them."""
        return self._done().issuperset(shards)

    def takes_end(self) -> bool:
        """Take the lease of whoever writes the manifest; return whether this task has it."""
        self.beat()
        self._leases = self._latest()
        if _END in self._mine:
            # By its name: one that is not listed yet counts, too. Its holder goes on from where this one was.
            if not self._place.text(f"leases/{_END}.{self._end + 1:05d}"):
                return True
            self._mine.discard(_END)
            self._leases[_END] = max(self._leases.get(_END, 0), self._end + 1)
        if not self._takes(_END, self._place.signs()):
            return False
        self._end = self._leases[_END]
        return True

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
        return {name.removesuffix(".json") for name in self._place.names("done") if name.endswith(".json")}

    def _latest(self) -> dict[str, int]:
        """Return the last generation of each lease."""
        found: dict[str, int] = {}
        for name in self._place.names("leases"):
            shard, _, number = name.rpartition(".")
            found[shard] = max(found.get(shard, 0), int(number))
        return found

    def _takes(self, name: str, signs: Signs) -> bool:
        """Create the first or the next generation of a lease; return whether this process did."""
        if name not in self._leases:
            return self._creates(name, 0)
        generation = self._leases[name]
        return self._is_free(f"{name}.{generation:05d}", signs) and self._creates(name, generation + 1)

    def _creates(self, name: str, generation: int) -> bool:
        if not self._place.create(f"leases/{name}.{generation:05d}", f"{self._holder} {self._token}\n"):
            return False
        self._leases[name] = generation
        self._mine.add(name)
        return True

    def _is_free(self, lease: str, signs: Signs) -> bool:
        """Return whether the holder of a lease has left, or has shown no sign of life for long enough."""
        holder = self._holders.get(lease) or self._place.text(f"leases/{lease}")
        if holder.endswith("\n"):
            self._holders[lease] = holder
        task, _, token = holder.strip().partition(" ")
        if token == self._token:
            return False
        if task == self._holder:  # the process that had this number before: the lock of our folder was free
            return True
        sign = signs(token) if token else ""
        if sign is None:
            return True
        # The name counts, too: one that was killed before it wrote it shows no number.
        state, now = f"{holder} {sign}", time.monotonic()
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


def _refuse_other_plan(place: TaskFolder | TaskBucket, planned: PlannedJob, lease_s: float) -> dict[str, Any]:
    """Write down what the tasks make, if this is the first of them; otherwise compare; return what is written.

    Raises:
        OutputError: they make something else; says what differs.
    """
    shards = [[shard.name, shard.fingerprint, shard.num_rows] for shard in planned.plan.shards]
    mine = {
        "name": planned.plan.name,
        "plan": xxhash.xxh3_128_hexdigest(json.dumps(shards).encode()),
        "ingredients": planned.manifest_digests,
        "lease_s": lease_s,
    }
    there = place.agree(mine)
    if there is None or there.get("plan") == mine["plan"]:
        return there or mine
    changes = changed_digests(there["ingredients"], planned.manifest_digests, augmented=True)
    why = "; ".join(changes) or "its rows or the layout of its shards differ"
    raise OutputError(
        f"{planned.job.place} is being made by tasks of another definition than that of this one: {why}. Give all "
        "tasks the same source, code, options and versions of packages; or give this one another output. If what those "
        f"tasks made is no longer wanted, end them and remove {place}"
    )


# ---------------------------------------------------------------- where tasks meet
#
# A folder on a file system that they share, or objects in a bucket: names that only one can create, and small texts.


class TaskFolder:
    """The folder of what tasks share.

    Args:
        work: the `.datamat` folder of the output.
    """

    most_pause_s = _MOST_PAUSE_S

    def __init__(self, work: pathlib.Path) -> None:
        self._folder = slices_folder(work)

    def __str__(self) -> str:
        """Return its path."""
        return str(self._folder)

    @property
    def is_over(self) -> bool:
        """Whether what the tasks shared is removed."""
        return not (self._folder / _PLAN).exists()

    def holder(self, task: TaskNumber, _: pathlib.Path) -> str:
        """Return what stands for a task in its leases, also after a kill."""
        return task.name

    def agree(self, mine: dict[str, Any]) -> dict[str, Any] | None:
        """Write down a plan unless there is one; return what is there, None where another has cleared up."""
        for name in ("leases", "beats", "done"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".plan.{uuid.uuid4().hex}.tmp"
        temporary.write_bytes(render_json(mine))
        try:
            _name_first(temporary, self._folder / _PLAN)
        finally:
            temporary.unlink(missing_ok=True)
        return _read_plan(self._folder / _PLAN)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        return _names(self._folder / folder)

    def text(self, name: str) -> str:
        """Return the content of a small file; "" where there is none."""
        with contextlib.suppress(OSError, CorruptDataError):
            return read_regular(self._folder / name, max_bytes=1000).decode(errors="replace")
        return ""

    def create(self, name: str, text: str) -> bool:
        """Create a file; return False where another was first, or has cleared up."""
        try:
            descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except (FileExistsError, FileNotFoundError):
            return False
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return True

    def show(self, token: str, text: str) -> None:
        """Write the sign of life of a task, as long as the one before, unless all is done and somebody cleared up."""
        with contextlib.suppress(FileNotFoundError):
            # Opened and closed each time: that is what makes NFS show it to other hosts.
            descriptor = os.open(self._folder / "beats" / token, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(descriptor, text.encode(), 0)
            finally:
                os.close(descriptor)

    def leave(self, token: str) -> None:
        """Replace the sign of life of a task by that of one that has left."""
        self.show(token, _LEFT.ljust(20))

    def signs(self) -> Signs:
        """Return what each task shows now."""

        def sign(token: str) -> str | None:
            shown = self.text(f"beats/{token}")
            return None if shown.startswith(_LEFT) else shown

        return sign

    def finish(self, shard: str, note: bytes, _: pathlib.Path) -> None:
        """Note that a shard is complete, unless all is done and somebody has cleared up.

        A later note replaces an earlier one: each names files in the folder of its task.
        """
        with contextlib.suppress(FileNotFoundError):
            _put(self._folder / "done" / f"{shard}.json", note)


class TaskBucket:
    """The objects of what tasks share; a listing that is late only delays.

    Those of one session have a folder of their own, so that a task that wakes after its end meets nobody.

    Args:
        store: where the dataset goes.
    """

    most_pause_s = 5.0  # each look costs some requests

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._plan = self._read() or {}

    def __str__(self) -> str:
        """Return its URL."""
        return self._store.url_of(_BUCKET)

    def _read(self) -> dict[str, Any] | None:
        content = self._store.get(f"{_BUCKET}/{_PLAN}")
        if content is None:
            return None
        try:
            found: dict[str, Any] = parse_json(content, self._store.url_of(f"{_BUCKET}/{_PLAN}"))
            return {**found, "session": str(found["session"]), "lease_s": float(found["lease_s"])}
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{self}/{_PLAN} is damaged: {error}; end all tasks, and delete {self}") from error

    def check(self) -> None:
        """Refuse a store that grants a name to more than one.

        Raises:
            OptionError: it does, or is not known not to.
        """
        self._store.check_conditions(f"{_BUCKET}/conditions")

    @property
    def is_there(self) -> bool:
        """Whether tasks have begun to make the output together, and were not done when this was made."""
        return bool(self._plan)

    @property
    def is_over(self) -> bool:
        """Whether what the tasks shared is removed."""
        there = self._read()
        return there is None or there["session"] != self._plan.get("session")

    def holder(self, task: TaskNumber, work: pathlib.Path) -> str:
        """Return what stands for a task and its scratch folder in leases: another host has no lock of that folder."""
        return f"{task.name}@{_holder(work)}"

    def agree(self, mine: dict[str, Any]) -> dict[str, Any] | None:
        """Write down a plan unless there is one, and return what is there."""
        if not self._plan:
            replaces = any(self._store.head(there) for there in (MANIFEST_FILE, f"{WORK}/{MANIFEST_FILE}"))
            mine = {**mine, "session": uuid.uuid4().hex, "replaces": replaces}
            self._store.create(f"{_BUCKET}/{_PLAN}", render_json(mine))
            self._plan = self._read() or mine  # the second where another has cleared up
        return self._plan

    def _of(self, name: str) -> str:
        return f"{_BUCKET}/{self._plan['session']}/{name}"

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        return list(self._store.listed(self._of(folder)))

    def text(self, name: str) -> str:
        """Return the content of a small object; "" where there is none."""
        return (self._store.get(self._of(name)) or b"").decode(errors="replace")

    def create(self, name: str, text: str) -> bool:
        """Create an object; return False where another was first."""
        return self._store.create(self._of(name), text.encode())

    def show(self, token: str, text: str) -> None:
        """Write the sign of life of a task, unless all is done; where the store is out of reach, the next time."""
        with contextlib.suppress(OutputError):
            if not self.is_over:
                self._store.put(self._of(f"beats/{token}"), text.encode())

    def leave(self, token: str) -> None:
        """Remove the sign of life of a task."""
        with contextlib.suppress(OutputError):
            self._store.delete([self._of(f"beats/{token}")])

    def signs(self) -> Signs:
        """Return what each task shows now, by one listing for all: an ETag changes with the number."""
        return self._store.listed(self._of("beats")).get

    def finish(self, shard: str, note: bytes, work: pathlib.Path) -> None:
        """Note that a shard is complete, unless another task was first; the ledger of this task goes before."""
        self.send_ledger(work)
        self._store.create(self._of(f"done/{shard}.json"), note)

    def send_ledger(self, work: pathlib.Path) -> None:
        """Upload what the ledger of a task has got since the last time: its scratch folder may be lost."""
        note = work / "ledger.sent"
        begin = int(note.read_text(encoding="ascii")) if note.exists() else 0
        with contextlib.suppress(FileNotFoundError), open(work / LEDGER_FILE, "rb") as file:
            file.seek(begin)
            data = file.read()
            if piece := data[: data.rfind(b"\n") + 1]:
                # By its place: one that was sent before a kill, and not noted, is sent again, with what came since.
                self._store.put(self._of(f"ledgers/{_holder(work)}.{begin:015d}"), piece)
                _put(note, str(begin + len(piece)).encode())

    def take_ledgers(self, work: pathlib.Path) -> None:
        """Put the ledger that the output had, and what other tasks have uploaded of theirs, before that of this run."""
        mine = (work / LEDGER_FILE).read_bytes()
        before = self._store.get(f"{WORK}/{LEDGER_FILE}") or b""
        names = [self._of(f"ledgers/{name}") for name in self.names("ledgers") if not name.startswith(_holder(work))]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            pieces = [piece for piece in pool.map(self._store.get, names) if piece]
        if pieces and (pieces[0] in mine or pieces[0] in before):  # by a run that was killed after this
            pieces = []
        if not mine.startswith(before):
            pieces.insert(0, before)
        if pieces:
            _put(work / LEDGER_FILE, b"".join([*pieces, mine]))

    def made_folder(self, work: pathlib.Path) -> str:
        """Return the folder for the shards of the task that has a scratch folder, which no other writes to."""
        return self._of(f"made/{_holder(work)}")

    @property
    def replaces(self) -> bool:
        """Whether shards wait until all are there, and those that they replace are gone."""
        return bool(self._plan.get("replaces"))

    def made(self) -> dict[str, StoredShard]:
        """Return the shards that tasks have finished, by name."""
        return {shard: stored for shard, (_, stored) in self._notes().items()}

    def _notes(self) -> dict[str, tuple[str, StoredShard]]:
        """Return the task that finished a shard first, and where it is, by the name of the shard."""
        if not self._plan:
            return {}
        names = [name for name in self.names("done") if name.endswith(".json")]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            contents = list(pool.map(self._store.get, [self._of(f"done/{name}") for name in names]))
        found = {}
        for name, content in zip(names, contents, strict=True):
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, CorruptDataError):
                note = parse_json(content or b"", name)  # it may be gone, or damaged
                found[name.removesuffix(".json")] = str(note["task"]), StoredShard.from_json(note)
        return found

    def tasks(self) -> tuple[tuple[tuple[str, str, int], ...], dict[str, ShardFiles]]:
        """Return name, process at work and number of finished shards of each task, and the finished shards by name.

        A task that has shown no sign of life within the time of a lease, by the store's clock, counts as gone.
        """
        if not self._plan:
            return (), {}
        at_work: dict[str, str] = {}
        for token, age in self._store.ages(self._of("beats")).items():
            name, _, process = self.text(f"beats/{token}").partition(" ")[2].strip().partition(", ")
            if name and (age <= self._plan["lease_s"] or name not in at_work):
                at_work[name] = process if age <= self._plan["lease_s"] else ""
        notes = self._notes()
        finished = {shard: stored.files for shard, (_, stored) in notes.items()}
        made = collections.Counter(task for task, _ in notes.values())
        every = sorted({*at_work, *made})
        return tuple((name, at_work.get(name, ""), made[name]) for name in every), finished

    def refuse_if_alive(self, logger: logging.Logger) -> None:
        """Raise where a task shows a sign of life within the time of a lease.

        Raises:
            OutputLockedError: names the task.
        """
        if not self._plan:
            return
        before, began, lease_s = self._beats(), time.monotonic(), self._plan["lease_s"]
        if before:
            logger.info("%s: tasks share it; waiting up to %g s for a sign of life of one", self._store.url, lease_s)
        while before and time.monotonic() - began <= lease_s:
            time.sleep(min(self.most_pause_s, lease_s / _POLLS_PER_LEASE))
            now = self._beats()
            for token, sign in now.items():
                if sign != before.get(token):
                    who = self.text(f"beats/{token}").partition(" ")[2].strip()
                    raise OutputLockedError(
                        f"{self._store.url} is shared by tasks, and one is alive ({who}); wait for them, or end them"
                    )
            before = now

    def _beats(self) -> dict[str, str]:
        return self._store.listed(self._of("beats"))

    def remove(self) -> None:
        """Remove what tasks shared, the plan first, by which they see that all is done; and what earlier ones left."""
        with contextlib.suppress(OutputError):  # it costs nothing, and the next run does it
            there = self._store.head(f"{_BUCKET}/{_PLAN}")  # before it is read: that of a session that begins now stays
            if there is not None and not self.is_over:
                self._store.delete_known(f"{_BUCKET}/{_PLAN}", there.identity)
            names = self._store.listed(_BUCKET)
            # After the listing: what is of a session that begins now is not in it, or spared.
            session = (self._read() or {}).get("session")
            stale = [f"{_BUCKET}/{name}" for name in names if name.partition("/")[0] not in {_PLAN, session}]
            if stale:
                with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
                    list(pool.map(lambda name: self._store.delete([name]), stale))


def _holder(work: pathlib.Path) -> str:
    """Return what stands for a scratch folder."""
    path = work / "holder"
    if not path.exists():
        _put(path, uuid.uuid4().hex.encode())
    return path.read_text(encoding="ascii")


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
            if not str(found["task"]).startswith("task-") or "/" in found["task"]:
                raise ValueError(f"{name} names {found['task']!r}")
            files = tuple(ShardInfo.from_json(info) for info in found["files"])
            _adopt(folder / found["task"], entries, files)
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
