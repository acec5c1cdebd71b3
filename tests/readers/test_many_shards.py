"""More shards than a process may have files open."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import subprocess
import sys

import numpy as np
import pytest
from open_files import few_descriptors, no_descriptors, open_files

from datamat import Features, OutputError, PathosExecutor, Scalar, ShardOptions, load, materialize
from datamat.formats import format_names
from datamat.readers.records import ShardOpener
from datamat.testing import InlineExecutor

NUM_SHARDS = 60


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes 60 shards of two numbers each, in a format."""

    def write(name):
        folder = tmp_path_factory.mktemp("numbers") / "out"
        options = {"shards": ShardOptions(num_shards=NUM_SHARDS), "executor": InlineExecutor(), "progress": False}
        options["features"] = Features({"number": Scalar("int64")})
        materialize(lambda number: {"number": number}, range(2 * NUM_SHARDS), folder, format=name, **options)
        return folder

    return functools.cache(write)


@pytest.fixture
def output(written):
    """A directory of 60 shards, as TFRecord."""
    return written("tfrecord")


# Readers of other libraries, which tests of clients load into the same process, free descriptors at any moment.
_FORMATS = [pytest.param(name, marks=pytest.mark.long) if name == "arrayrecord" else name for name in format_names()]


@pytest.fixture(params=_FORMATS)
def in_each_format(request, written):
    """A directory of 60 shards, in each format."""
    if request.param == "arrayrecord":
        pytest.importorskip("array_record")
    return written(request.param)


def test_few_files_are_open_at_a_time(in_each_format):
    """This holds in order, at random, and by key."""
    data = load(in_each_format)
    wanted = list(range(2 * NUM_SHARDS))
    number_of = {sample["key"]: sample["number"] for sample in load(in_each_format)}  # imports what is needed, too

    gc.collect()  # files of earlier tests count as open
    # datamat keeps an eighth of the limit open, however much of it others hold.
    with few_descriptors(40 + len(open_files()) // 7):
        assert sorted(int(sample["number"]) for sample in data) == wanted
        assert sorted(int(data[place]["number"]) for place in range(-len(data), 0)) == wanted
        assert all(data[key]["number"] == number for key, number in number_of.items())
        for threads in (1, 2, 8):
            batches = data.to_numpy(8, shuffle=threads > 1, num_threads=threads)
            assert sorted(int(number) for batch in batches for number in batch["number"]) == wanted


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.long) for name in ("forkserver", "spawn"))]
)
def test_workers_take_a_dataset_whose_files_are_open(output, method):
    """After a fork they use the open files; elsewhere they open their own."""
    data = load(output)
    numbers = [int(sample["number"]) for sample in data]

    with PathosExecutor(2, start_method=method) as pool:
        found = [int(sample["number"]) for sample in pool.map(data.__getitem__, range(len(data)))]

    assert found == numbers
    if method == "fork":  # the loader in use here does the same
        assert [int(number) for batch in data.to_numpy(8, num_workers=2) for number in batch["number"]] == numbers
    assert [int(data[place]["number"]) for place in (0, -1)] == [numbers[0], numbers[-1]]


def test_several_datasets_share_what_may_be_open(output):
    """They are read in turn, and none is closed."""
    list(load(output))
    several = [load(output) for _ in range(3)]

    with few_descriptors(40):
        for place in range(2 * NUM_SHARDS):
            assert len({int(data[place]["number"]) for data in several}) == 1


def test_limit_may_be_lowered_later(output):
    """Files that exceed it are closed first."""
    data = load(output)
    list(data)

    with few_descriptors(-20):
        assert len(list(data)) == 2 * NUM_SHARDS


def test_no_shard_is_opened_twice_while_descriptors_last(output, monkeypatch):
    """This holds at random, by key, and in batches."""
    opened = []

    def open_shard(self, info, *, original=ShardOpener.open):
        opened.append(info.file)
        return original(self, info)

    monkeypatch.setattr(ShardOpener, "open", open_shard)
    data = load(output)
    for _ in range(3):
        for place in np.random.default_rng(0).permutation(len(data)).tolist():
            assert data[place]["key"] in data
        list(data.to_numpy(8, shuffle=True, num_threads=1))

    assert len(opened) == len(set(opened)) == NUM_SHARDS


def test_dataset_leaves_no_open_files_behind(output, monkeypatch):
    """Files that were open at the end are closed, and so are those that it closed before."""
    monkeypatch.setattr("datamat.readers.records._MOST_OPEN", 2)
    data = load(output)
    list(data)
    del data
    gc.collect()

    assert not open_files(output)


def test_program_that_ends_with_an_open_dataset_prints_nothing(output):
    """Files are closed without modules that are gone by then."""
    program = "import sys; from datamat import load; data = load(sys.argv[1]); other = data[0], data[-1]"

    ended = subprocess.run([sys.executable, "-c", program, output], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_threads_read_shards_that_others_close(output, monkeypatch):
    """A shard that is being read stays open, although the limit is two; each thread may have opened one too many."""
    monkeypatch.setattr("datamat.readers.records._MOST_OPEN", 2)
    data = load(output)
    numbers = [int(sample["number"]) for sample in load(output)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda place: int(data[place]["number"]), [*range(len(data))] * 5))

    assert found == numbers * 5
    assert len({path.partition(".")[0] for path in open_files(output)}) <= 1 + 8  # shards, some of two files


def test_lack_of_descriptors_is_no_damage(in_each_format):
    """No record is skipped because of it, and the same dataset reads again once there are descriptors."""
    data = load(in_each_format, errors="skip")
    next(iter(load(in_each_format)))

    with no_descriptors() as fill:
        for read in (lambda: list(data), data.keys, lambda: data["00000000"], lambda: load(in_each_format)):
            fill()  # threads of ArrayRecord's readers close files at their own pace
            with pytest.raises(
                OutputError, match=rf"{in_each_format}/.*: Too many open files; close what is open, or raise"
            ):
                read()

    assert len(list(data)) == len(data.keys()) == 2 * NUM_SHARDS
    assert data.num_skipped == 0
