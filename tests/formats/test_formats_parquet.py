"""Parquet shards: types, row groups, checksums and memory."""

from __future__ import annotations

import errno
import io
import itertools
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamat.errors import CorruptDataError, OptionError, SchemaError
from datamat.features import Bytes, Features, Image, ListOf, Mask, Nullable, Scalar, Tensor, Text
from datamat.features.base import dtype_of
from datamat.formats import Offsets, get_format, parquet
from datamat.formats.parquet import ParquetFormat
from datamat.testing.cases import CASES, MIXED, TABLE, mixed


def write(folder, features, samples, *, cuts=(), shard_format=None):
    """Write a shard in parts that begin at `cuts`; return its path."""
    shard_format = (shard_format or ParquetFormat()).with_features(features)
    path = folder / f"shard{len(list(folder.iterdir()))}.parquet"
    bounds = [0, *cuts, len(samples)]
    parts = []
    with open(path, "w+b", buffering=0) as file:
        for start, stop in itertools.pairwise(bounds):
            before = file.tell()
            writer = shard_format.writer(file, features.columns)
            for sample in samples[start:stop]:
                writer.append(features.encode(sample))
            writer.finish()
            parts.append((before, file.tell() - before))
        trailer = shard_format.trailer(file, parts)
        file.seek(0, io.SEEK_END)
        file.write(trailer)
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
    """The row that brings a group to the limit of what has to be held closes it."""
    monkeypatch.setattr(parquet, "_MOST_GROUP_BYTES", 10_000)
    features = Features({"data": Tensor((None,), "uint8", "raw"), "list": Tensor((None,), "float32"), "n": Scalar()})
    samples = [
        {"key": f"k{n:02d}", "data": np.zeros(n * 200, np.uint8), "list": np.zeros(n, np.float32), "n": 1.0}
        for n in range(40)
    ]

    whole = write(tmp_path, features, samples)

    sizes = [3 + n * 200 + n * 16 + 4 for n in range(40)]  # a number of a list counts 16 bytes
    starts = np.cumsum([0, *groups_of(whole)])
    for start, stop in itertools.pairwise(starts[:-1]):
        assert sum(sizes[start : stop - 1]) < 10_000 <= sum(sizes[start:stop])


LARGE = Features({"data": Tensor((None,), "uint8", "raw"), "boxes": Tensor((None, 4), "float32"), "caption": Text()})


def _stripes(rng, size):
    """Return bytes of which Zstandard compresses some blocks and leaves others, and ends blocks at odd places."""
    found = rng.integers(0, 256, size, np.uint8)
    for place in range(0, size, 200_000):
        found[place : place + rng.integers(1, 100_000)] = place % 251
    return found


CONTENTS = {
    "noise": lambda rng, size: rng.integers(0, 256, size, np.uint8),
    "zeros": lambda rng, size: np.zeros(size, np.uint8),
    "stripes": _stripes,
    "text": lambda rng, size: rng.integers(0, 4, size, np.uint8),
    "begins alike": lambda rng, size: np.concatenate([np.zeros(70, np.uint8), rng.integers(0, 256, size, np.uint8)]),
}
SIZES = (250_000, 0, 1, 131_072 - 4, 131_072, 5, 40_000, 1_500_000, 90_000, 262_140)


def large_samples(content, count=40):
    rng = np.random.default_rng(7)
    sizes = itertools.islice(itertools.cycle(SIZES), count)
    return [
        {
            "key": f"k{number}",
            "data": CONTENTS[content](rng, size),
            "boxes": np.full((number % 3, 4), number, np.float32),
            "caption": "a" * (number * 200),
        }
        for number, size in enumerate(sizes)
    ]


def reader_of(path, features, shard_format=None):
    shard_format = (shard_format or ParquetFormat()).with_features(features)
    with open(path, "rb") as file:
        return shard_format.reader(path, shard_format.find_offsets(file, path=str(path)))


def large_in(groups):
    return [{name: len(values) for name, values in group._large.items()} for group in groups]


@pytest.mark.parametrize(
    ("content", "cuts", "rows"),
    [
        ("noise", (), None),
        ("zeros", (), 1),
        ("stripes", (7, 7, 30), 16),
        ("text", (), None),
        ("begins alike", (7, 7, 30), 16),
    ],
    ids=CONTENTS,
)
def test_large_values_are_those_that_pyarrow_reads(tmp_path, content, cuts, rows):
    """In any order, whatever Zstandard made of them, from groups of any size; each was read alone."""
    samples = large_samples(content)
    path = write(tmp_path, LARGE, samples, cuts=cuts, shard_format=ParquetFormat(rows))
    wanted = pq.read_table(path).to_pylist()
    parquet._kept.clear()
    reader = reader_of(path, LARGE)

    for number in [*range(39, -1, -1), *np.random.default_rng(1).permutation(40).tolist()]:
        record = reader.read(number)
        assert record["data"] == [wanted[number]["data"]], number
        assert record["key"] == [wanted[number]["key"].encode()]
        assert record["boxes"].tolist() == np.ravel(wanted[number]["boxes"]).tolist()
        assert record["caption"] == [wanted[number]["caption"].encode()]

    found = large_in(parquet._kept.values())
    if rows != 1:  # a group of a small value is read as it is
        assert sorted(group["data"] for group in found) == sorted(groups_of(path))
    reader.close()


def test_large_values_do_not_stay_in_memory(tmp_path):
    """Nor does one that is asked for bring its neighbours along: a group of them has 16 MB."""
    parquet._kept.clear()
    path = write(tmp_path, LARGE, large_samples("noise", 64))
    reader = reader_of(path, LARGE)

    for number in range(64):
        reader.read(number)

    (group,) = parquet._kept.values()
    assert os.path.getsize(path) > 10_000_000 and group.num_bytes < 600_000  # most of it the captions
    reader.close()


def test_row_groups_in_memory_come_first(tmp_path, monkeypatch):
    """Of six groups, four are kept: two are read for each block of records in any order, and the records are right."""
    parquet._kept.clear()
    monkeypatch.setattr(parquet, "_GROUPS_KEPT", 4)
    monkeypatch.setattr(parquet, "_MOST_KEPT_BYTES", 0)
    monkeypatch.setattr(parquet, "_UNIT_BYTES", 0)  # each group is read alone
    monkeypatch.setattr(parquet, "_calls", itertools.repeat(0))  # as one of two threads that take turns sees it
    samples = [{"key": f"k{n}", "label": n % 3, "x": n / 7, "caption": "é" * (n % 9)} for n in range(60)]
    shard_format = ParquetFormat(20).with_features(TABLE)
    paths = [write(tmp_path, TABLE, samples, shard_format=shard_format) for _ in range(2)]
    readers = [reader_of(path, TABLE, shard_format) for path in paths]
    reads = []
    read_groups = parquet._ParquetReader.read_groups
    monkeypatch.setattr(
        parquet._ParquetReader, "read_groups", lambda self, groups: reads.append(groups) or read_groups(self, groups)
    )

    for seed in range(5):
        rng = np.random.default_rng(seed)
        which, numbers = np.divmod(rng.permutation(120)[:60], 60)
        block = shard_format.read_block(readers, which, numbers, TABLE.columns)
        assert list(block["key"]) == [f"k{number}" for number in numbers.tolist()]
        assert np.ravel(block["label"]).tolist() == (numbers % 3).tolist()
        assert np.ravel(block["x"]).tolist() == [number / 7 for number in numbers.tolist()]
        assert len(reads) == 6 + 2 * seed

    for reader in readers:
        reader.close()


def test_epochs_in_order_find_what_fits_in_memory(tmp_path, monkeypatch):
    """A set larger than the memory for row groups, read from its start to its end, does not push all of itself out."""
    parquet._kept.clear()
    monkeypatch.setattr(parquet, "_GROUPS_KEPT", 4)
    samples = [{"key": f"k{n}", "label": n % 3, "x": n / 7, "caption": "é"} for n in range(200)]
    shard_format = ParquetFormat(20).with_features(TABLE)
    reader = reader_of(write(tmp_path, TABLE, samples, shard_format=shard_format), TABLE, shard_format)
    group_bytes = reader._read([0]).num_bytes
    monkeypatch.setattr(parquet, "_UNIT_BYTES", group_bytes)
    monkeypatch.setattr(parquet, "_MOST_KEPT_BYTES", 6 * group_bytes)
    monkeypatch.setattr(parquet, "_calls", itertools.repeat(0))
    reads = []
    read = parquet._ParquetReader._read
    monkeypatch.setattr(
        parquet._ParquetReader, "_read", lambda self, groups: reads.extend(groups) or read(self, groups)
    )

    for _ in range(3):
        reads.clear()
        for start in range(0, 200, 40):
            numbers = np.arange(start, start + 40)
            block = shard_format.read_block([reader], np.zeros_like(numbers), numbers, TABLE.columns)
            assert list(block["key"]) == [f"k{number}" for number in numbers.tolist()]

    assert 0 < len(reads) < 6
    reader.close()


def test_flipped_bit_beside_a_large_value_never_gives_a_wrong_record(tmp_path):
    """In headers of pages, frames and blocks, in raw and in compressed ones, and in the footer."""
    samples = large_samples("stripes", 10)
    path = write(tmp_path, LARGE, samples, shard_format=ParquetFormat(5))
    whole = path.read_bytes()
    reader = reader_of(path, LARGE)
    wanted = [reader.read(number) for number in range(10)]
    metadata = pq.read_metadata(path).row_group(0)
    chunk = next(metadata.column(n) for n in range(4) if metadata.column(n).path_in_schema == "data")
    begin = chunk.data_page_offset
    rng = np.random.default_rng(3)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    places = [*range(begin, begin + 50), *rng.integers(4, len(whole), 20), *rng.integers(footer, len(whole), 40)]
    damaged = 0
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << rng.integers(8)
        changed = tmp_path / "changed.parquet"
        changed.write_bytes(content)
        shard_format = ParquetFormat(5).with_features(LARGE)
        try:
            other = shard_format.reader(changed, reader._spans)
        except CorruptDataError:
            damaged += 1
            continue
        for number in range(10):
            try:
                record = other.read(number)
            except CorruptDataError:
                damaged += 1
            else:
                assert record["data"] == wanted[number]["data"], (place, number)
                assert record["caption"] == wanted[number]["caption"] or place >= footer, (place, number)
        other.close()
    assert damaged > 50
    reader.close()


def test_large_value_that_changes_later_is_noticed(tmp_path):
    """Its checksum is compared each time; the message is that of any damaged page, and whole neighbours are read."""
    path = write(tmp_path, LARGE, large_samples("noise"), shard_format=ParquetFormat(20))
    reader = reader_of(path, LARGE)
    wanted = [reader.read(number)["data"] for number in range(40)]
    chunk = pq.read_metadata(path).row_group(1).column(1)
    assert chunk.path_in_schema == "data"
    with open(path, "r+b") as file:
        file.seek(chunk.data_page_offset + 1000)
        byte = file.read(1)[0]
        file.seek(-1, io.SEEK_CUR)
        file.write(bytes([byte ^ 16]))

    errors = []
    for number in range(40):
        try:
            assert reader.read(number)["data"] == wanted[number]
        except CorruptDataError as error:
            errors.append((number >= 20, "CRC checksum verification failed" in str(error)))
    assert errors == [(True, True)]
    reader.close()


PICTURES = Features({"image": Image(), "note": Bytes(), "masks": ListOf(Mask()), "extra": Nullable(Image())})


def picture(number):
    rng = np.random.default_rng(number)
    mask = np.full((9, 9), number, np.uint8)
    return {
        "key": f"k{number:02d}",
        "image": rng.integers(0, 256, (48 + number, 50, 3), np.uint8),
        "note": bytes(number * 500),
        "masks": [mask] * (number % 3),
        "extra": None if number % 2 else rng.integers(0, 256, (4, 4, 3), np.uint8),
    }


def chunks_of(path, group=0):
    found = pq.read_metadata(path).row_group(group)
    chunks = [found.column(number) for number in range(found.num_columns)]
    return {chunk.path_in_schema.partition(".")[0]: chunk for chunk in chunks}


def test_compressed_files_are_not_compressed_again(tmp_path):
    """Pictures are stored as they are, in lists, too; other bytes by Zstandard."""
    path = write(tmp_path, PICTURES, list(map(picture, range(40))))

    codecs = {name: chunk.compression for name, chunk in chunks_of(path).items()}
    assert codecs == dict.fromkeys(codecs, "ZSTD") | dict.fromkeys(["image", "masks", "extra"], "UNCOMPRESSED")
    assert chunks_of(path)["note"].total_compressed_size < 40 * 500


def test_every_large_value_has_a_page(tmp_path):
    """Its bytes lie in the file as they came."""
    samples = list(map(picture, range(40)))
    path = write(tmp_path, PICTURES, samples)
    data = path.read_bytes()

    for record in get_format("parquet").with_features(PICTURES).read(path):
        assert data.count(record["image"][0]) == 1


def test_offsets_cover_large_values(tmp_path):
    """The range of a row group holds all of its chunks, for `verify` and for readers of ranges."""
    shard_format = ParquetFormat(16).with_features(PICTURES)
    with open(tmp_path / "part", "w+b", buffering=0) as file:
        writer = shard_format.writer(file, PICTURES.columns)
        for number in range(40):
            writer.append(PICTURES.encode(picture(number)))
        offsets = writer.finish()
        file.seek(0)
        found = shard_format.find_offsets(file, path="part")

    assert offsets.to_text() == found.to_text()
    assert offsets.span(0)[0] == 4 and offsets.span(0)[1] > 16 * 7000


def test_footer_says_what_pyarrow_would(tmp_path):
    """Of large values, which it has not seen; and the file holds nothing between chunks."""
    features = Features(
        {"data": Tensor((None,), "uint8", "raw"), "caption": Text(), "more": Tensor((None,), "uint8", "raw")}
    )
    samples = [
        {"key": f"k{n}", "data": np.full(n * 99, n, np.uint8), "caption": "é" * n, "more": np.zeros(9000, np.uint8)}
        for n in range(30)
    ]
    path = write(tmp_path, features, samples, shard_format=ParquetFormat(8))
    table = pq.read_table(path)
    pq.write_table(
        table,
        tmp_path / "theirs",
        row_group_size=8,
        compression="zstd",
        use_dictionary=False,
        write_statistics=["key", "caption"],
    )

    found, wanted = pq.read_metadata(path), pq.read_metadata(tmp_path / "theirs")

    assert found.schema == wanted.schema and found.schema.to_arrow_schema() == table.schema
    end = 4
    for number in range(4):
        mine, theirs = found.row_group(number), wanted.row_group(number)
        assert mine.num_rows == theirs.num_rows
        chunks = sorted((mine.column(place) for place in range(4)), key=lambda chunk: chunk.data_page_offset)
        for chunk in chunks:
            assert chunk.data_page_offset == end
            end += chunk.total_compressed_size
        assert mine.total_byte_size == sum(chunk.total_uncompressed_size for chunk in chunks)
        for place in range(4):
            for name in ("path_in_schema", "physical_type", "num_values", "compression", "encodings", "statistics"):
                assert getattr(mine.column(place), name) == getattr(theirs.column(place), name)


def test_value_beyond_the_limit_of_a_page_is_refused(monkeypatch):
    """A page gives its size in 32 bits; nothing of the value is written."""
    monkeypatch.setattr(parquet, "_MOST_VALUE_BYTES", 1000)
    features = Features({"data": Tensor((None,), "uint8", "raw")})
    writer = get_format("parquet").with_features(features).writer(io.BytesIO(), features.columns)

    with pytest.raises(
        SchemaError, match=r"'data' does not fit into binary: a value has 1,001 bytes; Parquet allows at most 1,000"
    ):
        writer.append_block({"key": [b"k"], "data": [bytes(1001)]})

    writer.append_block({"key": [b"k"], "data": [bytes(1000)]})
    assert len(writer.finish()) == 1


def test_pages_are_compressed_and_have_checksums(tmp_path):
    """Zstandard compresses pages of plain bytes; readers that test no checksums take a changed page for right."""
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


@pytest.mark.parametrize("shape", [(), (3,), (None,), (None, 2)])
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int16", "int64", "float16", "bfloat16", "float32", "float64"]
)
@pytest.mark.parametrize("wrap", [lambda feature: feature, Nullable, ListOf])
def test_pages_are_encoded_as_every_reader_knows(tmp_path, dtype, shape, wrap):
    """Daft and fastparquet know plain pages and dictionaries only."""
    one = np.ones(tuple(2 if size is None else size for size in shape), dtype_of(dtype))
    features = Features({"x": wrap(Tensor(shape, dtype) if shape else Scalar(dtype))})
    rows = [{"key": f"{n}", "x": [one[()]] if wrap is ListOf else one[()]} for n in range(4)]

    group = pq.read_metadata(write(tmp_path, features, rows)).row_group(0)

    columns = list(map(group.column, range(group.num_columns)))
    assert {name for column in columns for name in column.encodings} <= {"PLAIN", "RLE", "RLE_DICTIONARY"}
    is_listed = bool(shape) or wrap is ListOf
    if dtype in {"int8", "uint8"} and is_listed and any(".list" in column.path_in_schema for column in columns):
        assert any("RLE_DICTIONARY" in column.encodings for column in columns)


def test_other_columns_are_named(tmp_path):
    """A file of other features says what it holds and what was asked for."""
    path = write(tmp_path, TABLE, [])
    other = get_format("parquet").with_features(Features({"x": Scalar("float32")}))

    with pytest.raises(
        CorruptDataError, match=r"its columns are .*x: double.*; the features require .*x: float$|float;"
    ):
        list(other.read(path))


def test_full_disk_is_not_taken_for_a_torn_part(tmp_path):
    """The disk's error is raised unchanged, with its number; the writer that it leaves behind does no harm."""
    taken = 0

    class Disk(io.BytesIO):
        def write(self, data):
            nonlocal taken
            taken += len(data)
            if taken > 1000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def fill(file):
        writer = get_format("parquet").with_features(MIXED).writer(file, MIXED.columns)
        for number in range(200):
            writer.append(MIXED.encode(mixed(number)))
        writer.finish()

    with pytest.raises(OSError, match="No space left on device") as caught:
        fill(Disk())

    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_footer_leads_to_the_row_groups_of_all_parts(tmp_path, rows):
    """It leads to every page of a part, however many there are, with numbers, statistics and dictionaries."""
    samples = [{"key": f"k{n}", "label": n % 3, "x": n / 7, "caption": "é" * (n % 9)} for n in range(rows)]
    whole = write(tmp_path, TABLE, samples)
    cuts = [0, 0, 1, *range(2, rows)] if rows else [0, 0]

    path = write(tmp_path, TABLE, samples, cuts=cuts)

    found, wanted = pq.read_metadata(path), pq.read_metadata(whole)
    assert found.schema == wanted.schema and found.metadata == wanted.metadata
    assert (found.num_rows, groups_of(path)) == (rows, [1] * rows)
    assert pq.read_table(path, page_checksum_verification=True).equals(pq.read_table(whole))
    ends = [4]
    for number in range(found.num_row_groups):
        group = found.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        starts = [min(filter(None, (c.dictionary_page_offset, c.data_page_offset))) for c in chunks]
        assert starts[0] >= ends[-1]
        ends.append(starts[-1] + chunks[-1].total_compressed_size)
        assert chunks[1].statistics.min == chunks[1].statistics.max == number % 3
    assert ends[-1] < path.stat().st_size


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fastparquet leaves files open
@pytest.mark.parametrize("client", ["duckdb", "polars", "fastparquet", "pandas", "datasets"])
def test_other_readers_read_pages_of_large_values(tmp_path, client):
    """All rows of a column, and the rows of a query by another; stored and compressed pages, of several parts."""
    library = pytest.importorskip(client)
    samples = list(map(picture, range(40)))
    path = str(write(tmp_path, PICTURES, samples, cuts=[3, 20], shard_format=ParquetFormat(7)))
    wanted = {row["key"]: row for row in pq.read_table(path).to_pylist()}

    if client == "duckdb":
        table = library.sql(f"select key, image, note from '{path}' where key >= 'k10'").arrow().read_all().to_pylist()
    elif client == "polars":
        table = library.scan_parquet(path).filter(library.col("key") >= "k10").collect().to_dicts()
    elif client == "fastparquet":
        frame = library.ParquetFile(path).to_pandas(columns=["key", "image", "note"])
        table = frame.query("key >= 'k10'").to_dict("records")
    elif client == "pandas":
        table = library.read_parquet(path, filters=[("key", ">=", "k10")]).to_dict("records")
    else:
        loaded = library.load_dataset("parquet", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
        table = [row for row in loaded if row["key"] >= "k10"]

    assert [row["key"] for row in table] == [f"k{number}" for number in range(10, 40)]
    for row in table:
        for name in ("image", "note"):
            assert bytes(row[name]) == wanted[row["key"]][name]


@pytest.mark.parametrize("change", ["cut", "magic", "length", "metadata"])
def test_part_without_its_footer_is_refused(tmp_path, change):
    """Its row groups could not be found."""
    features = TABLE
    shard_format = ParquetFormat().with_features(features)
    file = io.BytesIO()
    writer = shard_format.writer(file, features.columns)
    writer.append(features.encode({"key": "k", "label": 1, "x": 1.0, "caption": "c"}))
    writer.finish()
    data = file.getvalue()
    data = {
        "cut": data[:-1],
        "magic": data[:-1] + b"!",
        "length": data[:-8] + b"\xff\xff\xff\x7f" + data[-4:],
        "metadata": data[:-40] + b"\xff" * 32 + data[-8:],
    }[change]

    with pytest.raises(CorruptDataError, match=r"bytes 0 to \d+ are not a Parquet file: "):
        shard_format.trailer(io.BytesIO(data), [(0, len(data))])


def test_number_behind_the_end_is_refused(tmp_path):
    """Offsets of more records than the file holds lead to an error that names the record."""
    path = write(tmp_path, TABLE, [{"key": "k", "label": 1, "x": 0.5, "caption": ""}])
    offsets = Offsets(*(np.zeros(9, np.uint64) for _ in range(3)))
    reader = get_format("parquet").with_features(TABLE).reader(path, offsets)

    with pytest.raises(CorruptDataError, match=r"record 8 at byte \d+ is damaged: the file holds 1 records"):
        reader.read(8)


def test_value_that_is_not_of_its_type_is_refused():
    """Values that features never produce are refused, not converted."""
    features = Features({"text": Text(), "pair": Tensor((2,), "int32")})
    for wrong in ({"text": b"\xff", "pair": np.array([1, 2])}, {"text": b"", "pair": np.array([1, 2, 3])}):
        writer = get_format("parquet").with_features(features).writer(io.BytesIO(), features.columns)
        writer.append({"key": b"k", **wrong})

        with pytest.raises(
            SchemaError,
            match=r"column '(text|pair)' does not fit into (string|fixed_size_list).*; give what its feature declares",
        ):
            writer.finish()


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "64"])
def test_senseless_row_groups_are_refused(rows):
    """The constructor checks the number of rows."""
    with pytest.raises(OptionError, match=r"row_group_rows is .*; want a number of at least 1, or None"):
        ParquetFormat(rows)


def test_options_hold_what_decides_the_bytes():
    """Formats whose shards differ have other options, for fingerprints."""
    pictures, table = (ParquetFormat().with_features(features).options() for features in (MIXED, TABLE))

    assert (pictures["row_group_rows"], table["row_group_rows"]) == (64, 8192)
    assert ParquetFormat(5).with_features(TABLE).options()["row_group_rows"] == 5


def test_memory_does_not_grow_with_the_shard(tmp_path):
    """A part of 60 MB is written in the memory of a few row groups of 6 MB."""
    features = Features({"data": Tensor((None,), "uint8", "raw")})
    noise = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8)
    before, most = pa.total_allocated_bytes(), 0
    with open(tmp_path / "shard", "wb", buffering=0) as file:
        writer = get_format("parquet").with_features(features).writer(file, features.columns)
        for number in range(600):
            writer.append(features.encode({"key": "k", "data": noise[number : number + 100_000]}))
            most = max(most, pa.total_allocated_bytes() - before)
        writer.finish()

    assert (tmp_path / "shard").stat().st_size > 60_000_000
    assert most < 20_000_000
