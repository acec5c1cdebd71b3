"""The quarantine keeps a sample unchanged, under a name that cannot lead anywhere else."""

import json
import os

import pytest

from datamat import OutputError
from datamat.directory.ledger import FailedRow
from datamat.run.quarantine import quarantine, safe_name
from datamat.sources.rows import IndexRow


def failed(key):
    return FailedRow(3, key, "InputError", "InputError: it is cut off", "quarantine", 2)


@pytest.fixture
def row(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(b"picture")
    return IndexRow("0001", "train", {"image": str(tmp_path / "in" / "a b.png")}, "train.txt:1")


def test_later_failure_replaces_an_earlier_one(tmp_path, row):
    """Nothing of the earlier one remains."""
    quarantine(tmp_path, row, failed("0001"), "first")
    quarantine(tmp_path, row._replace(fields={}), failed("0001"), "second")

    assert {path.name for path in tmp_path.rglob("0001/*")} == {"sample.json", "traceback.txt"}
    assert next(tmp_path.rglob("traceback.txt")).read_text() == "second"


@pytest.mark.parametrize("key", [".", ".hidden", "a:b", "*", "x" * 300, "\u00e9" * 200, "-rf", " ", "CON", "a\u202eb"])
def test_any_key_has_a_name_of_its_own(tmp_path, row, key):
    """It is short and visible, and holds nothing that shells or systems interpret."""
    quarantine(tmp_path, row._replace(key=key), failed(key), "")

    (name,) = os.listdir(tmp_path / "quarantine" / "train")
    assert len(name.encode()) <= 255 and not name.startswith(".") and "\u202e" not in name
    assert safe_name(key) == name != safe_name(key + "x")


def test_special_files_are_named_and_not_read(tmp_path, row):
    """A FIFO would block the reader for ever."""
    os.mkfifo(tmp_path / "in" / "fifo")

    quarantine(tmp_path, row._replace(fields={"image": str(tmp_path / "in" / "fifo")}), failed("0001"), "")

    kept = json.loads((tmp_path / "quarantine" / "train" / "0001" / "sample.json").read_text())
    assert "is a FIFO" in kept["files"]["image"]["reason"]


@pytest.mark.parametrize("name", ["quarantine", "quarantine/train"])
def test_quarantine_is_not_kept_behind_a_link(tmp_path, row, name):
    """Nothing is written outside of the output."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OutputError, match="is a link"):
        quarantine(tmp_path, row, failed("0001"), "")
    assert os.listdir(tmp_path / "elsewhere") == []
