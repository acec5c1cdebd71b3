"""The estimate comes from real rows that a worker processes, and it writes nothing."""

import functools
import pickle
import random
import shutil
import threading

import numpy as np
import pytest
import small_pairs

from datamat import DatasetWriter, Features, IndexRow, OptionError, SampleError, Scalar, WorkerOptions
from datamat.testing import InlineExecutor

STAGES = {"read", "encode", "write", "other"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"), num_train=30, num_val=6)


job = functools.partial(small_pairs.job, workers=WorkerOptions(num_workers=2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("copies", [1, {"train": 3}], ids=["kept", "augmented"])
def test_estimate_is_about_what_the_run_makes(source, tmp_path, copies):
    """Rows are exact, bytes approximate; each stage has its share of the time."""
    options = {"copies": copies, "transform": None if copies == 1 else small_pairs.jitter}
    estimate = job(source, tmp_path / "out", **options).estimate(20)

    assert not (tmp_path / "out").exists()
    report = job(source, tmp_path / "out", **options).run(progress=False)
    assert (estimate.num_rows, estimate.num_workers) == (report.num_rows, 2)
    assert 0.7 < estimate.num_bytes / report.num_bytes < 1.4
    assert 16 <= estimate.num_samples <= 24
    assert estimate.stages.keys() == (STAGES if copies == 1 else STAGES | {"decode", "augment"})
    assert min(estimate.stages["read"], estimate.stages["encode"], estimate.seconds) > 0
    assert 20e6 < estimate.worker_bytes < 2e9
    assert estimate.fits and not estimate.failed
    assert f"{estimate.num_samples} samples" in str(estimate) and "ms per row" in estimate._repr_html_()


def test_estimate_warns_where_the_disk_will_not_do(source, tmp_path, monkeypatch):
    """The warning says how much is needed and how much is free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10_000))

    with pytest.warns(UserWarning, match=r"out needs about 0.1 MB, but its disk has 0.0 MB free; make room"):
        estimate = job(source, tmp_path / "out").estimate(8)

    assert not estimate.fits and "NOT ENOUGH" in str(estimate)


class Failing(small_pairs.Pairs):
    """Fails for some of the splits."""

    def __init__(self, split):
        self.split = split

    def read(self, row):
        if row.split == self.split or row.key == "train000":
            raise ValueError("cannot be read")
        return super().read(row)


def test_samples_that_fail_are_reported(source, tmp_path):
    """The estimate measures the others; of a split without a good sample there is none."""
    estimate = job(source, tmp_path / "out", Failing("none")).estimate(36)

    assert (estimate.num_samples, len(estimate.failed)) == (35, 1)
    assert "'train000': ValueError: cannot be read" in str(estimate)
    with pytest.raises(SampleError, match=r"'val': each sample of this split failed: .*cannot be read"):
        job(source, tmp_path / "out", Failing("val")).estimate(8)


class Numbers(DatasetWriter):
    """Gives rows in blocks."""

    name = "numbers"
    features = Features({"x": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{number:05d}", fields={"number": number}) for number in range(3000)]

    def read(self, row):
        raise AssertionError("the rows go in blocks")

    def read_block(self, keys, fields):
        return {"x": np.asarray(fields["number"])}


def test_rows_that_go_in_blocks_are_measured_in_one(tmp_path):
    """The block holds many more rows than the number of samples asked for."""
    estimate = job(None, tmp_path / "out", Numbers()).estimate(4)

    assert (estimate.num_samples, estimate.num_rows) == (256, 3000)
    assert estimate.stages.keys() == STAGES


class Locked(Numbers):
    """Holds what a plain pickle cannot send."""

    def __init__(self):
        self.lock = threading.RLock()


class PicklingExecutor(InlineExecutor):
    """Pickles arguments plainly, as a pool of the standard library does."""

    def submit(self, fn, /, *args):
        return super().submit(fn, *pickle.loads(pickle.dumps(args)))


def test_estimate_of_a_writer_with_a_lock_on_an_executor(tmp_path):
    """The writer travels as that of a run does."""
    assert small_pairs.job(None, tmp_path / "out", Locked(), executor=PicklingExecutor()).estimate(4).num_samples == 256


def test_estimate_leaves_the_caller_unchanged(source, tmp_path):
    """So its random state; less than one sample is refused."""
    random.seed(4)
    before = random.getstate(), np.random.get_state()[1].tobytes()

    job(source, tmp_path / "out", copies=2, transform=small_pairs.jitter).estimate(4)

    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before
    with pytest.raises(OptionError, match="num_samples is 0"):
        job(source, tmp_path / "out").estimate(0)
