"""The samples that a dataset does without: of a run, of an output that is not finished, of what is published."""

import itertools
import shutil

import pytest
import sliced_job
from memory_store import MemoryStore, s3
from prepared import Prepared

import datamat
from datamat import (
    DatasetWriter,
    Features,
    IncompleteRunError,
    IndexRow,
    Manifest,
    OutputError,
    Scalar,
    ShardOptions,
    failures,
    merge,
)
from datamat.run.status import status as read_status
from datamat.testing import InlineExecutor

__all__ = ["s3"]

URL = "s3://bucket/sets/one"


class Numbers(DatasetWriter):
    """Rows with a file each, of two splits; those that `bad` names fail, by their key."""

    name = "numbers"
    features = Features({"x": Scalar("int64")})

    def __init__(self, bad=(), stops=()):
        self.bad, self.stops = dict.fromkeys(bad, "bad"), tuple(stops)

    def index(self, source):
        paths = sorted(source.glob("*.txt"))
        return [IndexRow(path.stem, ("train", "val")[number % 2], {"path": path}) for number, path in enumerate(paths)]

    def read(self, row):
        if row.key in self.stops:
            raise KeyboardInterrupt
        text = row.fields["path"].read_text()
        if row.key in self.bad:
            raise ValueError(f"{text} is {self.bad[row.key]}")
        return {"x": int(text)}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(12):
        (folder / f"k{number:02d}.txt").write_text(str(number))
    return folder


@pytest.fixture(params=["local", "store"])
def output(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "out")
    request.getfixturevalue("s3")
    return URL


@pytest.fixture
def make(source, output, tmp_path):
    """Give a function that runs the job, on a machine if the output is in a store."""

    def make(bad=(), *, stops=(), errors="skip", machine="one", version="1", **options):
        if output == URL:
            options["scratch"] = tmp_path / machine
        job = Prepared(
            Numbers(bad, stops), source, output, version=version, errors=errors, executor=InlineExecutor(),
            **{"shards": ShardOptions(num_shards=2), **options},
        )  # fmt: skip
        return job.run(progress=False)

    return make


def keys(found):
    return sorted(failure.key for failure in found)


@pytest.mark.parametrize("action", ["skip", "quarantine"])
def test_failure_says_which_sample_why_and_where(make, source, output, action):
    """All attributes, by `failures` of the output, by the report, and by the status."""
    report = make(["k03", "k06"], errors=action)

    found = failures(output)

    assert found == read_status(output).failures and set(found) == set(report.failures) and len(found) == 2
    (failure,) = [failure for failure in found if failure.key == "k03"]
    assert (failure.split, failure.row, failure.action, failure.attempts) == ("val", 3, action, 1)
    assert failure.path == str(source / "k03.txt")
    assert (failure.exception, failure.reason.startswith("ValueError: 3 is bad")) == ("ValueError", True)
    assert failure.traceback.endswith("ValueError: 3 is bad\n") and "in read\n" in failure.traceback
    assert "k03: ValueError: 3 is bad" in str(failure)
    if output != URL:
        lacking = [info.file for info in Manifest.read(output).shards if info.num_failed and info.split == "val"]
        assert [failure.shard] == lacking


def test_run_that_does_nothing_has_no_failures_of_its_own(make, output):
    """The output still does without them."""
    made = make(["k03"])
    again = make(["k03"])

    assert (keys(made.failures), again.did_nothing, again.failures, again.num_failed) == (["k03"], True, (), 1)
    assert keys(failures(output)) == ["k03"]


def test_dataset_without_failures_needs_no_ledger(make, output, tmp_path):
    """Nothing failed: nothing is read."""
    assert make().failures == ()
    if output != URL:
        shutil.rmtree(f"{output}/.datamat")
    assert failures(output) == ()


def test_failures_of_earlier_versions_of_a_shard_are_gone(make, output):
    """Each run makes other shards anew, so that other rows fail, the same again, and none."""
    counts = [["k03", "k06"], ["k06", "k07"], ["k06"], [], ["k00"]]
    for version, bad in enumerate(counts):
        make(bad, version=str(version))
        assert keys(failures(output)) == bad
    make(["k02"], version="5", shards=ShardOptions(num_shards=1))
    assert keys(failures(output)) == ["k02"]
    make(["k02"], version="6", shards=ShardOptions(num_shards=2))
    assert keys(failures(output)) == ["k02"]


def test_unfinished_run_has_its_failures_in_status_and_the_next_takes_them_over(make, output):
    """What is published of an output that is not finished is nothing."""
    with pytest.raises(KeyboardInterrupt):
        make(["k00", "k03"], stops=["k09"])

    status = read_status(output)

    assert status.state == "unfinished" and len(status.failures) == status.done.num_failed
    assert status.failures or output == URL  # which has whole shards alone, so far none
    assert set(keys(status.failures)) <= {"k00", "k03"}
    with pytest.raises(OutputError, match=r"holds no manifest.json"):
        failures(output)
    report = make(["k00", "k03"])
    assert keys(failures(output)) == ["k00", "k03"] and report.num_failed == 2
    if output != URL:  # a store takes over shards whole, which are then left as they are
        assert keys(report.failures) == ["k00", "k03"]


def test_run_that_stops_while_it_replaces_leaves_failures_of_what_is_published(make, source, output):
    """The old shards are there until all of the new ones are; the same keys failed otherwise."""
    make(["k03"])
    with pytest.raises(KeyboardInterrupt):
        make(["k00", "k03"], stops=["k09"], version="2", shards=ShardOptions(num_shards=3))

    assert keys(failures(output)) == ["k03"]

    make(["k00", "k02"], version="3")
    assert keys(failures(output)) == ["k00", "k02"]


def test_too_many_failures_are_in_the_status(make, output):
    """The run that a limit stopped has no report."""
    if output == URL:
        pytest.skip("a store has whole shards alone")
    with pytest.raises(IncompleteRunError):
        make(["k00", "k02", "k03"], errors=datamat.ErrorPolicy("skip", max_errors=2))

    assert keys(read_status(output).failures) == ["k00", "k02", "k03"]


def test_other_machine_takes_over_what_failed(make, s3, output):
    """It has no scratch folder of the first, but the ledger of the store."""
    if output != URL:
        pytest.skip("needs a store")
    make(["k03", "k06"], machine="one")
    make(["k03", "k06", "k08"], machine="two", version="2", include=["*-val-*"])
    make(["k03", "k06", "k08"], machine="two", version="2")

    assert keys(failures(URL)) == ["k03", "k06", "k08"]


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_tasks_have_the_failures_of_all(s3, tmp_path, monkeypatch, place):
    """Each reports its own; the output has those of all, also while the others are not done."""
    monkeypatch.setenv("SLICES_FAIL", "37")
    monkeypatch.setattr(MemoryStore, "is_private", False)
    source = sliced_job.make_source(tmp_path / "source", 12)
    target = str(tmp_path / "out") if place == "folder" else URL
    scratch = [{"scratch": tmp_path / name} if place == "bucket" else {} for name in ("a", "b")]
    halves = {"include": ["*-0000[0-2]-*"]}, {"exclude": ["*-0000[0-2]-*"]}

    reports = []
    for number, options in enumerate(map(dict.__or__, scratch, halves)):
        reports.append(
            sliced_job.run_task(source, target, number, 2, 60, errors="skip", executor=InlineExecutor(), **options)
        )
        if not number:
            begun = read_status(target).failures

    assert set(begun) == set(reports[0].failures) and begun
    assert keys(failures(target)) == keys(itertools.chain(*(report.failures for report in reports)))
    assert len(failures(target)) == reports[1].num_failed == 2


def test_merged_sets_have_the_failures_of_all(source, tmp_path):
    """By the new names of their shards."""
    names = ["a", "b"]
    for name in names:
        folder = tmp_path / f"source-{name}"
        folder.mkdir()
        for path in source.glob("*.txt"):
            (folder / f"{name}{path.name}").write_text(path.read_text())
        job = Prepared(
            Numbers([f"{name}k03"]), folder, tmp_path / name, errors="skip", executor=InlineExecutor(),
            shards=ShardOptions(num_shards=2),
        )  # fmt: skip
        job.run(progress=False)

    merge([tmp_path / name for name in names], tmp_path / "both")

    found = failures(tmp_path / "both")
    assert keys(found) == ["ak03", "bk03"]
    assert {failure.shard for failure in found} <= {info.file for info in Manifest.read(tmp_path / "both").shards}


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_ledger_that_cannot_tell_is_named(make, tmp_path, output, damage):
    """The message says how many failed, and how to know again which."""
    if output == URL:
        pytest.skip("the same")
    make(["k03"])
    ledger = tmp_path / "out/.datamat/ledger.jsonl"
    ledger.unlink() if damage == "missing" else ledger.write_text("")

    with pytest.raises(OutputError, match=r"ledger.jsonl .*1 row failed.*retry_failed"):
        failures(output)
    assert read_status(output).failures == ()
