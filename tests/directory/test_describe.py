"""Inspection: files of records, whoever wrote them."""

import gzip
import io
import json
import tarfile
import tracemalloc

import numpy as np
import pytest
import small_pairs

from datamat import Image, InputError, OptionError, OutputError, Scalar, Tensor, Text, load
from datamat.cli import main
from datamat.codecs import encode_jpeg, encode_png
from datamat.directory.describe import describe
from datamat.formats.example import encode_example, varint
from datamat.formats.tfrecord import frame

PIXELS = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
KINDS = {"image": "bytes", "name": "bytes", "raw": "bytes", "label": "int64", "weight": "float32", "ids": "int64"}


def example(number):
    return encode_example(
        {
            "image": encode_jpeg(PIXELS) if number % 2 else encode_png(PIXELS[: 2 + number]),
            "name": "größer".encode() * number,
            "raw": b"\xff\x00" * 8,
            "label": np.array([number % 3]),
            "weight": np.array([number / 2], np.float32),
            "ids": np.arange(number),
        },
        KINDS,
    )


def framed(payloads):
    return b"".join(b"".join(frame([payload], len(payload))) for payload in payloads)


def written(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_features_of_examples_are_found(tmp_path, pack):
    """Kinds, lengths, ranges, pictures by their headers, text, and the feature that would hold them."""
    path = written(tmp_path / "some.tfrecord", pack(framed(map(example, range(4)))))

    found = describe(path)

    fields = {field.name: field for field in found.fields}
    assert (found.num_records, found.ok, found.contents) == (4, True, {"tf.train.Example": 4})
    assert {name: (field.kind, field.lengths) for name, field in fields.items()} == {
        "image": ("image", (1, 1)),
        "name": ("text", (1, 1)),
        "raw": ("bytes", (1, 1)),
        "label": ("int64", (1, 1)),
        "weight": ("float32", (1, 1)),
        "ids": ("int64", (0, 3)),
    }
    wanted = {
        "image": Image((None, 8, 3)),
        "name": Text(),
        "raw": None,
        "label": Scalar("int64"),
        "weight": Scalar("float32"),
        "ids": Tensor((None,), "int64"),
    }
    assert {name: field.feature for name, field in fields.items()} == wanted
    assert fields["label"].details == "values 0, 1, 2"
    assert fields["weight"].details == "0 to 1.5"
    assert fields["image"].details.startswith("png, jpeg, height 2 to 6, width 8, 3 channels, ")


def test_first_records_are_shown(tmp_path):
    """As many as the caller asks for, with long values cut."""
    path = written(tmp_path / "some.tfrecord", framed(map(example, range(20))))

    texts = [str(describe(path, records=count)) for count in (0, 2)]

    assert "record 0" not in texts[0]
    assert "record 1:" in texts[1]
    assert "record 2:" not in texts[1]
    assert "image: <jpeg, 6 x 8, " in texts[1]
    assert "raw: <16 bytes: ff 00 " in texts[1]
    assert "ids: [0, 1, 2, 3, 4, 5, 6, 7, ... (19 values)]" in describe(path, records=20).records[19]


def _message(*fields):
    return b"".join(bytes([number << 3 | 2]) + varint(len(data)) + data for number, data in fields)


def test_sequence_examples_are_recognized(tmp_path):
    """They show the context and the steps of the lists."""
    steps = [_message((3, _message((1, varint(value))))) for value in (5, 300)]
    entry = _message((1, b"tokens"), (2, b"".join(_message((1, step)) for step in steps)))
    context = _message((1, _message((1, b"id"), (2, _message((1, _message((1, b"a"))))))))
    path = written(tmp_path / "x.tfrecord", framed([_message((1, context), (2, _message((1, entry))))] * 2))

    found = describe(path)

    assert found.contents == {"tf.train.SequenceExample": 2}
    assert {field.name: (field.kind, field.lengths, field.details) for field in found.fields} == {
        "id": ("text", (1, 1), "1 bytes"),
        "tokens[]": ("int64", (2, 2), "values 5, 300"),
    }


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"plain text", "text"),
        (encode_png(PIXELS), "image"),
        (b"\n\x03abc", "bytes"),
        (b"\x08\x96\x01", "bytes"),
        (b"\x1a\x00", "bytes"),
        (b"\n\x04\n\x02\x18\x01", "bytes"),
    ],
)
def test_raw_payloads_are_called_raw(tmp_path, payload, kind):
    """This holds where the first bytes could begin a message."""
    found = describe(written(tmp_path / "x.tfrecord", framed([payload] * 3)))

    assert found.contents == {"raw payload": 3}
    assert [(field.name, field.kind) for field in found.fields] == [("", kind)]
    assert "(payload)" in str(found)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_damage_is_reported_with_its_place_and_the_records_before_it(tmp_path, pack):
    """A flipped bit in a record, and a file that is cut off."""
    payloads = [example(number) for number in range(5)]
    start = len(framed(payloads[:3]))
    flipped = bytearray(framed(payloads))
    flipped[start + 20] ^= 1

    damaged = describe(written(tmp_path / "flipped.tfrecord", pack(bytes(flipped))))
    cut = describe(written(tmp_path / "cut.tfrecord", pack(framed(payloads)[:-3])))
    torn = describe(written(tmp_path / "torn.tfrecord", gzip.compress(framed(payloads))[:-20]))

    assert not damaged.ok
    assert damaged.num_records == 3
    assert damaged.problem.startswith(f"record 3: at byte {start:,}")
    assert "3 records can be read before it" in str(damaged)
    assert (cut.num_records, cut.problem.partition(":")[0]) == (4, "record 4")
    assert torn.problem
    assert describe(written(tmp_path / "x.tfrecord", b"\x01" * 100)).problem.startswith("record 0: at byte 0: ")
    assert describe(written(tmp_path / "empty.tfrecord", b"")).ok


@pytest.mark.parametrize("name", ["parquet", "webdataset", "tfrecord.gz", "arrayrecord"])
def test_finished_directories_and_their_files_are_inspected(tmp_path, name):
    """The counts come from the manifest, the fields from the first shard."""
    if name == "arrayrecord":
        pytest.importorskip("array_record", reason="the format arrayrecord needs it")
    source = small_pairs.make_pairs(tmp_path / "source")
    small_pairs.job(source, tmp_path / "out", format=name).run(progress=False)

    whole = describe(tmp_path / "out")
    shard = describe(load(tmp_path / "out").files[0])

    assert whole.contents == {"train": 20, "val": 4}
    assert whole.num_records == 24
    assert 0 < shard.num_records < 20
    assert whole.fields == shard.fields
    assert [field.feature for field in shard.fields if "image" in field.name] == [Image((24, 32, 3))]


def test_tables_of_others_are_inspected(tmp_path):
    """The report has types of columns, nulls, and images as Hugging Face `datasets` stores them."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {
        "image": [{"bytes": encode_png(PIXELS), "path": "a.png"}] * 3,
        "small": pa.array([1, 2, None], pa.int8()),
        "list": pa.array([[1.5], [2.5, 3.5], []], pa.list_(pa.float32())),
        "word": ["a", "b", "c"],
        "flag": [True, False, True],
        "uint64": pa.array([[0, 2**64 - 1], [], [1]], pa.list_(pa.uint64())),
        "ragged": pa.array([[[1], [2, 3]], [], None], pa.list_(pa.list_(pa.int16()))),
        "moment": pa.array([0, 2**63 - 1, 1], pa.timestamp("us", "UTC")),
    }
    parquet.write_table(pa.table(table), tmp_path / "x.parquet")

    found = describe(tmp_path / "x.parquet", records=1)

    assert {field.name: (field.kind, field.num_records, field.lengths) for field in found.fields} == {
        "image": ("image", 3, (1, 1)),
        "small": ("int8", 2, (1, 1)),
        "list": ("float32", 3, (0, 2)),
        "word": ("text", 3, (1, 1)),
        "flag": ("bool", 3, (1, 1)),
        "uint64": ("uint64", 3, (0, 2)),
        "ragged": ("int16", 2, (0, 3)),
        "moment": ("text", 3, (1, 1)),
    }
    assert "uint64: [0, 18446744073709551615]" in found.records[0]


def test_damaged_table_is_reported(tmp_path):
    """The checksum of its page shows it, or the end is missing."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pa.table({"x": [f"{n:04d}" for n in range(500)]}), tmp_path / "x", compression=None, write_page_checksum=True
    )
    data = bytearray((tmp_path / "x").read_bytes())
    data[data.index(b"0200")] ^= 1

    flipped = describe(written(tmp_path / "flipped", bytes(data)))
    cut = describe(written(tmp_path / "cut", bytes(data[:-9])))

    assert "CRC" in flipped.problem
    assert (cut.num_records, cut.ok) == (0, False)


def _archive(files, mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archives_of_others_are_inspected(tmp_path, mode):
    """Members with a common name are one sample."""
    files = {f"dir.x/{n}.{end}": data for n in range(3) for end, data in (("jpg", encode_jpeg(PIXELS)), ("cls", b"7"))}

    found = describe(written(tmp_path / "x.tar", _archive(files, mode)))

    assert (found.num_records, found.ok) == (3, True)
    assert {field.name: (field.kind, field.num_records) for field in found.fields} == {
        "jpg": ("image", 3),
        "cls": ("text", 3),
    }


def test_damaged_archive_is_reported(tmp_path):
    """In a header, in the middle of a member, and at the end."""
    data = _archive({f"{n}.txt": b"x" * 600 for n in range(4)})  # 512 of header and 1,024 of data each
    header = bytearray(data)
    header[2 * 1536 + 5] ^= 1
    first = bytearray(data)
    first[5] ^= 1

    damaged = {
        "header": describe(written(tmp_path / "header", bytes(header))),
        "member": describe(written(tmp_path / "member", data[: 2 * 1536 + 700])),
        "end": describe(written(tmp_path / "end", data[: 4 * 1536])),
        "first": describe(written(tmp_path / "first", bytes(first))),
    }

    assert {name: found.num_records for name, found in damaged.items()} == {
        "header": 2,
        "member": 2,
        "end": 4,
        "first": 0,
    }
    assert all(not found.ok for found in damaged.values())
    assert "at byte 3,072" in damaged["header"].problem


@pytest.mark.parametrize("size", [-512, 1 << 31, 1 << 70])
def test_archive_with_false_sizes_is_reported(tmp_path, size):
    """No memory is allocated for it first; in the base-256 form, a header can claim any number."""
    data = bytearray(_archive({"a.txt": b"text"}))
    data[124:136] = (size % (1 << 96) | (0 if size < 0 else 1 << 95)).to_bytes(12, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path = written(tmp_path / "a.tar", bytes(data))

    found = describe(path)

    assert "its header says" in found.problem and "want 0 to" in found.problem


@pytest.mark.long
@pytest.mark.parametrize("kind", ["records", "members"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    """It keeps none of 32 records of 1 MB, and nothing of thousands of small members."""
    if kind == "records":
        with open(tmp_path / "x", "wb") as file:
            for _ in range(32):
                file.writelines(frame([b"\x00" * (1 << 20)], 1 << 20))
    else:
        written(tmp_path / "x", _archive({f"{number}.txt": b"x" for number in range(4000)}))
    describe(written(tmp_path / "first", _archive({"0.txt": b"x"})))  # imports count once
    tracemalloc.start()

    try:
        found = describe(tmp_path / "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found.num_records == (32 if kind == "records" else 4000)
    assert peak < (8 << 20 if kind == "records" else 1 << 20)


def test_what_cannot_be_inspected_is_refused(tmp_path):
    """The error says what could be inspected."""
    with pytest.raises(InputError, match="those of none of TFRecord, Parquet, tar and ArrayRecord"):
        describe(written(tmp_path / "x.json", json.dumps({"a": 1} | {str(n): n for n in range(99)}).encode()))
    with pytest.raises(OutputError, match=r"has no manifest\.json"):
        describe(tmp_path)
    with pytest.raises(OutputError, match=r"is not a file of records, .* correct the path"):
        describe(tmp_path / "nothing")
    with pytest.raises(OptionError, match="records is -1"):
        describe(tmp_path, records=-1)


def test_command_prints_findings_and_reports_damage_by_exit_code(tmp_path, capsys):
    """0 where all is well, 1 where something is damaged, 2 where there is nothing to describe."""
    good = written(tmp_path / "good.tfrecord", framed(map(example, range(3))))
    bad = written(tmp_path / "bad.tfrecord", good.read_bytes()[:-1])
    other = written(tmp_path / "other", b"something else entirely")

    codes = [main(["describe", str(path)]) for path in (good, bad, other, tmp_path / "none", tmp_path)]

    assert codes == [0, 1, 2, 2, 2]
    assert "3 records (3 tf.train.Example)" in (printed := capsys.readouterr().out)
    assert "Image(shape=(None, 8, 3))" in printed
    assert "DAMAGED: record 2: " in printed
    assert main(["describe", str(good), "--records", "2"]) == 0
    assert "record 1:" in capsys.readouterr().out


def test_command_prints_no_control_characters(tmp_path, capsys):
    """Strangers wrote the names and texts in a file."""
    payload = encode_example({"a\x1b[2J": b"\x1b[2J"}, {"a\x1b[2J": "bytes"})

    main(["describe", str(written(tmp_path / "x.tfrecord", framed([payload])))])

    assert "\x1b" not in capsys.readouterr().out
