"""A small dataset with every kind of column, finished in each format; clients are held to its samples.

Clients open it by the lines of `docs/interop.md`: what is documented is what is tested.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading

# Set before a client reads them.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", DO_NOT_TRACK="1")
# gcsfs would ask Google for the kind of a bucket, by gRPC, and for the age of a token.
os.environ.update(GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false", FETCH_RAW_TOKEN_EXPIRY="false")

import pytest
import streets
from breaking_proxy import Proxy
from documented import LINES, PAGE
from store_servers import running

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
def servers():
    """Give a function that returns the server of a kind, which is started once, and empty at first."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda kind: stack.enter_context(running(kind)))


@pytest.fixture
def kind():
    """The kind of store that the server is one of; tests that hold for several are parametrized by it."""
    return "s3"


@pytest.fixture
def server(servers, kind):
    """A server that answers as a store does."""
    return servers(kind)


@pytest.fixture
def options(server):
    """The options that its driver needs."""
    return server.options()


@pytest.fixture
def proxy(server):
    """A proxy before the server."""
    made = Proxy(server.behind)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()
