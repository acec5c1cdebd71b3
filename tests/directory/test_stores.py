"""Object stores: what all of them do, and what is asked of S3 where requests fail or others write.

S3 is a store in memory here; `interop/test_object_store.py` asks servers, also those of other kinds.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("operation", ["upload_part", "complete_multipart_upload"])
def test_upload_that_fails_is_ended(store, s3, tmp_path, operation):
    """Its parts would cost room, and no listing of objects shows them."""
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    s3.meet = lambda found, path: 403 if found == operation else None

    with pytest.raises(OutputError, match="file cannot be written"):
        store.upload(tmp_path / "file", "file", "abc")

    assert "abort_multipart_upload" in {what for what, _ in s3.seen}
    assert not s3.uploads
    assert store.get("file") is None


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
