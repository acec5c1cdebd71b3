"""Directories behind URLs: read as written, each file fetched once, and no trace of failed attempts."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import os
import pathlib
import pickle
import shutil
import socket
import sys

import numpy as np
import pytest
from web import serving

from datamat import CorruptDataError, MissingDependencyError, OptionError, OutputError, load
from datamat.readers import records
from datamat.readers.cache import ShardStore
from datamat.readers.remote import RemotePath, is_url

pytest.importorskip("aiohttp")


@pytest.fixture(scope="session")
def formats(make_pairs_output, tmp_path_factory):
    """The same pairs in every format that needs no further package. Read only."""
    return make_pairs_output(
        tmp_path_factory.mktemp("formats") / "out", format=["tfrecord", "tfrecord.gz", "parquet", "webdataset"]
    )


@pytest.fixture
def copied(pairs, tmp_path):
    """A directory that a test may damage."""
    return shutil.copytree(pairs, tmp_path / "out")


@pytest.fixture
def web(copied):
    """A server that serves the directory."""
    with serving(copied) as web:
        yield web


@pytest.fixture
def cache(tmp_path):
    """A folder for copies."""
    return tmp_path / "cache"


def copies(cache, ending=""):
    """Return the names of finished and unfinished copies."""
    return sorted(name for name in os.listdir(cache) if name != ".lock" and name.endswith(ending))


def same(one, other):
    """Tell whether two samples are equal."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def keys_in(place):
    """Return the keys of a directory, read record by record: for other processes."""
    url, cache = place
    return [sample["key"] for sample in load(url, cache_dir=cache)]


def read_all(data):
    """Read a dataset: for other processes."""
    return [sample["key"] for sample in data]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz", "parquet", "webdataset"])
def test_samples_are_those_of_the_directory(formats, cache, name, ranges):
    """This holds in every format, in order, by position and by key; from servers with and without range requests."""
    expected = load(formats, "train", format=name)

    with serving(formats, ranges=ranges) as web:
        found = load(web.url, "train", format=name, cache_dir=cache)
        in_order = list(found)
        by_key = found[expected.keys()[-1]]

    assert all(map(same, in_order, list(expected)))
    assert found.keys() == expected.keys()
    assert same(by_key, expected[-1])
    assert len(found) == len(in_order) == len(expected)


@pytest.mark.parametrize("ranges", [True, False])
def test_large_files_are_read_to_their_end(tmp_path, ranges):
    """Servers without range requests are read, too, and each file in one request."""
    content = np.random.default_rng(1).bytes(25 << 20)
    (tmp_path / "large").write_bytes(content)

    with serving(tmp_path, ranges=ranges) as web:
        found = (RemotePath(web.url) / "large").read_bytes(len(content))

    assert found == content
    assert web.asked == ["/large"]


def test_every_way_of_reading_works(pairs, web, cache):
    """Batches, previews, and resuming in the middle all work."""
    local, data = load(pairs, "val"), load(web.url, "val", cache_dir=cache)

    batches = list(data.to_numpy(2, shuffle=True, seed=3))
    walk = iter(data)
    first = next(walk)
    again = load(web.url, "val", cache_dir=cache)
    again.load_state_dict(data.state_dict())

    assert [one["key"] for one in batches] == [one["key"] for one in local.to_numpy(2, shuffle=True, seed=3)]
    assert [first["key"], *read_all(again)] == local.keys()
    assert np.array_equal(data.preview(2).array, local.preview(2).array)


@pytest.mark.slow
def test_tensorflow_gets_the_samples(pairs, web, cache):
    """TensorFlow does not read such URLs on its own."""
    data = load(web.url, "val", cache_dir=cache)

    tensors = [(one["key"].numpy().decode(), one["image"].numpy()) for one in data.to_tf()]

    assert [key for key, _ in tensors] == load(pairs, "val").keys()
    assert all(np.array_equal(image, sample["image"]) for (_, image), sample in zip(tensors, data, strict=True))


def test_dataset_shows_its_url(web, cache):
    """Options, which may hold secrets, are not shown."""
    data = load(web.url + "/", "train", cache_dir=cache, storage_options={"headers": {"X-Secret": "hush"}})

    assert data.files == [f"{web.url}/{info.file}" for info in data.manifest.splits["train"]]
    assert str(data.path) == web.url + "/"
    assert web.url in repr(data)
    assert "hush" not in repr(data) + repr(data.path)
    assert web.headers[-1]["X-Secret"] == "hush"


def test_files_are_fetched_when_needed_and_once(web, cache):
    """The files of one split are fetched; the next dataset fetches the manifest alone."""
    data = load(web.url, "train", cache_dir=cache)
    at_first = list(web.asked)
    data[0]
    after_one = list(web.asked)
    read_all(data)
    data.keys()

    again = load(web.url, "train", cache_dir=cache)
    read_all(again)
    again.keys()

    shards = data.manifest.splits["train"]
    names = [shards[0].file, shards[0].index_file, shards[1].file, shards[1].index_file, "_index/train.index"]
    assert at_first == ["/manifest.json"]
    assert after_one == [*at_first, f"/{names[0]}", f"/{names[1]}"]
    assert web.asked == ["/manifest.json", *(f"/{name}" for name in names), "/manifest.json"]


def test_copies_serve_at_another_address(web, copied, cache):
    """Copies are named by their content."""
    expected = read_all(load(web.url, "train", cache_dir=cache))

    with serving(copied) as moved:
        found = read_all(load(moved.url, "train", cache_dir=cache))

    assert found == expected
    assert moved.asked == ["/manifest.json"]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_share_fetched_files(pairs, web, cache, start_method):
    """Each shard is fetched once by all of them."""
    with concurrent.futures.ProcessPoolExecutor(3, multiprocessing.get_context(start_method)) as pool:
        found = list(pool.map(keys_in, [(web.url, cache)] * 3))

    shards = load(pairs).manifest.shards
    assert found == [load(pairs).keys()] * 3
    assert [web.count(info.file) for info in shards] == [1] * len(shards)
    assert copies(cache, ".part") == []


def test_pickled_dataset_reads(pairs, web, cache):
    """This holds here and in a spawned process."""
    data = load(web.url, "val", cache_dir=cache)
    data[0]

    here = pickle.loads(pickle.dumps(data))
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(read_all, data).result()

    assert read_all(here) == there == load(pairs, "val").keys()


def test_workers_read(pairs, web, cache):
    """They are the processes that make batches."""
    data = load(web.url, "train", cache_dir=cache)
    data[0]  # this process has connections, which those of the workers must not be

    batches = list(data.to_numpy(8, num_workers=2))

    assert [key for batch in batches for key in batch["key"]] == load(pairs, "train").keys()


def test_connections_outlive_what_a_forked_process_drops(web):
    """If a child closed its parent's connection, the parent would wait for ever for the next answer."""
    path = RemotePath(web.url) / "manifest.json"
    content = path.read_bytes(1 << 20)

    def read_and_collect():
        path.read_bytes(1 << 20)
        gc.collect()

    child = multiprocessing.get_context("fork").Process(target=read_and_collect)
    child.start()
    child.join(20)

    assert child.exitcode == 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(path.read_bytes, 1 << 20).result(20) == content


def test_replaced_directory_is_noticed(web, make_pairs_output, copied, cache):
    """Copies of its old shards do not pass for the new ones."""
    before = load(web.url, "train", cache_dir=cache)
    old = {sample["key"]: sample["image"] for sample in before}
    shutil.rmtree(copied)
    make_pairs_output(copied, seed=1)

    after = load(web.url, "train", cache_dir=cache)

    assert set(after.keys()) == set(old)
    assert not any(np.array_equal(sample["image"], old[sample["key"]]) for sample in after)
    assert all(map(same, after, load(copied, "train")))


def test_cache_stays_below_its_limit(web, cache, caplog):
    """A file without room is an error that says how much there is, raised when the dataset is loaded."""
    shards = load(web.folder, "train").manifest.splits["train"]
    limit = shards[0].num_bytes + 1000

    data = load(web.url, "train", cache_dir=cache, cache_bytes=limit, errors="skip")
    first = data[0]

    assert f"and cache_bytes is {limit}" in caplog.text
    assert first["key"] == load(web.folder, "train")[0]["key"]
    with pytest.raises(
        OutputError, match=rf"{shards[1].file} has {shards[1].num_bytes} bytes and no room .* of the {limit}"
    ):
        read_all(data)
    assert sum((cache / name).stat().st_size for name in os.listdir(cache)) <= limit
    assert copies(cache, ".part") == []


def test_offsets_without_room_are_not_kept(web, cache):
    """They are then fetched each time."""
    shards = load(web.folder, "val").manifest.splits["val"]
    limit = sum(info.num_bytes for info in shards)

    for _ in range(2):
        assert len(read_all(load(web.url, "val", cache_dir=cache, cache_bytes=limit))) == 4

    assert [web.count(info.index_file) for info in shards] == [2, 2]
    assert [web.count(info.file) for info in shards] == [1, 1]


def test_offsets_are_scanned_once(web, cache, monkeypatch):
    """One shard is all that may be open, but a kept file of offsets is named after its content."""
    tested = []
    monkeypatch.setattr("datamat.readers.records._MOST_OPEN", 1)
    monkeypatch.setattr(records, "_tested", lambda *args, really=records._tested: tested.append(args) or really(*args))
    data = load(web.url, "train", cache_dir=cache)

    for _ in range(3):
        list(data), [data[place] for place in (0, -1, 1, -2)]

    assert len(data.files) == 2
    assert len(tested) == 2 * 2  # what came from the server, and the file that was made of it
    assert all(web.count(info.index_file) == 1 for info in data.manifest.splits["train"])


def test_offsets_without_room_are_fetched_once_by_each_dataset(web, cache, monkeypatch):
    """This holds although one shard is all that may be open."""
    monkeypatch.setattr("datamat.readers.records._MOST_OPEN", 1)
    shards = load(web.folder, "train").manifest.splits["train"]
    data = load(web.url, "train", cache_dir=cache, cache_bytes=sum(info.num_bytes for info in shards))

    for _ in range(3):
        list(data)

    assert [web.count(info.index_file) for info in shards] == [1, 1]


@pytest.mark.parametrize("is_remote", [True, False])
def test_copy_that_others_remove_before_it_is_opened_is_no_damage(web, cache, monkeypatch, is_remote):
    """Others needed the room: the copy is fetched again, or the shard is read where it is."""
    name = "fetch" if is_remote else "local"
    really, removed = getattr(ShardStore, name), []

    def made_room_at_once(self, info, source):
        copy = really(self, info, source)
        if len(removed) < 3:
            removed.append(copy.unlink())
        return copy

    monkeypatch.setattr(ShardStore, name, made_room_at_once)
    data = load(web.url if is_remote else web.folder, "train", cache_dir=cache, errors="skip")

    assert [sample["key"] for sample in data] == load(web.folder, "train").keys()
    assert data.num_skipped == 0
    assert len(removed) >= 2


@pytest.mark.parametrize("fault", [404, 403, 500, "cut", "silence"])
@pytest.mark.parametrize("ending", [".tfrecord", ".idx", "train.index"])
def test_network_failure_is_reported_and_leaves_nothing(copied, cache, ending, fault):
    """It is no damage, so no record is skipped; the same dataset reads on when the server is back."""
    with serving(copied) as web:
        data = load(web.url, "train", cache_dir=cache, errors="skip")
        web.faults[ending] = fault
        with pytest.raises(OutputError, match=f"{web.url}/.*{ending} cannot be read: .*; check the address") as failed:
            data[0], data.keys()
        left = copies(cache)
        web.faults.clear()
        found = read_all(data)

    shard = f"{data.manifest.splits['train'][0].checksum}.tfrecord"
    assert failed.value.__cause__ is not None
    assert left == {".tfrecord": [], ".idx": [shard], "train.index": [shard, f"{shard}.offsets"]}[ending]
    assert found == data.keys() == load(copied, "train").keys()


@pytest.mark.parametrize("is_given", [True, False])
def test_server_that_does_not_answer_times_out(web, cache, monkeypatch, is_given):
    """The limit is a minute unless the options set another."""
    aiohttp = pytest.importorskip("aiohttp")
    options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.3)}} if is_given else None
    monkeypatch.setattr("datamat.readers.remote._WAIT_S", 60 if is_given else 0.3)
    web.faults["manifest.json"] = "stall"

    with pytest.raises(OutputError, match=r"manifest\.json cannot be read: .*TimeoutError"):
        load(web.url, cache_dir=cache, storage_options=options)


def test_server_that_is_down_is_reported(cache):
    """The error quotes the system."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        with pytest.raises(OutputError, match=f"{url}/manifest.json cannot be read: .*Connect"):
            load(url, cache_dir=cache)


def test_folder_without_manifest_is_reported(web, cache):
    """The error names the address."""
    with pytest.raises(OutputError, match=f"{web.url}/index/manifest.json cannot be read: FileNotFoundError"):
        load(f"{web.url}/index", cache_dir=cache)


def test_damaged_manifest_is_refused(web, copied, cache):
    """It is refused as on a local disk."""
    content = (copied / "manifest.json").read_bytes()
    (copied / "manifest.json").write_bytes(content.replace(b'"seed": 0', b'"seed": 1'))

    with pytest.raises(CorruptDataError, match=f"{web.url}/manifest.json was changed since it was written"):
        load(web.url, cache_dir=cache)


def test_damaged_shard_is_fetched_once(web, copied, cache):
    """Its records are skipped if asked for, without fetching the shard for each of them."""
    data = load(web.url, "train", cache_dir=cache, errors="skip")
    info = data.manifest.splits["train"][0]
    content = bytearray((copied / info.file).read_bytes())
    content[-1] ^= 1
    (copied / info.file).write_bytes(content)

    found = read_all(data)

    assert found == load(copied, "train").keys()[info.num_records :]
    assert data.num_skipped == info.num_records
    assert web.count(info.file) == 1
    with pytest.raises(CorruptDataError, match=f"{web.url}/{info.file} is not what the manifest says: checksum"):
        data[0]


def test_damage_of_a_copy_is_reported_without_the_index(web, cache):
    """The error names the key where it is known; here it is not."""
    data = load(web.url, "train", cache_dir=cache)
    info = data.manifest.splits["train"][0]
    data[1]
    web.faults["train.index"] = 500
    with open(cache / f"{info.checksum}.tfrecord", "r+b") as file:
        file.seek(40)
        file.write(bytes(8))

    with pytest.raises(CorruptDataError, match=f"{info.checksum}.tfrecord: record 0"):
        data[0]


@pytest.mark.parametrize("content", ["", "0 1\n", "x\n"])
def test_damaged_copy_of_offsets_is_replaced(web, copied, cache, content):
    """The shard is not fetched again."""
    data = load(web.url, "train", cache_dir=cache)
    info = data.manifest.splits["train"][0]
    data[0]
    kept = cache / f"{info.checksum}.tfrecord.offsets"
    kept.write_text(content)

    again = load(web.url, "train", cache_dir=cache)[3]

    assert again["key"] == data[3]["key"]
    assert kept.read_text() == (copied / info.index_file).read_text()
    assert web.count(info.file) == 1


def test_copy_that_is_gone_is_reported(web, cache, monkeypatch):
    """Someone may empty the folder at any time: that is no damage, and no record is skipped."""
    data = load(web.url, "train", cache_dir=cache, errors="skip")
    monkeypatch.setattr("datamat.readers.cache.ShardStore.fetch", lambda *_: cache / "gone.tfrecord")

    with pytest.raises(OutputError, match=r"gone\.tfrecord: other processes remove it as often"):
        read_all(data)


def test_damaged_index_is_not_kept(web, copied, cache):
    """The index has a checksum, too."""
    path = copied / "_index/train.index"
    content = path.read_bytes()
    path.write_bytes(content[:-10] + bytes(10))
    data = load(web.url, "train", cache_dir=cache)

    with pytest.raises(CorruptDataError, match=r"_index/train.index is not what the manifest says"):
        data.keys()
    path.write_bytes(content)

    assert data.keys() == load(copied, "train").keys()


@pytest.mark.parametrize(
    ("which", "message"),
    [("others", "does not lead to the last record"), ("half", "line"), ("endless", "has over .* the most it may have")],
)
def test_offsets_of_other_records_are_not_kept(web, copied, cache, which, message):
    """They have no checksum of their own, and may have been fetched while the directory was replaced."""
    info = load(copied, "train").manifest.splits["train"][0]
    right = (copied / info.index_file).read_text()
    lines = [[*map(int, line.split())] for line in right.splitlines()]
    others = "".join(f"{offset - 1} {size}\n" if offset else f"0 {size - 1}\n" for offset, size in lines)
    wrong = {"others": others, "half": right[: len(right) // 2], "endless": right * 100}[which]
    (copied / info.index_file).write_text(wrong)

    with pytest.raises(CorruptDataError, match=f"{web.url}/{info.index_file}.*{message}"):
        load(web.url, "train", cache_dir=cache)[0]
    kept = copies(cache, ".offsets")
    (copied / info.index_file).write_text(right)

    assert wrong != right
    assert kept == []
    assert load(web.url, "train", cache_dir=cache)[0]["key"] == load(copied, "train")[0]["key"]


def test_service_is_refused(web, cache):
    """Its workers would have to read the URL with TensorFlow."""
    pytest.importorskip("tensorflow")

    with pytest.raises(OptionError, match=f"open the shards themselves, and {web.url}/.* lies behind a URL; copy"):
        load(web.url, "train", cache_dir=cache).to_tf(4, service="grpc://127.0.0.1:1")


@pytest.mark.parametrize(
    ("scheme", "module", "line"),
    [
        ("s3", "s3fs", r"pip install 'datamat\[s3\]'"),
        ("gs", "gcsfs", "pip install 'gcsfs'"),
        ("https", "aiohttp", "pip install 'aiohttp'"),
        ("smb", "smbprotocol", "smb"),
    ],
)
def test_missing_package_is_named(scheme, module, line, tmp_path, monkeypatch):
    """The error has the line that installs it."""
    registry = pytest.importorskip("fsspec.registry")
    monkeypatch.delitem(registry._registry, scheme, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith(f"fsspec.implementations.{scheme}")]:
        monkeypatch.delitem(sys.modules, name)

    with pytest.raises(MissingDependencyError, match=f"{scheme}://bucket/out/manifest.json needs a package .*{line}"):
        load(f"{scheme}://bucket/out", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("http://h/out", {}, r"cache_dir is None; name a folder: load\('http://h/out', cache_dir="),
        ("nothing://h/out", {"cache_dir": "c"}, "nothing://h/out.*: Protocol not known"),
        ("simplecache::http://h/out", {"cache_dir": "c"}, "is a chain of filesystems"),
        ("out", {"storage_options": {"anon": True}}, "storage_options are for URLs, and out is a path"),
        (pathlib.Path("out"), {"storage_options": {}}, "storage_options are for URLs"),
    ],
)
def test_nonsense_is_refused(url, options, message, tmp_path, monkeypatch):
    """The error comes before any request."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(OptionError, match=message):
        load(url, **options)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/x", True),
        ("simplecache::s3://b/x", True),
        ("C:/data", False),
        ("C://data", False),
        ("out/s3://b", False),
        ("", False),
        (pathlib.Path("out"), False),
    ],
)
def test_urls_are_distinguished_from_paths(path, expected):
    """A drive letter of Windows is no scheme."""
    assert is_url(path) is expected
