"""What users of fsspec write for a store is understood, and what cannot be is refused with what to write instead."""

import contextlib
import http.server
import json
import os
import sys

import loopback_s3
import pytest
from web import listening

from datamat import MissingDependencyError, OptionError
from datamat.folders import open_folder
from datamat.folders.base import DeniedError
from datamat.folders.objects import _store, bucket_region
from datamat.folders.options import translated
from datamat.folders.urls import redacted


@pytest.mark.parametrize(
    ("scheme", "said", "expected"),
    [
        (
            "s3",
            {"key": "a", "secret": "b", "token": "c", "use_listings_cache": False},
            {"access_key_id": "a", "secret_access_key": "b", "session_token": "c"},
        ),
        (
            "s3",
            {"anon": True, "client_kwargs": {"region_name": "r", "endpoint_url": "https://h", "verify": False}},
            {
                "skip_signature": True,
                "region": "r",
                "endpoint": "https://h",
                "client_options": {"allow_invalid_certificates": True},
            },
        ),
        (
            "s3",
            {"anon": False, "endpoint_url": "http://h:1"},
            {"endpoint": "http://h:1", "client_options": {"allow_http": True}},
        ),
        (
            "s3",
            {
                "config_kwargs": {
                    "read_timeout": 5,
                    "s3": {"addressing_style": "virtual"},
                    "retries": {"mode": "legacy"},
                }
            },
            {"virtual_hosted_style_request": True, "client_options": {"read_timeout": "5s"}},
        ),
        (
            "s3",
            {"requester_pays": True, "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"}},
            {"request_payer": True, "server_side_encryption": "aws:kms", "sse_kms_key_id": "k"},
        ),
        ("s3", {"username": "a", "password": "b"}, {"access_key_id": "a", "secret_access_key": "b"}),
        (
            "s3",
            {"aws_region": "r", "aws_endpoint_url": "https://h", "aws_skip_signature": True},
            {"region": "r", "endpoint": "https://h", "skip_signature": True},
        ),
        ("abfs", {"account_name": "a", "sas_token": "?sv=1&sig=b"}, {"account_name": "a", "sas_key": "sv=1&sig=b"}),
        ("az", {"account_name": "a", "anon": True}, {"account_name": "a", "skip_signature": True}),
        ("az", {"account_name": "a", "credential": "k=="}, {"account_name": "a", "account_key": "k=="}),
        (
            "az",
            {"account_name": "a", "account_host": "a.blob.core.usgovcloudapi.net"},
            {"account_name": "a", "endpoint": "https://a.blob.core.usgovcloudapi.net"},
        ),
        (
            "az",
            {"connection_string": "AccountName=a;AccountKey=k==;EndpointSuffix=core.chinacloudapi.cn"},
            {"account_name": "a", "account_key": "k==", "endpoint": "https://a.blob.core.chinacloudapi.cn"},
        ),
        (
            "az",
            {"connection_string": "BlobEndpoint=https://a.blob.core.windows.net/;SharedAccessSignature=sv=1&sig=b"},
            {"account_name": "a", "sas_key": "sv=1&sig=b", "endpoint": "https://a.blob.core.windows.net"},
        ),
        ("az", {"connection_string": "UseDevelopmentStorage=true"}, {"use_emulator": True}),
        (
            "gs",
            {"token": "anon", "project": "p", "access": "read_only", "consistency": "md5", "timeout": 9},
            {"skip_signature": True, "bearer_token": "anonymous"},
        ),
        (
            "gcs",
            {"token": "ya29.a", "endpoint_url": "http://h:1/"},
            {"bearer_token": "ya29.a", "base_url": "http://h:1", "client_options": {"allow_http": True}},
        ),
        ("gs", {"token": "google_default", "endpoint_url": "https://h"}, {"base_url": "https://h"}),
        ("gs", {"token": "cloud"}, {"token": "cloud"}),
        ("gs", {"token": __file__}, {"application_credentials": __file__}),
        (
            "gs",
            {"token": {"type": "service_account", "private_key": "k"}},
            {"service_account_key": '{"type": "service_account", "private_key": "k"}'},
        ),
        (
            "gs",
            {"requester_pays": True, "project": "p"},
            {"client_options": {"default_headers": {"x-goog-user-project": "p"}}},
        ),
    ],
)
def test_options_are_said_in_the_words_of_the_client(scheme, said, expected):
    """Those words are understood as well, so that options can be said twice."""
    assert translated(scheme, said) == expected
    assert translated(scheme, expected) == expected


@pytest.mark.parametrize(
    ("scheme", "said", "message"),
    [
        ("az", {"connection_string": "hidden"}, "neither AccountName"),
        ("az", {"account_name": "a", "credential": object()}, "to be a text"),
        ("s3", {"client_kwargs": {"config": 1}}, "config, which reading S3 does not know"),
        ("s3", {"key": object()}, "not a text or a number"),
        ("gs", {"token": object()}, "token is to be"),
        ("gs", {"token": "browser"}, "auth application-default login"),
        ("gs", {"token": "/no/hidden.json"}, "the path of a file"),
        ("gs", {"token": {"type": "authorized_user", "refresh_token": "hidden"}}, "the path of a file"),
        ("gs", {"requester_pays": True}, "requester_pays='PROJECT'"),
        ("s3", {"endpoint_url": "127.0.0.1:9000"}, "has no scheme; want it as in http://"),
        ("s3", {"s3_additional_kwargs": {"ACL": "hidden"}}, "s3_additional_kwargs hold ACL, .* set it for the bucket"),
    ],
)
def test_what_has_no_other_words_is_refused(scheme, said, message, monkeypatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    with pytest.raises(OptionError, match=message) as raised:
        open_folder(f"{scheme}://bucket/a", said)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("all", "endpoint_url = {}"),
        ("s3", "services = local\n[services local]\ns3 =\n  endpoint_url = {}"),
    ],
)
def test_address_of_a_profile_is_asked(name, said, tmp_path, monkeypatch):
    """As by boto, so by a client that does not read profiles."""
    pytest.importorskip("boto3")
    for other in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(other, raising=False)
    with loopback_s3.serving() as s3:
        keys = f"aws_access_key_id = {loopback_s3.KEY}\naws_secret_access_key = {loopback_s3.SECRET}"
        (tmp_path / "config").write_text(f"[profile mine]\nregion = us-east-1\n{keys}\n{said.format(s3.url)}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

        open_folder(f"s3://bucket/{name}", {"profile": "mine"}).write("x", b"1")

        assert [*s3.objects] == [f"bucket/{name}/x"]


def test_credentials_that_come_later_are_used(monkeypatch):
    """In a notebook, they are set after the first error says that they are missing."""
    with loopback_s3.serving() as s3:
        s3.meet = lambda *_: None if os.environ["AWS_ACCESS_KEY_ID"] == "later" else 403
        said = {"endpoint_url": s3.url, "client_kwargs": {"region_name": "us-east-1"}}
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        clients = []
        for key in ("wrong", "later"):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            folder = open_folder("s3://bucket/later", said)
            with contextlib.suppress(DeniedError):
                folder.write("x", b"1")
            clients.append(_store.cache_info().currsize)
        assert clients == [0, 1]


@pytest.mark.parametrize(
    ("url", "said", "message"),
    [
        ("s3://bucket/a", {"region": "r", "nonsense": "hidden"}, "nonsense"),
        ("gs://bucket/a", {"token": "anon", "nonsense": "hidden"}, "nonsense"),
        ("gs://bucket/a", {"token": {"type": "service_account", "private_key": "hidden"}}, "private_key_id"),
    ],
)
def test_option_that_the_client_refuses_is_named(url, said, message):
    """When it is first used: the client knows which there are."""
    folder = open_folder(url, said)

    with pytest.raises(OptionError, match=f"{url}: .*{message}") as raised:
        folder.stat("x")
    assert "hidden" not in f"{raised.value} {folder!r}"


def test_places_of_the_environment_are_read(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    by_http = {"client_options": {"allow_http": True}}

    assert translated("s3", {}) == {"endpoint": "http://h:1", **by_http}
    assert translated("s3", {"endpoint_url": "https://other"}) == {"endpoint": "https://other"}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=k")

    assert translated("az", {}) == {"account_name": "a", "account_key": "k"}
    assert translated("az", {"account_name": "b"}) == {"account_name": "b"}
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "h:1")

    assert translated("gs", {"token": "t"}) == {"base_url": "http://h:1", "bearer_token": "t", **by_http}
    assert translated("gs", {"endpoint_url": "https://other"}) == {"base_url": "https://other"}


@pytest.fixture
def google(monkeypatch, tmp_path):
    """A server that holds nothing, and also tells a machine of Google's its token; its address, and what it saw."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path.startswith("/computeMetadata/"):
                content = b'{"access_token": "of-the-machine", "expires_in": 3600}'
            elif self.path == "/token":
                kind = "urn:ietf:params:oauth:token-type:access_token"
                said = {"access_token": "of-a-federation", "expires_in": 3600, "token_type": "Bearer"}
                content = json.dumps({**said, "issued_token_type": kind}).encode()
            else:
                content = b""
                seen.append((self.headers["Authorization"], self.headers["x-goog-user-project"]))
            self.send_response(200 if content else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_):
            """Say nothing."""

    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCE_", "CLOUDSDK_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with listening(Handler) as url:
        monkeypatch.setenv("GCE_METADATA_HOST", url.removeprefix("http://"))
        yield url, seen


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (None, None)),
        ({"token": "anon"}, (None, None)),
        ({"token": "google_default"}, ("Bearer of-the-machine", None)),
        ({"token": "cloud", "requester_pays": "p"}, ("Bearer of-the-machine", "p")),
        ({"token": "ya29.a", "requester_pays": True, "project": "p"}, ("Bearer ya29.a", "p")),
    ],
)
def test_google_store_is_asked_by_whom_the_options_name(google, said, expected):
    """By nobody, where it is an emulator, and nobody is named."""
    address, seen = google

    assert open_folder("gs://bucket/a", {"endpoint_url": address, **said}).read_if_there("x", 1) is None
    assert seen == [expected]


@pytest.fixture
def federation(google, tmp_path, monkeypatch):
    """The file of gcloud on this machine, which says where a federation gives tokens."""
    (tmp_path / "subject").write_text("me")
    said = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/locations/global/workforcePools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{google[0]}/token",
        "credential_source": {"file": str(tmp_path / "subject")},
    }
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps(said))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    return file


def test_federation_is_asked_by_google_auth(google, federation):
    """The client of the store knows none."""
    pytest.importorskip("google.auth")
    address, seen = google

    said = {"endpoint_url": address, "token": "google_default"}
    assert open_folder("gs://bucket/a", said).read_if_there("x", 1) is None
    assert seen == [("Bearer of-a-federation", None)]


def test_credentials_that_cannot_be_used_are_named(google, federation, monkeypatch):
    """Those that need google-auth or the environment, or would stand for the account of the machine, or are broken."""
    monkeypatch.setitem(sys.modules, "google.auth", None)
    said = {"endpoint_url": google[0], "token": "google_default"}

    with pytest.raises(MissingDependencyError, match=rf"'external_account', as in {federation},.* google-auth"):
        open_folder("gs://bucket/a", said).stat("x")
    with pytest.raises(OptionError, match=rf"token='cloud' .*{federation} first"):
        open_folder("gs://bucket/a", {**said, "token": "cloud"}).stat("x")
    with pytest.raises(OptionError, match=f"set GOOGLE_APPLICATION_CREDENTIALS={federation}"):
        open_folder("gs://bucket/a", {**said, "token": str(federation)}).stat("x")
    federation.write_text("{}")
    with pytest.raises(OptionError, match="missing field `type`"):
        open_folder("gs://bucket/a", said).stat("x")
    assert not google[1]


def test_region_of_a_bucket_is_asked_for():
    """Of a server that gives nothing else away, and of one that says nothing."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(301)
            if self.path == "/far":
                self.send_header("x-amz-bucket-region", "ap-south-1")
            self.end_headers()

        def log_message(self, *_):
            """Say nothing."""

    with listening(Handler) as url:
        found = [bucket_region(bucket, url) for bucket in ("far", "other")]

    assert found == ["ap-south-1", "us-east-1"]


def test_secrets_stay_out_of_texts(monkeypatch):
    """Those of the options and of the environment."""
    secret = "wJalrXUtnFEMI"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "fromEnvironment")
    options = {"key": "AKIAone", "client_kwargs": {"aws_session_token": secret}, "endpoint_url": "http://host"}

    text = redacted(f"AKIAone {secret} fromEnvironment http://host", "s3://bucket/out", options)

    assert text == "... ... ... http://host"
    string = f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={secret}==;EndpointSuffix=host"
    azure = redacted(f"https mine {secret}== host", "az://box/out", {"connection_string": string})
    assert azure == "https mine ... host"
