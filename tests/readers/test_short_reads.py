"""The system may return fewer bytes than asked for: Linux does beyond 2 GiB, network file systems at will."""

from __future__ import annotations

import os

import numpy as np
import pytest

from datamat import load, materialize, verify
from datamat.testing import InlineExecutor

MOST = 1000


@pytest.fixture
def short_reads(monkeypatch):
    pread, read = os.pread, os.read
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, MOST), offset))
    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, MOST)))


def payload(number):
    return np.random.default_rng(number).bytes(5 * MOST + number)


@pytest.mark.parametrize("name", ["tfrecord", "webdataset", "parquet"])
def test_long_records_are_read_whole(tmp_path, request, name):
    rows = [{"data": np.frombuffer(payload(number), np.uint8), "n": number} for number in range(5)]
    options = {"format": name, "executor": InlineExecutor(), "progress": False}
    materialize(lambda number: rows[number], range(5), tmp_path / "out", **options)
    request.getfixturevalue("short_reads")

    data = load(tmp_path / "out")

    for samples in (data, data.select(range(4, -1, -1)), data.to_numpy(), data.select([3, 1]).to_numpy()):
        for sample in samples:
            assert sample["data"].tobytes() == payload(int(sample["n"]))
    (batch,) = data.to_numpy(5)
    assert [value.tobytes() for value in batch["data"]] == [payload(int(number)) for number in batch["n"]]
    assert verify(tmp_path / "out").ok
