"""Folders in the stores of servers on this machine pass the conformance tests."""

import base64
import json
import uuid

import pytest
from store_servers import SECRETS

from datamat import OutputError
from datamat.folders import AbsentError, ChangedError, ReplaceIf, open_folder
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

    def test_large_file_is_sent_in_parts(self, tmp_path, monkeypatch):
        monkeypatch.setattr("datamat.folders.objects._AT_ONCE_BYTES", 15)
        monkeypatch.setattr(type(self), "large_bytes", 20 << 20)
        self.test_file_of_the_disk_is_written(tmp_path)

    def test_bucket_that_is_missing_is_no_missing_file(self):
        folder = open_folder(f"{self.server.kind}://b{uuid.uuid4().hex}/sets/one", self.server.options())
        for use in (lambda: folder.read("a", 1), lambda: folder.stat("a"), folder.list, lambda: folder.write("a", b"")):
            with pytest.raises(OutputError, match="there is no such bucket") as raised:
                use()
            assert not isinstance(raised.value, AbsentError)


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

    def test_version_is_a_generation(self, tmp_path):
        """Another one after each write, whatever the content; 0, which means "create" to the store, is none."""
        folder = self.make_folder({}, tmp_path)
        first, last = folder.write("a", b"same"), folder.write("a", b"same")

        for name, version in [("a", first), ("new", "0"), ("new", "00")]:
            with pytest.raises(ChangedError):
                folder.write(name, b"other", ReplaceIf(version))
        assert folder.list() == {"a": (4, "")}
        assert folder.stat("a") == (4, last)

    @pytest.mark.parametrize("is_file", [True, False])
    def test_service_account_signs(self, tmp_path, proxy, is_file):
        """The `token` is its file, or what that says; without an account, a write is signed as nobody's."""
        pytest.importorskip("cryptography")  # comes with moto
        from cryptography.hazmat.primitives import serialization as forms
        from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

        form = forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
        key = generate_private_key(65537, 2048).private_bytes(*form).decode()
        said = {"type": "service_account", "private_key": key, "private_key_id": "1", "client_email": "me@p"}
        (tmp_path / "account").write_text(json.dumps(said))
        place, address = str(self.make_folder({}, tmp_path)), f"http://127.0.0.1:{proxy.server_port}"
        for token in (str(tmp_path / "account") if is_file else said, "anon"):
            open_folder(place, {"token": token, "endpoint_url": address}).write("a", b"1")

        signed, anonymous = (headers["Authorization"] for headers in proxy.headers)
        assert json.loads(base64.urlsafe_b64decode(signed.split(".")[1] + "=="))["iss"] == "me@p"
        assert anonymous == "Bearer anonymous"


class TestAzure(StoreFolders):
    secrets = (SECRETS["az"],)

    @pytest.fixture
    def kind(self):
        return "az"
