"""Every format passes the conformance tests that datamat ships for users' formats."""

from __future__ import annotations

import importlib.util
import itertools
import shutil

import numpy as np
import pytest

from datamat.features import Features, Tensor
from datamat.formats import Offsets, get_format
from datamat.testing import ShardFormatConformance

needs_array_record = pytest.mark.skipif(
    importlib.util.find_spec("array_record") is None, reason="the package array-record is not installed"
)


class TestTFRecord(ShardFormatConformance):
    shows_missing_tail = False

    def make_format(self):
        return get_format("tfrecord")


class TestGzipTFRecord(TestTFRecord):
    hides_cuts = False

    def make_format(self):
        return get_format("tfrecord.gz")


class TestWebDataset(ShardFormatConformance):
    def make_format(self):
        return get_format("webdataset")


class TestParquet(ShardFormatConformance):
    hides_cuts = False

    def make_format(self):
        return get_format("parquet")


@needs_array_record
class TestArrayRecord(TestParquet):
    def make_format(self):
        return get_format("arrayrecord")


class TestThirdParty(ShardFormatConformance):
    """A format of another package, found through its entry point."""

    shows_missing_tail = False

    def make_format(self):
        return get_format("lines")

    @pytest.fixture(autouse=True)
    def installed(self, tmp_path_factory, monkeypatch):
        """Put on the path what an installed package leaves there."""
        info = tmp_path_factory.mktemp("site") / "lines-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[datamat.formats]\nlines = lines_format:LinesFormat\n")
        monkeypatch.syspath_prepend(str(info.parent))


@pytest.mark.long  # writes two gigabytes
@pytest.mark.timeout(300)
# Not of tfrecord.gz: deflating so much takes minutes, and its offsets are joined as those of tfrecord.
@pytest.mark.parametrize(
    "name", ["tfrecord", "webdataset", "parquet", pytest.param("arrayrecord", marks=needs_array_record)]
)
def test_offsets_go_beyond_two_gib(tmp_path, name):
    """Records behind the first 2 GiB of a shard are found, and their content is right."""
    features = Features({"data": Tensor((None,), "uint8", "raw")})
    shard_format = get_format(name).with_features(features)
    noise = np.random.default_rng(0).integers(0, 256, 64 << 20, np.uint8)
    path = tmp_path / "data"

    offsets = big_shard(tmp_path, path, shard_format, features, noise)

    assert int(offsets.offset[-1]) > 1 << 31
    reader = shard_format.reader(path, offsets)
    record = features.decode(reader.read(34))
    reader.close()
    assert record["key"] == "k34"
    assert (record["data"] == np.roll(noise, 34)).all()


def big_shard(folder, path, shard_format, features, noise):
    """Write 35 records of 64 MiB, one to a part, and return the offsets. All parts but the last are the same."""
    assembler = None if shard_format.joins_parts else shard_format.assembler(path)
    part, written = folder / "part", []
    for number in range(35):
        if number in {0, 34}:
            with open(part, "wb", buffering=0) as file:
                writer = shard_format.writer(file, features.columns)
                writer.append(features.encode({"key": f"k{number}", "data": np.roll(noise, number)}))
                found = writer.finish(), file.tell()
        written.append(found)
        if assembler:
            assembler.add(part)
        else:
            with open(part, "rb") as file, open(path, "ab") as shard:
                shutil.copyfileobj(file, shard, 1 << 20)
    if assembler:
        return assembler.finish()
    sizes = [size for _, size in written]
    starts = itertools.accumulate(sizes, initial=0)
    with open(path, "r+b") as file:
        trailer = shard_format.trailer(file, list(zip(starts, sizes, strict=False)))
        file.seek(sum(sizes))
        file.write(trailer)
    return Offsets.joined(written)
