"""Outputs in an object store: shards are made in a scratch folder, uploaded by workers, and removed.

    scratch folder: as a local output ── a shard is complete ──> a worker uploads its files, its entry last ──> freed
         │                                                                                                      │
         └── small files, the manifest ──> the store <───────────── a stand-in stays, of no size on disk ───────┘

    OUT/SHARD.EXT, SHARD.idx, ...       as in a local output; objects appear complete
        .datamat/run-N/plan.json        the process that began a run, and its shards, for `status` and other runs
                       SHARD.json       location of an uploaded shard's objects, until a manifest lists it
                       SHARD.EXT, ...   shards that wait to be published, including those of tasks
                 ledger.jsonl, quarantine/, sidecars.json, inputs

The scratch folder is a local output with one exception: an uploaded shard is replaced by a stand-in (`leave_stand_in`),
a file of its size without content. Each run removes the stand-ins that it finds, and creates new ones for what the
store has: for a published shard size and ends are compared, for another one the versions in its entry. So losing a
scratch folder loses only parts of shards.

No two runs write to one name: each has its own folder. Shards get their final names at once only if nothing is
published and no run of another plan has begun. One write of the manifest, on condition that it has not changed
meanwhile, decides what is published; see `datamat.directory.publication`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import pathlib
import platform
import re
import shutil
import tempfile
import uuid
from typing import TYPE_CHECKING

import xxhash

from datamat.directory.files import (
    MADE,
    SPOOL,
    WORK,
    commit,
    commit_json,
    default_scratch,
    digest_file,
    is_stand_in,
    leave_stand_in,
    locked,
    parse_json,
    read_json,
    render_json,
)
from datamat.directory.ledger import LEDGER_FILE
from datamat.directory.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardInfo,
    by_shard,
    is_manifest,
    run_folder,
    salvaged_shards,
    write_entry,
)
from datamat.directory.publication import (
    check_published,
    finish_publication,
    publish_manifest,
    remove_unlisted,
    version_there,
)
from datamat.directory.sidecars.exporting import known_sidecars
from datamat.directory.sidecars.indexes import tar_index
from datamat.errors import CorruptDataError, OutputError, count_of
from datamat.folders.base import (
    AbsentError,
    ChangedError,
    ExistsError,
    Folder,
    ReplaceIf,
    UnsupportedError,
    create_once,
    each,
)
from datamat.folders.local import read_regular
from datamat.plan.changes import parse_snapshot, snapshot
from datamat.run.outputs import LocalOutput, StoredObject, StoredShard, UploadTask, aside_names

if TYPE_CHECKING:
    import logging
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from datamat.directory.manifest import IndexInfo, ShardFiles
    from datamat.plan.job import Job
    from datamat.plan.plan import Plan

_PLAN = "plan.json"
_OF_RUN = re.compile(r"run-(\d{5})/")
_SMALL = ("sidecars.json", "inputs")
_MOST_BYTES = 1 << 32
_TAR = "tar"


def scratch_folder(place: Folder, scratch: str | os.PathLike[str] | None) -> pathlib.Path:
    """Return the folder on this machine in which shards are made: their own, or one that depends only on their URL.

    Args:
        place: destination of the shards.
        scratch: folder for those of a store, given by the user; None for one in `TMPDIR`.
    """
    if (here := place.local_path()) is not None:
        return here
    url = str(place)
    name = f"{url.rpartition('/')[2]}-{xxhash.xxh3_64_hexdigest(url.encode())}"
    if scratch is not None:
        return pathlib.Path(os.path.abspath(os.path.expanduser(scratch)), name)
    return default_scratch() / name


# ---------------------------------------------------------------- in a worker


def upload(task: UploadTask) -> StoredShard:
    """Upload the files of a finished shard, its entry last.

    Raises:
        OutputError: the store refuses it.
    """
    objects: dict[str, StoredObject] = {}

    def send(path: pathlib.Path, name: str, checksum: str) -> None:
        objects[name] = StoredObject(_sent(task.store, path, f"{task.folder}{name}", checksum), checksum)

    for path, index, info in task.files:
        if info.extension == _TAR:
            task.made.mkdir(exist_ok=True)
            made = task.made / f"{info.file}.idx"
            with commit(made) as file:
                file.write(tar_index(path))
            send(made, made.name, digest_file(made))
        send(index, info.index_file, digest_file(index))
        send(path, info.file, info.checksum)
    stored = StoredShard(tuple(info for _, _, info in task.files), task.folder, objects)
    task.store.write(task.entry, render_json(stored.to_json()))
    return stored


def _sent(store: Folder, path: pathlib.Path, name: str, checksum: str) -> str:
    """Write a file to a store, replacing exactly the object that is there now.

    Args:
        store: the store.
        path: path of the file, which must not change meanwhile.
        name: its name in the store.
        checksum: its checksum.

    Returns:
        Its version.

    Raises:
        OutputError: the store refuses it, or then has another object there.
    """
    before = version_there(store, name)
    try:
        return store.write_file(name, path, ReplaceIf(before) if before else "create")
    except UnsupportedError:  # the store does not support conditions
        return store.write_file(name, path)
    except (ExistsError, ChangedError):
        # Another write was faster: an attempt of ours whose reply was lost, or a worker that was presumed dead.
        if _holds(store, name, path):
            return version_there(store, name)
        raise OutputError(
            f"{store.place(name)} is not what this run has seen or sent; {count_of(path.stat().st_size, 'byte')} with "
            f"the checksum {checksum} belong there: something else writes there: end that, and run again"
        ) from None


def _holds(store: Folder, name: str, path: pathlib.Path) -> bool:
    """Return True if the object of this name has the content of a file."""
    blocks = store.blocks(name, path.stat().st_size)
    with open(path, "rb") as file, contextlib.suppress(AbsentError), contextlib.closing(blocks):
        return all(block == file.read(len(block)) for block in blocks) and not file.read(1)
    return False


# ---------------------------------------------------------------- in the driver


def output_of(job: Job, *, is_shared: bool = False, salvages: bool = False) -> LocalOutput:
    """Return the output of a job, before anything has begun; see `opened_output`."""
    if job.folder.local_path() is not None:
        return LocalOutput(job.output)
    return RemoteOutput(job.folder, job.output, job.how.logger, is_shared=is_shared, salvages=salvages)


@contextlib.contextmanager
def opened_output(job: Job, *, is_shared: bool = False, salvages: bool = False) -> Iterator[LocalOutput]:
    """Yield the output of a job; for a store, synchronise it with its scratch folder.

    Args:
        job: the job; its output is the folder, or the scratch folder, whose lock is held.
        is_shared: whether other tasks write there, too.
        salvages: whether a damaged manifest is replaced, not refused.
    """
    output = output_of(job, is_shared=is_shared, salvages=salvages)
    output.begin()
    try:
        yield output
    except ChangedError:  # another run has published
        output.give_up()
        raise
    except OutputError:  # the store is unreachable
        raise
    except BaseException:
        output.end()
        raise
    output.end()


@contextlib.contextmanager
def laid_out(job: Job) -> Iterator[tuple[Job, LocalOutput]]:
    """Yield a job and its output as they are now; nothing is written, and a store is laid out in a temporary folder.

    Raises:
        OutputError: the store cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix=SPOOL) as folder:
        job = dataclasses.replace(job, output=scratch_folder(job.folder, folder))
        place = output_of(job, is_shared=True)
        place.lay_out()
        yield job, place


class RemoteOutput(LocalOutput):
    """An output in a store and its scratch folder, which holds stand-ins for the shards.

    Args:
        store: destination of the shards.
        folder: the scratch folder.
        logger: receives a warning if cleaning up fails.
        is_shared: whether other tasks write there, too.
        salvages: whether to take over the shards that a damaged manifest still lists, and to replace it.
    """

    holds_shards = False

    def __init__(
        self,
        store: Folder,
        folder: pathlib.Path,
        logger: logging.Logger,
        *,
        is_shared: bool = False,
        salvages: bool = False,
    ) -> None:
        super().__init__(folder)
        self._salvages = salvages
        self._store = store
        self._work = folder / WORK
        self._logger = logger
        self.is_shared = is_shared
        self._mine = ""  # this run's folder in the store, once it has one
        self._seen = ""  # version of the manifest there; "" for none
        self._content: bytes | None = None  # content of that manifest
        self._stored: dict[str, StoredShard] = {}  # unpublished shards, by name
        self._others: set[str] = set()  # names of the shards of other plans
        self._left: list[str] = []  # names of files left by runs that are over or make this same plan
        self._made: Mapping[str, StoredShard] = {}  # by tasks
        self._known = _Known(self._work / "known.json")

    # ------------------------------------------------------------ the scratch folder

    def of_task(self, job: Job, task: str) -> tuple[Job, Job]:
        """Return the job with a scratch folder of its own, beside this one, which knows what the store has."""
        own = dataclasses.replace(job, output=self._folder.with_name(f"{self._folder.name}-{task}"))
        return own, own

    def remove_scratch_of_tasks(self) -> None:
        """Remove the scratch folders of tasks on this machine, except those of live tasks."""
        for folder in self._folder.parent.glob(f"{glob.escape(self._folder.name)}-task-*"):
            with contextlib.suppress(OSError), locked(folder / WORK / "lock"):
                shutil.rmtree(folder, ignore_errors=True)

    # ------------------------------------------------------------ repair

    @contextlib.contextmanager
    def at_hand(self, files: ShardFiles) -> Iterator[pathlib.Path]:
        """Fetch the files of a shard to a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="damaged-", dir=self._work) as folder:
            for info in files:
                path = pathlib.Path(folder, info.file)
                blocks = self._store.blocks(info.file, info.num_bytes)
                with contextlib.suppress(AbsentError), contextlib.closing(blocks), open(path, "wb") as file:
                    file.writelines(blocks)
            yield pathlib.Path(folder)

    def in_the_way(self, names: Iterable[str]) -> set[str]:
        """Return none of them: a store holds nothing but files."""
        return set()

    def set_aside(self, name: str) -> None:
        """Move an object to quarantine if it exists."""
        if self._store.stat(name) is not None:
            self._store.move(name, next(aside for aside in aside_names(name) if self._store.stat(aside) is None))

    # ------------------------------------------------------------ existing files

    def begin(self) -> None:
        """Finish an interrupted publication, and synchronise the scratch folder with the store."""
        finish_publication(self._store)
        self.lay_out()
        super().begin()

    def lay_out(self) -> None:
        """Synchronise the scratch folder with the store, without writing to the store unless a manifest is salvaged."""
        (self._work / "shards").mkdir(parents=True, exist_ok=True)
        self._seen = version_there(self._store)  # before its content: if it changes in between, `publish` fails
        content = self._read(MANIFEST_FILE)
        if self._salvages and content is not None and not _is_whole(content):
            _note_uploaded(self._store, by_shard(salvaged_shards(self._store)).values())
            content = None
        self._content = content
        self._forget_uploaded()
        here = _content(self._folder / MANIFEST_FILE)
        if content is not None and content != here:
            self._start_over(content)
        with contextlib.suppress(CorruptDataError):
            manifest = Manifest.parse(_content(self._folder / MANIFEST_FILE) or b"", "").placed(self._store)
            each(self._stand_in_listed, by_shard(manifest.all_files).values())
            each(self._renew_index, manifest.index)
        if content is None:  # it was deleted: its shards count as those of an unfinished run
            (self._folder / MANIFEST_FILE).unlink(missing_ok=True)
        if not self.is_shared and not (self._work / LEDGER_FILE).exists():
            self._fetch({f"{WORK}/{LEDGER_FILE}": self._work / LEDGER_FILE})

    def _read(self, name: str) -> bytes | None:
        return self._store.read_if_there(name, _MOST_BYTES)

    def _forget_uploaded(self) -> None:
        """Remove the stand-ins of earlier runs and their entries: the store is authoritative."""
        for folder, entries in ((self._folder, self._work / "shards"), (waiting := run_folder(self._work), waiting)):
            found = [path for path in (folder.iterdir() if folder.is_dir() else ()) if is_stand_in(path)]
            for shard in {path.name.partition(".")[0] for path in found}:
                (entries / f"{shard}.json").unlink(missing_ok=True)
            for path in found:
                path.unlink()

    def _start_over(self, content: bytes) -> None:
        """Rebuild the scratch folder for the dataset in the store, which another machine has finished."""
        place = self._store.place(MANIFEST_FILE)
        try:
            manifest = Manifest.parse(content, place)
        except CorruptDataError as error:
            if not is_manifest(content):
                raise OutputError(
                    f"{place} is not a manifest of datamat, and this run would overwrite it; move it away, or give "
                    "another output"
                ) from error
            raise OutputError(
                f"{place} is damaged; call repair(), which rebuilds it from what is still readable"
            ) from error
        for path in (*self._folder.iterdir(), *self._work.iterdir()):
            if path.name in {WORK, "lock"}:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self._known.clear()
        index = {info.file for info in manifest.placed(self._store).index}
        self._fetch({name: self._folder / name for name in {*index, *(f"{WORK}/{small}" for small in _SMALL)}})
        with commit(self._folder / MANIFEST_FILE) as file:
            file.write(content)

    def _fetch(self, names: Mapping[str, pathlib.Path]) -> None:
        def fetch(name: str) -> None:
            path, version = names[name], version_there(self._store, name)
            content = self._read(name) if version else None
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with commit(path) as file:
                    file.write(content)
                self._known[name] = StoredObject(version, digest_file(path))

        each(fetch, names)

    def _stand_in_listed(self, files: ShardFiles) -> None:
        """Create stand-ins for a published shard if the store has it intact."""
        if not all(map(self._has_listed, files)):
            return
        for info in files:
            self._leave(self._folder, info)
        self._fetch_made(f"{info.file}.idx" for info in files if info.extension == _TAR)
        if self._content is None:
            write_entry(self._work / "shards", files)

    def _has_listed(self, info: ShardInfo) -> bool:
        """Return True if the store has a file and its offsets; files changed since the last check are read again."""
        beside = [info.index_file, *([f"{info.file}.idx"] if info.extension == _TAR else [])]
        there = self._store.stat(info.file)
        if there is None or there.num_bytes != info.num_bytes or not all(map(self._store.stat, beside)):
            return False
        now = StoredObject(there.version, info.checksum)
        if self._known.get(info.file) != now:
            with contextlib.suppress(AbsentError):
                head = self._store.read_range(info.file, 0, info.head.num_bytes).content
                tail = self._store.read_range(info.file, info.num_bytes - info.tail.num_bytes, info.num_bytes).content
                if info.differences(there.num_bytes, head, tail):
                    return False
                self._known[info.file] = now
        return True

    def _renew_index(self, info: IndexInfo) -> None:
        """Renew the copy of an index file that may not be that of the store; where it has none, the run makes both."""
        now = StoredObject(version_there(self._store, info.file), info.checksum)
        if self._known.get(info.file) != now:
            (self._folder / info.file).unlink(missing_ok=True)
            self._fetch({info.file: self._folder / info.file})

    def _fetch_made(self, names: Iterable[str], folder: str = "") -> None:
        wanted = {f"{folder}{name}": self._work / MADE / name for name in names}
        self._fetch({name: path for name, path in wanted.items() if folder or not path.exists()})

    def _leave(self, folder: pathlib.Path, info: ShardInfo) -> None:
        for name, num_bytes in ((info.file, info.num_bytes), (info.index_file, 0)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            leave_stand_in(folder / name, num_bytes)

    # ------------------------------------------------------------ unpublished runs

    def adopt(self, plan: Plan, made: Mapping[str, StoredShard] | None = None) -> None:
        """Take over shards of a plan that are complete in the store, from any run."""
        self._made = self._made if made is None else made
        wanted = {shard.name: shard.fingerprint for shard in plan.shards}
        names = self._of_runs()
        foreign: tuple[str, ...] = ()
        for folder in [name.removesuffix(_PLAN) for name in names if name.endswith(f"/{_PLAN}")]:
            shards = self._shards_of(folder)
            if folder != self._mine and any(wanted.get(name) != fingerprint for name, fingerprint in shards.items()):
                self.has_others = True
                self._others |= shards.keys()
                foreign += (folder,)
        self._left = [name for name in names if not name.startswith(foreign)]
        entries = [name for name in names if pathlib.PurePosixPath(name).stem in wanted and name.endswith(".json")]
        noted = [one for one in each(self._noted, entries) if one is not None]
        found = {one.name: one for one in noted} | dict(self._made)
        each(lambda one: self._adopt(one, wanted[one.name]), [one for one in found.values() if one.name in wanted])

    def _shards_of(self, folder: str) -> dict[str, str]:
        with contextlib.suppress(ValueError, TypeError, LookupError):
            value = parse_json(self._read(f"{folder}{_PLAN}") or b"", folder)
            return {shard.name: shard.fingerprint for shard in parse_snapshot(value["shards"]) or ()}
        return {}

    def _noted(self, name: str) -> StoredShard | None:
        """Return the shard described by a note in the store; None if the note is missing or damaged."""
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, CorruptDataError):
            return StoredShard.from_json(parse_json(self._read(name) or b"", name))
        return None

    def _adopt(self, stored: StoredShard, fingerprint: str) -> None:
        """Record a shard in the store as finished if it has this fingerprint and is complete."""
        if any(info.fingerprint != fingerprint for info in stored.files) or self._lost(stored):
            return
        folder = run_folder(self._work) if stored.folder else self._folder
        entries = folder if stored.folder else self._work / "shards"
        entries.mkdir(parents=True, exist_ok=True)
        self._note(stored)
        self._fetch_made((name for name in stored.objects if name.endswith(f".{_TAR}.idx")), stored.folder)
        for info in stored.files:
            self._leave(folder, info)
        write_entry(entries, stored.files)

    def _note(self, stored: StoredShard) -> None:
        self._stored[stored.name] = stored
        if not stored.folder:
            self._known.update(stored.objects)

    def _lost(self, stored: StoredShard) -> list[str]:
        """Return the objects of a shard that are missing or replaced."""
        wanted = {f"{stored.folder}{name}": found.version for name, found in stored.objects.items()}
        return [name for name, version in wanted.items() if version_there(self._store, name) != version]

    def show_plan(self, plan: Plan) -> None:
        """Claim a folder in the store, and write the plan there, before anything is made.

        A run that begins later sees it, and delays shards that would replace those of this run; if both begin at the
        same time, each sees the other.
        """
        who = {"pid": os.getpid(), "host": platform.node(), "run": uuid.uuid4().hex}
        content = render_json({**who, "shards": snapshot(plan)})
        number = max([0, *self._numbers()])
        while not self._mine:
            number += 1
            if self._created(f"{WORK}/run-{number:05d}/{_PLAN}", content):
                self._mine = f"{WORK}/run-{number:05d}/"
        self.adopt(plan)

    def _created(self, name: str, content: bytes) -> bool:
        try:
            return create_once(self._store, name, content)
        except UnsupportedError:
            self._store.write(name, content)
            return True

    def _numbers(self) -> list[int]:
        found = map(_OF_RUN.match, self._store.list(WORK, deep=True) or ())
        return [int(one[1]) for one in found if one]

    # ------------------------------------------------------------ shards

    def take_over(self, files: ShardFiles, renamed: ShardFiles, below: str = "") -> None:
        """Keep a finished shard under another name until it is published; the store copies it."""
        objects: dict[str, StoredObject] = {}
        for old, new in zip(files, renamed, strict=True):
            names = {old.index_file: new.index_file, old.file: new.file}
            if old.extension == _TAR:
                names[f"{old.file}.idx"] = f"{new.file}.idx"
            for name, target in names.items():
                self._store.copy(f"{below}{name}", f"{self._mine}{target}")
                version = version_there(self._store, f"{self._mine}{target}")
                objects[target] = StoredObject(version, new.checksum if target == new.file else "")
        stored = StoredShard(renamed, self._mine, objects)
        self._store.write(f"{self._mine}{stored.name}.json", render_json(stored.to_json()))
        self._adopt(stored, renamed[0].fingerprint)

    def task(self, shard: str, files: ShardFiles, *, waits: bool) -> UploadTask | None:
        """Return the task that uploads a finished shard; None if the store has it."""
        place = run_folder(self._work) if waits else self._folder
        placed = tuple((place / info.file, place / info.index_file, info) for info in files)
        if all(is_stand_in(path) for path, _, _ in placed):
            return None
        folder = self._mine if waits else ""
        return UploadTask(self._store, shard, placed, folder, f"{self._mine}{shard}.json", self._work / MADE)

    def stored(self, files: ShardFiles) -> StoredShard:
        """Return the location of an uploaded shard."""
        return self._stored.get(files[0].name) or StoredShard(files)

    def has(self, files: ShardFiles) -> bool:
        """Return True if a shard has been uploaded, under its final names or waiting."""
        places = self._folder, run_folder(self._work)
        return any(all(is_stand_in(place / info.file) for info in files) for place in places)

    def settle(self, task: UploadTask, stored: StoredShard) -> None:
        """Replace the files of an uploaded shard by stand-ins."""
        self._note(stored)
        for path, index, info in task.files:
            leave_stand_in(path, info.num_bytes)
            leave_stand_in(index, 0)

    # ------------------------------------------------------------ the end

    def delete(self, names: Iterable[str]) -> None:
        """Delete files that describe changing shards."""
        each(self._store.delete, names)

    def publish(self, manifest: Manifest, waiting: Collection[str], going: Iterable[str]) -> None:
        """Publish a finished set, first in the store."""
        self._publish_in_store(manifest, waiting, going)
        super().publish(manifest, waiting, going)

    def _publish_in_store(self, manifest: Manifest, waiting: Collection[str], going: Iterable[str]) -> None:
        moving: dict[str, str] = {}
        for info in manifest.index:
            if info.name in waiting:
                moving[info.name] = f"{self._mine}{info.name}"
                path = run_folder(self._work) / info.name
            else:
                path = self._folder / info.name
            self._send(moving.get(info.name, info.name), path)
        for stored in self._stored.values():
            if stored.folder and any(info.file in waiting for info in stored.files):
                moving |= {name: f"{stored.folder}{name}" for name in stored.objects}
        if manifest.render() == self._content and not moving:
            return
        mine = {info.name for info in manifest.all_files}
        late = [name for name in self._store.list() or () if name.partition(".")[0] in self._others - mine]
        changed = dataclasses.replace(manifest, moving=moving)
        check_published(self._store, self._seen)
        if lost := [name for names in each(self._lost, self._stored.values()) for name in names]:
            raise OutputError(
                f"{self._store.place(lost[0])} was uploaded, and is gone or another one now; something else deletes or "
                "writes there: end that, and run again"
            )
        self._seen = publish_manifest(self._store, changed, self._seen, {*going, *late} - moving.keys())
        self._content = manifest.render()
        for name in [info.name for info in manifest.index if info.name in moving]:
            known = self._known.pop(moving[name])
            self._known[name] = StoredObject(version_there(self._store, name), known.checksum)

    def fetch_edited(self, names: Collection[str] = (), *, shards: Collection[str]) -> None:
        """Fetch files for other readers that somebody else has edited in the store."""
        record = f"{WORK}/sidecars.json"  # without it, files of a killed run elsewhere would count as the user's
        if not (self._folder / record).exists():
            self._fetch({record: self._folder / record})

        def fetch(name: str) -> None:
            version = version_there(self._store, name)
            known = self._known.get(name)
            if not version:
                (self._folder / name).unlink(missing_ok=True)
            elif known is None or known.version != version:
                self._fetch({name: self._folder / name})

        known = known_sidecars(self._folder, documents=True)
        each(fetch, [name for name in known.union(names) if name.partition(".")[0] not in shards])

    def send_small(self, manifest: Manifest) -> None:
        """Upload the small files that are missing or different in the store."""
        listed = manifest.file_names | {MANIFEST_FILE}
        check_published(self._store, self._seen)
        each(lambda one: self._send(*one), [one for one in self._small() if one[0] not in listed])

    def _send(self, name: str, path: pathlib.Path) -> None:
        now = StoredObject(version_there(self._store, name), digest_file(path))
        if self._known.get(name) != now:
            self._known[name] = StoredObject(_sent(self._store, path, name, now.checksum), now.checksum)

    def _small(self) -> Iterator[tuple[str, pathlib.Path]]:
        """Yield name and path of each small file that belongs in the store, except the ledger."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if name.startswith(f"{WORK}/") and name not in {f"{WORK}/{small}" for small in _SMALL}:
                continue
            if path.is_file() and not path.is_symlink() and not is_stand_in(path):
                yield name, path

    def give_up(self) -> None:
        """Delete what this run has made, unless the set published by another run contains it."""
        names = {name for stored in self._stored.values() for name in stored.objects}
        names |= {name for name in self._of_runs() if self._mine and name.startswith(self._mine)}
        remove_unlisted(self._store, names)

    def sweep(self) -> None:
        """Remove leftovers of runs in the store once the set is published, except newer ones.

        A run that had nothing to do leaves other runs' files: they may be active, and publish after it.
        """
        self._known.save()
        mine = self._mine
        self._remove([name for name in self._of_runs() if name.startswith(mine) or name < mine] if mine else self._left)
        self._mine = ""
        super().sweep()

    def remove_stage(self, name: str) -> None:
        """Remove a set that is published, also in the store."""
        stage = self._store.child(name)
        each(stage.delete, [file for file in stage.list(deep=True) or () if file != MANIFEST_FILE])
        stage.delete(MANIFEST_FILE)
        super().remove_stage(name)

    def _remove(self, names: Collection[str]) -> None:
        """Delete the content of runs' folders, their plans last, since these show that there is more."""
        each(self._store.delete, [name for name in names if not name.endswith(f"/{_PLAN}")])
        each(self._store.delete, [name for name in names if name.endswith(f"/{_PLAN}")])

    def _of_runs(self) -> list[str]:
        return [f"{WORK}/{name}" for name in self._store.list(WORK, deep=True) or () if _OF_RUN.match(name)]

    def end(self) -> None:
        """Upload the ledger and the quarantine; not the ledger if another run is at work."""
        self._known.save()
        kept = [path for path in sorted((self._work / "quarantine").rglob("*")) if path.is_file()]
        try:
            if not self.is_shared and not [
                number for number in self._numbers() if f"{WORK}/run-{number:05d}/" > self._mine
            ]:
                kept.append(self._work / LEDGER_FILE)
            for path in kept:
                if path.is_file():
                    self._store.write_file(path.relative_to(self._folder).as_posix(), path)
        except OutputError as error:
            self._logger.warning("%s; the next run uploads what is missing", error)


class _Known(dict[str, StoredObject]):
    """A scratch folder's cache of what objects of a store contain, by name; it only saves requests."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            self.update({name: StoredObject(*found) for name, found in read_json(path).items()})

    def save(self) -> None:
        """Save it for the next run."""
        if self._path.parent.is_dir():
            commit_json(self._path, {name: dataclasses.astuple(found) for name, found in self.items()})


def _is_whole(content: bytes) -> bool:
    try:
        return bool(Manifest.parse(content, ""))
    except CorruptDataError:
        return False


def _note_uploaded(store: Folder, shards: Iterable[ShardFiles]) -> None:
    """Record which shards are fully uploaded, so that the next run can take them over."""
    for files in shards:
        objects = {}
        for info in files:
            beside = [f"{info.file}.idx"] if info.extension == _TAR else []
            for name, checksum in ((info.file, info.checksum), *((one, "") for one in (info.index_file, *beside))):
                if version := version_there(store, name):
                    objects[name] = StoredObject(version, checksum)
        if all({info.file, info.index_file} <= objects.keys() for info in files):
            noted = StoredShard(files, "", objects)
            store.write(f"{WORK}/run-00000/{files[0].name}.json", render_json(noted.to_json()))


def _content(path: pathlib.Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return read_regular(path, max_bytes=_MOST_BYTES)
    return None
