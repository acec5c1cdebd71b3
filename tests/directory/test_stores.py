"""Object stores: what all of them do, and what is asked of S3 where requests fail or others write.

S3 is a store in memory here; `interop/test_object_store.py` asks servers, also those of other kinds.
"""

from __future__ import annotations

import dataclasses
import os
import pickle

import pytest
from memory_s3 import refusal, s3
from store_cases import StoreCases

from datamat import OptionError, OutputError
from datamat.directory.stores import ObjectStore
from datamat.folders.retries import is_transient, retried
from datamat.folders.urls import redacted

__all__ = ["s3"]

SECRET = "wJalrXUtnFEMI"


class TestS3(StoreCases):
    @pytest.fixture
    def store(self, s3):
        return ObjectStore("s3://bucket/sets/one")


class TestMemory(StoreCases):
    """Other stores are written through fsspec: the same calls, without parts and checksums."""

    @pytest.fixture
    def store(self, tmp_path):
        return ObjectStore(f"memory://{tmp_path.name}/out")


class TestFolder(StoreCases):
    """What does not appear whole is written aside."""

    @pytest.fixture
    def store(self, tmp_path):
        return ObjectStore(f"local://{tmp_path}/out")


@pytest.fixture
def store(s3):
    return ObjectStore("s3://bucket/sets/one")


def operations(s3, first=0):
    """Return the parts that were copied and those that were sent since a request."""
    seen = s3.seen[first:]
    return tuple(
        sorted(number for what, number in seen if what == kind) for kind in ("upload_part_copy", "upload_part")
    )


def refuse(s3, operation, status=403):
    """Have the store refuse an operation, and none if that is ""."""
    s3.meet = lambda found, path: status if found == operation else None


def test_object_that_changes_meanwhile_is_not_replaced(store, s3, tmp_path):
    """Not even where it is small, and was looked at a moment ago."""
    (tmp_path / "file").write_bytes(b"mine")
    store.put("file", b"before")

    def meet(operation, path):
        if operation == "put_object":
            s3.meet = lambda operation, path: None
            store.put("file", b"of another")

    s3.meet = meet

    with pytest.raises(OutputError, match=r"file holds .* where 4 bytes with the checksum abc belong; something else"):
        store.upload(tmp_path / "file", "file", "abc")
    assert store.get("file") == b"of another"


def test_store_without_conditions_is_written_without_them(store, s3, tmp_path):
    """But tasks share no output there."""
    (tmp_path / "file").write_bytes(b"mine")
    given = []
    put = s3.put_object

    def put_object(path, IfNoneMatch="", **values):
        given.append(IfNoneMatch)
        if IfNoneMatch:
            raise refusal(501)
        return put(path, **values)

    s3.put_object = put_object

    assert store.upload(tmp_path / "file", "file", "abc").checksum == "abc"
    assert given == ["*", ""]
    with pytest.raises(OptionError, match="not known to keep conditions"):
        store.create("lease", b"")


@pytest.mark.parametrize("answer", ["lose", 503])
def test_answer_that_is_lost_is_asked_for_again(store, s3, tmp_path, answer):
    """Whatever request of an upload it is of, small or large; an object of our own is known."""
    tried = set()

    def meet(operation, path):
        if (operation, path) in tried or operation.startswith(("head", "list", "get")):
            return None
        tried.add((operation, path))
        return answer

    for size in (7, 9 << 20):
        (tmp_path / "file").write_bytes(os.urandom(size))
        s3.meet = meet

        store.upload(tmp_path / "file", f"file-{size}", "abc")

        assert store.get(f"file-{size}") == (tmp_path / "file").read_bytes()
    assert store.create("lease", b"mine") and not store.create("lease", b"other")
    assert len(tried) >= 5


@pytest.mark.parametrize(("folder", "ends"), [("/sets/one", ["sets/one/.datamat/held/a", "sets/one/a"]), ("", ["top"])])
def test_open_uploads_are_ended(store, s3, folder, ends):
    """Those of other outputs stay: of a neighbour whose name begins alike, and of one in a folder of this one."""
    every = ["sets/one-other/a", "sets/one/.datamat/held/a", "sets/one/a", "sets/one/b/a", "top"]
    for name in every:
        s3.create_multipart_upload(f"bucket/{name}")

    assert ObjectStore(f"s3://bucket{folder}").end_uploads() == len(ends)
    assert sorted(upload.place[1] for upload in s3.uploads.values()) == sorted({*every} - {*ends})


def test_upload_that_a_kill_left_is_continued(store, s3, tmp_path):
    """What is there, and right, is not sent again; what is wrong is. It is spared when others are ended."""
    path, notes = tmp_path / "file", tmp_path / "notes"
    path.write_bytes(os.urandom((16 << 20) + 5))
    s3.meet = lambda operation, path: 403 if operation == "upload_part" and path.endswith("#3") else None
    with pytest.raises(OutputError, match="file cannot be written"):
        store.upload(path, "file", "abc", notes=notes)
    (upload,) = s3.uploads.values()
    upload.parts[2] = b"wrong"
    refuse(s3, "")
    first = len(s3.seen)

    assert store.end_uploads(notes) == 0
    store.upload(path, "file", "abc", notes=notes)

    assert operations(s3, first) == ([], [2, 3])
    assert store.get("file") == path.read_bytes()
    assert not [*notes.iterdir()]


BEGINNINGS = {
    "": ([1, 2], [3]),
    "gone": ([1, 2], [2, 3]),
    "changed": ([1, 2], [2, 3]),
    "refused": ([1, 2], [1, 2, 3]),
    "other-bytes": ([1, 2], [2, 3]),
    "small": ([], [1, 2, 3]),
    "too-long": ([], [1, 2]),
}


@pytest.mark.parametrize("fault", BEGINNINGS)
def test_beginning_is_copied_from_chunks(store, s3, tmp_path, fault):
    """Whatever is wrong with a chunk, the object has the bytes of the file: they are sent."""
    content = os.urandom((19 << 20) + 5)
    path = tmp_path / "file"
    path.write_bytes(content)
    sizes = [(5 << 20) - 1, 9 << 20] if fault == "small" else [9 << 20, 6 << 20]
    chunks = [
        store.put_chunk(f"chunks/{number}", content[sum(sizes[:number]) : sum(sizes[: number + 1])])
        for number in range(2)
    ]
    if fault == "gone":
        store.delete(["chunks/1"])
    elif fault == "changed":
        store.put("chunks/1", bytes(6 << 20))
    elif fault == "refused":
        refuse(s3, "upload_part_copy")
    elif fault == "other-bytes":
        chunks[1] = dataclasses.replace(chunks[1], md5=chunks[0].md5, identity=chunks[0].md5)
    elif fault == "too-long":
        path.write_bytes(content[: 15 << 20][:-1])
    first = len(s3.seen)

    made = store.upload(path, "file", "abc", beginning=chunks)

    assert operations(s3, first) == BEGINNINGS[fault]
    assert store.get("file") == path.read_bytes()
    assert made.num_bytes == path.stat().st_size
    assert not s3.uploads


def test_copies_that_a_kill_left_are_not_made_again(store, s3, tmp_path):
    """They have the ETags of their chunks."""
    content = os.urandom((14 << 20) + 5)
    path, notes = tmp_path / "file", tmp_path / "notes"
    path.write_bytes(content)
    chunks = [store.put_chunk("chunks/0", content[: 9 << 20])]
    refuse(s3, "complete_multipart_upload")
    with pytest.raises(OutputError, match="file cannot be written"):
        store.upload(path, "file", "abc", notes=notes, beginning=chunks)
    refuse(s3, "")
    store.delete([chunk.name for chunk in chunks])
    first = len(s3.seen)

    store.upload(path, "file", "abc", notes=notes, beginning=chunks)

    assert operations(s3, first) == ([], [])
    assert store.get("file") == content


@pytest.mark.parametrize("more", [{}, {"ServerSideEncryption": "aws:kms"}])
def test_other_tag_is_damage_unless_the_store_encrypts(store, s3, tmp_path, more):
    """ETags of objects that are encrypted with a key of KMS look like an MD5, and are none."""
    (tmp_path / "file").write_bytes(b"content")
    s3.more = {"ETag": f'"{"0" * 32}"', **more}

    if more:
        assert store.upload(tmp_path / "file", "file", "abc").checksum == "abc"
    else:
        with pytest.raises(OutputError, match=r"has the ETag 0+, what was sent has .* it was damaged on its way"):
            store.upload(tmp_path / "file", "file", "abc")


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
    ("errors", "expected"),
    [
        ([Answer(500), Answer(503, "SlowDown"), Answer(400, "RequestTimeout"), Answer(400, "BadDigest")], True),
        ([TimeoutError(), ConnectionResetError()], True),
        ([Answer(400, "EntityTooSmall"), Answer(403), Answer(404), Answer(412)], False),
        ([PermissionError(), ValueError()], False),
    ],
)
def test_which_errors_pass(errors, expected):
    """What a later try may mend, and what it will not."""
    assert {is_transient(error) for error in errors} == {expected}


def test_retry_ends(monkeypatch):
    """The last error is raised; one that lasts is raised at once."""
    pauses = []
    monkeypatch.setattr("datamat.folders.retries.time.sleep", pauses.append)
    errors = [Answer(503), Answer(500), Answer(403)]

    with pytest.raises(Answer) as caught:
        retried(lambda: (_ for _ in ()).throw(errors[len(pauses)]))

    assert caught.value is errors[2]
    assert len(pauses) == 2
    assert all(0 <= pause <= 8 for pause in pauses)
