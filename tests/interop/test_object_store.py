"""Objects written whole to a server on this machine that answers as S3 does, through a proxy that breaks things."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import pickle

import pytest
from breaking_proxy import SECRET

from datamat import OptionError, OutputError
from datamat.directory.remote import is_transient, redacted, retried
from datamat.directory.stores import ObjectStore, StoredObject

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture
def store(options, request):
    """A folder in a bucket of its own."""
    import s3fs

    bucket = request.node.name.replace("_", "-").replace("[", "-").strip("]")[:60].lower().strip("-")
    s3fs.S3FileSystem(**options).mkdir(bucket)
    return ObjectStore(f"s3://{bucket}/sets/one", options)


def calls(store, operation, **values):
    """Return the answer of the server to a call of S3."""
    import s3fs

    bucket = store.url.split("/")[2]
    return s3fs.S3FileSystem(**store.options).call_s3(operation, Bucket=bucket, **values)


@pytest.mark.parametrize("size", [0, 5, (8 << 20) + 1, 20 << 20])
def test_file_becomes_an_object(store, tmp_path, size):
    """It is whole, has the ETag of its bytes and our checksum, and is not sent twice."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))

    made = store.upload(path, "deep/file", "abc")
    again = store.upload(path, "deep/file", "abc")

    assert (made.num_bytes, made.checksum) == (size, "abc")
    assert again == made == store.head("deep/file")
    assert hashlib.md5(store.get("deep/file")).digest() == hashlib.md5(path.read_bytes()).digest()
    assert not calls(store, "list_multipart_uploads").get("Uploads")


def test_other_bytes_replace_an_object(store, tmp_path):
    """The condition is that it is still the object that was looked at."""
    path = tmp_path / "file"
    for content in (b"one", b"three", bytes(9 << 20)):
        path.write_bytes(content)
        store.upload(path, "file", hashlib.md5(content).hexdigest())

        assert store.get("file") == content


def test_missing_object_is_none(store):
    """Nothing is raised, and deleting it does no harm."""
    assert (store.head("nothing"), store.get("nothing")) == (None, None)
    store.delete(["nothing"])


def test_missing_bucket_is_refused_at_once(options):
    """The error says place and remedy, and no secret."""
    with pytest.raises(OutputError, match=r"s3://nowhere/out/x cannot be read: .* make the bucket") as caught:
        ObjectStore("s3://nowhere/out", options).get("x")

    assert SECRET not in str(caught.value)


def test_copy_and_delete(store):
    """Both happen in the store."""
    store.put("one", b"content")

    store.copy("one", "two")
    store.delete(["one"])

    assert (store.head("one"), store.get("two")) == (None, b"content")


def test_open_uploads_are_ended(store):
    """Those of a neighbour whose name begins alike stay."""
    for name in ("sets/one/a", "sets/one/b/c", "sets/one-other/a"):
        calls(store, "create_multipart_upload", Key=name)

    assert store.end_uploads() == 2
    assert [upload["Key"] for upload in calls(store, "list_multipart_uploads")["Uploads"]] == ["sets/one-other/a"]


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
