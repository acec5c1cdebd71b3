"""A small dataset with every kind of column, finished in each format; clients are held to its samples.

Clients open it by the lines of `docs/interop.md`: what is documented is what is tested.
"""

from __future__ import annotations

import functools
import os
import sys
import threading

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DO_NOT_TRACK="1")  # set before a client reads them

import pytest
import streets
from breaking_proxy import KEY, SECRET, Proxy
from documented import LINES, PAGE

from datamat import Materializer, ShardOptions, load


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """Give a function that returns the finished directory of a format, made once."""

    @functools.cache
    def directory(name, writer=streets.Streets):
        folder = tmp_path_factory.mktemp(name.replace(".", "_")) / writer.name
        Materializer(writer(), None, folder, format=name, shards=ShardOptions(num_shards=4)).run(progress=False)
        return folder

    return directory


@pytest.fixture(scope="session")
def samples(directory):
    """The samples of the split `train`, by key, as datamat reads them from TFRecord."""
    return {sample["key"]: sample for sample in load(directory("tfrecord"), "train")}


@pytest.fixture
def java_ends(monkeypatch):
    """End the Java process that Spark keeps for the next session, which is one of another test file."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    yield
    pyspark = sys.modules.get("pyspark")
    if pyspark is not None and (gateway := pyspark.SparkContext._gateway) is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()  # for which it waits
        gateway.proc.wait()
        pyspark.SparkContext._gateway = pyspark.SparkContext._jvm = None


@pytest.fixture
def opened(directory, tmp_path, monkeypatch):
    """Give a function that runs the code under a heading of the page, and returns the variables that it sets."""

    def opened(heading, name, **given):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/streets").symlink_to(directory(name))
        monkeypatch.chdir(tmp_path)
        variables = {"__name__": "lines", **given}
        exec(compile(LINES[heading], f"{PAGE}: {heading}", "exec"), variables)
        return variables

    return opened


@pytest.fixture(scope="module")
def behind():
    """Host and port of a server that answers as S3 does, empty at first."""
    server = pytest.importorskip("moto.server")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield running.get_host_and_port()
    running.stop()


@pytest.fixture
def options(behind):
    """The options that s3fs needs for it."""
    return {"key": KEY, "secret": SECRET, "endpoint_url": f"http://{behind[0]}:{behind[1]}"}


@pytest.fixture
def proxy(behind):
    """A proxy before the server."""
    made = Proxy(behind)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()
