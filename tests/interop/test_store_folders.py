"""Folders in the stores of servers on this machine pass the conformance tests."""

from __future__ import annotations

import uuid

import pytest
from store_servers import SECRETS

from datamat.folders import open_folder
from datamat.testing import FolderConformance

pytestmark = pytest.mark.long


class StoreFolders(FolderConformance):
    @pytest.fixture(autouse=True)
    def at_hand(self, server, monkeypatch):
        for name in ("AWS_METADATA_ENDPOINT", "GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
            monkeypatch.setenv(name, "127.0.0.1:9")  # where nobody would tell who this machine is
        self.server = server

    def make_folder(self, files, tmp_path):
        bucket = f"b{uuid.uuid4().hex}"
        there = self.server.files()
        there.mkdir(bucket)
        for name, content in files.items():
            there.pipe_file(f"{bucket}/sets/one/{name}", content)
        return open_folder(f"{self.server.kind}://{bucket}/sets/one", self.server.options())


class TestS3(StoreFolders):
    secrets = (SECRETS["s3"],)

    @pytest.fixture
    def kind(self):
        return "s3"


class TestGoogle(StoreFolders):
    secrets = (SECRETS["gs"],)
    large_bytes = 1_000_000  # of more, aiohttp warns its user, gcsfs

    @pytest.fixture
    def kind(self):
        return "gs"


class TestAzure(StoreFolders):
    secrets = (SECRETS["az"],)

    @pytest.fixture
    def kind(self):
        return "az"
