"""TFRecord files, plain and gzip: equal to TensorFlow's, opened by tf.data, with all damage detected."""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import struct
import tempfile
import tracemalloc

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamat.errors import CorruptDataError, OutputError
from datamat.formats import Offsets, get_format
from datamat.formats.example import encode_example

tf = pytest.importorskip("tensorflow")  # which has no wheels for the newest Python

FORMATS = ["tfrecord", "tfrecord.gz"]
KINDS = {"image": "bytes", "key": "bytes", "boxes": "float32", "label": "int64"}


def record(index, *, size=20):
    return {
        "image": np.random.default_rng(index).bytes(size),
        "key": b"key-%d" % index,
        "boxes": np.arange(index % 3 * 4, dtype=np.float32),
        "label": np.array([index - 2]),
    }


def shard(shard_format, records, columns=KINDS):
    """Return the offsets and the bytes of a shard."""
    file = io.BytesIO()
    writer = shard_format.writer(file, columns)
    for item in records:
        writer.append(item)
    return writer.finish(), file.getvalue()


def read_all(shard_format, data, path="camvid.shard"):
    return [found for found, _ in shard_format.read_file(io.BytesIO(data), path=path)]


def read_by_offsets(shard_format, data, offsets):
    """Read each record by its line of the index."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with contextlib.closing(shard_format.reader(file.name, offsets)) as reader:
            return [reader.read(number) for number in range(len(offsets))]


def whole_of(data):
    """Return the offsets of a file that is one record."""
    return Offsets(np.zeros(1, np.uint64), np.array([len(data)], np.uint64))


def plain(values):
    return {name: value if isinstance(value, list) else value.tolist() for name, value in values.items()}


def expected(index, **options):
    return {
        name: [value] if isinstance(value, bytes) else value.tolist()
        for name, value in record(index, **options).items()
    }


def tfrecord2idx(data):
    """Return DALI's index by the rule of its tool, which follows each length to the next record."""
    lines, position = [], 0
    while position < len(data):
        (length,) = struct.unpack_from("<q", data, position)
        lines.append(f"{position} {8 + 4 + length + 4}\n")
        position += 8 + 4 + length + 4
    return "".join(lines)


def masked_crc(data):
    """Return TFRecord's checksum of some bytes."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def gzip_member(data):
    """Return a gzip member with our constant header."""
    found = bytearray(gzip.compress(data, mtime=0))
    found[8:10] = b"\x00\xff"
    return bytes(found)


@settings(max_examples=30, deadline=None)
@given(payloads=st.lists(st.binary(max_size=400), max_size=6))
def test_files_equal_those_of_tensorflow(tmp_path_factory, payloads):
    """Plain files are byte for byte TFRecordWriter's, gzip files once they are inflated."""
    path = tmp_path_factory.mktemp("tf") / "theirs"
    records = [{"a": payload} for payload in payloads]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for item in records:
            writer.write(encode_example(item, {"a": "bytes"}))

    theirs = path.read_bytes()

    assert shard(get_format("tfrecord"), records, {"a": "bytes"})[1] == theirs
    assert gzip.decompress(shard(get_format("tfrecord.gz"), records, {"a": "bytes"})[1]) == theirs


@pytest.mark.parametrize(("name", "compression"), [("tfrecord", ""), ("tfrecord.gz", "GZIP")])
def test_tf_data_reads_joined_parts(tmp_path, name, compression):
    """tf.data reads a shard made of part files, one of them empty, and parses every kind of column."""
    shard_format = get_format(name)
    parts = [
        shard(shard_format, [record(index, size=9000) for index in indices])[1]
        for indices in ([0, 1], [], range(2, 30))
    ]
    path = tmp_path / "shard"
    path.write_bytes(b"".join(parts))

    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "key": tf.io.FixedLenFeature([], tf.string),
        "boxes": tf.io.VarLenFeature(tf.float32),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    dataset = tf.data.TFRecordDataset(str(path), compression_type=compression)
    found = [tf.io.parse_single_example(data, features) for data in dataset]

    assert [int(item["label"]) for item in found] == [index - 2 for index in range(30)]
    for index, item in enumerate(found):
        assert item["image"].numpy() == record(index, size=9000)["image"]
        assert item["key"].numpy() == record(index)["key"]
        assert tf.sparse.to_dense(item["boxes"]).numpy().tolist() == record(index)["boxes"].tolist()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0, 200_000, 2**20 + 1])
def test_records_read_back_in_order_and_by_offset(name, size):
    """Small, large and larger-than-buffer values come back, from a stream and one by one."""
    shard_format = get_format(name)

    offsets, data = shard(shard_format, [record(index, size=size) for index in range(8)])

    wanted = [expected(index, size=size) for index in range(8)]
    assert [plain(found) for found in read_all(shard_format, data)] == wanted
    assert [plain(found) for found in read_by_offsets(shard_format, data, offsets)] == wanted
    assert shard_format.find_offsets(io.BytesIO(data), path="s") == offsets


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50)))
def test_offsets_equal_tfrecord2idx(payloads):
    """The index is the one that DALI's tool makes from the file."""
    offsets, data = shard(get_format("tfrecord"), [{"a": payload} for payload in payloads], {"a": "bytes"})

    assert offsets.to_text() == tfrecord2idx(data)


def test_gzip_members_hold_whole_records_of_64_kib():
    """Members close with the record that brings them to 64 KiB, and their header never changes."""
    offsets, data = shard(get_format("tfrecord.gz"), [record(index, size=1000) for index in range(200)])

    starts = sorted(set(offsets.offset.tolist()))
    members = [gzip.decompress(data[start:stop]) for start, stop in zip(starts, [*starts[1:], None], strict=True)]
    assert len(members) == 4
    assert all(2**16 <= len(member) < 2**16 + 1200 for member in members[:-1])
    assert {data[start : start + 10].hex() for start in starts} == {"1f8b08000000000000ff"}
    assert get_format("tfrecord.gz").options() == {"level": 6, "member_bytes": 2**16}
    assert offsets.skip[0] == 0
    assert offsets.to_text().splitlines()[1].count(" ") == 2


def test_truncation_of_a_plain_file_is_noticed_at_every_byte():
    """Only a cut between two records goes unnoticed; any other is reported with file, record and byte."""
    shard_format = get_format("tfrecord")
    offsets, data = shard(shard_format, [record(index) for index in range(3)])
    starts = offsets.offset.tolist()

    for length in range(len(data)):
        number = max(index for index, start in enumerate(starts) if start <= length)
        if length in starts:
            assert len(read_all(shard_format, data[:length])) == number
            continue
        place = rf"^camvid\.shard: record {number} at byte {starts[number]} is damaged: the data ends inside the"
        with pytest.raises(CorruptDataError, match=place):
            read_all(shard_format, data[:length])
        with pytest.raises(CorruptDataError, match=rf"record {number} at byte {starts[number]} is damaged: "):
            read_by_offsets(shard_format, data[:length], offsets)


def test_every_flipped_bit_of_a_plain_file_is_noticed():
    """Both ways of reading detect each flipped bit, and name its record."""
    shard_format = get_format("tfrecord")
    offsets, data = shard(shard_format, [record(index) for index in range(3)])
    starts = offsets.offset.tolist()

    for position in range(len(data)):
        number = max(index for index, start in enumerate(starts) if start <= position)
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            place = rf"record {number} at byte {starts[number]} is damaged: "
            with pytest.raises(CorruptDataError, match=place):
                read_all(shard_format, bytes(damaged))
            with pytest.raises(CorruptDataError, match=place):
                read_by_offsets(shard_format, bytes(damaged), offsets)


def gzip_shard_of_two_members():
    records = [record(0, size=2**16), record(1), record(2)]
    compressible = [{**item, "image": bytes(len(item["image"]))} for item in records]
    return shard(get_format("tfrecord.gz"), compressible)


def test_truncation_of_a_gzip_file_is_noticed_at_every_byte():
    """Only a cut between two members goes unnoticed; any other is reported with file, record and the member's byte."""
    shard_format = get_format("tfrecord.gz")
    offsets, data = gzip_shard_of_two_members()
    starts = sorted(set(offsets.offset.tolist()))
    assert len(starts) == 2

    for length in set(range(len(data))) - {0, *starts}:
        number, start = (1, starts[1]) if length > starts[1] else (0, 0)
        with pytest.raises(
            CorruptDataError, match=rf"^camvid\.shard: record {number} at byte {start} is damaged: the "
        ):
            read_all(shard_format, data[:length])
        with pytest.raises(CorruptDataError, match=r"record [01] at byte \d+ is damaged: "):
            read_by_offsets(shard_format, data[:length], offsets)


def test_every_flipped_bit_of_a_gzip_file_is_noticed_or_harmless():
    """No flipped bit changes a record unnoticed; those without effect are padding and unused codes."""
    shard_format = get_format("tfrecord.gz")
    offsets, data = gzip_shard_of_two_members()
    whole = [plain(found) for found in read_all(shard_format, data)]

    harmless = 0
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        streamed = outcome(read_all, shard_format, bytes(damaged))
        by_offset = outcome(read_by_offsets, shard_format, bytes(damaged), offsets)
        if streamed == by_offset == whole:
            harmless += 1
            continue
        assert re.match(r"camvid\.shard: record [01] at byte \d+ is damaged: ", streamed)
        assert re.search(r": record [012] at byte \d+ is damaged: ", by_offset)
    assert harmless < len(data) * 8 // 100


def outcome(read, *arguments):
    """Return the plain records that were read, or the message of the refusal."""
    try:
        return [plain(found) for found in read(*arguments)]
    except CorruptDataError as error:
        return str(error)


@pytest.mark.parametrize("name", FORMATS)
def test_index_of_another_file_is_noticed(name):
    """Offsets of another file never give a wrong record."""
    shard_format = get_format(name)
    _, data = shard(shard_format, [record(0), record(1)])
    other, _ = shard(shard_format, [record(0, size=40), record(1)])

    with pytest.raises(
        CorruptDataError, match=r"record \d at byte .*; remove the file and run the job again to rebuild it"
    ):
        read_by_offsets(shard_format, data, other)


def test_range_longer_than_its_record_is_noticed():
    """A valid record that the index gives another length is not accepted."""
    shard_format = get_format("tfrecord")
    _, data = shard(shard_format, [record(0), record(1)])

    with pytest.raises(CorruptDataError, match=r"record 0 at byte 0 .* the record has \d+ bytes, but the index says"):
        read_by_offsets(shard_format, data, whole_of(data))


@pytest.mark.parametrize("tail", [b"\0" * 10, b"junk"])
def test_bytes_behind_the_last_gzip_member_are_noticed(tail):
    """The file may hold nothing but members."""
    shard_format = get_format("tfrecord.gz")
    _, data = shard(shard_format, [record(0)])

    with pytest.raises(CorruptDataError, match=rf"record 1 at byte {len(data)} is damaged: the gzip header is"):
        read_all(shard_format, data + tail)
    with pytest.raises(CorruptDataError, match="bytes follow the gzip member"):
        read_by_offsets(shard_format, data + tail, whole_of(data + tail))


def test_length_over_two_gib_is_refused_before_memory_is_taken():
    """A header with a valid checksum does not make the reader allocate what it claims."""
    length = struct.pack("<Q", 2**40)

    with pytest.raises(CorruptDataError, match=r"record 0 at byte 0 .* claims 1099511627776 bytes"):
        read_all(get_format("tfrecord"), length + masked_crc(length))


@pytest.mark.parametrize("name", FORMATS)
def test_payload_that_is_no_example_names_the_record(name):
    """A record with valid framing and a foreign payload is located like any other damage."""
    shard_format = get_format(name)
    _, data = shard(shard_format, [record(0)])
    payload = b"\x0a\x05abc"
    framed = (
        struct.pack("<Q", len(payload)) + masked_crc(struct.pack("<Q", len(payload))) + payload + masked_crc(payload)
    )

    with pytest.raises(CorruptDataError, match=r"record 1 at byte \d+ .* needs 5 bytes but its message has 3 left"):
        read_all(shard_format, data + (framed if name == "tfrecord" else gzip_member(framed)))


class Trickle(io.RawIOBase):
    """An unbuffered file that takes little at a time, as a pipe or a full disk may."""

    def __init__(self, most, *, keep=True):
        self.taken = bytearray()
        self.most = most
        self.keep = keep

    def writable(self):
        return True

    def write(self, data):
        taken = data[: self.most]
        if self.keep:
            self.taken += taken
        return len(taken)


@pytest.mark.parametrize("name", FORMATS)
def test_short_writes_lose_nothing(name):
    """A file that takes part of the data is given the rest."""
    shard_format, file = get_format(name), Trickle(1000)

    writer = shard_format.writer(file, KINDS)
    for index in range(3):
        writer.append(record(index, size=2**20 + 5 if index == 1 else 5000))
    writer.finish()

    assert file.taken == shard(shard_format, [record(0, size=5000), record(1, size=2**20 + 5), record(2, size=5000)])[1]


def test_file_that_takes_nothing_is_an_error():
    """A write that returns 0 is an error, not a reason to retry forever."""
    writer = get_format("tfrecord").writer(Trickle(0), KINDS)
    writer.append(record(0))

    with pytest.raises(OutputError, match=r"the file took 0 of \d+ bytes"):
        writer.finish()


@pytest.mark.parametrize("name", FORMATS)
def test_writer_memory_stays_flat(name):
    """Writing 100 MB takes a few buffers, not the data."""
    value = np.random.default_rng(0).bytes(100_000)
    writer = get_format(name).writer(Trickle(1 << 30, keep=False), {"a": "bytes"})

    tracemalloc.start()
    for _ in range(100 if name == "tfrecord.gz" else 1000):
        writer.append({"a": value})
    writer.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 3 << 20
