"""ArrayRecord shards: offsets match the file, and errors of the package become datamat's."""

from __future__ import annotations

import errno
import io
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from open_files import no_descriptors

from datamat.errors import CorruptDataError
from datamat.features import Features, Tensor
from datamat.formats import Offsets, get_format
from datamat.formats.example import ExampleEncoder, varint
from datamat.testing.cases import MIXED, mixed

array_record_module = pytest.importorskip(
    "array_record.python.array_record_module", reason="the package array-record is not installed"
)

BLOCK_BYTES, BLOCK_HEADER_BYTES, CHUNK_HEADER_BYTES = 65_536, 24, 40
RAW = Features({"data": Tensor((None,), "uint8", "raw")})


def chunk_of(data, offset, size):
    """Return the bytes of a chunk without the block headers that interrupt it."""
    found, place = bytearray(), offset
    while place < offset + size:
        if place % BLOCK_BYTES == 0:
            place += BLOCK_HEADER_BYTES
            continue
        stop = min(offset + size, (place // BLOCK_BYTES + 1) * BLOCK_BYTES)
        found += data[place:stop]
        place = stop
    return bytes(found)


SIZES = st.integers(0, 300) | st.integers(65_000, 66_000) | st.integers(0, 300_000)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(SIZES, max_size=15), min_size=1, max_size=3))
@example([[0, 0, 0, 65_000]])  # the header of a block stands in the middle of the positions in the file
@example([[0, 65_000, 65_534]])  # and these stand more than two blocks before its end
@example([[], []])
@example([[1], [], [65_536 - 64 - 44 - 24]])
@example([[5 << 20, 5 << 20, 1]])  # more than the package gets to write at once
def test_offsets_are_those_of_the_file(tmp_path_factory, parts):
    """Each line is a chunk that holds one record, and the positions in the file agree."""
    path = tmp_path_factory.mktemp("offsets") / "shard"
    rng = np.random.default_rng(0)
    records = [[{"key": b"k", "data": rng.bytes(size)} for size in sizes] for sizes in parts]

    offsets = write_shard(path, RAW, records)

    data, payloads = path.read_bytes(), []
    end = int((offsets.offset + offsets.size).max(initial=0))
    footer = chunk_of(data, end, len(data) - end)
    for record, offset, size in zip(
        itertools.chain(*records), offsets.offset.tolist(), offsets.size.tolist(), strict=True
    ):
        payload = example_of(record)
        length = varint(len(payload))
        wanted = bytes([0, len(length)]) + length + payload
        assert chunk_of(data, offset, size)[CHUNK_HEADER_BYTES:] == wanted
        assert b"\x08" + varint(offset) + b"\x10" + varint(len(payload)) + b"\x18\x01" in footer
        payloads.append(payload)
    assert read_by_package(path) == payloads
    with open(path, "rb") as file:
        assert get_format("arrayrecord").find_offsets(file, path="").to_text() == offsets.to_text()


def example_of(record):
    pieces, _ = ExampleEncoder(RAW.columns).encode(record)
    return b"".join(pieces)


def write_shard(path, features, parts):
    """Write records, divided into parts, as a worker does; return their offsets."""
    shard_format = get_format("arrayrecord").with_features(features)
    written, starts = [], []
    with open(path, "w+b", buffering=0) as file:
        for records in parts:
            starts.append(file.tell())
            writer = shard_format.writer(file, features.columns)
            for record in records:
                writer.append(record)
            written.append((writer.finish(), file.tell() - starts[-1]))
        trailer = shard_format.trailer(file, [(start, size) for start, (_, size) in zip(starts, written, strict=True)])
        file.seek(0, os.SEEK_END)
        file.write(trailer)
    return Offsets.joined(written)


def read_by_package(path):
    """Read all records in three ways that the package has, which must agree."""
    found = array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0")
    count = found.num_records()
    by_number = found.read(list(range(count))) if count else []
    assert found.read_all() == by_number
    found.close()
    ahead = array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:64K,max_parallelism:2")
    assert [ahead.read() for _ in range(count)] == by_number
    ahead.close()
    return by_number


def test_every_byte_of_a_part_is_written_once_and_none_is_read(tmp_path):
    """The positions come from the headers of chunks: what the trailer reads does not grow with the records."""
    read = []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            count = super().readinto(buffer)
            read.append(count)
            return count

        def read(self, size=-1):
            data = super().read(size)
            read.append(len(data))
            return data

    shard_format = get_format("arrayrecord").with_features(RAW)
    with open(tmp_path / "part", "wb", buffering=0) as file:
        writer = shard_format.writer(file, RAW.columns)
        for _ in range(20):
            writer.append({"key": b"k", "data": bytes(300_000)})
        writer.finish()
        size = file.tell()
    with Counted(tmp_path / "part") as file:
        shard_format.trailer(file, [(0, size)])

    assert sum(read) <= 25 * 64
    assert size < 20 * 300_000 * 1.02


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (64, "byte 64 is not the start of a chunk"),  # the first record's
        (64 + 8, "byte 64 is not the start of a chunk that ends before byte 131072"),  # its size
    ],
)
def test_damaged_part_gets_no_trailer(tmp_path, place, message):
    """Positions are never those of garbage."""
    write_shard(tmp_path / "shard", RAW, [[{"key": b"k", "data": bytes(70_000)}]])
    data = bytearray((tmp_path / "shard").read_bytes())
    data[place : place + 40] = b"\xff" * 40

    with pytest.raises(CorruptDataError, match=message):
        get_format("arrayrecord").trailer(io.BytesIO(data), [(0, 131_072)])


def test_records_are_groups_of_one(tmp_path):
    """The file's own options show it: any record is found without its neighbours, on any host alike."""
    from array_record.python.array_record_module import ArrayRecordReader

    path = shard_of(tmp_path, 3)
    reader = ArrayRecordReader(str(path))

    options = reader.writer_options_string()
    reader.close()
    assert {"group_size:1", "uncompressed", "max_parallelism:1"} <= set(options.split(","))


def shard_of(folder, count):
    write_shard(folder / "shard", MIXED, [[MIXED.encode(mixed(number)) for number in range(count)]])
    return folder / "shard"


def test_block_comes_from_several_files_in_the_order_asked_for(tmp_path):
    """And is refused where one of its records is not there, which single reads then name."""
    made, readers = get_format("arrayrecord"), []
    for number in range(2):
        path = tmp_path / f"{number}"
        offsets = write_shard(path, RAW, [[{"key": b"%d-%d" % (number, n), "data": b"x" * n} for n in range(9)]])
        readers.append(made.reader(path, offsets))
    which, numbers = np.array([1, 0, 1, 1]), np.array([8, 3, 0, 8])

    found = made.read_block(readers, which, numbers, RAW.columns)

    assert found["key"] == [b"1-8", b"0-3", b"1-0", b"1-8"]
    assert list(map(len, found["data"])) == [8, 3, 0, 8]
    assert made.read_block(readers, which, numbers + 1, RAW.columns) is None


def test_lack_of_memory_is_an_output_error():
    """The package reports its errors at the end only; they are raised then, from a real limit."""
    script = (
        "import io, resource, signal; from datamat.formats import get_format; from datamat.errors import OutputError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "writer = get_format('arrayrecord').writer(io.BytesIO(), {'data': 'bytes'})\n"
        "writer.append({'data': bytes(1 << 20)})\n"
        "try: writer.finish()\n"
        "except OutputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert "records could not be packed in memory: " in done.stdout
    assert done.stdout.endswith("; make room, or write fewer at a time\n")


def test_files_without_memory_of_a_name(tmp_path, monkeypatch):
    """Where memory has no names, as on macOS, the package writes to a temporary file: the bytes are the same."""
    records = [[MIXED.encode(mixed(number)) for number in range(9)]]
    write_shard(tmp_path / "one", MIXED, records)
    monkeypatch.delattr(os, "memfd_create")
    write_shard(tmp_path / "two", MIXED, records)

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_number_behind_the_end_is_refused(tmp_path):
    """Offsets of more records than the file holds lead to an error that names the record."""
    path = shard_of(tmp_path, 3)
    offsets = Offsets(*(np.arange(10, dtype=np.uint64) for _ in range(2)))
    reader = get_format("arrayrecord").reader(path, offsets)

    with pytest.raises(CorruptDataError, match="record 7 at byte 7 is damaged: index 7 out of bound 3"):
        reader.read(7)
    reader.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_lack_of_descriptors_in_the_package_is_no_damage(tmp_path, monkeypatch, code):
    """The package says so in words: another thread took the last one between our look at the file and its own."""
    path = shard_of(tmp_path, 3)

    class Unopened:
        def __init__(self, *_):
            pass

        def ok(self):
            return False

        def close(self):
            raise RuntimeError(f"open() failed: {os.strerror(code)}; reading {path}")

    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordReader", Unopened)
    with pytest.raises(OSError, match=os.strerror(code)) as failed:
        get_format("arrayrecord").reader(path, Offsets.from_text(""))

    assert failed.value.errno == code
    assert not isinstance(failed.value, CorruptDataError)


def test_package_reports_lack_of_descriptors_in_these_words(tmp_path):
    """The test above relies on this."""
    path = shard_of(tmp_path, 3)

    with no_descriptors():
        opened = array_record_module.ArrayRecordReader(str(path), "")
        with pytest.raises(RuntimeError, match=os.strerror(errno.EMFILE)):
            opened.close()
