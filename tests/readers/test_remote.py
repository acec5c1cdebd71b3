"""Directories behind URLs: read as written, each file fetched once, and no trace of failed attempts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import html
import itertools
import multiprocessing
import os
import pathlib
import pickle
import re
import shutil
import socket
import sys
import threading

import numpy as np
import pytest
from loopback_s3 import md5_of, s3
from web import serving

from datamat import (
    CorruptDataError,
    DatasetWriter,
    Features,
    IndexRow,
    Manifest,
    Materializer,
    MissingDependencyError,
    OptionError,
    OutputError,
    ShardOptions,
    Tensor,
    describe,
    load,
    materialize,
    view,
)
from datamat.folders import open_folder
from datamat.readers.cache import ShardStore
from datamat.testing import InlineExecutor

__all__ = ["s3"]

pytest.importorskip("aiohttp")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """What fails is tried again at once; however slow the machine is, no look at the manifest is due."""
    monkeypatch.setattr("datamat.folders.retries._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("datamat.readers.remote._CHECK_S", 3600)


@pytest.fixture
def always_looks(monkeypatch):
    """A look at the manifest is due before each use of a shard."""
    monkeypatch.setattr("datamat.readers.remote._CHECK_S", 0)


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


def arrived():
    """Wait for the shards that are being fetched, and for those that are begun when one of them is here."""
    while running := [thread for thread in threading.enumerate() if thread.name.startswith("datamat-fetch")]:
        running[0].join(20)


def flip(path, place):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def same(one, other):
    """Return True if two samples are equal."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def keys_in(place):
    """Return the keys of a directory, read record by record: for other processes."""
    url, cache = place
    return [sample["key"] for sample in load(url, cache_dir=cache)]


def read_all(data):
    """Read a dataset: for other processes."""
    return [sample["key"] for sample in data]


@pytest.mark.parametrize(
    ("name", "ranges"), [("tfrecord", True), ("tfrecord.gz", False), ("parquet", True), ("webdataset", False)]
)
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


def test_index_that_is_missing_is_named_on_the_page(copied, web, cache):
    """The samples are shown all the same."""
    (copied / "_index/val.index").unlink()

    page = view(web.url, "val", count=2, cache_dir=cache)

    assert f"{web.url}/_index/val.index is missing; run the job again to rebuild it" in html.unescape(page.html)
    assert page.num_samples == 2


def test_inspection_of_a_directory_without_its_first_shard(copied, web):
    """It is what would be looked at."""
    first = Manifest.read(copied).shards[0].file
    (copied / first).unlink()

    with pytest.raises(OutputError, match=rf"{web.url}/{first} is missing; run the job again to rebuild it"):
        describe(web.url)


def test_dataset_shows_its_url(web, cache):
    """Options, which may hold secrets, are not shown."""
    data = load(web.url + "/", "train", cache_dir=cache, storage_options={"headers": {"X-Secret": "hush"}})

    assert data.files == [f"{web.url}/{info.file}" for info in data.manifest.splits["train"]]
    assert str(data.path) == web.url + "/"
    assert web.url in repr(data)
    assert "hush" not in repr(data) + repr(data.path)
    assert web.headers[-1]["X-Secret"] == "hush"


def test_files_are_fetched_when_needed_and_once(web, cache):
    """One record is a range of its shard; the epoch fetches each shard, and the next dataset the manifest alone."""
    data = load(web.url, "train", cache_dir=cache)
    at_first = list(web.asked)
    data[0]
    after_one = list(web.asked)
    read_all(data)
    data.keys()
    arrived()

    again = load(web.url, "train", cache_dir=cache)
    read_all(again)
    again.keys()

    one, other = data.manifest.splits["train"]
    assert at_first == ["/manifest.json"]
    assert after_one == [*at_first, f"/{one.index_file}", f"/{one.file}"]
    assert web.headers[2]["Range"] is not None
    assert sorted(web.asked[3:]) == sorted(
        [f"/{one.file}", f"/{other.file}", f"/{other.index_file}", "/_index/train.index", "/manifest.json"]
    )


def test_copies_serve_at_another_address(web, copied, cache):
    """Copies are named by their content."""
    expected = read_all(load(web.url, "train", cache_dir=cache))
    arrived()

    with serving(copied) as moved:
        found = read_all(load(moved.url, "train", cache_dir=cache))

    assert found == expected
    assert moved.asked == ["/manifest.json"]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_share_fetched_files(pairs, web, cache, start_method):
    """Each shard is fetched once by all of them."""
    with concurrent.futures.ProcessPoolExecutor(3, multiprocessing.get_context(start_method)) as pool:
        found = list(pool.map(keys_in, [(web.url, cache)] * 3))

    shards = load(pairs).manifest.shards
    assert found == [load(pairs).keys()] * 3
    assert [web.count(info.file) for info in shards] == [1] * len(shards)
    assert copies(cache, ".part") == []


def test_pickled_dataset_and_workers_read(pairs, web, cache):
    """Workers are the processes that make batches."""
    data = load(web.url, "val", cache_dir=cache)
    data[0]  # this process has connections, which those of the workers must not be

    copied = pickle.loads(pickle.dumps(data))
    batches = list(data.to_numpy(2, num_workers=2))

    assert read_all(copied) == load(pairs, "val").keys()
    assert [key for batch in batches for key in batch["key"]] == load(pairs, "val").keys()


@pytest.mark.long
def test_spawned_process_reads(pairs, web, cache):
    data = load(web.url, "val", cache_dir=cache)

    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(read_all, data).result() == load(pairs, "val").keys()


def test_connections_outlive_what_a_forked_process_drops(web):
    """If a child closed its parent's connection, the parent would wait for ever for the next answer."""
    folder = open_folder(web.url)
    content = folder.read("manifest.json", 1 << 20)

    def read_and_collect():
        folder.read("manifest.json", 1 << 20)
        gc.collect()

    child = multiprocessing.get_context("fork").Process(target=read_and_collect)
    child.start()
    child.join(20)

    assert child.exitcode == 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(folder.read, "manifest.json", 1 << 20).result(20) == content


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


class Numbers(DatasetWriter):
    """Arrays of one size, which hold the number of the row and that of the version."""

    name = "numbers"
    features = Features({"array": Tensor((64,), "int64")})

    def __init__(self, version):
        self.version = version

    def index(self, source):
        return [IndexRow(f"k{number:02d}", fields={"version": self.version}) for number in range(40)]

    def read(self, row):
        return {"array": np.full(64, 40 * self.version + int(row.key[1:]))}


@pytest.fixture(scope="session")
def versions(tmp_path_factory):
    """Two versions of a dataset, whose files have the same names, sizes and offsets. Read only."""
    folders = []
    for version in range(2):
        folders.append(tmp_path_factory.mktemp("version") / "out")
        cut = ShardOptions(num_shards=4)
        Materializer(Numbers(version), None, folders[-1], shards=cut).run(executor=InlineExecutor(), progress=False)
    one, other = (load(folder).manifest.shards for folder in folders)
    assert [(info.file, info.num_bytes) for info in one] == [(info.file, info.num_bytes) for info in other]
    assert [info.checksum for info in one] != [info.checksum for info in other]
    assert all(
        (folders[0] / one[n].index_file).read_bytes() == (folders[1] / one[n].index_file).read_bytes() for n in range(4)
    )
    return folders


def read_by_number(data):
    """Yield arrays as one program may read them."""
    return (data[number]["array"] for number in range(len(data)))


def until_it_fails(arrays):
    """Return the numbers that come, and what the error says that ends them."""
    found = []
    try:
        for array in arrays:
            found.append(int(array[0]))
    except OutputError as error:
        return found, str(error)
    return found, ""


READING = {
    "numbers": read_by_number,
    "order": lambda data: (sample["array"] for sample in data),
    "batches": lambda data: (array for batch in data.to_numpy(3) for array in batch["array"]),
    "shuffled": lambda data: (array for batch in data.to_numpy(3, shuffle=True) for array in batch["array"]),
}


SEEN = ["nothing", "a record", "a shard", "a record of each shard"]
IN_EACH_COMMIT = {("order", SEEN[0]), ("numbers", SEEN[1]), ("batches", SEEN[2]), ("shuffled", SEEN[3])}


@pytest.mark.usefixtures("always_looks")
@pytest.mark.parametrize(
    ("way", "seen"),
    [
        pytest.param(*case, marks=() if case in IN_EACH_COMMIT else pytest.mark.long)
        for case in itertools.product(READING, SEEN)
    ],
)
def test_replaced_directory_of_the_same_sizes_is_refused(versions, cache, way, seen):
    """Nothing but the manifest shows that a range is of another record: what is whole here is read on."""
    with serving(versions[0]) as web:
        data = load(web.url, cache_dir=cache, errors="skip")
        info = data.manifest.shards[0]
        if seen == "a shard":
            ShardStore(cache, 1 << 30, [info]).fetch(info, open_folder(web.url))
        elif seen != "nothing":
            starts = itertools.accumulate([0, *(info.num_records for info in data.manifest.shards[:-1])])
            assert [data[start]["key"] for start in starts if start == 0 or seen != "a record"]
        web.folder = versions[1]

        found, problem = until_it_fails(READING[way](data))
        arrived()
        again = [int(array[0]) for array in READING[way](load(web.url, cache_dir=cache))]

    is_refused = "is no longer the file that was loaded: a run has replaced it; load" in problem
    assert is_refused or sorted(found) == list(range(40)), "small shards may be here as a whole by then"
    assert [number for number in found if number >= 40] == []
    assert sorted(again) == list(range(40, 80))


@pytest.mark.usefixtures("always_looks")
def test_directory_that_is_being_replaced_is_refused(versions, cache, tmp_path):
    """A run has removed the manifest, and no shard yet: what comes next may be of the new dataset."""
    copied = shutil.copytree(versions[0], tmp_path / "out")
    with serving(copied) as web:
        data = load(web.url, cache_dir=cache)
        (copied / "manifest.json").rename(copied / "aside")

        with pytest.raises(OutputError, match=r"manifest\.json has gone since it was loaded: a run is replacing"):
            data[0]
        (copied / "aside").rename(copied / "manifest.json")

        assert same(data[0], load(copied)[0])


@pytest.mark.usefixtures("always_looks")
def test_shards_that_a_run_has_kept_are_read_on(versions, cache, tmp_path):
    """The new manifest lists them, with the same checksums."""
    copied = shutil.copytree(versions[0], tmp_path / "out")
    infos = load(copied).manifest.shards
    kept = list(load(copied))[: infos[0].num_records]
    with serving(copied) as web:
        data = load(web.url, cache_dir=cache)
        manifest = load(versions[1]).manifest
        dataclasses.replace(manifest, shards=(infos[0], *manifest.shards[1:])).write(copied)
        shutil.copy(versions[1] / infos[1].file, copied)

        assert all(same(data[number], sample) for number, sample in enumerate(kept))
        with pytest.raises(OutputError, match=f"{infos[1].file} is no longer the file that was loaded"):
            data[len(kept)]
        assert same(data[0], kept[0])


@pytest.mark.parametrize("travels", [False, True])
def test_range_of_another_version_is_refused(s3, cache, tmp_path, travels):
    """Although its records are intact, its ends those of before, and the manifest is not there yet."""
    order = []
    for folder in ("old", "new"):
        arrays = [np.random.default_rng([number, number in order[1:-1]]).bytes(1 << 14) for number in range(12)]
        rows = [{"number": number, "array": np.frombuffer(array, "uint8")} for number, array in enumerate(arrays)]
        options = {"key": "number", "shards": 1, "executor": InlineExecutor(), "progress": False}
        materialize(dict, rows, tmp_path / folder, **options)
        order = [sample["number"] for sample in load(tmp_path / folder)]

    def serve(pattern):
        for path in filter(pathlib.Path.is_file, tmp_path.glob(pattern)):
            s3.write(f"bucket/set/{path.name}", path.read_bytes(), md5_of(path.read_bytes()).hexdigest(), {})

    serve("old/*")
    data = load("s3://bucket/set", cache_dir=cache, errors="skip")
    assert [data[number]["number"] for number in range(3)] == order[:3]
    serve("new/*.tfrecord")
    data = pickle.loads(pickle.dumps(data)) if travels else data

    for _ in range(2):
        with pytest.raises(
            OutputError, match=r"data-train-00000-of-00001\.tfrecord is no longer the file that was loaded"
        ):
            data[5]
    serve("new/*")
    assert same(load("s3://bucket/set", cache_dir=cache)[5], load(tmp_path / "new")[5])


@pytest.mark.usefixtures("always_looks")
@pytest.mark.parametrize("way", ["keys", "a key"])
def test_replaced_index_is_refused(versions, cache, way, caplog):
    """It is no damage, of which the log would tell."""
    with serving(versions[0]) as web:
        data = load(web.url, cache_dir=cache)
        web.folder = versions[1]

        with pytest.raises(OutputError, match="is no longer the file that was loaded"):
            data.keys() if way == "keys" else data["k03"]

    assert "repair" not in caplog.text


def size_of(folder):
    """Return the bytes of the files in a folder, from which a thread may take some meanwhile."""
    found = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


@pytest.mark.parametrize(("name", "room"), [("tfrecord", 0), ("tfrecord.gz", 1), ("parquet", 1), ("webdataset", 0)])
def test_dataset_may_be_larger_than_the_cache(formats, cache, name, room):
    """A shard that was read makes room for the next one; where none fits, records are read by ranges."""
    expected = load(formats, "train", format=name)
    shards = expected.manifest.of_format(name).splits["train"]
    limit = room * max(info.num_bytes for info in shards) + 1000

    with serving(formats) as web:
        data = load(web.url, "train", format=name, cache_dir=cache, cache_bytes=limit)
        for _ in range(2):
            assert [sample["key"] for sample in data] == [sample["key"] for sample in expected]
            assert size_of(cache) <= limit
        shuffled = [one["key"] for one in data.to_numpy(3, shuffle=True, seed=1)]

        arrived()

    assert copies(cache, ".part") == copies(cache, ".scratch") == []
    assert shuffled == [one["key"] for one in expected.to_numpy(3, shuffle=True, seed=1)]


@pytest.mark.parametrize("is_remote", [True, False])
def test_copy_that_others_remove_before_it_is_opened_is_no_damage(web, cache, monkeypatch, is_remote):
    """Others needed the room: the copy is fetched again, or the shard is read where it is."""
    really, removed = ShardStore.fetch_if_it_fits, []

    def made_room_at_once(self, info, source, **more):
        copy = really(self, info, source, **more)
        if len(removed) < 3:
            copy.unlink(missing_ok=True)  # two threads may have been given the same copy
            removed.append(copy)
        return copy

    monkeypatch.setattr(ShardStore, "fetch_if_it_fits", made_room_at_once)
    data = load(web.url if is_remote else web.folder, "train", cache_dir=cache, errors="skip")

    assert [sample["key"] for sample in data] == load(web.folder, "train").keys()
    assert data.num_skipped == 0
    assert len(removed) >= 2


@pytest.mark.parametrize(
    ("ending", "fault"),
    [(".tfrecord", 404), (".tfrecord", "silence"), (".idx", 500), (".idx", 403), ("train.index", "cut")],
)
def test_network_failure_is_reported_and_leaves_nothing(copied, cache, ending, fault):
    """It is no damage, so no record is skipped; the same dataset reads on when the server is back."""
    with serving(copied) as web:
        data = load(web.url, "train", cache_dir=cache, errors="skip")
        web.faults[ending] = fault
        with pytest.raises(OutputError, match=f"{web.url}/.*{ending} cannot be read: .*; check the address") as failed:
            data[0], data.keys()
        left, before = [name for name in copies(cache) if not name.endswith(".idx")], web.count(ending)
        web.faults.clear()
        found = read_all(data)

    assert failed.value.__cause__ is not None
    assert left == []
    assert before == 1 if fault in (403, 404) else before >= 5
    assert found == data.keys() == load(copied, "train").keys()


@pytest.mark.parametrize("ending", [".tfrecord", ".idx", "train.index", "manifest.json"])
def test_failures_that_pass_are_survived(copied, cache, ending):
    """Each request may fail a few times, in any way that a busy server knows."""
    expected = load(copied, "train").keys()
    with serving(copied) as web:
        web.faults[ending] = [503, 500, "cut", 429]
        data = load(web.url, "train", cache_dir=cache)
        one = data[expected[-1]]["key"]
        web.faults[ending] = [502, 504, "cut"]
        found = read_all(data), data.keys()
        arrived()

    assert one == expected[-1]
    assert found == (expected, expected)


@pytest.mark.parametrize("ranges", [True, False])
def test_cut_file_continues_where_it_ended(tmp_path, ranges):
    """A server without ranges sends it again from its beginning, which is dropped."""
    content = np.random.default_rng(1).bytes(9 << 20)
    (tmp_path / "large").write_bytes(content)

    with serving(tmp_path, ranges=ranges) as web:
        web.faults["large"] = ["cut", 503, "cut"]
        found = b"".join(open_folder(web.url).blocks("large", len(content)))

    assert found == content
    assert "Range" not in web.headers[0]
    assert re.fullmatch(r"bytes=[1-9]\d+-9437183", web.headers[1]["Range"])


def test_shards_are_fetched_ahead(web, cache):
    """The first sample is all that was asked for, and the next shards are on their way."""
    data = load(web.url, cache_dir=cache)
    walk = iter(data)

    next(walk)
    arrived()
    web.faults[".tfrecord"] = 404

    assert len(data.files) == 4
    assert [sample["key"] for sample in walk] == data.keys()[1:]


def test_shards_of_partners_are_fetched_ahead(web, copied, cache):
    """As those of the records themselves, from wherever they come."""
    here = load(copied)
    walk = iter(here.join(load(web.url, cache_dir=cache), prefix="far_"))

    next(walk)
    arrived()
    web.faults[".tfrecord"] = 404

    for sample, own in zip(walk, here[1:], strict=True):
        assert np.array_equal(sample["far_image"], own["image"])


def test_record_by_key_is_a_range_of_its_shard(web, copied, cache):
    """Neither the rest of the shard nor another one is fetched."""
    data = load(web.url, "train", cache_dir=cache)
    key = load(copied, "train").keys()[-2]

    sample = data[key]

    assert sample["key"] == key
    assert copies(cache, ".tfrecord") == []
    asked = [headers for path, headers in zip(web.asked, web.headers, strict=True) if path.endswith(".tfrecord")]
    assert [headers["Range"] is not None for headers in asked] == [True]


@pytest.mark.parametrize("fault", [403, "cut"])
def test_secrets_of_url_and_options_are_never_shown(copied, cache, caplog, fault):
    """Neither user and password, nor a signature, nor a token in an error, a log, or the chain of causes."""
    caplog.set_level("DEBUG")
    secrets = ["open-sesame", "swordfish", "sig%2Fna%2Bture", "sig/na+ture", "tok-en-123"]
    with serving(copied) as web:
        url = web.url.replace("://", "://swordfish:open-sesame@") + "?X-Signature=sig%2Fna%2Bture&v=1"
        options = {"headers": {"X-Token": "tok-en-123"}}
        data = load(url, "train", cache_dir=cache, storage_options=options)
        said = [repr(data), str(data.path), repr(data.path), *data.files]
        web.faults[".tfrecord"] = fault
        with pytest.raises(OutputError) as failed:
            read_all(data)

    assert "?X-Signature=" in web.asked[0]
    error = failed.value
    while error is not None:
        said += [str(error), repr(error)]
        error = error.__cause__ or error.__context__
    own = [record.getMessage() for record in caplog.records if record.name.startswith("datamat")]
    assert [secret for secret in secrets if secret in " ".join(said + own)] == []


@pytest.mark.parametrize("is_given", [True, pytest.param(False, marks=pytest.mark.long)])
def test_server_that_does_not_answer_times_out(web, cache, monkeypatch, is_given):
    """The limit is a minute unless the options set another."""
    aiohttp = pytest.importorskip("aiohttp")
    options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.3)}} if is_given else None
    monkeypatch.setattr("datamat.folders.other._WAIT_S", 60 if is_given else 0.3)
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


def test_damaged_manifest_is_refused(web, copied, cache):
    """It is refused as on a local disk."""
    content = (copied / "manifest.json").read_bytes()
    (copied / "manifest.json").write_bytes(content.replace(b'"seed": 0', b'"seed": 1'))

    with pytest.raises(CorruptDataError, match=f"{web.url}/manifest.json was changed since it was written"):
        load(web.url, cache_dir=cache)


def test_damaged_shard_is_read_as_far_as_it_is_intact(web, copied, cache):
    """As in a local directory: the records that are damaged are skipped, and nothing is fetched for each of them."""
    data = load(web.url, "train", cache_dir=cache, errors="skip")
    info = data.manifest.splits["train"][0]
    flip(copied / info.file, -1)

    found = [read_all(data) for _ in range(2)]

    keys = load(copied, "train").keys()
    expected = [key for number, key in enumerate(keys) if number != info.num_records - 1]
    assert found == [expected] * 2
    assert data.num_skipped == 1
    arrived()
    assert copies(cache, ".part") == []
    with pytest.raises(CorruptDataError, match=f"{web.url}/{info.file}: record {info.num_records - 1} at byte"):
        data[info.num_records - 1]


@pytest.mark.parametrize("name", ["tfrecord", "parquet"])
def test_damaged_copy_is_fetched_again(formats, cache, name):
    """A disk that lies is no reason to stop, and none to skip a record."""
    expected = load(formats, "train", format=name)
    with serving(formats) as web:
        data = load(web.url, "train", format=name, cache_dir=cache, errors="skip")
        read_all(data)
        for path in cache.glob(f"*.{name}"):
            flip(path, path.stat().st_size // 3)
        again = load(web.url, "train", format=name, cache_dir=cache, errors="skip")
        found = list(again)

    assert all(map(same, found, list(expected)))
    assert len(found) == len(expected)
    assert again.num_skipped == 0
    assert [info.is_whole(cache / f"{info.checksum}.{name}") for info in again.manifest.splits["train"]] == [True] * 2


def test_damage_is_reported_under_the_name_of_the_shard(web, copied, cache):
    """Not under that of the copy, of which nobody knows where it came from."""
    data = load(web.url, "train", cache_dir=cache)
    info = data.manifest.splits["train"][0]
    read_all(data)
    for path in (cache / f"{info.checksum}.tfrecord", copied / info.file):
        flip(path, 40)

    with pytest.raises(CorruptDataError, match=f"^{web.url}/{info.file}: record 0 ") as failed:
        load(web.url, "train", cache_dir=cache)[0]
    assert str(cache) not in str(failed.value)


@pytest.mark.parametrize("content", ["", "0 1\n"])
def test_damaged_copy_of_offsets_is_replaced(web, copied, cache, content):
    """The shard is not fetched again."""
    data = load(web.url, "train", cache_dir=cache)
    info = data.manifest.splits["train"][0]
    read_all(data)
    kept = cache / f"{info.offsets.digest}.idx"
    kept.write_text(content)

    again = load(web.url, "train", cache_dir=cache)[3]

    assert again["key"] == data[3]["key"]
    assert kept.read_text() == (copied / info.index_file).read_text()
    assert web.count(info.file) == 1


def test_a_key_costs_the_file_of_hashes_and_its_record(web, copied, cache):
    """The index itself stays where it is, and the record that proves the key is not fetched again."""
    key = load(copied, "train").keys()[3]
    data = load(web.url, "train", cache_dir=cache)
    del web.asked[:]

    assert data[key]["key"] == key
    assert web.asked == ["/_index/train.keys", f"/{data.manifest.splits['train'][0].index_file}", *web.asked[2:]]
    assert set(web.asked[2:]) == {f"/{data.manifest.splits['train'][0].file}"}
    assert "nothing" not in load(web.url, "train", cache_dir=cache)
    assert "/_index/train.index" not in web.asked


@pytest.mark.parametrize("damage", ["missing", "other"])
def test_hashes_that_cannot_be_fetched_are_left_aside(web, copied, cache, damage, caplog):
    """The index has the keys, too."""
    path = copied / "_index/train.keys"
    keys = load(copied, "train").keys()
    content = path.read_bytes()
    path.unlink()
    if damage == "other":
        path.write_bytes(bytes(len(content)))

    assert load(web.url, "train", cache_dir=cache)[keys[3]]["key"] == keys[3]
    assert "run repair() to write it again" in caplog.text


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


@pytest.mark.parametrize("which", ["others", "half", "endless"])
def test_offsets_of_other_records_are_not_kept(web, copied, cache, which):
    """They may have been fetched while the directory was replaced."""
    info = load(copied, "train").manifest.splits["train"][0]
    right = (copied / info.index_file).read_text()
    lines = [[*map(int, line.split())] for line in right.splitlines()]
    others = "".join(f"{offset - 1} {size}\n" if offset else f"0 {size - 1}\n" for offset, size in lines)
    wrong = {"others": others, "half": right[: len(right) // 2], "endless": right * 100}[which]
    (copied / info.index_file).write_text(wrong)

    with pytest.raises(CorruptDataError, match=f"{web.url}/{info.index_file} is not what the manifest says"):
        load(web.url, "train", cache_dir=cache)[0]
    kept = copies(cache, ".idx")
    (copied / info.index_file).write_text(right)

    assert wrong != right
    assert kept == []
    assert load(web.url, "train", cache_dir=cache)[0]["key"] == load(copied, "train")[0]["key"]


def test_url_is_all_that_load_needs(web, copied, tmp_path, monkeypatch):
    """Copies go to the cache folder of the user, for nobody else to read; one of somebody else's is refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep" / "caches"))
    place = tmp_path / "deep/caches/datamat"

    found = list(load(web.url, "train"))
    arrived()
    asked = len(web.asked)
    again = read_all(load(web.url, "train"))

    assert all(map(same, found, load(copied, "train")))
    assert again == [sample["key"] for sample in found]
    assert web.asked[asked:] == ["/manifest.json"]
    assert place.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(place)
    place.symlink_to(tmp_path)
    with pytest.raises(OutputError, match=f"{place} is not a folder; .*cache_dir="):
        load(web.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(copied / "manifest.json"))
    with pytest.raises(OptionError, match="cache_dir="):
        load(web.url)


@pytest.mark.parametrize(
    ("scheme", "module", "line"),
    [
        ("hf", "huggingface_hub", "pip install 'huggingface_hub'"),
        ("https", "aiohttp", "pip install 'aiohttp'"),
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
