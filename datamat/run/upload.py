"""Outputs in an object store: shards are made in a scratch folder, uploaded by workers, and freed.

    scratch folder: as a local output ── a shard is named ──> a worker uploads its files, its entry last ──> freed
         │                                                                                                   │
         └── small files, the manifest last ──> the store <────────── a stand-in stays, of no size on disk ──┘

    OUT/SHARD.EXT, SHARD.idx, ...       as in a local output; an object appears whole
        .datamat/run                    the mark of the run at work
                 shards/SHARD.json      of an uploaded shard, until a manifest lists it
                 plan.json              the shards of the run at work, for `status`
                 earlier.json           the shards of plans before it that were not finished
                 held/...               shards that wait until those that they replace are gone
                 slices/SESSION/made/HOLDER/...  shards that one of several tasks has made, see `slices`
                 manifest.json          what was there before a run that replaces shards
                 objects.json           size and identity of each object of the finished dataset; written after all
                 ledger.jsonl, quarantine/, sidecars.json, inputs

The scratch folder is a local output in all but one thing: of an uploaded shard it keeps a stand-in (`leave_stand_in`),
a file of its size without content. Whatever is said of the local path, also of kills, holds there. Before each run the
stand-ins are compared with the store, by name and not by a listing: what it does not have whole is made again. Without
the scratch folder, on another machine, a run takes what the store has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import tempfile
import uuid
from typing import TYPE_CHECKING, Any

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
    render_json,
)
from datamat.directory.ledger import LEDGER_FILE
from datamat.directory.manifest import (
    HELD,
    MANIFEST_FILE,
    Manifest,
    ShardInfo,
    by_shard,
    growing_path,
    is_manifest,
    read_entries,
    read_entry,
    write_entry,
)
from datamat.directory.sidecars.indexes import tar_index
from datamat.errors import CorruptDataError, OutputError, OutputLockedError, count_of
from datamat.folders.base import AbsentError, ChangedError, ExistsError, Folder, ReplaceIf, Stat, UnsupportedError
from datamat.folders.local import read_regular
from datamat.plan.changes import render_snapshot
from datamat.sources.fetching import each
from datamat.values import frozen

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from datamat.directory.manifest import ShardFiles
    from datamat.plan.job import Job
    from datamat.plan.plan import Plan, ShardSpec


__all__ = [
    "RemoteOutput",
    "StoredObject",
    "StoredShard",
    "UploadTask",
    "Uploaded",
    "forget_objects",
    "laid_out",
    "note_uploaded",
    "opened_output",
    "scratch_folder",
    "upload",
]

_RUN = f"{WORK}/run"
_PLAN = f"{WORK}/plan.json"
_EARLIER = f"{WORK}/earlier.json"
_OBJECTS = f"{WORK}/objects.json"
_ASIDE = f"{WORK}/{MANIFEST_FILE}"
_ENTRIES = f"{WORK}/shards"
_HELD = f"{WORK}/{HELD}"
_SLICES = f"{WORK}/slices/"
_UPLOADED = "uploaded"  # folder below `.datamat` of the scratch folder: what the store said of the objects of a shard
_SMALL = (LEDGER_FILE, "sidecars.json", "inputs")
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


@frozen()
class StoredObject:
    """A file of a store, as it was when it was written.

    Attributes:
        num_bytes: its size.
        identity: the version that the store gave it.
        checksum: checksum of its content, as `digest_file` returns it.
    """

    num_bytes: int
    identity: str
    checksum: str


@frozen()
class UploadTask:
    """A finished shard to upload; travels to a worker.

    Attributes:
        store: where it goes.
        run: mark of the run.
        shard: name of the shard.
        files: path and entry of its file in each format, and the path of the offsets of that.
        is_held: whether it waits for shards that it replaces.
        folder: with what the names of its objects begin.
        entry: name of the object that makes it count, written last; "" where `TaskClaims` does that.
        made: local folder for what is made from the shard, once it is gone from the disk.
    """

    store: Folder
    run: str
    shard: str
    files: tuple[tuple[pathlib.Path, pathlib.Path, ShardInfo], ...]
    is_held: bool
    folder: str
    entry: str
    made: pathlib.Path


@frozen()
class Uploaded:
    """A shard that is whole in the store.

    Attributes:
        shard: name of the shard.
        objects: what the store says of each of its files, by name.
    """

    shard: str
    objects: dict[str, StoredObject]


@frozen()
class StoredShard:
    """A shard of a store as notes there describe it.

    Attributes:
        files: its entry in each format.
        folder: with what the names of its objects begin: "" where they have those that readers look for.
        objects: what the store says of each of its files, by name in `folder`.
    """

    files: ShardFiles
    folder: str
    objects: Mapping[str, StoredObject]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "files": [info.to_json() for info in self.files],
            "folder": self.folder,
            "objects": _rendered(self.objects),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredShard:
        """Return what `to_json` was called on.

        Raises:
            ValueError, TypeError, LookupError, AttributeError, CorruptDataError: it is something else.
        """
        return cls(
            tuple(ShardInfo.from_json(info) for info in value["files"]),
            str(value["folder"]),
            {str(name): StoredObject(*found) for name, found in value["objects"].items()},
        )


def upload(task: UploadTask) -> Uploaded:
    """Upload the files of a finished shard, its entry last; what the store has whole already is not sent again.

    Raises:
        OutputError: the store refuses it.
        OutputLockedError: another run has begun to write there.
    """
    store = task.store
    objects: dict[str, StoredObject] = {}

    def send(path: pathlib.Path, name: str, checksum: str) -> None:
        objects[name] = _sent(store, path, f"{task.folder}{name}", checksum, lambda: _check_mark(store, task.run))

    for path, index, info in task.files:
        if info.file.partition(".")[2] == _TAR:
            task.made.mkdir(exist_ok=True)
            made = task.made / f"{info.file}.idx"
            with commit(made) as file:
                file.write(tar_index(path))
            send(made, made.name, digest_file(made))
        send(index, info.index_file, digest_file(index))
        send(path, info.file, info.checksum)
    if task.entry:
        stored = StoredShard(tuple(info for _, _, info in task.files), task.folder, objects)
        _check_mark(store, task.run)
        store.write(task.entry, render_json(stored.to_json()))
    return Uploaded(task.shard, objects)


def _sent(
    store: Folder,
    path: pathlib.Path,
    name: str,
    checksum: str,
    check: Callable[[], object],
    replaces: str | None = None,
) -> StoredObject:
    """Write a file to a store in the place of what is there now, and of nothing that comes in between.

    Args:
        store: the store.
        path: path of the file, which nobody changes meanwhile.
        name: name that it gets.
        checksum: its checksum.
        check: raises where nothing may be written; called once it is known what is there.
        replaces: version of the only file that it may replace, "" for none; None for whatever is there.

    Raises:
        OutputError: the store refuses it, or has something else there than what was sent, or than may be replaced.
    """
    before = store.stat(name)
    check()
    if replaces is not None and replaces != ("" if before is None else before.version):
        raise _other_there(store, name, path, checksum)
    try:
        version = store.write_file(name, path, "create" if before is None else ReplaceIf(before.version))
    except UnsupportedError:  # the store keeps no conditions
        version = store.write_file(name, path)
    except (ExistsError, ChangedError):
        # Somebody was faster: a try of ours whose answer was lost, or a worker that was taken for dead.
        if not _holds(store, name, path):
            raise _other_there(store, name, path, checksum) from None
        found = store.stat(name)
        version = "" if found is None else found.version
    return StoredObject(path.stat().st_size, version, checksum)


def _other_there(store: Folder, name: str, path: pathlib.Path, checksum: str) -> OutputError:
    return OutputError(
        f"{store.place(name)} is not what this run has seen or sent; {count_of(path.stat().st_size, 'byte')} with "
        f"the checksum {checksum} belong there: something else writes there: end that, and run again"
    )


def _holds(store: Folder, name: str, path: pathlib.Path) -> bool:
    """Return whether a store has the content of a file under a name."""
    blocks = store.blocks(name, path.stat().st_size)
    with open(path, "rb") as file, contextlib.suppress(AbsentError), contextlib.closing(blocks):
        return all(block == file.read(len(block)) for block in blocks) and not file.read(1)
    return False


def _found(store: Folder, info: ShardInfo) -> StoredObject | None:
    """Return the file of a shard as a store has it; None where its size or one of its ends is not as it was made."""
    with contextlib.suppress(AbsentError):
        there = store.stat(info.file)
        if there is not None and there.num_bytes == info.num_bytes:
            head = store.read_range(info.file, 0, info.head.num_bytes)
            tail = store.read_range(info.file, info.num_bytes - info.tail.num_bytes, info.num_bytes)
            if not info.differences(there.num_bytes, head, tail):
                return StoredObject(there.num_bytes, there.version, info.checksum)
    return None


def _check_mark(store: Folder, run: str) -> None:
    found = json.loads(store.read_if_there(_RUN, _MOST_BYTES) or b"{}")
    if found.get("run") != run:
        raise OutputLockedError(
            f"{store} is being written by another run, of process {found.get('pid')} on {found.get('host')}: two "
            "have been at work on the output, and this one stops; once no other is, run again to resume"
        )


# ---------------------------------------------------------------- in the driver


@contextlib.contextmanager
def opened_output(job: Job, *, is_shared: bool = False) -> Iterator[RemoteOutput | None]:
    """Yield the output of a job in its store, brought together with the scratch folder; None for a local output.

    Args:
        job: the job; its output is the scratch folder.
        is_shared: whether other tasks write there, too: then `share` marks it.
    """
    if job.store is None:
        yield None
        return
    remote = RemoteOutput(job.store, job.output, job.how.logger, is_shared=is_shared)
    remote.begin()
    try:
        yield remote
    except OutputError:  # the store is out of reach, or another run's
        raise
    except BaseException:
        remote.end()
        raise
    remote.end()


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
        # As a task begins, which does not mark the store.
        remote = RemoteOutput(job.store, copied.output, job.how.logger, is_shared=True)
        remote.begin()
        yield copied, remote


class RemoteOutput:
    """An output in a store, and its scratch folder; only while the lock of the folder is held.

    Args:
        store: where the shards go.
        folder: the scratch folder.
        logger: receives a warning where cleaning up fails.
        is_shared: whether other tasks write there, too.
    """

    def __init__(
        self,
        store: Folder,
        folder: pathlib.Path,
        logger: logging.Logger,
        *,
        is_shared: bool = False,
    ) -> None:
        self._store = store
        self._folder = folder
        self._work = folder / WORK
        self._logger = logger
        self._run = uuid.uuid4().hex
        self._is_shared = is_shared
        self._made = ""  # with what the names of the objects of a shard begin that this task makes
        self._manifest: bytes | None = None  # that readers can see
        self._seen = ""  # identity of that; "" for none
        self._before: dict[str, StoredObject] = {}  # the objects of the finished dataset
        self._is_changed = False
        self._earlier: set[str] = set()  # shards of unfinished plans, of which objects may be there that nothing notes

    # ------------------------------------------------------------ what is there

    def begin(self) -> None:
        """Refuse a store that cannot be written, mark it as ours, and bring the scratch folder in line with it."""
        store = self._store
        seen = store.stat(MANIFEST_FILE)  # before its content: if it changes in between, `finish` learns of it
        self._seen = "" if seen is None else seen.version
        self._manifest = self._content(MANIFEST_FILE)
        if not self._is_shared:
            self._mark()
            if self._manifest is None:  # else they wait in a folder, which is listed in the end
                self._earlier = self._named_in(_EARLIER) | self._named_in(_PLAN)
        self._before = _objects(store)
        entries = self._work / "shards"
        here, aside = _content(self._folder / MANIFEST_FILE), _content(entries / MANIFEST_FILE)
        replaced: dict[str, ShardFiles] = {}
        if self._manifest is not None and self._manifest not in (here, aside):
            self._start_over(self._manifest)
        elif (
            self._manifest is aside is None and (before := self._content(_ASIDE)) is not None and here in (None, before)
        ):
            entries.mkdir(exist_ok=True)
            with commit(entries / MANIFEST_FILE) as file:
                file.write(before)
            (self._folder / MANIFEST_FILE).unlink(missing_ok=True)  # here: that of the run before the killed one
            manifest = Manifest.parse(before, store.place(_ASIDE), strict=False)
            self._stand_in_all(manifest)
            replaced = by_shard(manifest.all_files)
        self._compare()
        for shard, files in replaced.items():  # another machine was killed while it replaced some of them
            is_whole = all(is_stand_in(self._folder / info.file) for info in files)
            if is_whole and not (entries / f"{shard}.json").exists():
                write_entry(entries, files)
        if not self._is_shared and not (self._work / LEDGER_FILE).exists():
            self._fetch({f"{WORK}/{LEDGER_FILE}": self._work / LEDGER_FILE})

    def _mark(self) -> None:
        mark = {"run": self._run, "pid": os.getpid(), "host": platform.node()}
        self._store.write(_RUN, render_json(mark))

    def share(self, run: str, folder: str) -> None:
        """Mark the store as that of all tasks of one plan.

        Args:
            run: what stands for them.
            folder: folder for the shards of this task, to which no other writes: one that is late, whose shard may be
                another one where rows fail now and then, replaces nothing.
        """
        self._run = run
        self._made = f"{folder}/"
        with contextlib.suppress(OutputLockedError):
            _check_mark(self._store, run)
            return
        self._mark()

    def _content(self, name: str) -> bytes | None:
        return self._store.read_if_there(name, _MOST_BYTES)

    def _start_over(self, content: bytes) -> None:
        """Make the scratch folder that of the dataset in the store: another machine has finished it."""
        try:
            manifest = Manifest.parse(content, self._store.place(MANIFEST_FILE))
        except CorruptDataError as error:
            place = self._store.place(MANIFEST_FILE)
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
        self._stand_in_all(manifest)
        shards = {name for info in manifest.all_files for name in (info.file, info.index_file)}
        small = {*self._before, *(info.file for info in manifest.index)} - shards
        self._fetch({name: self._folder / name for name in small})
        for info in manifest.index:  # the run writes those again that are others than the manifest means
            path = self._folder / info.file
            if path.is_file() and digest_file(path) != info.checksum:
                path.unlink()
        with commit(self._folder / MANIFEST_FILE) as file:
            file.write(content)

    def _stand_in_all(self, manifest: Manifest) -> None:
        """Note the shards of a manifest as uploaded from here, but for those that lie here."""
        of_shard: dict[str, dict[str, StoredObject]] = {}
        for name, found in self._before.items():
            of_shard.setdefault(name.partition(".")[0], {})[name] = found
        for shard, files in by_shard(manifest.all_files).items():
            if not any((self._folder / info.file).exists() for info in files):
                known = of_shard.get(shard, {})
                if any(info.file not in known or known[info.file].checksum != info.checksum for info in files):
                    # They are of a dataset before this one: a kill came between its manifest and `objects.json`.
                    known = {info.file: there for info in files if (there := _found(self._store, info))}
                if all(info.file in known for info in files):
                    self._stand_in(StoredShard(files, "", known), is_held=False)
        self._fetch(
            {
                f"{info.file}.idx": self._work / MADE / f"{info.file}.idx"
                for info in manifest.all_files
                if info.file.partition(".")[2] == _TAR
            }
        )

    def _fetch(self, names: Mapping[str, pathlib.Path]) -> None:
        def fetch(name: str) -> None:
            path = names[name]
            if not pathlib.PurePosixPath(os.path.normpath(path)).is_relative_to(self._folder):
                raise CorruptDataError(f"{self._store.place(_OBJECTS)} names {name!r}, which is no file of a dataset")
            content = self._content(name)
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with commit(path) as file:
                    file.write(content)

        each(fetch, names)

    def _stand_in(self, stored: StoredShard, *, is_held: bool) -> None:
        """Note a shard that is in the store as one that was uploaded from here."""
        for info in stored.files:
            leave_stand_in(self._place(info.file, is_held=is_held), info.num_bytes)
            leave_stand_in(self._place(info.index_file, is_held=is_held), 0)
        self._remember(stored.files[0].name, stored.folder, stored.objects, is_held=is_held)

    def _place(self, name: str, *, is_held: bool) -> pathlib.Path:
        return growing_path(self._work / "shards", name) if is_held else self._folder / name

    def _record(self, shard: str, *, is_held: bool) -> pathlib.Path:
        return self._work / _UPLOADED / (HELD if is_held else "") / f"{shard}.json"

    def _remember(self, shard: str, folder: str, objects: Mapping[str, StoredObject], *, is_held: bool) -> None:
        path = self._record(shard, is_held=is_held)
        path.parent.mkdir(parents=True, exist_ok=True)
        commit_json(path, {"folder": folder, "objects": _rendered(objects)})

    def _known(self, shard: str, *, is_held: bool = False) -> StoredShard:
        """Return what the scratch folder notes of an uploaded shard, which is all but its files."""
        path = self._record(shard, is_held=is_held)
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
            return StoredShard.from_json({"files": (), **parse_json(_content(path) or b"", str(path))})
        return StoredShard((), "", {})

    def _compare(self) -> None:
        """Remove each stand-in whose shard the store does not have whole."""
        entries = self._work / "shards"
        settling = set()  # shards that have their names here, and perhaps not yet in the store
        for path in (self._work / _UPLOADED / HELD).glob("*.json"):
            if not (entries / HELD / path.name).exists():
                settling.add(path.stem)
                if not self._is_shared:  # else who writes the manifest names them
                    self._settle_held(path.stem, read_entry(entries / path.name) or ())
        folders = [folder for folder in (self._folder, entries) if folder.is_dir()]
        paths = [path for folder in folders for path in folder.iterdir() if is_stand_in(path) and path.stat().st_size]

        def check(path: pathlib.Path) -> None:
            name = path.name.removesuffix(".growing")
            is_held = path.name != name
            shard = name.partition(".")[0]
            if self._is_shared and not is_held and shard in settling:
                return
            known = self._known(shard, is_held=is_held)
            folder, objects = known.folder, known.objects
            beside = [one for one in objects if one.startswith(f"{name}.") or one == f"{shard}.idx"]
            wanted = [name, *beside]
            if name not in objects or not all(self._is_whole(f"{folder}{one}", objects[one]) for one in wanted):
                path.unlink()

        each(check, paths)

    def _settle_held(self, shard: str, files: ShardFiles) -> None:
        """Name a shard in the store that has its names here, or forget one that is no longer wanted, or not noted yet.

        Its objects stay: they may be the only ones, and what no manifest names in the end is deleted then.
        """
        held = self._known(shard, is_held=True).objects
        if files and all(info.file in held and held[info.file].checksum == info.checksum for info in files):
            self._name(shard, self._copied(self._known(shard, is_held=True)))  # the run was killed in between
        else:
            self._record(shard, is_held=True).unlink()

    def _is_whole(self, name: str, wanted: StoredObject) -> bool:
        return self._store.stat(name) == Stat(wanted.num_bytes, wanted.identity)

    def adopt_made(self, plan: Plan, made: Mapping[str, StoredShard], *, are_held: bool) -> None:
        """Take over the shards of a plan that tasks have made; nothing else that these have uploaded counts.

        Args:
            plan: the plan.
            made: what counts, by the name of the shard.
            are_held: whether it waits for shards that it replaces.
        """
        if made:
            each(self._forget_made, [shard.name for shard in plan.shards])
        each(
            lambda shard: self._adopt_made(made[shard.name], shard.fingerprint, is_held=are_held),
            [shard for shard in plan.shards if shard.name in made],
        )

    def note_made(self, plan: Plan, made: Mapping[str, StoredShard]) -> None:
        """Note the shards of a plan that tasks have made, and leave them where they are."""

        def note(shard: ShardSpec) -> None:
            if self._has_whole(made[shard.name], shard.fingerprint):
                self._enter(made[shard.name], is_held=True)

        each(note, [shard for shard in plan.shards if shard.name in made])

    def adopt(self, plan: Plan) -> None:
        """Take over the shards of a plan that are whole in the store, and that the scratch folder does not know of."""
        entries = self._work / "shards"
        infos = [
            info for folder in (entries, entries / HELD) for files in read_entries(folder).values() for info in files
        ]
        with contextlib.suppress(CorruptDataError):
            if (manifest := _content(path := self._folder / MANIFEST_FILE)) is not None:
                infos += Manifest.parse(manifest, str(path), strict=False).all_files
        known = {(info.name, info.fingerprint) for info in infos}
        each(self._adopt_named, [shard for shard in plan.shards if (shard.name, shard.fingerprint) not in known])

    def adopt_one(self, shard: ShardSpec) -> None:
        """Take over one shard as `adopt` does, whatever the manifest lists."""
        entries = self._work / "shards"
        if not any((folder / f"{shard.name}.json").exists() for folder in (entries, entries / HELD)):
            self._adopt_named(shard)

    def _adopt_named(self, shard: ShardSpec) -> None:
        for is_held, folder in ((False, _ENTRIES), (True, _HELD)):
            stored = self._noted(f"{folder}/{shard.name}.json")
            if stored is not None and self._has_whole(stored, shard.fingerprint):
                self._enter(stored, is_held=is_held)
                return

    def _noted(self, name: str) -> StoredShard | None:
        """Return the shard that a note in the store describes; None where there is none, or it is damaged."""
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, CorruptDataError):
            return StoredShard.from_json(parse_json(self._content(name) or b"", name))
        return None

    def _has_whole(self, stored: StoredShard, fingerprint: str) -> bool:
        """Return whether the store has what a note says, and that is of this fingerprint."""
        return all(info.fingerprint == fingerprint for info in stored.files) and all(
            self._is_whole(f"{stored.folder}{name}", found) for name, found in stored.objects.items()
        )

    def _enter(self, stored: StoredShard, *, is_held: bool) -> None:
        """Note a shard of the store as a finished one."""
        tars = [name for name in stored.objects if name.endswith(f".{_TAR}.idx")]
        self._fetch({f"{stored.folder}{name}": self._work / MADE / name for name in tars})
        entries = self._work / "shards" / (HELD if is_held else "")
        entries.mkdir(parents=True, exist_ok=True)
        self._stand_in(stored, is_held=is_held)
        write_entry(entries, stored.files)

    def _adopt_made(self, made: StoredShard, fingerprint: str, *, is_held: bool) -> None:
        """Take over a shard from the folder of a task; one that a killed run has moved on is found by its entry."""
        if made.folder.startswith(_SLICES) and self._has_whole(made, fingerprint):
            shard = made.files[0].name
            stored = made
            if not is_held:
                stored = dataclasses.replace(made, folder="", objects=self._copied(made))
                if stored.objects.keys() != made.objects.keys():
                    return  # they are gone since: the run makes it again
            self._store.write(f"{_HELD if is_held else _ENTRIES}/{shard}.json", render_json(stored.to_json()))
            self._enter(stored, is_held=is_held)
            if not is_held:
                each(self._store.delete, [f"{made.folder}{name}" for name in made.objects])

    def _forget_made(self, shard: str) -> None:
        """Forget a shard that this task has uploaded to its folder: another task may have been the first."""
        entries = self._work / "shards"
        for is_held, folder in ((False, entries), (True, entries / HELD)):
            stored = self._known(shard, is_held=is_held)
            if stored.folder.startswith(_SLICES):
                for name in stored.objects:
                    self._place(name, is_held=is_held).unlink(missing_ok=True)
                (folder / f"{shard}.json").unlink(missing_ok=True)
                self._record(shard, is_held=is_held).unlink()

    def _named_in(self, name: str) -> set[str]:
        with contextlib.suppress(ValueError, TypeError, LookupError):
            return {str(shard["name"]) for shard in parse_json(self._content(name) or b"[]", name)}
        return set()

    def show_plan(self, plan: Plan) -> None:
        """Write down what this run makes, for whoever asks how far it is."""
        if earlier := sorted(self._earlier - {shard.name for shard in plan.shards}):
            self._store.write(_EARLIER, render_json([{"name": name} for name in earlier]))
        _check_mark(self._store, self._run)
        self._store.write(_PLAN, render_snapshot(plan))

    # ------------------------------------------------------------ shards

    def task(self, shard: str, files: ShardFiles, *, is_held: bool) -> UploadTask | None:
        """Return what uploads a finished shard; None where the store has it."""
        placed = tuple(
            (self._place(info.file, is_held=is_held), self._place(info.index_file, is_held=is_held), info)
            for info in files
        )
        if all(is_stand_in(path) for path, _, _ in placed):
            return None
        folder = self._made or (f"{_HELD}/" if is_held else "")
        entry = "" if self._made else f"{_HELD if is_held else _ENTRIES}/{shard}.json"
        return UploadTask(self._store, self._run, shard, placed, is_held, folder, entry, self._work / MADE)

    def stored(self, files: ShardFiles, *, is_held: bool) -> StoredShard:
        """Return where an uploaded shard is."""
        return dataclasses.replace(self._known(files[0].name, is_held=is_held), files=files)

    def has(self, files: ShardFiles) -> bool:
        """Return whether a shard, with its names or waiting, has been uploaded."""
        return any(all(is_stand_in(self._place(info.file, is_held=held)) for info in files) for held in (False, True))

    def settle(self, task: UploadTask, uploaded: Uploaded) -> None:
        """Free the files of an uploaded shard."""
        self._is_changed = True
        self._remember(task.shard, task.folder, uploaded.objects, is_held=task.is_held)
        for path, _, info in task.files:
            leave_stand_in(path, info.num_bytes)

    def withdraw(self, names: Iterable[str] = ()) -> None:
        """Remove the manifest, of which a copy stays, and files that describe it: a shard that it lists changes."""
        if self._manifest is not None:
            _check_mark(self._store, self._run)
            self._store.write(_ASIDE, self._manifest)
            _check_mark(self._store, self._run)
            self._store.delete(MANIFEST_FILE)
            self._manifest, self._seen = None, ""
        each(self._store.delete, names)

    def replace(self, gone: Iterable[str], held: Iterable[ShardFiles]) -> None:
        """Delete the shards that go, and then give those that wait their names.

        Raises:
            OutputLockedError: another run has begun since: these names may be those of its shards.
            OutputError: a shard that waited is gone from the store.
        """

        def delete(name: str) -> None:
            _check_mark(self._store, self._run)
            # Who was stopped before this, and goes on after another run, does not delete what that has put there.
            before, found = self._before.get(name), self._store.stat(name)
            if found is not None and (before is None or before.identity == found.version):
                self._store.delete(name)

        def give_name(shard: str) -> None:
            _check_mark(self._store, self._run)
            held = self._known(shard, is_held=True)
            known = self._copied(held)
            if missing := sorted(held.objects.keys() - known.keys()):
                raise OutputError(
                    f"{self._store.place(f'{held.folder}{missing[0]}')} was uploaded, and is gone or another one now; "
                    "something else deletes or writes there: end that, and run again"
                )
            self._name(shard, known)

        each(delete, list(gone))
        each(give_name, [files[0].name for files in held])

    def _name(self, shard: str, known: Mapping[str, StoredObject]) -> None:
        """Note that the objects of a shard that waited have their names, and delete those that had others."""
        held = self._known(shard, is_held=True)
        self._remember(shard, "", known, is_held=False)
        if (noted := self._noted(f"{_HELD}/{shard}.json")) is not None:
            # By which another machine finds it, if this one is killed before it has written the manifest.
            noted = dataclasses.replace(noted, folder="", objects=known)
            self._store.write(f"{_ENTRIES}/{shard}.json", render_json(noted.to_json()))
        each(self._store.delete, [f"{_HELD}/{shard}.json", *(f"{held.folder}{name}" for name in held.objects)])
        self._record(shard, is_held=True).unlink(missing_ok=True)

    def _copied(self, stored: StoredShard) -> dict[str, StoredObject]:
        """Copy objects to where readers look for them, as far as they are whole; return those that are there then."""
        known = {}
        for name, wanted in stored.objects.items():
            if self._is_whole(f"{stored.folder}{name}", wanted):
                self._store.copy(f"{stored.folder}{name}", name)
                if (found := self._store.stat(name)) is not None and found.num_bytes == wanted.num_bytes:
                    known[name] = dataclasses.replace(wanted, identity=found.version)
        return known

    # ------------------------------------------------------------ the end

    def fetch_edited(self, names: Collection[str], shards: Collection[str]) -> None:
        """Bring here what somebody else has written in the store under the names of files for other readers.

        Args:
            names: names of these files.
            shards: names of the shards; indexes of one are nobody's to edit.
        """
        record = f"{WORK}/sidecars.json"  # without it, what a killed run elsewhere wrote would pass for the user's
        if not (self._folder / record).exists():
            self._fetch({record: self._folder / record})

        def fetch(name: str) -> None:
            there, known = self._store.stat(name), self._before.get(name)
            if there is None:
                (self._folder / name).unlink(missing_ok=True)
            elif known is None or there.version != known.identity:
                self._fetch({name: self._folder / name})

        each(fetch, [name for name in names if name.partition(".")[0] not in shards])

    def finish(self, manifest: Manifest) -> None:
        """Upload the small files, and the manifest last.

        Raises:
            OutputLockedError: another run has begun since.
            OutputError: another manifest is there than this run has seen.
        """
        content = read_regular(self._folder / MANIFEST_FILE, max_bytes=_MOST_BYTES)
        shards = [files[0].name for files in by_shard(manifest.all_files).values()]
        objects = {name: found for shard in shards for name, found in self._known(shard).objects.items()}
        small = {name: path for name, path in self._small() if name not in objects}
        for name, path in small.items():
            checksum = digest_file(path)
            before = self._before.get(name)
            is_known = before is not None and (before.num_bytes, before.checksum) == (path.stat().st_size, checksum)
            if before is not None and is_known and self._is_whole(name, before):
                objects[name] = before
                continue
            objects[name] = self._sent(path, name, checksum)
        left = self._left(shards, objects)
        is_same = not self._is_changed and objects == self._before and content == self._manifest
        if is_same and not left:
            return
        _check_mark(self._store, self._run)  # after the listing: what is in it is of no run that began since
        if content != self._manifest:
            path = self._folder / MANIFEST_FILE
            self._sent(path, MANIFEST_FILE, digest_file(path), replaces=self._seen)
            _check_mark(self._store, self._run)
        stale = [name for name in self._before if name not in objects]
        each(self._store.delete, [*stale, *(name for names in left.values() for name in names)])
        # After the objects that they name: what a kill leaves of those is found by them.
        stale = [*{_ASIDE, *(f"{_ENTRIES}/{shard}.json" for shard in shards), *left}]
        each(self._store.delete, stale)
        # After what is stale is gone: a run that finds other objects here than it knows of has that to do again.
        self._store.write(_OBJECTS, render_json(_rendered(objects)))

    def _sent(self, path: pathlib.Path, name: str, checksum: str, *, replaces: str | None = None) -> StoredObject:
        """Upload a file as `_sent` does, unless another run has begun since."""

        def check() -> None:
            _check_mark(self._store, self._run)

        try:
            return _sent(self._store, path, name, checksum, check, replaces)
        except OutputError:
            check()  # which says that it was another run
            raise

    def _left(self, shards: Collection[str], objects: Collection[str]) -> dict[str, list[str]]:
        """Return what other runs have left of shards, killed or late, as far as the store lists it.

        Args:
            shards: names of the shards of the dataset.
            objects: names of the objects of the dataset.

        Returns:
            By its name, each with the objects that it names and that no manifest does.
        """
        left: dict[str, list[str]] = {}
        with contextlib.suppress(OutputError):
            for folder in (_ENTRIES, _HELD):
                left |= {f"{folder}/{name}": [] for name in self._store.list(folder, deep=True) or ()}
            left |= {name: [] for name in (_PLAN, _EARLIER) if self._store.stat(name) is not None}
            if earlier := self._earlier.difference(shards):
                left |= {name: [] for name in self._store.list() or () if name.partition(".")[0] in earlier}

            def follow(name: str) -> None:
                shard = pathlib.PurePosixPath(name).stem
                stored = self._noted(name)
                if stored is not None and not stored.folder:
                    named = [one for one in stored.objects if one.partition(".")[0] == shard]
                    left[name] = [one for one in named if one not in objects]

            others = [name for name in left if name.endswith(".json") and name.startswith(f"{_ENTRIES}/")]
            each(follow, [name for name in others if pathlib.PurePosixPath(name).stem not in shards])
        return left

    def _small(self) -> Iterator[tuple[str, pathlib.Path]]:
        """Yield name and path of each small file that belongs into the store, but for ledger and manifest."""
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if name.startswith(f"{WORK}/") and name not in {f"{WORK}/{small}" for small in _SMALL[1:]}:
                continue
            if path.is_file() and not path.is_symlink() and name != MANIFEST_FILE and not is_stand_in(path):
                yield name, path

    def end(self) -> None:
        """Upload the ledger and what is in quarantine; nothing where another run has begun since."""
        kept = [] if self._is_shared else [self._work / LEDGER_FILE]
        kept += [path for path in sorted((self._work / "quarantine").rglob("*")) if path.is_file()]
        try:
            if not self._is_shared:
                _check_mark(self._store, self._run)
            for path in kept:
                if path.is_file():
                    self._store.write_file(path.relative_to(self._folder).as_posix(), path)
        except OutputLockedError:
            return
        except OutputError as error:
            self._logger.warning("%s; the next run uploads what is missing", error)


def forget_objects(store: Folder, names: Collection[str]) -> None:
    """Have the next run upload files again that a finished dataset has, unless they are there as they should be."""
    objects = _objects(store)
    if objects.keys() & names:
        store.write(_OBJECTS, render_json(_rendered({name: objects[name] for name in objects.keys() - names})))


def note_uploaded(store: Folder, shards: Iterable[ShardFiles]) -> None:
    """Write the entries of shards that are in a store, by which the next run takes over those that are there whole."""
    known = _objects(store)
    for files in shards:
        objects = {name: found for name, found in known.items() if name.partition(".")[0] == files[0].name}
        objects |= {info.file: found for info in files if (found := _found(store, info))}
        store.write(f"{_ENTRIES}/{files[0].name}.json", render_json(StoredShard(files, "", objects).to_json()))


def _rendered(objects: Mapping[str, StoredObject]) -> dict[str, Any]:
    return {name: dataclasses.astuple(found) for name, found in objects.items()}


def _objects(store: Folder) -> dict[str, StoredObject]:
    content = store.read_if_there(_OBJECTS, _MOST_BYTES)
    if content is None:
        return {}
    try:
        return {name: StoredObject(*found) for name, found in parse_json(content, store.place(_OBJECTS)).items()}
    except (ValueError, TypeError, AttributeError):
        return {}  # it only saves requests


def _content(path: pathlib.Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError):
        return read_regular(path, max_bytes=_MOST_BYTES)
    return None
