"""ArrayRecord shards: offsets match the file, and errors of the package become datamat's."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from open_files import no_descriptors

from datamat.errors import CorruptDataError, OutputError
from datamat.features import Features, Tensor
from datamat.formats import Offsets, get_format
from datamat.formats.example import varint
from datamat.testing import MIXED, mixed

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


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 300) | st.integers(65_000, 66_000) | st.integers(0, 300_000), max_size=30))
@example([0, 0, 0, 65_000])  # the header of a block stands in the middle of the positions in the file
@example([0, 65_000, 65_534])  # and these stand more than two blocks before its end
def test_offsets_are_those_of_the_file(tmp_path_factory, sizes):
    """Each line is a chunk that holds one record, and the positions in the file agree."""
    folder = tmp_path_factory.mktemp("offsets")
    shard_format = get_format("arrayrecord").with_features(RAW)
    rng = np.random.default_rng(0)
    payloads = []
    with open(folder / "part", "wb", buffering=0) as file:
        writer = shard_format.writer(file, RAW.columns)
        for size in sizes:
            writer.append({"key": b"k", "data": rng.bytes(size)})
        places = writer.finish()
    part = (folder / "part").read_bytes()
    for offset, size in zip(places.offset.tolist(), places.size.tolist(), strict=True):
        payloads.append(part[offset + 12 : offset + size - 4])

    assembler = shard_format.assembler(folder / "shard")
    assembler.add(folder / "part")
    offsets = assembler.finish()

    data = (folder / "shard").read_bytes()
    end = int((offsets.offset + offsets.size).max(initial=0))
    footer = chunk_of(data, end, len(data) - end)
    for payload, offset, size in zip(payloads, offsets.offset.tolist(), offsets.size.tolist(), strict=True):
        length = varint(len(payload))
        wanted = bytes([0, len(length)]) + length + payload
        assert chunk_of(data, offset, size)[CHUNK_HEADER_BYTES:] == wanted
        assert b"\x08" + varint(offset) + b"\x10" in footer


def test_records_are_groups_of_one(tmp_path):
    """The file's own options show it: any record is found without its neighbours, on any host alike."""
    from array_record.python.array_record_module import ArrayRecordReader

    path = shard_of(tmp_path, 3)
    reader = ArrayRecordReader(str(path))

    options = reader.writer_options_string()
    reader.close()
    assert {"group_size:1", "uncompressed", "max_parallelism:1"} <= set(options.split(","))


def shard_of(folder, count):
    shard_format = get_format("arrayrecord").with_features(MIXED)
    with open(folder / "part", "wb", buffering=0) as file:
        writer = shard_format.writer(file, MIXED.columns)
        for number in range(count):
            writer.append(MIXED.encode(mixed(number)))
        writer.finish()
    assembler = shard_format.assembler(folder / "shard")
    assembler.add(folder / "part")
    assembler.finish()
    return folder / "shard"


def test_shard_that_cannot_be_written_is_an_output_error(tmp_path):
    """The package reports its errors at the end only; they are raised then."""
    assembler = get_format("arrayrecord").assembler(tmp_path / "no such folder" / "shard")

    with pytest.raises(OutputError, match=r"shard could not be written: .*make room or give another output"):
        assembler.finish()
    assembler.close()


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
