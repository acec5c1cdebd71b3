"""Objects written whole to servers on this machine that answer as stores do, through a proxy that breaks things.

What is asked of S3 where requests fail is in `directory/test_stores.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re

import pytest
from datamat.directory.stores import ObjectStore
from store_cases import StoreCases
from store_servers import KINDS

from datamat import OutputError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

# aiohttp warns of many bytes at once, which gcsfs and adlfs hand it.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")]

EVERY_STORE = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def store(server, request):
    """A folder in a bucket of its own."""
    bucket = f"b{hashlib.md5(request.node.name.encode()).hexdigest()}"
    server.files().mkdir(bucket)
    return ObjectStore(f"{server.kind}://{bucket}/sets/one", server.options())


@pytest.fixture
def through(store, server, proxy):
    """The same, behind the proxy."""
    return ObjectStore(store.url, server.options(proxy.server_port))


@EVERY_STORE
class TestServers(StoreCases):
    @pytest.fixture(autouse=True)
    def knows_secret(self, server):
        self.secret = server.secret


@pytest.mark.parametrize(("kind", "states"), [("az", ["pending", "pending"]), ("az", ["failed"])])
def test_copy_that_takes_a_while_is_waited_for(store, through, proxy, states):
    """One that fails is an error, not an object of no bytes."""
    store.put("one", b"content")
    proxy.alter = lambda headers: {
        name: states.pop(0) if name == "x-ms-copy-status" and states else value for name, value in headers.items()
    }
    fails = "failed" in states

    with pytest.raises(OutputError, match="has ended as failed") if fails else contextlib.nullcontext():
        if fails:
            states *= 5
        through.copy("one", "two")

    assert not states
    assert sum(line.startswith("PUT") for line in proxy.seen) == (5 if fails else 1)


@pytest.mark.parametrize("kind", ["gs", "az"])
@pytest.mark.parametrize("size", [7, 9 << 20])
def test_other_digest_is_damage(through, proxy, tmp_path, size):
    """What the store says of the bytes is compared with those that were sent."""
    (tmp_path / "file").write_bytes(bytes(size))
    wrong = {"content-md5": "AAAAAAAAAAAAAAAAAAAAAA=="}
    proxy.alter = lambda headers: {**headers, **(wrong if "x-ms-blob-type" in headers else {})}
    proxy.rewrite = lambda content: re.sub(rb'"crc32c":"[^"]*"', b'"crc32c":"AAAAAA=="', content)

    with pytest.raises(OutputError, match=r"the [^ ]+ [^ ]+, what was sent has .* damaged on its way") as caught:
        through.upload(tmp_path / "file", "file", "abc")
    assert re.search(r"file has the (CRC32C AAAAAA==|MD5 0+), ", str(caught.value))


@pytest.mark.parametrize(("kind", "fault"), [("gs", "lose"), ("gs", "cut"), ("gs", 503), ("az", "lose"), ("az", 500)])
def test_answer_that_is_lost_is_asked_for_again(store, through, proxy, tmp_path, fault):
    """Whatever request of an upload it is of, small or large, new or in the place of another object."""
    for size in (7, 9 << 20):
        (tmp_path / "file").write_bytes(os.urandom(size))
        for checksum in ("first", "second"):
            tried = set()

            def meet(_, handler, tried=tried):
                known = f"{handler.command} {re.sub('[0-9a-f]{32}', '', handler.path)}"
                # Google answers whoever repeats the last request of an upload; the emulator hangs up.
                is_last = fault == "lose" and "upload_id=" in handler.path
                if known in tried or handler.command not in {"PUT", "POST"} or is_last:
                    return None
                tried.add(known)
                return fault

            proxy.meet = meet
            through.upload(tmp_path / "file", f"file-{size}", checksum)

            assert store.get(f"file-{size}") == (tmp_path / "file").read_bytes()
            assert tried


@pytest.mark.parametrize("kind", ["gs"])
@pytest.mark.parametrize("status", [404, 410])
def test_upload_that_the_store_has_given_up_begins_again(store, through, proxy, tmp_path, status):
    """Its session has gone, not the bucket."""
    (tmp_path / "file").write_bytes(os.urandom(9 << 20))
    gone = []

    def meet(_, handler):
        if not gone and "upload_id=" in handler.path:
            gone.append(handler.path)
            return status
        return None

    proxy.meet = meet

    through.upload(tmp_path / "file", "file", "abc")

    assert gone
    assert store.get("file") == (tmp_path / "file").read_bytes()


@EVERY_STORE
def test_object_that_changes_meanwhile_is_not_replaced(store, through, proxy, tmp_path):
    """Not even where it is small, and was looked at a moment ago."""
    (tmp_path / "file").write_bytes(b"mine")
    before = store.put("file", b"before")

    def meet(_, handler):
        if handler.command == "PUT" or "/compose" in handler.path:
            proxy.meet = lambda number, handler: None
            store.put("file", b"of another")
            # As Google answers; its emulator keeps no such condition.
            return 412 if f"ifGenerationMatch={before.identity}" in handler.path else None
        return None

    proxy.meet = meet

    with pytest.raises(OutputError, match=r"file holds .* where 4 bytes with the checksum abc belong; something else"):
        through.upload(tmp_path / "file", "file", "abc")
    assert store.get("file") == b"of another"
