"""The order of steps that keeps an output honest, observed from inside the run."""

import os
import pathlib

from job import Job
from naming import observe_names

from datamat.run.parts import PartFile
from datamat.testing import InlineExecutor


class Disk:
    """Observes what is flushed and what is named, through `os.fsync`, `os.replace` and `os.rename`.

    Args: output: where files with final names are. monkeypatch: restores the functions.
    """

    def __init__(self, output, monkeypatch):
        self.named = []
        self._output = output
        self._flushed = {}  # size of each file when it was flushed, by inode
        self._unflushed = set()  # folders with a name that is not on the disk yet
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._on_fsync)
        observe_names(monkeypatch, self._on_name)

    def _on_fsync(self, descriptor):
        self._fsync(descriptor)
        found = os.fstat(descriptor)
        self._flushed[found.st_ino] = found.st_size
        self._unflushed.discard(found.st_ino)

    def _on_name(self, source, target):
        if ".datamat" not in target.relative_to(self._output).parts:
            found = os.stat(source)
            self.named.append(target.name)
            assert self._flushed.get(found.st_ino) == found.st_size, f"{target} is named and not flushed"
            if target.name == "manifest.json":
                assert not self._unflushed, (
                    "the manifest is named before the names of the files that it lists are flushed"
                )
            self._unflushed.add(target.parent.stat().st_ino)

    @property
    def is_flushed(self):
        """Whether all names are on the disk."""
        return not self._unflushed


def test_nothing_has_a_final_name_before_it_is_flushed(small_source, whole, tmp_path, monkeypatch):
    """Each file's bytes are flushed before its name, and the manifest comes after all other names."""
    job = Job(str(small_source), str(tmp_path / "out"))
    disk = Disk(tmp_path / "out", monkeypatch)

    job.run(InlineExecutor())  # in this process, whose calls are observed

    assert sorted(disk.named) == sorted(pathlib.PurePath(name).name for name in whole)
    assert disk.named[-1] == "manifest.json"
    assert disk.is_flushed


def test_part_begun_by_a_killed_process_starts_over(tmp_path):
    """Nothing that the killed process wrote of it remains."""
    path = tmp_path / "00000.tfrecord.part"
    killed = PartFile(path)
    killed.__enter__().write(b"half of ")

    with PartFile(path) as file:
        file.write(b"all of it")
        file.finish()

    assert path.read_bytes() == b"all of it"
    killed.__exit__(None)
