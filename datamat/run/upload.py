"""Outputs in an object store: shards are made in a scratch folder, uploaded by workers, and freed.

    scratch folder: as a local output ── a shard is complete ──> a worker uploads its files, its entry last ──> freed
         │                                                                                                      │
         └── small files, the manifest ──> the store <───────────── a stand-in stays, of no size on disk ───────┘

    OUT/SHARD.EXT, SHARD.idx, ...       as in a local output; an object appears whole
        .datamat/run-N/plan.json        who began a run, and the shards that it makes, for `status` and other runs
                       SHARD.json       of an uploaded shard, until a manifest lists it: where its objects are
                       SHARD.EXT, ...   shards that wait until they are published; so does what tasks have made
                 ledger.jsonl, quarantine/, sidecars.json, inputs

The scratch folder is a local output in all but one thing: of an uploaded shard it keeps a stand-in (`leave_stand_in`),
a file of its size without content. Each run removes those that it finds, and leaves others for what the store has: of a
published shard size and ends are compared, and of another the versions in its entry. So nothing is lost with a scratch
folder but parts of shards.

No two runs write to one name: each has a folder of its own. Only where nothing is published, and no run of another plan
has begun, do shards get their names at once. What is published is decided by one write of the manifest, on condition
that it is the one that was seen; see `datamat.directory.publication`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
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
from datamat.plan.changes import parse_snapshot, render_snapshot
from datamat.run.outputs import LocalOutput, StoredObject, StoredShard, UploadTask

if TYPE_CHECKING:
    import logging
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from datamat.directory.manifest import IndexInfo, ShardFiles
    from datamat.plan.job import Job
    from datamat.plan.plan import Plan


__all__ = [
    "RemoteOutput",
    "laid_out",
    "note_uploaded",
    "opened_output",
    "output_of",
    "scratch_folder",
    "upload",
]

_PLAN = "plan.json"
_OF_RUN = re.compile(r"run-(\d{5})/")
_LEFT = re.compile(rf"{_OF_RUN.pattern}|damaged/")  # by runs, and by repairs, which restore what is damaged
_SMALL = ("sidecars.json", "inputs")
_MOST_BYTES = 1 << 32
_TAR = "tar"


def scratch_folder(store: Folder, scratch: str | os.PathLike[str] | None) -> pathlib.Path:
    """Return the local folder in which shards for a store are made: always the same one for its URL.

    Args:
        store: where the shards go.
        scratch: folder that the user gives; None for one below `TMPDIR`.
    """
    url = str(store)
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
    """Write a file to a store in the place of what is there now, and of nothing that comes in between.

    Args:
        store: the store.
        path: path of the file, which nobody changes meanwhile.
        name: name that it gets.
        checksum: its checksum.

    Returns:
        Its version.

    Raises:
        OutputError: the store refuses it, or has something else there than what was sent.
    """
    before = version_there(store, name)
    try:
        return store.write_file(name, path, ReplaceIf(before) if before else "create")
    except UnsupportedError:  # the store keeps no conditions
        return store.write_file(name, path)
    except (ExistsError, ChangedError):
        # Somebody was faster: a try of ours whose answer was lost, or a worker that was taken for dead.
        if _holds(store, name, path):
            return version_there(store, name)
        raise OutputError(
            f"{store.place(name)} is not what this run has seen or sent; {count_of(path.stat().st_size, 'byte')} with "
            f"the checksum {checksum} belong there: something else writes there: end that, and run again"
        ) from None


def _holds(store: Folder, name: str, path: pathlib.Path) -> bool:
    """Return True if a store has the content of a file under a name."""
    blocks = store.blocks(name, path.stat().st_size)
    with open(path, "rb") as file, contextlib.suppress(AbsentError), contextlib.closing(blocks):
        return all(block == file.read(len(block)) for block in blocks) and not file.read(1)
    return False


# ---------------------------------------------------------------- in the driver


def output_of(job: Job, *, is_shared: bool = False) -> LocalOutput:
    """Return the output of a job, at which nothing has begun; see `opened_output`."""
    if job.store is None:
        return LocalOutput(job.output)
    return RemoteOutput(job.store, job.output, job.how.logger, is_shared=is_shared)


@contextlib.contextmanager
def opened_output(job: Job, *, is_shared: bool = False) -> Iterator[LocalOutput]:
    """Yield the output of a job; one in a store is brought together with its scratch folder.

    Args:
        job: the job; its output is the folder, or the scratch folder, of which the lock is held.
        is_shared: whether other tasks write there, too.
    """
    output = output_of(job, is_shared=is_shared)
    output.begin()
    try:
        yield output
    except ChangedError:  # another has published
        output.give_up()
        raise
    except OutputError:  # the store is out of reach
        raise
    except BaseException:
        output.end()
        raise
    output.end()


@contextlib.contextmanager
def laid_out(job: Job) -> Iterator[tuple[Job, RemoteOutput]]:
    """Yield a job whose scratch folder is a temporary one, in line with the store, and its output; nothing is written.

    Raises:
        OutputError: the store cannot be read.
    """
    assert job.store is not None
    with tempfile.TemporaryDirectory(prefix=SPOOL) as folder:
        copied = dataclasses.replace(job, output=pathlib.Path(folder))
        (copied.work / "shards").mkdir(parents=True)
        remote = RemoteOutput(job.store, copied.output, job.how.logger, is_shared=True)
        remote.lay_out()
        yield copied, remote


class RemoteOutput(LocalOutput):
    """An output in a store, and its scratch folder, in which stand-ins are left of the shards.

    Args:
        store: where the shards go.
        folder: the scratch folder.
        logger: receives a warning where cleaning up fails.
        is_shared: whether other tasks write there, too.
    """

    holds_shards = False

    def __init__(
        self,
        store: Folder,
        folder: pathlib.Path,
        logger: logging.Logger,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(folder)
        self._store = store
        self._work = folder / WORK
        self._logger = logger
        self.is_shared = is_shared
        self._mine = ""  # the folder of this run in the store, once it has one
        self._seen = ""  # version of the manifest there; "" for none
        self._content: bytes | None = None  # of that
        self._stored: dict[str, StoredShard] = {}  # shards that no manifest lists, by name
        self._others: set[str] = set()  # names of the shards of other plans
        self._left: list[str] = []  # names of what runs have left, which are over, or make this very plan
        self._made: Mapping[str, StoredShard] = {}  # by tasks
        self._known = _Known(self._work / "known.json")

    # ------------------------------------------------------------ what is there

    def begin(self) -> None:
        """Finish what is half published, and bring the scratch folder in line with the store."""
        finish_publication(self._store)
        self.lay_out()
        super().begin()

    def lay_out(self) -> None:
        """Bring the scratch folder in line with the store, in which nothing is written."""
        self._seen = version_there(self._store)  # before its content: if it changes in between, `publish` learns of it
        self._content = content = self._read(MANIFEST_FILE)
        self._forget_uploaded()
        here = _content(self._folder / MANIFEST_FILE)
        if content is not None and content != here:
            self._start_over(content)
        with contextlib.suppress(CorruptDataError):
            manifest = Manifest.parse(_content(self._folder / MANIFEST_FILE) or b"", "").placed(self._store)
            each(self._stand_in_listed, by_shard(manifest.all_files).values())
            each(self._renew_index, manifest.index)
        if content is None:  # somebody has deleted it: its shards count, as those of a run that is not finished
            (self._folder / MANIFEST_FILE).unlink(missing_ok=True)
        if not self.is_shared and not (self._work / LEDGER_FILE).exists():
            self._fetch({f"{WORK}/{LEDGER_FILE}": self._work / LEDGER_FILE})

    def _read(self, name: str) -> bytes | None:
        return self._store.read_if_there(name, _MOST_BYTES)

    def _forget_uploaded(self) -> None:
        """Remove the stand-ins of earlier runs, with their entries: the store says what it has."""
        for folder, entries in ((self._folder, self._work / "shards"), (waiting := run_folder(self._work), waiting)):
            found = [path for path in (folder.iterdir() if folder.is_dir() else ()) if is_stand_in(path)]
            for shard in {path.name.partition(".")[0] for path in found}:
                (entries / f"{shard}.json").unlink(missing_ok=True)
            for path in found:
                path.unlink()

    def _start_over(self, content: bytes) -> None:
        """Make the scratch folder that of the dataset in the store: another machine has finished it."""
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
                f"{place} is damaged; call repair(), which rebuilds it from what it still says"
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
        """Leave stand-ins for a shard that is published, if the store has it whole."""
        if not all(map(self._has_listed, files)):
            return
        for info in files:
            self._leave(self._folder, info)
        self._fetch_made(f"{info.file}.idx" for info in files if info.extension == _TAR)
        if self._content is None:
            write_entry(self._work / "shards", files)

    def _has_listed(self, info: ShardInfo) -> bool:
        """Return True if the store has a file and its offsets; what has changed since the last look is read again."""
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

    # ------------------------------------------------------------ runs that are not published

    def adopt(self, plan: Plan, made: Mapping[str, StoredShard] | None = None) -> None:
        """Take over the shards of a plan that are whole in the store, from whatever run."""
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
        """Return the shard that a note in the store describes; None if there is none, or it is damaged."""
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, CorruptDataError):
            return StoredShard.from_json(parse_json(self._read(name) or b"", name))
        return None

    def _adopt(self, stored: StoredShard, fingerprint: str) -> None:
        """Note a shard of the store as a finished one, if it is of this fingerprint and whole."""
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
        """Return the objects of a shard that are gone, or others now."""
        wanted = {f"{stored.folder}{name}": found.version for name, found in stored.objects.items()}
        return [name for name, version in wanted.items() if version_there(self._store, name) != version]

    def show_plan(self, plan: Plan) -> None:
        """Take a folder in the store, and write down there who makes what, before anything is made.

        A run that begins later sees it, and waits with what would take the place of shards of this one; if both begin
        at once, each sees the other.
        """
        who = {"pid": os.getpid(), "host": platform.node(), "run": uuid.uuid4().hex}
        content = render_json({**who, "shards": json.loads(render_snapshot(plan))})
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
        """Have a finished shard wait under another name; the store copies it."""
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
        """Return what uploads a finished shard; None if the store has it."""
        place = run_folder(self._work) if waits else self._folder
        placed = tuple((place / info.file, place / info.index_file, info) for info in files)
        if all(is_stand_in(path) for path, _, _ in placed):
            return None
        folder = self._mine if waits else ""
        return UploadTask(self._store, shard, placed, folder, f"{self._mine}{shard}.json", self._work / MADE)

    def stored(self, files: ShardFiles) -> StoredShard:
        """Return where an uploaded shard is."""
        return self._stored.get(files[0].name) or StoredShard(files)

    def has(self, files: ShardFiles) -> bool:
        """Return True if a shard, with its names or waiting, has been uploaded."""
        places = self._folder, run_folder(self._work)
        return any(all(is_stand_in(place / info.file) for info in files) for place in places)

    def settle(self, task: UploadTask, stored: StoredShard) -> None:
        """Free the files of an uploaded shard."""
        self._note(stored)
        for path, index, info in task.files:
            leave_stand_in(path, info.num_bytes)
            leave_stand_in(index, 0)

    # ------------------------------------------------------------ the end

    def delete(self, names: Iterable[str]) -> None:
        """Delete files that describe shards that change."""
        each(self._store.delete, names)

    def publish(self, manifest: Manifest, waiting: Collection[str], going: Iterable[str]) -> None:
        """Have readers see a finished set, first in the store."""
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
        """Bring here what somebody else has written in the store under the names of files for other readers."""
        record = f"{WORK}/sidecars.json"  # without it, what a killed run elsewhere wrote would pass for the user's
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
        """Upload the small files that the store has not got, or has otherwise."""
        listed = manifest.file_names | {MANIFEST_FILE}
        check_published(self._store, self._seen)
        each(lambda one: self._send(*one), [one for one in self._small() if one[0] not in listed])

    def _send(self, name: str, path: pathlib.Path) -> None:
        now = StoredObject(version_there(self._store, name), digest_file(path))
        if self._known.get(name) != now:
            self._known[name] = StoredObject(_sent(self._store, path, name, now.checksum), now.checksum)

    def _small(self) -> Iterator[tuple[str, pathlib.Path]]:
        """Yield name and path of each small file that belongs into the store, but for the ledger."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if name.startswith(f"{WORK}/") and name not in {f"{WORK}/{small}" for small in _SMALL}:
                continue
            if path.is_file() and not path.is_symlink() and not is_stand_in(path):
                yield name, path

    def give_up(self) -> None:
        """Delete what this run has made, as far as the set of another that is published lacks it."""
        names = {name for stored in self._stored.values() for name in stored.objects}
        names |= {name for name in self._of_runs() if self._mine and name.startswith(self._mine)}
        remove_unlisted(self._store, names)

    def sweep(self) -> None:
        """Remove what runs have left in the store, once the set is published; not what is newer.

        A run that had nothing to do leaves what others make: they may be alive, and publish after it.
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
        """Delete what is in folders of runs, their plans last: others see by them that there is more."""
        each(self._store.delete, [name for name in names if not name.endswith(f"/{_PLAN}")])
        each(self._store.delete, [name for name in names if name.endswith(f"/{_PLAN}")])

    def _of_runs(self) -> list[str]:
        return [f"{WORK}/{name}" for name in self._store.list(WORK, deep=True) or () if _LEFT.match(name)]

    def end(self) -> None:
        """Upload the ledger and what is in quarantine; no ledger where another run is at work."""
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
    """What objects of a store hold, by their names, as a scratch folder remembers it: it only saves requests.

    Args:
        path: the file that keeps it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            self.update({name: StoredObject(*found) for name, found in read_json(path).items()})

    def save(self) -> None:
        """Keep it for the next run."""
        if self._path.parent.is_dir():
            commit_json(self._path, {name: dataclasses.astuple(found) for name, found in self.items()})


def note_uploaded(store: Folder, shards: Iterable[ShardFiles]) -> None:
    """Write the entries of shards that are in a store, by which the next run takes over those that are there whole."""
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
