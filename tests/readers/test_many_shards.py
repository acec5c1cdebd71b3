"""More shards than a process may have files open."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import gc
import os
import subprocess
import sys

import pytest
from descriptors import few_descriptors, no_descriptors, open_files

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
from datamat.formats import Offsets, format_names, get_format

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
    """In order, at random, and by key."""
    data = load(output)
    wanted = list(range(2 * NUM_SHARDS))
    number_of = {sample["key"]: sample["number"] for sample in load(output)}  # imports what is needed, too

    with few_descriptors(40):
        assert sorted(int(sample["number"]) for sample in data) == wanted
        assert sorted(int(data[place]["number"]) for place in range(-len(data), 0)) == wanted
        assert all(data[key]["number"] == number for key, number in number_of.items())
        for batches in (data.to_numpy(8, shuffle=True), data.to_numpy(8)):
            assert sorted(int(number) for batch in batches for number in batch["number"]) == wanted


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("forkserver", "spawn"))]
)
def test_workers_take_a_data_set_whose_files_are_open(output, method):
    """What is open is theirs after a fork, and opened anew elsewhere."""
    data = load(output)
    numbers = [int(sample["number"]) for sample in data]

    with PathosExecutor(2, start_method=method) as pool:
        found = [int(sample["number"]) for sample in pool.map(data.__getitem__, range(len(data)))]

    assert found == numbers
    if method == "fork":  # which is what the loader does here
        assert [int(number) for batch in data.to_numpy(8, num_workers=2) for number in batch["number"]] == numbers
    assert [int(data[place]["number"]) for place in (0, -1)] == [numbers[0], numbers[-1]]


def test_several_data_sets_share_what_may_be_open(output):
    """They are read by turns, and none is closed."""
    list(load(output))
    several = [load(output) for _ in range(5)]

    with few_descriptors(40):
        for place in range(2 * NUM_SHARDS):
            assert {int(data[place]["number"]) for data in several} == {int(several[0][place]["number"])}


def test_limit_may_be_lowered_later(output):
    """What is open beyond it is closed first."""
    data = load(output)
    list(data)

    with few_descriptors(-20):
        assert len(list(data)) == 2 * NUM_SHARDS


def test_nothing_stays_open_behind_a_data_set(output, monkeypatch):
    """Neither what it holds at its end, nor what it let go before."""
    monkeypatch.setattr("datamat.readers.records._MOST_OPEN", 2)
    data = load(output)
    list(data)
    del data
    gc.collect()

    assert not open_files(output)


def test_program_that_ends_with_an_open_data_set_says_nothing(output):
    """What closes files must do without modules that are gone by then."""
    program = "import sys; from datamat import load; data = load(sys.argv[1]); other = data[0], data[-1]"

    ended = subprocess.run([sys.executable, "-c", program, output], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_threads_read_shards_that_others_close(output, monkeypatch):
    """Those that are read stay open, although two are the most that may; each thread may have opened one too many."""
    monkeypatch.setattr("datamat.readers.records._MOST_OPEN", 2)
    data = load(output)
    numbers = [int(sample["number"]) for sample in load(output)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda place: int(data[place]["number"]), [*range(len(data))] * 5))

    assert found == numbers * 5
    assert len(data._samples.records._files) <= 1 + 8


def test_shards_are_let_go_of_where_others_have_taken_the_descriptors(output):
    """The process may open many, and has: a quarter is not there any more."""
    data = load(output)
    next(iter(load(output)))  # imports what is needed

    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(open(os.devnull, "rb"))
        with few_descriptors(20):
            assert sorted(int(sample["number"]) for sample in data) == list(range(2 * NUM_SHARDS))


def test_want_of_descriptors_is_no_damage(output):
    """Nothing is left out for it, and the same data set reads on when there are some."""
    data = load(output, errors="skip")
    next(iter(load(output)))

    with no_descriptors():
        for read in (lambda: list(data), data.keys, lambda: data["row000"], lambda: load(output)):
            with pytest.raises(OutputError, match=rf"{output}/.*: Too many open files; close what is open, or raise"):
                read()

    assert len(list(data)) == len(data.keys()) == 2 * NUM_SHARDS
    assert data.num_skipped == 0


def test_reader_tells_want_of_descriptors_from_damage(output):
    """By the system's error."""
    data = load(output)
    next(iter(data))
    places = Offsets.from_text("")  # nothing is asked of it
    shard_format = get_format(data.manifest.format).with_features(data.features)

    with no_descriptors(), pytest.raises(OSError, match="Too many open files") as failed:
        shard_format.reader(data.files[0], places)

    assert failed.value.errno == errno.EMFILE
