"""Parquet shards: types, row groups, checksums and memory."""

from __future__ import annotations

import errno
import io
import itertools
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from conformance import CASES, MIXED, TABLE, mixed

from datamat.errors import CorruptDataError, OptionError, SchemaError
from datamat.features import Features, Scalar, Tensor, Text
from datamat.formats import Offsets, get_format, parquet
from datamat.formats.parquet import ParquetFormat


def write(folder, features, samples, *, cuts=(), shard_format=None):
    """Write a shard in parts that begin at `cuts`; return its path."""
    shard_format = (shard_format or ParquetFormat()).with_features(features)
    path = folder / f"shard{len(list(folder.iterdir()))}.parquet"
    assembler = shard_format.assembler(path)
    bounds = [0, *cuts, len(samples)]
    for start, stop in itertools.pairwise(bounds):
        part = folder / "part"
        with open(part, "wb", buffering=0) as file:
            writer = shard_format.writer(file, features.columns)
            for sample in samples[start:stop]:
                writer.append(features.encode(sample))
            writer.finish()
        assembler.add(part)
    assembler.finish()
    return path


def groups_of(path):
    metadata = pq.read_metadata(path)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("png", "binary"),
        ("mask", "binary"),
        ("label", "int64"),
        ("labels", "list<element: int64 not null>"),
        ("two labels", "fixed_size_list<element: int64 not null>[2]"),
        ("boxes", "list<element: fixed_size_list<element: float not null>[4] not null>"),
        ("text", "string"),
        ("scalar bool", "bool"),
        ("scalar uint8", "uint8"),
        ("scalar uint64", "uint64"),
        ("scalar float16", "float"),
        ("scalar float64", "double"),
        ("scalar complex64", "binary"),
        ("fixed int16", "fixed_size_list<element: int16 not null>[3]"),
        ("open float64", "list<element: double not null>"),
        ("raw float32", "binary"),
        ("matrix", "fixed_size_list<element: fixed_size_list<element: int32 not null>[3] not null>[2]"),
        ("open inside", "list<element: float not null>"),
        ("no numbers", "list<element: float not null>"),
    ],
)
def test_columns_are_typed(tmp_path, case, wanted):
    """Each feature becomes the type that clients of tables expect, without nulls."""
    feature, values = CASES[case]
    features = Features({"value": feature})

    path = write(tmp_path, features, [{"key": "k", "value": value} for value in values])

    field = pq.read_schema(path).field("value")
    assert (str(field.type), field.nullable) == (wanted, False)


def test_rows_of_a_group_are_fixed(tmp_path):
    """64 rows with pictures, 8,192 without, or as many as asked for; the last group has the rest."""
    table = [{"key": f"k{n}", "label": 1, "x": 0.5, "caption": ""} for n in range(8200)]

    assert groups_of(write(tmp_path, MIXED, list(map(mixed, range(150))))) == [64, 64, 22]
    assert groups_of(write(tmp_path, TABLE, table)) == [8192, 8]
    assert groups_of(write(tmp_path, TABLE, table[:25], shard_format=ParquetFormat(10))) == [10, 10, 5]


def test_large_rows_end_a_group(tmp_path, monkeypatch):
    """A group is closed by the row that brings it to the most bytes, wherever parts are cut."""
    monkeypatch.setattr(parquet, "_MOST_GROUP_BYTES", 10_000)
    features = Features({"data": Tensor((None,), "uint8", "raw"), "list": Tensor((None,), "float32"), "n": Scalar()})
    samples = [
        {"key": f"k{n:02d}", "data": np.zeros(n * 200, np.uint8), "list": np.zeros(n, np.float32), "n": 1.0}
        for n in range(40)
    ]

    whole = write(tmp_path, features, samples)

    sizes = [3 + n * 200 + n * 4 + 4 for n in range(40)]
    starts = np.cumsum([0, *groups_of(whole)])
    for start, stop in itertools.pairwise(starts[:-1]):
        assert sum(sizes[start : stop - 1]) < 10_000 <= sum(sizes[start:stop])
    for cuts in ([1, 2, 3], list(range(1, 40)), [20]):
        assert write(tmp_path, features, samples, cuts=cuts).read_bytes() == whole.read_bytes()


def test_pages_are_compressed_and_have_checksums(tmp_path):
    """Zstandard everywhere; what is changed in a page is read as if it were right by those who test no checksums."""
    features = Features({"data": Tensor((None,), "uint8", "raw")})
    noise = np.random.default_rng(0).integers(0, 256, 50_000, np.uint8)
    path = write(tmp_path, features, [{"key": "k", "data": noise}])
    group = pq.read_metadata(path).row_group(0)
    data = bytearray(path.read_bytes())
    data[group.column(1).data_page_offset + 25_000] ^= 1
    path.write_bytes(data)

    assert {group.column(number).compression for number in range(group.num_columns)} == {"ZSTD"}
    assert pq.ParquetFile(path).read()["data"][0].as_py() != noise.tobytes()
    with pytest.raises(CorruptDataError, match=r"record 0 at byte 4 is damaged: .*CRC checksum"):
        list(get_format("parquet").with_features(features).read(path))


def test_other_columns_are_named(tmp_path):
    """A file of other features says what it holds and what was asked for."""
    path = write(tmp_path, TABLE, [])
    other = get_format("parquet").with_features(Features({"x": Scalar("float32")}))

    with pytest.raises(
        CorruptDataError, match=r"its columns are .*x: double.*; the features ask for .*x: float$|float;"
    ):
        list(other.read(path))


def test_full_disk_is_not_taken_for_a_torn_part(tmp_path):
    """An error of the shard's own disk comes as it is, with its number, and giving up leaves no trace of it."""
    path = write(tmp_path, MIXED, list(map(mixed, range(200))))
    assembler = get_format("parquet").with_features(MIXED).assembler("/dev/full")

    def fill():
        for _ in range(50):
            assembler.add(path.with_name("part"))

    with pytest.raises(OSError, match="No space left on device") as caught:
        fill()
    assembler.close()

    assert caught.value.errno == errno.ENOSPC


def test_number_behind_the_end_is_refused(tmp_path):
    """Offsets that tell of more records than there are lead to an error that names the record."""
    path = write(tmp_path, TABLE, [{"key": "k", "label": 1, "x": 0.5, "caption": ""}])
    offsets = Offsets(*(np.zeros(9, np.uint64) for _ in range(3)))
    reader = get_format("parquet").with_features(TABLE).reader(path, offsets)

    with pytest.raises(CorruptDataError, match=r"record 8 at byte \d+ is damaged: the file holds 1 records"):
        reader.read(8)


def test_value_that_is_not_of_its_type_is_refused():
    """What features would never give is not stored as something else."""
    features = Features({"text": Text(), "pair": Tensor((2,), "int32")})
    for wrong in ({"text": b"\xff", "pair": np.array([1, 2])}, {"text": b"", "pair": np.array([1, 2, 3])}):
        writer = get_format("parquet").with_features(features).writer(io.BytesIO(), features.columns)
        writer.append({"key": b"k", **wrong})

        with pytest.raises(SchemaError, match=r"column '(text|pair)' does not fit into (string|fixed_size_list)"):
            writer.finish()


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "64"])
def test_senseless_row_groups_are_refused(rows):
    """The number of rows is checked where it is given."""
    with pytest.raises(OptionError, match=r"row_group_rows is .*; want a number of at least 1, or None"):
        ParquetFormat(rows)


def test_options_tell_what_decides_the_bytes():
    """Formats whose shards differ have other options, for fingerprints."""
    pictures, table = (ParquetFormat().with_features(features).options() for features in (MIXED, TABLE))

    assert (pictures["row_group_rows"], table["row_group_rows"]) == (64, 8192)
    assert ParquetFormat(5).with_features(TABLE).options()["row_group_rows"] == 5


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shard(tmp_path):
    """A shard of 200 MB is assembled in the memory of a few row groups of 6 MB."""
    code = """
import pathlib, sys, numpy as np, pyarrow as pa
from datamat.features import Features, Tensor
from datamat.formats import get_format
features = Features({"data": Tensor((None,), "uint8", "raw")})
shard_format = get_format("parquet").with_features(features)
folder = pathlib.Path(sys.argv[1])
assembler = shard_format.assembler(folder / "shard")
rng = np.random.default_rng(0)
for number in range(20):
    with open(folder / "part", "wb", buffering=0) as file:
        writer = shard_format.writer(file, features.columns)
        for _ in range(100):
            writer.append(features.encode({"key": "k", "data": rng.integers(0, 256, 100_000, np.uint8)}))
        writer.finish()
    assembler.add(folder / "part")
assembler.finish()
print(pa.default_memory_pool().max_memory())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)

    assert done.stderr == ""
    assert (tmp_path / "shard").stat().st_size > 200_000_000
    assert int(done.stdout) < 64 << 20
