"""What users of fsspec write for a store is understood, and what cannot be is refused with what to write instead."""

from __future__ import annotations

import contextlib
import http.server
import threading

import pytest

from datamat import OptionError
from datamat.folders import open_folder
from datamat.folders.objects import bucket_region
from datamat.folders.options import translated


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
        ("s3", {"requester_pays": True, "s3_additional_kwargs": {"ACL": "x"}}, {"request_payer": True}),
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
    ],
)
def test_what_has_no_other_words_is_refused(scheme, said, message):
    with pytest.raises(OptionError, match=message) as raised:
        open_folder(f"{scheme}://bucket/a", said)
    assert "hidden" not in str(raised.value)


def test_unknown_option_is_refused_by_its_name():
    """When it is first used: the client knows which there are."""
    folder = open_folder("s3://bucket/a", {"region": "r", "nonsense": "hidden"})

    with pytest.raises(OptionError, match=r"s3://bucket/a: .*nonsense") as raised:
        folder.stat("x")
    assert "hidden" not in str(raised.value)


def test_places_of_the_environment_are_read(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    by_http = {"client_options": {"allow_http": True}}

    assert translated("s3", {}) == {"endpoint": "http://h:1", **by_http}
    assert translated("s3", {"endpoint_url": "https://other"}) == {"endpoint": "https://other"}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=k")

    assert translated("az", {}) == {"account_name": "a", "account_key": "k"}
    assert translated("az", {"account_name": "b"}) == {"account_name": "b"}


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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with contextlib.closing(server.socket):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        found = [bucket_region(bucket, f"http://127.0.0.1:{server.server_port}") for bucket in ("far", "other")]
        server.shutdown()

    assert found == ["ap-south-1", "us-east-1"]
