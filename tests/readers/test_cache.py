"""Caches: bounded, never wrong, and shared by processes without harm."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib
import socket
import threading

import numpy as np
import pytest
from nfs_locks import refuse_as_nfs_does

from datamat import CorruptDataError, OptionError, load
from datamat.folders import open_folder
from datamat.readers.cache import RecordCache, ShardStore


def keys_in(path):
    """Return the keys of a directory, read through a cache: for other processes."""
    folder, cache_dir = path
    return [sample["key"] for sample in load(folder, cache_dir=cache_dir)]


def copies(folder):
    """Return the shards in a cache folder, once those that are being fetched have arrived."""
    for thread in threading.enumerate():
        if thread.name.startswith("datamat-fetch"):
            thread.join(20)
    return sorted(path.name for path in pathlib.Path(folder).iterdir())


def record(size):
    return {"key": [b"k"], "image": [bytes(size)], "label": np.zeros(1, np.int64)}


def test_records_in_memory_are_not_read_again(copied):
    """With enough room, this holds for all of them."""
    data = load(copied, "train", cache=1 << 30)
    expected = [sample["image"].copy() for sample in data]

    for file in data.files:
        os.truncate(file, 0)

    assert all(np.array_equal(sample["image"], image) for sample, image in zip(data, expected, strict=True))


def test_memory_cache_stops_at_its_limit(copied):
    """The first ones stay, others are read each time."""
    data = load(copied, "train", cache=20_000)
    list(data)
    os.truncate(data.files[0], 0)

    assert data[0]["key"] == data.keys()[0]
    with pytest.raises(CorruptDataError):
        data[data.manifest.shards[0].num_records - 1]


def test_memory_cache_counts_what_it_holds():
    """Several threads add at once: the total never exceeds the limit, and each record counts once."""
    cache = RecordCache(100_000)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda place: cache.keep(place % 50, record(5000)), range(4000)))

    held = sum(cache.get(place) is not None for place in range(50))
    assert held * 5400 <= cache.num_bytes <= 100_000 < (held + 1) * 5500


def test_process_forked_under_the_lock_does_not_wait():
    """It caches nothing more, and works otherwise."""
    cache = RecordCache(1000)

    with cache._lock:
        child = multiprocessing.get_context("fork").Process(target=cache.keep, args=(0, record(10)))
        child.start()
        child.join(20)

    assert child.exitcode == 0


def test_shards_are_copied_when_needed_and_read_from_there(copied, tmp_path):
    """Records come from the copies by position, and in the next process without the shards at all."""
    data = load(copied, "train", cache_dir=tmp_path / "cache")
    expected = list(load(copied, "train"))

    assert copies(tmp_path / "cache") == []
    assert data[0]["key"] == expected[0]["key"]
    assert len(copies(tmp_path / "cache")) == 1
    list(data)
    for file in data.files:
        os.unlink(file)
    again = list(load(copied, "train", cache_dir=tmp_path / "cache"))

    assert all(np.array_equal(one["image"], other["image"]) for one, other in zip(again, expected, strict=True))
    assert len(copies(tmp_path / "cache")) == 2


def test_shard_without_room_is_read_where_it_is(copied, tmp_path):
    """The first copy stays: one that took its place would be gone again before it is needed."""
    shards = load(copied, "train").manifest.splits["train"]
    limit = max(info.num_bytes for info in shards)

    for _ in range(2):
        data = load(copied, "train", cache_dir=tmp_path / "cache", cache_bytes=limit)
        assert [sample["key"] for sample in data] == data.keys()

    assert len(shards) == 2
    (copy,) = copies(tmp_path / "cache")
    assert copy in {f"{info.checksum}.tfrecord" for info in shards}


@pytest.mark.parametrize("is_nfs", [False, True])
def test_older_copies_make_room(copied, make_pairs_output, tmp_path, monkeypatch, is_nfs):
    """The least recently used go; files that are no copies of datamat stay."""
    if is_nfs:
        refuse_as_nfs_does(monkeypatch)
    limit = sum(info.num_bytes for info in load(copied, "train").manifest.splits["train"])
    other = make_pairs_output(tmp_path / "other", seed=1)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "notes.txt").write_text("")
    list(load(other, "train", cache_dir=tmp_path / "cache", cache_bytes=2 * limit))
    before = copies(tmp_path / "cache")

    data = load(copied, "train", cache_dir=tmp_path / "cache", cache_bytes=limit)
    list(data)

    mine = {f"{info.checksum}.tfrecord" for info in data.manifest.splits["train"]}
    assert len(before) == 3
    assert {"notes.txt"} < set(copies(tmp_path / "cache")) <= mine | {"notes.txt"}


def test_child_does_not_release_what_its_parent_reads(pairs, tmp_path):
    """It has inherited the open file, and drops its readers when it ends."""
    info = load(pairs, "train").manifest.splits["train"][0]
    store = ShardStore(tmp_path, 1 << 30, [info])
    copy = store.fetch(info, open_folder(pairs))
    release = store.in_use(copy)

    child = multiprocessing.get_context("fork").Process(target=release)
    child.start()
    child.join(20)

    assert child.exitcode == 0
    assert not store._remove(copy)
    release()
    assert store._remove(copy)


def test_what_a_killed_copier_left_is_replaced(copied, tmp_path):
    """Half a file has another name than a whole one, and counts until it is gone."""
    info = load(copied, "train").manifest.splits["train"][0]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"{info.checksum}.tfrecord.part").write_bytes(b"half")
    (tmp_path / "cache" / f"{'0' * 32}.tfrecord.part").write_bytes(bytes(info.num_bytes))

    load(copied, "train", cache_dir=tmp_path / "cache", cache_bytes=info.num_bytes)[0]

    assert copies(tmp_path / "cache") == [f"{info.checksum}.tfrecord"]


def test_damaged_shard_is_read_where_it_is(copied, tmp_path):
    """The copy is compared with the manifest, and the records that are intact need none."""
    data = load(copied, "train", cache_dir=tmp_path / "cache")
    content = bytearray(pathlib.Path(data.files[0]).read_bytes())
    content[-1] ^= 1
    pathlib.Path(data.files[0]).write_bytes(content)

    assert data[0]["key"] == data.keys()[0]
    with pytest.raises(CorruptDataError, match=f"{data.files[0]}: record .* at byte"):
        data[data.manifest.splits["train"][0].num_records - 1]
    assert copies(tmp_path / "cache") == []


def test_lock_is_free_when_its_block_ends_though_a_forked_process_lives(tmp_path):
    """A child forked while a thread copies a shard holds the lock's file open."""
    store = ShardStore(tmp_path, 0, [])
    ends = multiprocessing.Event()

    with store._lock("one"):
        child = multiprocessing.get_context("fork").Process(target=ends.wait, args=(20,))
        child.start()
    try:
        with store._lock("one", wait=False):
            pass
    finally:
        ends.set()
        child.join(20)


def test_many_processes_share_a_cache_folder(pairs, tmp_path):
    """Each shard is copied once, and completely."""
    jobs = [(pairs, tmp_path / "cache")] * 6

    with concurrent.futures.ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        found = list(pool.map(keys_in, jobs))

    data = load(pairs)
    assert found == [data.keys()] * 6
    sizes = {f"{info.checksum}.tfrecord": info.num_bytes for info in data.manifest.shards}
    assert {name: (tmp_path / "cache" / name).stat().st_size for name in copies(tmp_path / "cache")} == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": -1}, "cache is -1"),
        ({"cache_dir": "c", "cache_bytes": 1.5}, "cache_bytes is 1.5"),
        ({"cache_dir": "/proc/nothing"}, "cache_dir /proc/nothing: "),
    ],
)
def test_nonsense_is_refused(pairs, options, message, tmp_path, monkeypatch):
    """The error says what is wanted."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(OptionError, match=message):
        load(pairs, **options)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _folder(path):
    path.mkdir()
    (path / "inside").write_text("something")


IN_THE_WAY = {
    "fifo": os.mkfifo,
    "folder": _folder,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link": lambda path: path.symlink_to(__file__),
    "socket": _socket,
}


@pytest.mark.parametrize("what", IN_THE_WAY)
@pytest.mark.parametrize("place", ["{}", "{}.part", ".{checksum}.lock", ".room.lock"])
def test_what_is_no_file_in_the_cache_is_replaced(pairs, tmp_path, monkeypatch, what, place):
    """Nobody waits for a FIFO; no link is written through."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.chdir(cache)  # the path of a socket is short
    data = load(pairs, "train", cache_dir=cache, cache_bytes=1 << 30)
    for info in data.manifest.splits["train"]:
        path = cache / place.format(f"{info.checksum}.tfrecord", checksum=info.checksum)
        if not os.path.lexists(path):
            IN_THE_WAY[what](path)

    assert [sample["key"] for sample in data] == load(pairs, "train").keys()
    assert all(info.is_whole(cache / f"{info.checksum}.tfrecord") for info in data.manifest.splits["train"])
    assert not (cache / "nowhere").exists()
