"""The output of a run, as the run uses it: its folder, or a store; see `upload`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
from typing import TYPE_CHECKING, Any

from datamat.directory.files import WORK, fsync_folder
from datamat.directory.manifest import MANIFEST_FILE, MOST_MANIFEST_BYTES, ShardInfo, run_folder
from datamat.directory.publication import finish_publication, publish_manifest, version_there
from datamat.directory.sidecars.exporting import built_in_files, withdraw_sidecars, write_sidecars
from datamat.folders import LocalFolder
from datamat.run.shards import take_over
from datamat.values import frozen

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from datamat.directory.manifest import Manifest, ShardFiles
    from datamat.directory.sidecars import Sidecar
    from datamat.folders import Folder
    from datamat.plan.job import Job
    from datamat.plan.plan import Plan


def slices_folder(work: pathlib.Path) -> pathlib.Path:
    """Return the shared folder of tasks, in the `.datamat` of an output."""
    return work / "slices"


STAGES = {"append": f"{WORK}/append", "edit": f"{WORK}/edit"}
"""Folders of an output in which sets of their own wait: of rows that are appended, and of shards that are edited."""


@frozen()
class StoredObject:
    """The state of a stored file when it was written.

    Attributes:
        version: its version in the store.
        checksum: checksum of its content, as returned by `digest_file`.
    """

    version: str
    checksum: str


@frozen()
class StoredShard:
    """A finished shard and its files in the output.

    Attributes:
        files: its entry in each format.
        folder: prefix of the names of its objects; "" for the names that readers use.
        objects: version and checksum of each file in a store, by name in `folder`; empty for a shard on disk.
    """

    files: ShardFiles
    folder: str = ""
    objects: Mapping[str, StoredObject] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the shard."""
        return self.files[0].name

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        return {
            "files": [info.to_json() for info in self.files],
            "folder": self.folder,
            "objects": {name: dataclasses.astuple(found) for name, found in self.objects.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredShard:
        """Return the shard that `to_json` was called on.

        Raises:
            ValueError, TypeError, LookupError, AttributeError, CorruptDataError: the value is not valid.
        """
        return cls(
            tuple(ShardInfo.from_json(info) for info in value["files"]),
            str(value["folder"]),
            {str(name): StoredObject(*map(str, found)) for name, found in value["objects"].items()},
        )


@frozen()
class UploadTask:
    """A finished shard to upload; travels to a worker.

    Attributes:
        store: its destination.
        shard: name of the shard.
        files: path and entry of its file in each format, and the path of its offsets.
        folder: prefix of the names of its objects; "" for the names that readers use.
        entry: name of the object that makes it count, written last.
        made: local folder for files derived from the shard, which is then no longer on disk.
    """

    store: Folder
    shard: str
    files: tuple[tuple[pathlib.Path, pathlib.Path, ShardInfo], ...]
    folder: str
    entry: str
    made: pathlib.Path


class LocalOutput:
    """An output in a folder, whose lock must be held. The subclass for stores does more at each step of a run.

    Attributes:
        holds_shards: whether finished shards are files in the folder, which can be read and renamed there.
        is_shared: whether other tasks write there, too.
        has_others: whether unpublished runs of other plans have begun there.
    """

    holds_shards = True
    is_shared = False
    has_others = False

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._here = LocalFolder(folder)
        self._seen_here = ""  # version of the manifest in the folder

    def begin(self) -> None:
        """Finish an interrupted publication, and record the present state, from which the run is planned."""
        finish_publication(self._here)
        self._seen_here = version_there(self._here)

    def lay_out(self) -> None:
        """Have the folder show what the output holds now, without writing to the output."""

    def of_task(self, job: Job, task: str) -> tuple[Job, Job]:
        """Return the job of the whole output, for one of several tasks, and that of the task's own folder."""
        output = slices_folder(self._folder / WORK) / task
        return job, dataclasses.replace(job, folder=LocalFolder(output), output=output)

    def remove_scratch_of_tasks(self) -> None:
        """Remove what tasks of a complete output have left on this machine outside of it."""

    # ------------------------------------------------------------ repair

    @contextlib.contextmanager
    def at_hand(self, files: ShardFiles) -> Iterator[pathlib.Path]:
        """Yield a folder that holds the files of a shard, damaged or not, as far as they exist."""
        yield self._folder

    def in_the_way(self, names: Iterable[str]) -> set[str]:
        """Return those names of files that something else has: a folder, a link, a device."""
        from datamat.directory.verify import unreadable

        return {name for name in names if os.path.lexists(self._folder / name) and unreadable(self._folder, name)}

    def set_aside(self, name: str) -> None:
        """Move a file to quarantine if it exists; of a link, leave only a note of where it led."""
        path = self._folder / name
        if not os.path.lexists(path):
            return
        target = next(aside for one in aside_names(name) if not os.path.lexists(aside := self._folder / one))
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder, folders, files in os.walk(path):
            for inner in (os.path.join(folder, one) for one in (*folders, *files)):
                _note_link(inner, f"{inner}.link")
        if not _note_link(path, target):
            os.replace(path, target)
        fsync_folder(path.parent)

    # ------------------------------------------------------------ a run

    def adopt(self, plan: Plan, made: Mapping[str, StoredShard] | None = None) -> None:
        """Take over shards of a plan that are complete elsewhere.

        Args:
            plan: the plan.
            made: shards made by tasks, by name, which take precedence; None for those already known.
        """

    def show_plan(self, plan: Plan) -> None:
        """Publish the plan before anything is made, so that other runs see it."""

    def take_over(self, files: ShardFiles, renamed: ShardFiles, below: str = "") -> None:
        """Keep a finished shard under another name until it is published.

        Args:
            files: entries of its files.
            renamed: the same under the other name.
            below: the folder of the files in the output; "" for a published shard.
        """
        take_over(self._folder, files, renamed, below)

    def task(self, shard: str, files: ShardFiles, *, waits: bool) -> UploadTask | None:
        """Return the task that uploads a finished shard; None if nothing is to be done."""
        return None

    def settle(self, task: UploadTask, stored: StoredShard) -> None:
        """Record that the task returned by `task` is done."""

    def stored(self, files: ShardFiles) -> StoredShard:
        """Return the location of a finished shard."""
        return StoredShard(files)

    def has(self, files: ShardFiles) -> bool:
        """Return True if a shard has arrived in the output, under its final names or waiting."""
        return True

    def publish(self, manifest: Manifest, waiting: Collection[str], going: Iterable[str]) -> None:
        """Publish a finished set, as `publish_manifest` does, unless it is published already.

        Raises:
            OutputError: another run has published meanwhile; or a shard is gone.
        """
        there = self._here.read_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES)
        if there is None or manifest.render() != there:
            place = run_folder(self._folder / WORK).relative_to(self._folder)
            moving = {name: f"{place}/{name}" for name in waiting}
            publish_manifest(self._here, dataclasses.replace(manifest, moving=moving), self._seen_here, going)
            for stage in STAGES.values():
                self.remove_stage(stage)

    def remove_stage(self, name: str) -> None:
        """Remove a set that is published, its manifest last: by that it is known to be published."""
        stage = self._here.child(name)
        for file in stage.list(deep=True):
            if file != MANIFEST_FILE:
                stage.delete(file)
        stage.delete(MANIFEST_FILE)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def withdraw_sidecars(self, before: Manifest | None, logger: logging.Logger) -> None:
        """Remove sidecars of published shards, which are about to change or have changed."""
        self.fetch_edited(shards=() if before is None else {info.name for info in before.all_files})
        self.delete(withdraw_sidecars(self._folder, before, logger))

    def write_sidecars(
        self, manifest: Manifest, logger: logging.Logger, sidecars: Sequence[Sidecar], before: Manifest | None
    ) -> None:
        """Write the sidecars of a finished set, and store all small files."""
        files = built_in_files(manifest)
        self.fetch_edited(files, shards={info.name for info in manifest.all_files})
        write_sidecars(self._folder, manifest, files, logger, sidecars=sidecars, trusted=before)
        self.send_small(manifest)

    def fetch_edited(self, names: Collection[str] = (), *, shards: Collection[str]) -> None:
        """Fetch files for other readers that somebody else has edited.

        Args:
            names: names of files for other readers.
            shards: names of the shards; per-shard indexes are never edited by users.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete files that describe changing shards, and no longer exist here."""

    def send_small(self, manifest: Manifest) -> None:
        """Store small files that are not stored yet."""

    def sweep(self) -> None:
        """Remove leftovers of runs once the set is published."""
        work = self._folder / WORK
        for folder in (work / "parts", work / "shards", run_folder(work)):
            shutil.rmtree(folder, ignore_errors=True)

    def give_up(self) -> None:
        """Delete what this run has made, unless the set published by another run contains it."""

    def end(self) -> None:
        """Store the ledger and the quarantine."""


def aside_names(name: str) -> Iterator[str]:
    """Yield names in quarantine for a file that belongs to nothing."""
    aside = f"{WORK}/quarantine/foreign/{name.replace('/', '-')}"
    yield aside
    for number in itertools.count(1):
        yield f"{aside}.{number}"


def _note_link(path: str | os.PathLike[str], note: str | os.PathLike[str]) -> bool:
    """Replace a link, beside which no run would write, by a note; return True if it is one."""
    if not os.path.islink(path):
        return False
    with open(note, "x", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"a link to {os.readlink(path)}\n")
    os.unlink(path)
    return True
