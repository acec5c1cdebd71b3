"""A finished directory in a bucket, read from a server on this machine that answers as S3 does."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib
import re

import numpy as np
import pytest

from datamat import OutputError, WorkerOptions, convert, load, verify

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = pytest.mark.long


@pytest.fixture
def upload(options):
    """Give a function that uploads a directory to a new public bucket, and returns its URL."""
    import s3fs

    def upload(folder, bucket):
        files = s3fs.S3FileSystem(**options, s3_additional_kwargs={"ACL": "public-read"}, skip_instance_cache=True)
        files.mkdir(bucket)
        files.put(f"{folder}/", f"{bucket}/sets/{folder.name}/", recursive=True)
        return f"s3://{bucket}/sets/{folder.name}"

    return upload


def keys_in(place):
    """Return the keys of a directory, read record by record: for other processes."""
    url, cache_dir, options = place
    return [sample["key"] for sample in load(url, "train", cache_dir=cache_dir, storage_options=options)]


@pytest.mark.parametrize("name", ["tfrecord", "parquet", "webdataset"])
def test_bucket_holds_the_samples(directory, upload, options, tmp_path, name):
    """They come in order, by key, and in batches that processes make."""
    local = load(directory(name), "train")
    url = upload(directory(name), name)

    data = load(url, "train", cache_dir=tmp_path / "cache", storage_options=options)
    found = list(data)
    batches = list(data.to_numpy(4, num_workers=2))

    assert data.keys() == local.keys()
    assert [sample["key"] for sample in found] == local.keys()
    assert all(np.array_equal(sample["image"], other["image"]) for sample, other in zip(found, local, strict=True))
    assert [key for batch in batches for key in batch["key"]] == local.keys()
    assert data[local.keys()[-1]]["key"] == local.keys()[-1]


def test_silent_and_slow_server_gives_the_samples(directory, upload, options, proxy, tmp_path):
    """Requests that get no answer are given up and made again; those that get it late count."""
    url = upload(directory("tfrecord"), "silent")
    faults = ["hang", "slow", "cut", "hang"]
    proxy.meet = lambda number, handler: faults.pop() if number % 2 and faults else None
    endpoint = f"http://127.0.0.1:{proxy.server_port}"
    options = {**options, "endpoint_url": endpoint, "config_kwargs": {"read_timeout": 1}}

    data = load(url, "train", cache_dir=tmp_path / "cache", storage_options=options)

    assert [sample["key"] for sample in data] == load(directory("tfrecord"), "train").keys()
    assert not faults


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_processes_share_a_cache(directory, upload, options, tmp_path, start_method):
    """So do processes forked from one that has read."""
    folder = directory("tfrecord")
    url = upload(folder, f"shared-{start_method}")
    load(url, "train", cache_dir=tmp_path / "mine", storage_options=options)[0]

    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context(start_method)) as pool:
        found = list(pool.map(keys_in, [(url, tmp_path / "cache", options)] * 2))

    again = load(url, "train", cache_dir=tmp_path / "mine", storage_options=options)
    assert found == [load(folder, "train").keys()] * 2
    assert [sample["key"] for sample in again] == found[0]


def test_forked_workers_convert_a_bucket(directory, upload, options, tmp_path):
    """The process that started them has read the manifest, and goes on reading afterwards."""
    folder = directory("tfrecord")
    url = upload(folder, "forked")
    how = {"format": "parquet", "source_options": options, "workers": WorkerOptions(2, start_method="fork")}

    assert convert(url, tmp_path / "out", progress=False, **how).is_complete
    assert load(tmp_path / "out").keys() == load(folder).keys()
    assert verify(url, storage_options=options).ok


def test_documented_line_runs(directory, upload, options, tmp_path, monkeypatch):
    """It is the line of `docs/reading.md`, with a bucket that exists."""
    page = pathlib.Path(__file__).parents[2] / "docs/reading.md"
    (line,) = re.findall(r"^```py3\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    folder = directory("tfrecord")
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = line.replace("s3://bucket/camvid", upload(folder, "line"))
    names = {"load": load}

    exec(there, names)

    assert there.count("s3://line/sets/") == 1
    assert [sample["key"] for sample in names["remote"]] == load(folder, "train").keys()
    assert os.listdir(tmp_path / "datamat")


def test_object_that_was_replaced_is_noticed(directory, upload, options, tmp_path):
    """This holds although s3fs remembers the sizes of objects that it has listed."""
    import s3fs

    url = upload(directory("tfrecord"), "replaced")
    files = s3fs.S3FileSystem(**options)
    files.ls(url)
    load(url, cache_dir=tmp_path / "cache", storage_options=options)
    other = directory("webdataset")
    outside = s3fs.S3FileSystem(**options, skip_instance_cache=True)  # as another machine has it
    outside.put_file(f"{other}/manifest.json", f"{url}/manifest.json")

    assert load(url, cache_dir=tmp_path / "cache", storage_options=options).manifest.format == "webdataset"


def test_missing_object_and_bucket_are_reported(directory, upload, options, tmp_path):
    """The error gives their addresses, and no half of a shard is left behind."""
    import s3fs

    url = upload(directory("tfrecord"), "missing")
    data = load(url, "train", cache_dir=tmp_path / "cache", storage_options=options)
    shard = data.files[0]
    s3fs.S3FileSystem(**options).rm(shard)

    with pytest.raises(OutputError, match=f"{shard} cannot be read: FileNotFoundError"):
        data[0]
    with pytest.raises(OutputError, match=r"s3://nowhere/out/manifest\.json cannot be read: "):
        load("s3://nowhere/out", cache_dir=tmp_path / "cache", storage_options=options)
    assert [name for name in os.listdir(tmp_path / "cache") if not name.endswith((".lock", ".idx"))] == []
