"""The five conditions of a good loader, in the order of docs/how-reading-works.md."""

from __future__ import annotations

import functools
import shutil
import socket
import threading
import tracemalloc

import numpy as np
import pytest
from prepared import Prepared

from datamat import DatasetWriter, Features, IndexRow, ShardOptions, Tensor, WorkerOptions, load
from datamat.readers.loader import keep_freed_pages
from datamat.readers.tf import TfOptions
from datamat.testing import InlineExecutor

pytestmark = pytest.mark.timeout(180)  # a busy machine imports TensorFlow slowly
WAIT_S = 30


class Arrays(DatasetWriter):
    """Numbered arrays of 64 KiB; each process waits with its first row for another one, where `meeting` is a port."""

    name = "arrays"
    features = Features({"array": Tensor((128, 128), "float32", "raw")})

    def __init__(self, count, meeting=None):
        self.count = count
        self.meeting = meeting

    def index(self, source):
        return [IndexRow(f"row{number:04d}", "train", {"number": number}) for number in range(self.count)]

    def read(self, row):
        meeting, self.meeting = self.meeting, None
        if meeting is not None:
            with socket.create_connection(("localhost", meeting), WAIT_S) as other:
                assert other.recv(1) == b"!"
        return {"array": np.full((128, 128), row.fields["number"], np.float32)}


def write(folder, count, **options):
    writer = Arrays(count, options.pop("meeting", None))
    options = options or {"executor": InlineExecutor()}
    Prepared(writer, None, folder, shards=ShardOptions(num_shards=4), **options).run(progress=False)
    return load(folder, "train")


@pytest.mark.long
def test_first_shards_are_written_in_parallel(tmp_path):
    """The first row of a process waits until another process holds a row as well."""
    with socket.create_server(("localhost", 0)) as meeting:
        meeting.settimeout(WAIT_S)
        server = threading.Thread(target=_let_go, args=(meeting, 2))
        server.start()
        data = write(tmp_path / "out", 8, meeting=meeting.getsockname()[1], workers=WorkerOptions(num_workers=2))
        server.join()

    assert len(data) == 8 and len(data.files) == 4


def _let_go(meeting, num_processes):
    for connection in [meeting.accept()[0] for _ in range(num_processes)]:
        connection.sendall(b"!")
        connection.close()


def test_first_shards_are_read_in_parallel(tf, tmp_path):
    """Each decoding thread waits for another one; tf.data reads all shards in turn."""
    data = write(tmp_path / "out", 16)
    barrier = threading.Barrier(2, timeout=WAIT_S)

    def meet(sample):
        barrier.wait()
        return sample

    assert len(list(data.to_numpy(transform=meet, num_threads=2))) == 16
    ends = np.cumsum([shard.num_records for shard in data.manifest.shards])
    first = [sample["key"].decode() for sample in data.to_tf(shuffle=1).take(4).as_numpy_iterator()]
    assert len({int(np.searchsorted(ends, data.keys().index(key), "right")) for key in first}) == 4


def test_second_schema_is_known_without_reading_data(tmp_path):
    """Fields, types, shapes, the number of records and their keys, of a directory without its shards."""
    whole = write(tmp_path / "out", 8)
    shutil.copytree(tmp_path / "out", tmp_path / "bare", ignore=shutil.ignore_patterns("*.tfrecord", "*.idx"))

    bare = load(tmp_path / "bare", "train")

    assert bare.features == Arrays.features
    assert len(bare) == 8
    assert list(bare.keys()) == list(whole.keys())


@pytest.mark.sample(3)
@pytest.mark.parametrize("read", ["samples", "batches", "shuffled"])
def test_third_memory_does_not_grow_with_the_data(tmp_path, read):
    """Four batches of four records of 64 KiB at most, for any number of records: two ready, two handed over."""
    for count in (24, 80):
        data = write(tmp_path / str(count), count)
        loader = {
            "samples": data,
            "batches": data.to_numpy(4, num_threads=1),
            "shuffled": data.to_numpy(4, shuffle=True, num_threads=1),
        }[read]
        keep_freed_pages()  # asks, once, for much that is never touched
        tracemalloc.start()
        seen = sum(np.asarray(sample["array"]).size >> 14 for sample in loader)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        assert seen == count
        assert peak < 6 * (4 << 16)


@pytest.mark.parametrize("reader", ["to_tf", "to_numpy"])
def test_fourth_next_batch_is_made_while_one_is_used(tf, tmp_path, reader):
    """The transform of the second batch runs although nobody has asked for it."""
    data = write(tmp_path / "out", 8)
    ahead = threading.Event()

    def tell(key):
        if key == data.keys()[3]:
            ahead.set()

    if reader == "to_tf":
        transform = lambda sample: _calling(tf, tell, sample)  # noqa: E731
    else:
        transform = lambda sample: tell(sample["key"]) or sample  # noqa: E731

    batches = iter(getattr(data, reader)(2, transform=transform))
    next(batches)

    assert ahead.wait(WAIT_S)


def test_fifth_static_transforms_are_cached_and_dynamic_ones_drawn_again(tf, tmp_path):
    """With a cache, one runs once for each record, the other once for each record and epoch."""
    data = write(tmp_path / "out", 8)
    generator = tf.random.Generator.from_seed(1)
    calls = {"static": [], "dynamic": []}
    dataset = data.to_tf(
        4,
        tf=TfOptions(cache=True, static_transform=functools.partial(_calling, tf, calls["static"].append)),
        transform=lambda sample: {**_calling(tf, calls["dynamic"].append, sample), "draw": generator.uniform(())},
    )

    draws = [draw for _ in range(3) for batch in dataset.as_numpy_iterator() for draw in batch["draw"]]

    assert sorted(calls["static"]) == sorted(data.keys())
    assert sorted(calls["dynamic"]) == sorted([*data.keys()] * 3)
    assert len(set(draws)) == 24


def _calling(tf, function, sample):
    """Call a Python function with the key of a sample, in tf.data."""
    with tf.control_dependencies([tf.py_function(lambda key: function(key.numpy().decode()), [sample["key"]], [])]):
        return {name: tf.identity(value) for name, value in sample.items()}
