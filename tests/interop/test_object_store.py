"""Objects written whole to servers on this machine that answer as stores do, through a proxy that breaks things."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import os
import pickle
import re

import pytest
from breaking_proxy import SECRET
from store_servers import KINDS

from datamat import OptionError, OutputError
from datamat.directory.remote import is_transient, redacted, retried
from datamat.directory.stores import ObjectStore, StoredObject

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

# aiohttp warns of many bytes at once, which gcsfs and adlfs hand it.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

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


def calls(store, operation, **values):
    """Return the answer of the server to a call of S3."""
    import s3fs

    bucket = store.url.split("/")[2]
    return s3fs.S3FileSystem(**store.options).call_s3(operation, Bucket=bucket, **values)


@EVERY_STORE
@pytest.mark.parametrize("size", [0, 5, (8 << 20) + 1, 20 << 20])
def test_file_becomes_an_object(store, tmp_path, size):
    """It is whole, has the store's digest of its bytes and our checksum, and is not sent twice."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))

    made = store.upload(path, "deep/file", "abc")
    again = store.upload(path, "deep/file", "abc")

    assert (made.num_bytes, made.checksum) == (size, "abc")
    assert again == made == store.head("deep/file")
    assert hashlib.md5(store.get("deep/file")).digest() == hashlib.md5(path.read_bytes()).digest()
    assert store.end_uploads() == 0


@EVERY_STORE
def test_other_bytes_replace_an_object(store, tmp_path):
    """The condition is that it is still the object that was looked at."""
    path = tmp_path / "file"
    for content in (b"one", b"three", bytes(9 << 20)):
        path.write_bytes(content)
        store.upload(path, "file", hashlib.md5(content).hexdigest())

        assert store.get("file") == content
    assert store.end_uploads() == 0


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


@EVERY_STORE
def test_name_is_granted_to_one(store, tmp_path):
    """Whoever asks at once; and a file is not written over what another has written since."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        granted = list(pool.map(lambda number: store.create("lease", f"{number}".encode()), range(8)))

    store.check_conditions("conditions")

    assert sum(granted) == 1


@EVERY_STORE
def test_listing_tells_names_and_ages(store):
    """By the clock of the store; and an object that is written again has another identity."""
    store.put("folder/one", b"1")
    store.put("folder/deep/two", b"2")
    store.put("folders", b"3")
    before = store.listed("folder")

    store.put("folder/one", b"4")

    assert [*before] == ["deep/two", "one"]
    assert store.listed("folder")["deep/two"] == before["deep/two"]
    assert store.listed("folder")["one"] == store.head("folder/one").identity != before["one"]
    assert all(-1 <= age <= 60 for age in store.ages("folder").values())
    assert {*store.ages("folder")} == {*before}
    assert store.listed("nothing") == {}


@EVERY_STORE
def test_missing_object_is_none(store):
    """Nothing is raised, and deleting it does no harm."""
    assert (store.head("nothing"), store.get("nothing")) == (None, None)
    store.delete(["nothing"])


@EVERY_STORE
def test_missing_bucket_is_refused_at_once(server):
    """The error says place and remedy, and no secret."""
    url = f"{server.kind}://nowhere/out"
    with pytest.raises(OutputError, match=rf"{url}/x cannot be written: .* make the bucket") as caught:
        ObjectStore(url, server.options()).put("x", b"")

    assert server.secret not in str(caught.value)


@EVERY_STORE
def test_copy_and_delete(store, tmp_path):
    """Both happen in the store, and the copy has the checksum."""
    (tmp_path / "one").write_bytes(b"content")
    store.upload(tmp_path / "one", "one", "abc")

    store.copy("one", "two")
    store.delete(["one"])

    assert (store.head("one"), store.get("two")) == (None, b"content")
    assert store.head("two").checksum == "abc"


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


@pytest.mark.parametrize(
    ("folder", "ends"),
    [
        ("/sets/one", ["sets/one/.datamat/held/a", "sets/one/a"]),
        ("", ["top"]),
    ],
)
def test_open_uploads_are_ended(store, folder, ends):
    """Those of other outputs stay: of a neighbour whose name begins alike, and of one in a folder of this one."""
    every = ["sets/one-other/a", "sets/one/.datamat/held/a", "sets/one/a", "sets/one/b/a", "top"]
    for name in every:
        calls(store, "create_multipart_upload", Key=name)

    ended = ObjectStore(store.url.removesuffix("/sets/one") + folder, store.options).end_uploads()

    assert ended == len(ends)
    left = sorted(upload["Key"] for upload in calls(store, "list_multipart_uploads")["Uploads"])
    assert left == sorted({*every} - {*ends})


def test_upload_that_a_kill_left_is_continued(store, tmp_path, proxy):
    """What is there, and right, is not sent again; what is wrong is. It is spared when others are ended."""
    path, notes = tmp_path / "file", tmp_path / "notes"
    path.write_bytes(os.urandom((16 << 20) + 5))
    through = ObjectStore(store.url, {**store.options, "endpoint_url": f"http://127.0.0.1:{proxy.server_port}"})
    refused = {"partNumber=3": 403}
    proxy.meet = lambda number, handler: next((refused[one] for one in refused if one in handler.path), None)
    with pytest.raises(OutputError, match="file cannot be written"):
        through.upload(path, "file", "abc", notes=notes)
    (upload,) = calls(store, "list_multipart_uploads")["Uploads"]
    more = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
    calls(store, "upload_part", **more, PartNumber=2, Body=b"wrong")
    refused.clear()
    before = len(proxy.seen)

    assert through.end_uploads(notes) == 0
    through.upload(path, "file", "abc", notes=notes)

    sent = sorted(line.partition("partNumber=")[2][0] for line in proxy.seen[before:] if "partNumber=" in line)
    assert sent == ["2", "3"]
    assert store.get("file") == path.read_bytes()
    assert not [*notes.iterdir()]


@pytest.mark.parametrize("kind", ["gs"])
@pytest.mark.parametrize("fault", ["", "gone", "changed", "refused", "too-long"])
def test_google_joins_chunks(store, through, proxy, tmp_path, fault, monkeypatch):
    """More than it takes at once; whatever is wrong with one, the object has the bytes of the file: they are sent."""
    content = os.urandom((1 << 20) + 5)
    path = tmp_path / "file"
    path.write_bytes(content)
    chunks = chunks_of(store, content, [10_000] * 80)
    if fault == "gone":
        store.delete(["chunks/1"])
        # As Google answers; the emulator calls it an error of its own.
        proxy.meet = lambda number, handler: 404 if "/compose" in handler.path else None
    elif fault == "changed":  # which Google refuses; the emulator joins it, and the CRC32C differs
        store.put("chunks/1", bytes(10_000))
    elif fault == "refused":
        proxy.meet = lambda number, handler: 403 if "/compose" in handler.path else None
    elif fault == "too-long":
        path.write_bytes(content[:700_000])
    first = len(proxy.seen)

    made = through.upload(path, "file", "abc", beginning=chunks)

    composed = [line for line in proxy.seen[first:] if "/compose" in line]
    sent = sum(
        int(headers["Content-Length"])
        for line, headers in zip(proxy.seen[first:], proxy.headers[first:], strict=True)
        if line.startswith("POST /upload/")
    )
    assert len(composed) == {"": 4, "gone": 1, "changed": 5, "refused": 1}.get(fault, 0)
    assert (sent < 300_000) == (fault == "")
    assert store.get("file") == path.read_bytes()
    assert (made.num_bytes, made.checksum) == (path.stat().st_size, "abc")
    assert [*store.listed(".datamat")] == []


@pytest.mark.parametrize("kind", ["gs"])
def test_what_a_kill_left_of_a_join_is_deleted(store, through, proxy, tmp_path):
    """A refused request stands in for the kill."""
    (tmp_path / "file").write_bytes(b"content")
    chunks = chunks_of(store, b"content", [3])
    faults = {"DELETE": 403, "/compose": 403}
    proxy.meet = lambda number, handler: next(
        (status for part, status in faults.items() if part in f"{handler.command} {handler.path}"), None
    )
    through.upload(tmp_path / "file", "file", "abc", beginning=chunks)

    assert len(store.listed(".datamat/uploads")) == 1
    assert store.end_uploads() == 1
    assert [*store.listed(".datamat")] == []


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


def chunks_of(store, content, sizes):
    """Write the beginning of a content as chunks of these sizes; return them."""
    ends = list(itertools.accumulate(sizes))
    return [
        store.put_chunk(f"chunks/{number}", content[end - size : end])
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def sent_parts(proxy, first):
    """Return the numbers of the parts that were copied and sent since a request, by their headers."""
    found = {True: [], False: []}
    for line, headers in zip(proxy.seen[first:], proxy.headers[first:], strict=True):
        if line.startswith("PUT") and "partNumber=" in line:
            number = int(line.partition("partNumber=")[2].partition("&")[0])
            found["x-amz-copy-source" in headers].append(number)
    return sorted(found[True]), sorted(found[False])


@pytest.mark.parametrize("fault", ["", "gone", "changed", "refused", "small", "other-bytes", "too-long"])
def test_beginning_is_copied_from_chunks(store, proxy, tmp_path, fault):
    """Whatever is wrong with a chunk, the object has the bytes of the file: they are sent."""
    content = os.urandom((19 << 20) + 5)
    path = tmp_path / "file"
    path.write_bytes(content)
    through = ObjectStore(store.url, {**store.options, "endpoint_url": f"http://127.0.0.1:{proxy.server_port}"})
    sizes = [(5 << 20) - 1, 9 << 20] if fault == "small" else [9 << 20, 6 << 20]
    chunks = chunks_of(store, content, sizes)
    if fault == "gone":
        store.delete(["chunks/1"])
    elif fault == "changed":
        store.put("chunks/1", bytes(6 << 20))
    elif fault == "refused":
        proxy.meet = lambda number, handler: 403 if "x-amz-copy-source" in handler.headers else None
    elif fault == "other-bytes":
        chunks[1] = dataclasses.replace(chunks[1], md5=chunks[0].md5, identity=chunks[0].md5)
    elif fault == "too-long":
        path.write_bytes(content[: 15 << 20][:-1])
    first = len(proxy.seen)

    made = through.upload(path, "file", "abc", beginning=chunks)

    copied, sent = sent_parts(proxy, first)
    expected = {
        "": ([1, 2], [3]),
        "gone": ([1, 2], [2, 3]),
        "changed": ([1, 2], [2, 3]),
        "refused": ([1, 2], [1, 2, 3]),
        "other-bytes": ([1, 2], [2, 3]),
    }
    assert (copied, sent) == expected.get(fault, ([], sent))
    assert store.get("file") == path.read_bytes()
    assert made.num_bytes == path.stat().st_size
    assert not calls(store, "list_multipart_uploads").get("Uploads")


def test_copies_that_a_kill_left_are_not_made_again(store, proxy, tmp_path):
    """They have the ETags of their chunks."""
    content = os.urandom((19 << 20) + 5)
    path, notes = tmp_path / "file", tmp_path / "notes"
    path.write_bytes(content)
    through = ObjectStore(store.url, {**store.options, "endpoint_url": f"http://127.0.0.1:{proxy.server_port}"})
    chunks = chunks_of(store, content, [9 << 20, 6 << 20])
    proxy.meet = lambda number, handler: 403 if handler.command == "POST" and "uploadId=" in handler.path else None
    with pytest.raises(OutputError, match="file cannot be written"):
        through.upload(path, "file", "abc", notes=notes, beginning=chunks)
    proxy.meet = lambda number, handler: None
    store.delete([chunk.name for chunk in chunks])
    first = len(proxy.seen)

    through.upload(path, "file", "abc", notes=notes, beginning=chunks)

    assert sent_parts(proxy, first) == ([], [])
    assert store.get("file") == content


@pytest.mark.parametrize("more", [{}, {"x-amz-server-side-encryption": "aws:kms"}])
def test_other_tag_is_damage_unless_the_store_encrypts(store, proxy, tmp_path, more):
    """ETags of objects that are encrypted with a key of KMS look like an MD5, and are none."""
    (tmp_path / "file").write_bytes(b"content")
    through = ObjectStore(store.url, {**store.options, "endpoint_url": f"http://127.0.0.1:{proxy.server_port}"})
    proxy.alter = lambda headers: {**headers, **({"ETag": f'"{"0" * 32}"', **more} if "ETag" in headers else {})}

    if more:
        assert through.upload(tmp_path / "file", "file", "abc").checksum == "abc"
    else:
        with pytest.raises(OutputError, match=r"has the ETag 0+, what was sent has .* it was damaged on its way"):
            through.upload(tmp_path / "file", "file", "abc")


def test_other_stores_are_written_through_fsspec(tmp_path):
    """Memory and local files: the same calls, without parts."""
    path = tmp_path / "file"
    path.write_bytes(b"content")
    for url in (f"memory://{tmp_path.name}/out", f"local://{tmp_path}/out"):
        store = ObjectStore(url)

        made = store.upload(path, "deep/file", "abc")

        assert made == store.head("deep/file")
        assert store.get("deep/file") == b"content"
        assert store.put("small", b"1").num_bytes == 1
        store.copy("small", "other")
        store.delete(["small"])
        assert (store.get("small"), store.get("other")) == (None, b"1")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host/out", "can be read, not written"),
        ("s3://key:secret@bucket/out", "holds a password"),
        ("az://container/out?sig=abc", "holds a password or a signature"),
        ("s3://", "s3:// names no folder; want a URL such as s3://bucket/out"),
        ("simplecache::s3://bucket/out", "is a chain of filesystems; want the URL of a folder, as in s3"),
    ],
)
def test_what_cannot_be_written_is_refused(url, message):
    """The message never repeats what may be a secret."""
    with pytest.raises(OptionError, match=message) as caught:
        ObjectStore(url)

    assert "secret@" not in str(caught.value)
    assert "sig=" not in str(caught.value)


def test_secrets_stay_out_of_texts(monkeypatch):
    """Those of the options and of the environment."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "fromEnvironment")
    options = {"key": "AKIAone", "client_kwargs": {"aws_session_token": SECRET}, "endpoint_url": "http://host"}

    text = redacted(f"AKIAone {SECRET} fromEnvironment http://host", "s3://bucket/out", options)

    assert text == "... ... ... http://host"
    string = f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={SECRET}==;EndpointSuffix=host"
    azure = redacted(f"https mine {SECRET}== host", "az://box/out", {"connection_string": string})
    assert azure == "https mine ... host"
    assert SECRET not in repr(ObjectStore("s3://bucket/out", options))
    assert pickle.loads(pickle.dumps(ObjectStore("s3://bucket/out", options))).options == options


class Answer(Exception):
    """An error as clients raise it."""

    def __init__(self, status, code=""):
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Answer(500), True),
        (Answer(503, "SlowDown"), True),
        (Answer(400, "RequestTimeout"), True),
        (Answer(400, "BadDigest"), True),
        (Answer(400, "EntityTooSmall"), False),
        (Answer(403), False),
        (Answer(404), False),
        (Answer(412), False),
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (PermissionError(), False),
        (ValueError(), False),
    ],
)
def test_which_errors_pass(error, expected):
    """What a later try may mend, and what it will not."""
    assert is_transient(error) is expected


def test_retry_ends(monkeypatch):
    """The last error is raised; one that lasts is raised at once."""
    pauses = []
    monkeypatch.setattr("datamat.directory.remote.time.sleep", pauses.append)
    errors = [Answer(503), Answer(500), Answer(403)]

    with pytest.raises(Answer) as caught:
        retried(lambda: (_ for _ in ()).throw(errors[len(pauses)]))

    assert caught.value is errors[2]
    assert len(pauses) == 2
    assert all(0 <= pause <= 8 for pause in pauses)
    assert StoredObject(1, "x").checksum == ""
