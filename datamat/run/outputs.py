"""Where the shards of a run go, as the run asks for it: they lie in its folder, or they go to a store; see `upload`."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

from datamat.directory.files import WORK
from datamat.directory.manifest import MANIFEST_FILE, MOST_MANIFEST_BYTES, ShardInfo, run_folder
from datamat.directory.publication import finish_publication, publish_manifest, version_there
from datamat.directory.sidecars.exporting import built_in_files, withdraw_sidecars, write_sidecars
from datamat.folders import LocalFolder
from datamat.run.shards import take_over
from datamat.values import frozen

if TYPE_CHECKING:
    import logging
    import pathlib
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from datamat.directory.manifest import Manifest, ShardFiles
    from datamat.directory.sidecars import Sidecar
    from datamat.folders import Folder
    from datamat.plan.plan import Plan


__all__ = ["STAGE", "LocalOutput", "StoredObject", "StoredShard", "UploadTask"]

STAGE = f"{WORK}/append"
"""Folder of an output in which rows that are appended wait, as a set of their own."""


@frozen()
class StoredObject:
    """A file of a store, as it was when it was written.

    Attributes:
        version: the version that the store gave it.
        checksum: checksum of its content, as `digest_file` returns it.
    """

    version: str
    checksum: str


@frozen()
class StoredShard:
    """A shard as notes describe it.

    Attributes:
        files: its entry in each format.
        folder: with what the names of its objects begin: "" where they have those that readers look for.
        objects: what a store says of each of its files, by name in `folder`; none of a shard on a disk.
    """

    files: ShardFiles
    folder: str = ""
    objects: Mapping[str, StoredObject] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the shard."""
        return self.files[0].name

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "files": [info.to_json() for info in self.files],
            "folder": self.folder,
            "objects": {name: dataclasses.astuple(found) for name, found in self.objects.items()},
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
            {str(name): StoredObject(*map(str, found)) for name, found in value["objects"].items()},
        )


@frozen()
class UploadTask:
    """A finished shard to upload; travels to a worker.

    Attributes:
        store: where it goes.
        shard: name of the shard.
        files: path and entry of its file in each format, and the path of the offsets of that.
        folder: with what the names of its objects begin: "" where they get those that readers look for.
        entry: name of the object that makes it count, written last.
        made: local folder for what is made from the shard, once it is gone from the disk.
    """

    store: Folder
    shard: str
    files: tuple[tuple[pathlib.Path, pathlib.Path, ShardInfo], ...]
    folder: str
    entry: str
    made: pathlib.Path


class LocalOutput:
    """An output in its folder; only while the lock of that is held. A store has more to do at each step of a run.

    Args:
        folder: the folder.

    Attributes:
        holds_shards: whether finished shards are files of the folder, which can be read and renamed there.
        is_shared: whether other tasks write there, too.
        has_others: whether runs of other plans have begun there, which are not published.
    """

    holds_shards = True
    is_shared = False
    has_others = False

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._here = LocalFolder(folder)
        self._seen_here = ""  # version of the manifest in the folder

    def begin(self) -> None:
        """Finish what is half published, and take note of what is there, from which the run is planned."""
        finish_publication(self._here)
        self._seen_here = version_there(self._here)

    def adopt(self, plan: Plan, made: Mapping[str, StoredShard] | None = None) -> None:
        """Take over the shards of a plan that are whole elsewhere.

        Args:
            plan: the plan.
            made: shards that tasks have made, by name: of several of one name, these count; None for those known.
        """

    def show_plan(self, plan: Plan) -> None:
        """Have others see what is made here, before anything is made."""

    def take_over(self, files: ShardFiles, renamed: ShardFiles, below: str = "") -> None:
        """Have a finished shard wait under another name.

        Args:
            files: entries of its files.
            renamed: the same under the other name.
            below: where they are: "" for a shard of the published set, else a folder of the output.
        """
        take_over(self._folder, files, renamed, below)

    def task(self, shard: str, files: ShardFiles, *, waits: bool) -> UploadTask | None:
        """Return what brings a finished shard to where it goes; None if it is there."""
        return None

    def settle(self, task: UploadTask, stored: StoredShard) -> None:
        """Take note of what a task of `task` has done."""

    def stored(self, files: ShardFiles) -> StoredShard:
        """Return where a finished shard is."""
        return StoredShard(files)

    def has(self, files: ShardFiles) -> bool:
        """Return True if a shard, with its names or waiting, is where it goes."""
        return True

    def publish(self, manifest: Manifest, waiting: Collection[str], going: Iterable[str]) -> None:
        """Have readers see a finished set, as `publish_manifest` does, unless they see it already.

        Args:
            manifest: its manifest; the files of its index are in the folder.
            waiting: names of the files that wait until they are published.
            going: names of files of the set before.

        Raises:
            OutputError: another has published meanwhile; or a shard is gone.
        """
        there = self._here.read_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES)
        if there is None or manifest.render() != there:
            place = run_folder(self._folder / WORK).relative_to(self._folder)
            moving = {name: f"{place}/{name}" for name in waiting}
            publish_manifest(self._here, dataclasses.replace(manifest, moving=moving), self._seen_here, going)
            self.remove_stage()

    def remove_stage(self) -> None:
        """Remove what was made to be appended, its manifest last: by that it is known to be published."""
        stage = self._here.child(STAGE)
        for name in stage.list(deep=True):
            if name != MANIFEST_FILE:
                stage.delete(name)
        stage.delete(MANIFEST_FILE)
        shutil.rmtree(self._folder / STAGE, ignore_errors=True)

    def withdraw_sidecars(self, before: Manifest | None, logger: logging.Logger) -> None:
        """Remove sidecars of the shards that are published, which are about to change or have changed."""
        self.fetch_edited(shards=() if before is None else {info.name for info in before.all_files})
        self.delete(withdraw_sidecars(self._folder, before, logger))

    def write_sidecars(
        self, manifest: Manifest, logger: logging.Logger, sidecars: Sequence[Sidecar], before: Manifest | None
    ) -> None:
        """Write the sidecars of a set that is finished, and bring all small files to where they go.

        Args:
            manifest: its manifest.
            logger: hears of files that were edited.
            sidecars: those of the user.
            before: manifest of the set before.
        """
        files = built_in_files(manifest)
        self.fetch_edited(files, shards={info.name for info in manifest.all_files})
        write_sidecars(self._folder, manifest, files, logger, sidecars=sidecars, trusted=before)
        self.send_small(manifest)

    def fetch_edited(self, names: Collection[str] = (), *, shards: Collection[str]) -> None:
        """Bring here what somebody else has written under the names of files for other readers.

        Args:
            names: names of these files, but for those that datamat has written there.
            shards: names of the shards; indexes of one are nobody's to edit.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, which are gone here, that describe shards that change."""

    def send_small(self, manifest: Manifest) -> None:
        """Bring small files to where they go, as far as they are not there."""

    def sweep(self) -> None:
        """Remove what runs have left, once the set is published."""
        work = self._folder / WORK
        for folder in (work / "parts", work / "shards", run_folder(work)):
            shutil.rmtree(folder, ignore_errors=True)

    def give_up(self) -> None:
        """Delete what this run has made, as far as the set of another that is published lacks it."""

    def end(self) -> None:
        """Bring the ledger and what is in quarantine to where they go."""
