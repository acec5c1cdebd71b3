"""Small records read many at once: the same values as one by one, in every format, order and condition."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from every_feature import Everything
from forged import relist
from numbered_rows import written
from prepared import Prepared

from datamat import CorruptDataError, DatasetWriter, Features, IndexRow, ShardOptions, Tensor, Text, load
from datamat.formats import parquet, tfrecord
from datamat.formats.example import decode_example, fields, varint
from datamat.formats.tfrecord import frame, read_payload
from datamat.readers.records import SampleReader
from datamat.testing import InlineExecutor

FORMATS = ["tfrecord", "tfrecord.gz", "parquet"]
if importlib.util.find_spec("array_record"):
    FORMATS.append("arrayrecord")
NUM_ROWS = 120
PICTURES = {name for name, feature in Everything.features.items() if not feature.decodes_many()}


class Numbers(DatasetWriter):
    """Every feature type that is no picture; text and lists of many lengths, empty ones among them."""

    name = "numbers"
    features = Features(
        {
            **{name: feature for name, feature in Everything.features.items() if name not in PICTURES},
            "long": Text(),
            "many": Tensor((None,), "float32"),
        }
    )

    def index(self, source):
        return [IndexRow(f"{'k' * (number % 5)}{number}", "train", {"number": number}) for number in range(NUM_ROWS)]

    def read(self, row):
        number = int(row.fields["number"])
        rng = np.random.default_rng(number)
        found = {name: value for name, value in Everything().read(row).items() if name not in PICTURES}
        found["boxes"] = np.repeat(found["boxes"], number % 3, 0)
        found["open"] = rng.integers(-(2**31), 2**31, (number % 4, 2, number % 3), np.int32)
        found["long"] = "ß" * int(rng.integers(400))
        found["many"] = rng.random(int(rng.integers(300)), np.float32)
        return found


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A directory in each of the formats, in five shards. Read only."""
    output = tmp_path_factory.mktemp("numbers") / "out"
    options = {"format": FORMATS, "shards": ShardOptions(num_shards=5), "executor": InlineExecutor()}
    Prepared(Numbers, None, output, **options).run(progress=False)
    return output


@pytest.fixture
def count_blocks(monkeypatch):
    """Return how many blocks were decoded so far, and how many were refused."""
    made = []

    def read_block(self, positions, num_threads, *, original=SampleReader.read_block):
        found = original(self, positions)
        made.append(found is not None)
        return found

    monkeypatch.setattr(SampleReader, "read_block", read_block)
    return lambda: (made.count(True), made.count(False))


def assert_same(found, wanted):
    """Assert that two samples, or values of them, agree in type, dtype, shape and content."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_same(found[name], value)
    elif isinstance(wanted, str):
        assert found == wanted
    else:
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()


def rows_of(batches):
    """Return the samples of batches."""
    return [
        {name: values[row] for name, values in batch.items()} for batch in batches for row in range(len(batch["key"]))
    ]


@pytest.mark.parametrize("shuffle", [False, True, 40])
def test_each_gzip_member_is_inflated_once_an_epoch(numbers, shuffle):
    """In a shuffled epoch, too: it mixes the records of a few members at a time, which stay inflated."""
    data = load(numbers, "train", format="tfrecord.gz")
    offsets = [numbers / info.index_file for info in data.manifest.splits["train"]]
    members = {(path, line.split()[0]) for path in offsets for line in path.read_text().splitlines()}
    tfrecord._kept_member.cache_clear()

    assert len(rows_of(data.to_numpy(16, shuffle=shuffle, num_threads=1))) == NUM_ROWS

    assert tfrecord._kept_member.cache_info().misses == len(members) < NUM_ROWS


@pytest.mark.parametrize("shuffle", [False, True])
def test_whole_row_groups_are_read_together(tmp_path, monkeypatch, shuffle):
    """Each is read once; one of which a block takes only some rows is kept for the next block."""
    monkeypatch.setattr(parquet, "_LARGE_ROWS", 8)
    data = written(tmp_path, 0, NUM_ROWS, 3, parquet.ParquetFormat(row_group_rows=8))
    read = []

    def read_groups(self, groups, *, original=parquet._ParquetReader.read_groups):
        read.append([(self._path, group) for group in groups])
        return original(self, groups)

    monkeypatch.setattr(parquet._ParquetReader, "read_groups", read_groups)
    found = rows_of(data.to_numpy(100, shuffle=shuffle, seed=1, num_threads=1))
    groups_read = [group for call in read for group in call]

    num_groups = sum(pq.read_metadata(file).num_row_groups for file in data.files)
    assert len(groups_read) == len(set(groups_read)) == num_groups
    assert len(read) < len(groups_read) / 2
    assert sorted(row["key"] for row in found) == sorted(data.keys())
    for row in found:
        assert_same(row, data[row["key"]])


def test_row_groups_of_another_size_are_shuffled_as_such(tmp_path, monkeypatch):
    """`load` knows the format by its name alone: groups larger than by default were read once for each window."""
    monkeypatch.setattr(parquet, "_LARGE_ROWS", 2)
    monkeypatch.setattr(parquet, "_SMALL_ROWS", 2)
    monkeypatch.setattr(parquet, "_MOST_KEPT_BYTES", 0)  # as if they were large
    data = written(tmp_path, 0, 800, 1, parquet.ParquetFormat(row_group_rows=40))
    sizes = [
        metadata.row_group(group).num_rows
        for metadata in map(pq.read_metadata, data.files)
        for group in range(metadata.num_row_groups)
    ]
    assert max(sizes) > 4
    read = []

    def read_groups(self, groups, *, original=parquet._ParquetReader.read_groups):
        read.extend(groups)
        return original(self, groups)

    monkeypatch.setattr(parquet._ParquetReader, "read_groups", read_groups)
    found = rows_of(data.to_numpy(16, shuffle=True, seed=1, num_threads=1))

    assert len(read) < 1.3 * len(sizes)  # some are read again, by the next window
    assert sorted(row["key"] for row in found) == sorted(data.keys())


PAIRS = [
    ("tfrecord", False, 7), ("tfrecord", True, 64), ("tfrecord.gz", 40, 1), ("tfrecord.gz", True, 1000),
    ("parquet", False, 1000), ("parquet", 40, 64), ("parquet", True, 7),
    *(("arrayrecord", True, 64),) * ("arrayrecord" in FORMATS),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "shuffle", "batch_size"), PAIRS)
def test_batches_hold_what_single_reads_return(numbers, count_blocks, name, shuffle, batch_size):
    data = load(numbers, "train", format=name)

    found = rows_of(data.to_numpy(batch_size, shuffle=shuffle, seed=3))

    assert sorted(row["key"] for row in found) == sorted(data.keys())
    for row in found:
        assert_same(row, data[row["key"]])
    made, refused = count_blocks()
    assert made and not refused


@pytest.mark.parametrize(("name", "shuffle"), [(name, shuffle) for name, shuffle, _ in PAIRS if shuffle])
def test_records_come_in_the_order_of_the_epoch(numbers, name, shuffle):
    """Blocks are cut across shards and row groups; with a transform, rows are read one at a time."""
    data = load(numbers, "train", format=name)

    found = [batch["key"] for batch in data.to_numpy(8, shuffle=shuffle, seed=5)]

    assert found == [batch["key"] for batch in data.to_numpy(8, shuffle=shuffle, seed=5, transform=lambda one: one)]
    assert [key for keys in found for key in keys] != data.keys()


def test_worker_processes_decode_blocks_too(numbers):
    data = load(numbers, "train", format="tfrecord")

    for row in rows_of(data.to_numpy(16, num_workers=2, shuffle=True)):
        assert_same(row, data[row["key"]])


@pytest.mark.parametrize("name", FORMATS)
def test_values_belong_to_the_user(numbers, name):
    """Writing into a batch changes no other one, and nothing that is cached."""
    data = load(numbers, "train", format=name)
    before = rows_of(data.to_numpy(1))

    for batch in data.to_numpy(1):
        for values in batch.values():
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, np.ndarray):
                    value[...] = 1
    for one, other in zip(before, rows_of(data.to_numpy(1)), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", FORMATS)
def test_reading_resumes_in_the_middle_of_a_block(numbers, name):
    data = load(numbers, "train", format=name)
    loader = data.to_numpy(7, shuffle=True, seed=1)
    batches = iter(loader)
    first = [next(batches)["key"] for _ in range(5)]
    again = data.to_numpy(3, shuffle=True, seed=1)
    again.load_state_dict(loader.state_dict())

    rest = [key for batch in again for key in batch["key"]]

    assert sorted(rest + [key for keys in first for key in keys]) == sorted(data.keys())


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_record_is_named_or_skipped_and_no_other(numbers, tmp_path, name):
    """The block is refused, and its records are read one by one."""
    data = load(numbers, "train", format=name)
    damaged = _damaged(data, tmp_path)
    sound = {key for key in data.keys() if _is_readable(damaged, key)}  # noqa: SIM118 -- no dict
    assert 0 < len(sound) < len(data)

    with pytest.raises(CorruptDataError, match=r"record \d+ .*damaged"):
        list(damaged.to_numpy(32))
    skipping = load(damaged.path, "train", format=name, errors="skip")
    found = rows_of(skipping.to_numpy(32, shuffle=True))
    for row in found:
        assert_same(row, data[row["key"]])
    keys = [row["key"] for row in found]
    assert len({*keys}) == len(keys)
    # Of a damaged gzip member, those come that have not changed, by their own checksums.
    assert sound <= {*keys} if name == "tfrecord.gz" else sound == {*keys}


def test_no_flipped_bit_of_a_tfrecord_passes_a_block(numbers, tmp_path):
    """Header, checksums, message: a sample of all bytes of three records, and each bit of a byte in turn."""
    data = load(numbers, "train", format="tfrecord")
    damaged = _damaged(data, tmp_path, flip=False)
    path = pathlib.Path(damaged.files[0])
    content = path.read_bytes()
    starts = [int(line.split()[0]) for line in path.with_suffix(".idx").read_text().splitlines()]
    for place in range(starts[4], starts[7], 13):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        assert load(damaged.path, "train", format="tfrecord")._records.read_block(np.arange(20)) is None
    path.write_bytes(content)
    assert load(damaged.path, "train", format="tfrecord")._records.read_block(np.arange(20)) is not None


def test_records_of_another_writer_are_read(numbers, tmp_path, count_blocks):
    """Fields in another order, numbers unpacked: valid, but not in the form that blocks are decoded from."""
    data = load(numbers, "train", format="tfrecord")
    copied = _damaged(data, tmp_path, flip=False)
    path = pathlib.Path(copied.files[0])
    sizes = []
    with path.open("rb") as file, (tmp_path / "other").open("wb") as target:
        while (payload := read_payload(file)) is not None:
            ((_, _, start, stop),) = fields(payload, 0, len(payload))
            entries = [payload[begin:end] for _, _, begin, end in fields(payload, start, stop)]
            body = b"".join(b"\x0a" + varint(len(entry)) + entry for entry in reversed(entries))
            message = b"\x0a" + varint(len(body)) + body
            assert decode_example(message).keys() == decode_example(payload).keys()
            sizes.append(target.write(b"".join(frame([message], len(message)))))
    assert sum(sizes) == path.stat().st_size
    (tmp_path / "other").replace(path)
    relist(path.parent)
    copied = load(path.parent, "train", format="tfrecord")

    for row in rows_of(copied.to_numpy(32)):
        assert_same(row, data[row["key"]])
    assert count_blocks()[1]


def _damaged(data, folder, *, flip=True):
    """Return a copy of a dataset, if asked for with a flipped bit in a record in the middle of its second shard."""
    path = shutil.copytree(data.path, folder / "damaged")
    copied = load(path, "train", format=data.manifest.format)
    if flip:
        file, info = pathlib.Path(copied.files[1]), copied.manifest.splits["train"][1]
        content = bytearray(file.read_bytes())
        lines = (path / info.index_file).read_text().splitlines()
        offset, size = map(int, lines[len(lines) // 2].split()[:2])
        content[offset + size // 2] ^= 16
        file.write_bytes(content)
    return copied


def _is_readable(data, key):
    try:
        data[key]
    except CorruptDataError:
        return False
    return True
