"""Runs that cannot end well say what to do, and touch nothing outside of their output."""

import concurrent.futures
import pathlib
import pickle

import pytest
from small_rows import Rows, damage, job

import datamat
from datamat import ErrorPolicy, Index, WorkerOptions
from datamat.errors import (
    IncompleteRunError,
    OutputError,
    SourceError,
)
from datamat.events import RunEnded
from datamat.testing import InlineExecutor

ONE = WorkerOptions(num_workers=1, start_method="fork")


def test_function_that_always_fails(tmp_path):
    """No features can be inferred from nothing; the last failure is named."""

    def fail(item):
        raise ValueError(item)

    with pytest.raises(IncompleteRunError, match="pass features="):
        datamat.materialize(
            fail,
            range(1100),
            tmp_path / "out",
            errors=ErrorPolicy("skip"),
            executor=InlineExecutor(),
            progress=False,
        )


class Damaging:
    """Something that damages a shard as it is written: a broken disk."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, event):
        """Flip a bit."""
        if isinstance(event, RunEnded):
            damage(self.folder)


def test_directory_that_no_repair_mends(tmp_path):
    """Memory or disk are at fault."""
    hooked = job(tmp_path / "out", hooks=[Damaging(tmp_path / "out")])
    hooked.run(progress=False)

    with pytest.raises(OutputError, match="test memory, disk and network"):
        hooked.repair(progress=False)


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_bad_samples_that_cannot_be_kept(tmp_path, obstacle):
    """A file is where the folder of one should be, or a link leads elsewhere."""

    class Failing(Rows):
        def read(self, row):
            place = tmp_path / "out/.datamat/quarantine"
            if obstacle == "link" and not place.is_symlink():
                place.symlink_to(tmp_path / "elsewhere")
            raise ValueError(row.key)

    (tmp_path / "elsewhere").mkdir()
    if obstacle == "file":
        (tmp_path / "out/.datamat/quarantine/train").mkdir(parents=True)
        for number in range(4):
            (tmp_path / f"out/.datamat/quarantine/train/r{number}").touch()

    with pytest.raises(OutputError, match="quarantine"):
        job(tmp_path / "out", Failing(), errors=ErrorPolicy("quarantine")).run(progress=False)

    assert not list((tmp_path / "elsewhere").iterdir())


class Elsewhere(concurrent.futures.ThreadPoolExecutor):
    """An engine whose workers do not have the source."""

    def submit(self, fn, /, *args, **kwargs):
        """Remove the source before a worker looks; it gets a copy of the function, as elsewhere."""
        pathlib.Path("source").unlink(missing_ok=True)
        return super().submit(pickle.loads(pickle.dumps(fn)), *args, **kwargs)


def test_worker_that_does_not_see_the_source(tmp_path, monkeypatch):
    """It is mounted at the caller's only."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("source").touch()

    with Elsewhere(1) as engine, pytest.raises(SourceError, match="mount it"):
        datamat.Materializer(Rows(), "source", tmp_path / "out").run(executor=engine, progress=False)


def test_part_that_cannot_be_written(tmp_path):
    """The run goes on from there once that is mended."""

    class Blocking(Rows):
        def read(self, row):
            for folder in (tmp_path / "out/.datamat/parts").iterdir():
                if folder.is_dir():
                    folder.rmdir()
                    folder.touch()
            return {"x": 1}

    with pytest.raises(OutputError, match="run again"):
        job(tmp_path / "out", Blocking(), format="parquet", executor=None, workers=ONE).run(progress=False)


def test_list_with_a_name_that_no_disk_has(tmp_path):
    """It holds a null byte."""
    with pytest.raises(SourceError, match="list file"):
        list(Index.from_lists(tmp_path, {"train": "a\0b"}, fields=["image"]))
