"""More shards than a process may have files open."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from open_files import few_descriptors, no_descriptors, open_files

from datamat import (
    DatasetWriter,
    Features,
    IndexRow,
    Materializer,
    OutputError,
    PathosExecutor,
    Scalar,
    ShardOptions,
    load,
)
from datamat.formats import Offsets, ShardFormat, format_names, get_format
from datamat.readers import records
from datamat.readers.records import ShardOpener

NUM_SHARDS = 60


class Numbers(DatasetWriter):
    """Two numbers in each shard."""

    name = "numbers"
    features = Features({"number": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"row{number:03d}", "train", {"number": number}) for number in range(2 * NUM_SHARDS)]

    def read(self, row):
        return {"number": row.fields["number"]}


@pytest.fixture(scope="module", params=format_names())
def output(request, tmp_path_factory):
    """A directory of 60 shards."""
    if request.param == "arrayrecord":
        pytest.importorskip("array_record")
    output = tmp_path_factory.mktemp("numbers") / "out"
    options = {"shards": ShardOptions(num_shards=NUM_SHARDS), "format": request.param}
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        Materializer(Numbers, None, output, executor=executor, **options).run(progress=False)
    return output


def test_few_files_are_open_at_a_time(output):
    """This holds in order, at random, and by key."""
    data = load(output)
    wanted = list(range(2 * NUM_SHARDS))
    number_of = {sample["key"]: sample["number"] for sample in load(output)}  # imports what is needed, too

    with few_descriptors(40):
        assert sorted(int(sample["number"]) for sample in data) == wanted
        assert sorted(int(data[place]["number"]) for place in range(-len(data), 0)) == wanted
        assert all(data[key]["number"] == number for key, number in number_of.items())
        for threads in (1, 2, 8):
            batches = data.to_numpy(8, shuffle=threads > 1, num_threads=threads)
            assert sorted(int(number) for batch in batches for number in batch["number"]) == wanted


def test_threads_that_read_blocks_share_what_may_be_open(output, monkeypatch):
    """The shards of a block cannot be closed while it is read, so together the threads hold no more than is allowed."""
    data = load(output)
    made = type(get_format(data.manifest.format))
    if (
        made.read_block is ShardFormat.read_block or made.name == "arrayrecord"
    ):  # a shard of 2 records has 192 KiB there
        pytest.skip("the records of these shards are read one by one")
    held = []

    def read_block(self, readers, *args, original=made.read_block):
        held.append(len(readers))
        return original(self, readers, *args)

    monkeypatch.setattr(made, "read_block", read_block)
    with few_descriptors(40):
        list(data.to_numpy(8, shuffle=True, num_threads=4))

        assert 4 * max(held) <= max(records._most_open(), 4)


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
    several = [load(output) for _ in range(5)]

    with few_descriptors(40):
        for place in range(2 * NUM_SHARDS):
            assert {int(data[place]["number"]) for data in several} == {int(several[0][place]["number"])}


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


def test_as_many_shards_stay_open_as_descriptors_allow(monkeypatch):
    """A quarter of the descriptors, at two for each shard; and no more than the system allows maps."""
    for limit, most in ((80, 10), (1024, 128), (80_000, 10_000), (10**6, 16_384), (resource.RLIM_INFINITY, 16_384)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert records._most_open() == most


def test_pipeline_of_tensorflow_asks_once_about_each_shard(output, monkeypatch):
    """One system call for each: more of them took seconds with thousands of shards."""
    pytest.importorskip("tensorflow")
    data = load(output)
    if "tfrecord" not in data.manifest.format:
        pytest.skip("TensorFlow does not read the format")
    data.to_tf(4)  # imports what is needed
    asked = []

    def counted(function):
        def call(path, *args, **names):
            asked.append(path)
            return function(path, *args, **names)

        return call

    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))

    data.to_tf(4)

    assert sorted(path for path in asked if str(path).startswith(str(output))) == sorted(data.files)


def test_limit_may_be_lowered_later(output):
    """Files that exceed it are closed first."""
    data = load(output)
    list(data)

    with few_descriptors(-20):
        assert len(list(data)) == 2 * NUM_SHARDS


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


def test_shards_are_closed_where_others_have_taken_the_descriptors(output):
    """The process has opened so many other files that its quarter is not left."""
    data = load(output)
    next(iter(load(output)))  # imports what is needed

    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(open(os.devnull, "rb"))
        with few_descriptors(20):
            assert sorted(int(sample["number"]) for sample in data) == list(range(2 * NUM_SHARDS))


def test_lack_of_descriptors_is_no_damage(output):
    """No record is skipped because of it, and the same dataset reads again once there are descriptors."""
    data = load(output, errors="skip")
    next(iter(load(output)))

    with no_descriptors():
        for read in (lambda: list(data), data.keys, lambda: data["row000"], lambda: load(output)):
            with pytest.raises(OutputError, match=rf"{output}/.*: Too many open files; close what is open, or raise"):
                read()

    assert len(list(data)) == len(data.keys()) == 2 * NUM_SHARDS
    assert data.num_skipped == 0


def test_reader_distinguishes_lack_of_descriptors_from_damage(output):
    """The system's error tells them apart."""
    data = load(output)
    next(iter(data))
    places = Offsets.from_text("")  # nothing is asked of it
    shard_format = get_format(data.manifest.format).with_features(data.features)

    with no_descriptors(), pytest.raises(OSError, match="Too many open files") as failed:
        shard_format.reader(data.files[0], places)

    assert failed.value.errno == errno.EMFILE
