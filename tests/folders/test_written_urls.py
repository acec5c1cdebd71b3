"""URLs that are written to, and what may be shown of one."""

from __future__ import annotations

import pytest

from datamat import OptionError
from datamat.folders import open_output
from datamat.folders.urls import redacted

SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host/out", "can be read, not written"),
        ("s3://key:secret@bucket/out", "holds a password"),
        ("az://container/out?sig=abc", "holds a password or a signature"),
        ("s3://", "s3:// names no folder; want a URL such as s3://bucket/out"),
        ("simplecache::s3://bucket/out", "is a chain of filesystems; want the URL of the folder itself"),
    ],
)
def test_what_cannot_be_written_is_refused(url, message):
    """The message never repeats what may be a secret."""
    with pytest.raises(OptionError, match=message) as caught:
        open_output(url, None)

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
