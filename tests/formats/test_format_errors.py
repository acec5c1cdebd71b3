"""Files that end too early, also while they are read."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from small_rows import job, shard_of

from datamat import Features, Text
from datamat.errors import CorruptDataError
from datamat.formats import Offsets, get_format
from datamat.formats.io import RangeReader, read_spans
from datamat.formats.webdataset import member


def test_archive_that_ends_inside_a_member(tmp_path):
    """What follows is lost, and that is no end of the archive."""
    (tmp_path / "a.tar").write_bytes(b"".join(member("one.txt", bytes(3000)))[:1000])

    with pytest.raises(CorruptDataError, match="after 488 of 3072 bytes"):
        list(get_format("webdataset").with_features(Features({"txt": Text()})).read(tmp_path / "a.tar"))


@pytest.mark.parametrize("span", [(90, 10_000, 0), (80, 40, 0)], ids=["before", "meanwhile"])
def test_shard_that_becomes_shorter_while_it_is_open(tmp_path, span):
    """Whoever reads many records at once gets none of them."""
    job(tmp_path / "out").run(progress=False)
    path, offsets = shard_of(tmp_path / "out"), Offsets(*np.array([span], np.uint64).T)
    os.truncate(path, 120)

    with contextlib.closing(RangeReader(path, offsets, None)) as reader:
        os.truncate(path, 100)
        with pytest.raises(CorruptDataError, match="shorter"):
            read_spans([reader], np.zeros(1, np.int64), np.zeros(1, np.int64))
