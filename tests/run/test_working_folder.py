"""Relative paths mean what they meant when they were given, whatever the program's working folder is later."""

import pytest
import small_pairs

from datamat import ImportWriter, Materializer, concat, failures, load
from datamat.testing import InlineExecutor

HERE = {"executor": InlineExecutor(), "progress": False}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Make `source` and `out` below the working folder, and give what changes that."""
    (tmp_path / "[work]/sub").mkdir(parents=True)
    small_pairs.make_pairs(tmp_path / "[work]/source", num_train=4, num_val=2)
    monkeypatch.chdir(tmp_path / "[work]")
    Materializer(small_pairs.Pairs(), "source", "out").run(**HERE)
    return lambda: monkeypatch.chdir(tmp_path / "[work]/sub")


USES = {
    "read": lambda loaded, job: loaded[0],
    "batches": lambda loaded, job: list(loaded.to_numpy(2)),
    "view": lambda loaded, job: list(loaded.filter(lambda sample: True)),
    "concat": lambda loaded, job: list(concat([loaded, loaded])),
    "preview": lambda loaded, job: loaded.preview(1),
    "run": lambda loaded, job: job.run(**HERE),
    "plan": lambda loaded, job: job.plan(),
    "status": lambda loaded, job: job.status(),
    "verify": lambda loaded, job: job.verify(sample=1),
    "replay": lambda loaded, job: job.replay("train000"),
    "failures": lambda loaded, job: failures(job.output),
}


@pytest.mark.parametrize("use", USES)
def test_paths_are_those_of_the_folder_in_which_they_were_given(elsewhere, use):
    """Of what was loaded, and of a job: its source as well as its output."""
    loaded, job = load("out"), Materializer(small_pairs.Pairs(), "source", "out")
    elsewhere()

    USES[use](loaded, job)


def test_pattern_is_that_of_the_folder_in_which_it_was_given(elsewhere):
    """Whose own name may hold what means something in patterns."""
    writer = ImportWriter(kind="tfrecord", drop=["key"])
    Materializer(writer, "out/*-train-*.tfrecord", "copy").run(**HERE)
    job = Materializer(writer, "out/*-train-*.tfrecord", "copy")
    elsewhere()

    assert job.run(**HERE).did_nothing
