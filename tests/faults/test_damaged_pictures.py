"""Thousands of damaged pictures beside good ones: one run ends, accounts for each row, and needs little memory."""

import json
import subprocess

import damaged_pictures
import pytest

from datamat import load, verify
from datamat.directory.ledger import read_ledger

MEMORY = 512 << 10  # KiB, that a damaged picture may cost above what good ones take
HARMLESS_AT_TIMES = {"flip", "drop", "double", "scribble", "cut"}
"""Ways that may leave a file which decodes: a bit of a JPEG's pixels, a piece behind the last."""


def run(source, output):
    """Run the job to its end and return what it printed."""
    ended = subprocess.run(
        damaged_pictures.command(source, output), capture_output=True, text=True, timeout=1500, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.fixture
def num_pictures(request):
    return (100, 25) if request.config.getoption("--commit") else (4_000, 1_000)


@pytest.mark.timeout(1800)
def test_damaged_pictures_are_reported_and_their_neighbours_all_stored(tmp_path, num_pictures):
    """Under "skip", every good row gives its records; every other one does so, too, or is in the ledger, once."""
    num_spoilt, num_good = num_pictures
    source = damaged_pictures.make_pictures(tmp_path / "source", num_spoilt, num_good)
    base = run(damaged_pictures.make_pictures(tmp_path / "few", 10, 50), tmp_path / "base")["largest"]

    counts = run(source, tmp_path / "out")

    failed = [
        entry.values["key"]
        for entry in read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl")
        if entry.event == "sample_skipped"
    ]
    rows = {path.stem for path in source.iterdir()}
    keys = list(load(tmp_path / "out").keys())
    done = {key.partition("#")[0] for key in keys}
    assert counts["is_complete"] and counts["rows"] == len(rows)
    assert len(failed) == len(set(failed)) == counts["failed"]
    assert done == rows - set(failed)
    assert len(keys) == len(set(keys)) == counts["records"]
    assert not [key for key in failed if key.endswith("-good")]
    assert {key.partition("-")[2] for key in done} <= HARMLESS_AT_TIMES | {"good"}
    assert counts["largest"] <= base + MEMORY
    assert verify(tmp_path / "out").ok
