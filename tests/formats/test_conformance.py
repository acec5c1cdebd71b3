"""Every format is held to the same tests."""

from __future__ import annotations

import importlib.util

import pytest
from conformance import FormatConformance

needs_array_record = pytest.mark.skipif(
    importlib.util.find_spec("array_record") is None, reason="the package array-record is not installed"
)


class TestTFRecord(FormatConformance):
    name = "tfrecord"
    shows_missing_tail = False


class TestGzipTFRecord(FormatConformance):
    name = "tfrecord.gz"
    hides_cuts = False
    shows_missing_tail = False
    test_offsets_go_beyond_two_gib = (
        None  # deflating as much takes minutes, and offsets are joined as those of TFRecord
    )


class TestWebDataset(FormatConformance):
    name = "webdataset"


class TestParquet(FormatConformance):
    name = "parquet"


@needs_array_record
class TestArrayRecord(FormatConformance):
    name = "arrayrecord"


class TestThirdParty(FormatConformance):
    """A format of another package, found through its entry point."""

    name = "lines"
    shows_missing_tail = False
    test_offsets_go_beyond_two_gib = None  # nothing of datamat's own is in its offsets

    @pytest.fixture(autouse=True)
    def installed(self, tmp_path, monkeypatch):
        """Put what an installation leaves of a package where Python looks for it."""
        info = tmp_path / "site" / "lines-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[datamat.formats]\nlines = lines_format:LinesFormat\n")
        monkeypatch.syspath_prepend(str(info.parent))
