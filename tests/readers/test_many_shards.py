"""More shards than a process may have files open."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import resource

import pytest

from datamat import DatasetWriter, Features, IndexRow, Materializer, OutputError, Scalar, ShardOptions, load
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


@contextlib.contextmanager
def few_descriptors(count):
    """Let this process open no more than `count` further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def test_threads_read_shards_that_others_close(output, monkeypatch):
    """Those that are read stay open, although two are the most that a data set may keep."""
    monkeypatch.setattr("datamat.readers.records._MOST_OPEN", 2)
    data = load(output)
    numbers = [int(sample["number"]) for sample in load(output)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda place: int(data[place]["number"]), [*range(len(data))] * 5))

    assert found == numbers * 5
    assert len(data._samples.records._files) <= 2 + 8


@contextlib.contextmanager
def no_descriptors():
    """Let this process open no file at all."""
    held = []
    with few_descriptors(20):
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        try:
            yield
        finally:
            for descriptor in held:
                os.close(descriptor)


def test_want_of_descriptors_is_no_damage(output):
    """Nothing is left out for it, and the same data set reads on when there are some."""
    data = load(output, errors="skip")
    next(iter(load(output)))

    with no_descriptors(), pytest.raises(OutputError, match=r"numbers-.*: Too many open files; close what is open, or"):
        list(data)

    assert len(list(data)) == 2 * NUM_SHARDS
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
