"""The built-in sidecars, and two as users write them, pass the conformance tests that datamat ships for sidecars."""

import pytest

from datamat import testing
from datamat.directory.sidecars import FromShard, exporting


def list_checksums(manifest):
    """Return a file of checksums."""
    return {"CHECKSUMS": "".join(f"{info.checksum} {info.file}\n" for info in manifest.all_files).encode()}


def first_bytes(manifest):
    """Return a file for each tar shard, made of its bytes."""
    tars = [info for info in manifest.all_files if info.file.endswith(".tar")]
    return {f"{info.file}.head": FromShard(info, lambda path: path.read_bytes()[:100]) for info in tars}


@pytest.mark.long
class TestChecksums(testing.SidecarConformance):
    def make_sidecar(self):
        return list_checksums


class TestFirstBytes(testing.SidecarConformance):
    def make_sidecar(self):
        return first_bytes


@pytest.mark.sample(5)
class TestBuiltIn(testing.SidecarConformance):
    """Each as if a user had written it: in a process in which no sidecar is built in."""

    @pytest.fixture(autouse=True, params=exporting.BUILT_IN, ids=lambda sidecar: sidecar.__name__)
    def given(self, request, monkeypatch):
        monkeypatch.setattr(exporting, "BUILT_IN", ())
        self.sidecar = request.param

    def make_sidecar(self):
        return self.sidecar
