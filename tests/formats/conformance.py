"""What every shard format must do, as one class of tests; a format's test class says which one and what it promises.

A third-party format is held to the same: subclass `FormatConformance`, set `name`, and let pytest find the class.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from datamat.codecs import encode_jpeg, encode_png
from datamat.errors import CorruptDataError, OptionError, SchemaError
from datamat.features import BBoxes, ClassLabel, Features, Image, Mask, Scalar, Tensor, Text
from datamat.formats import Offsets, get_format

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 4), np.uint8)
BOXES = np.array([[0, 0.25, 0.5, 1], [0.1, 0.1, 0.3, 0.7]], np.float32)


def extremes(dtype):
    """Return the bounds of a dtype, and what lies at odd places between."""
    kind = np.dtype(dtype).kind
    if kind in "iu":
        return np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 7], dtype)
    if kind == "b":
        return np.array([True, False, True])
    values = [0.1, -0.0, np.inf, np.nan, np.finfo(dtype).tiny, np.finfo(dtype).max]
    return np.array(values, dtype) + (1j if kind == "c" else 0) * np.array(1, dtype)


NUMBERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128"]

CASES = {
    "png": (Image((8, 6, 3)), [encode_png(PIXELS[..., :3]), encode_png(PIXELS[..., :3] // 2)]),
    "jpeg": (Image((8, 6, 3)), [encode_jpeg(PIXELS[..., :3])]),
    "either": (Image((8, 6, 3)), [encode_png(PIXELS[..., :3]), encode_jpeg(PIXELS[..., :3])]),
    "mask": (Mask((8, 6)), [encode_png(PIXELS[..., 0] % 3)]),
    "label": (ClassLabel(num_classes=5), [0, 4]),
    "labels": (ClassLabel(num_classes=5, shape=(None,)), [[], [4], [0, 1, 2, 3, 4]]),
    "two labels": (ClassLabel(num_classes=5, shape=(2,)), [[0, 4], [1, 1]]),
    "boxes": (BBoxes(), [np.zeros((0, 4), np.float32), BOXES, BOXES[:1]]),
    "text": (Text(), ["", "größer – 日本語 \U0001f600", 'a "quote"\n\0 and \\ more', "x" * 5000]),
    **{f"scalar {dtype}": (Scalar(dtype), list(extremes(dtype))) for dtype in NUMBERS},
    **{f"fixed {dtype}": (Tensor((3,), dtype), [extremes(dtype)[:3], extremes(dtype)[-3:]]) for dtype in NUMBERS},
    **{f"open {dtype}": (Tensor((None,), dtype), [extremes(dtype)[:n] for n in (0, 1, 3)]) for dtype in NUMBERS},
    **{f"raw {dtype}": (Tensor((None,), dtype, "raw"), [extremes(dtype)[:n] for n in (0, 3)]) for dtype in NUMBERS},
    "matrix": (Tensor((2, 3), "int32"), [np.arange(6, dtype=np.int32).reshape(2, 3)]),
    "matrices": (Tensor((None, 2, 3), "int16"), [np.arange(6 * n, dtype=np.int16).reshape(n, 2, 3) for n in (2, 0)]),
    "open inside": (Tensor((2, None), "float32"), [np.ones((2, n), np.float32) for n in (3, 0)]),
    "open twice": (Tensor((None, 2, None), "int32"), [np.ones((2, 2, 3), np.int32), np.ones((0, 2, 5), np.int32)]),
    "no numbers": (Tensor((None, 0), "float32"), [np.zeros((4, 0), np.float32), np.zeros((0, 0), np.float32)]),
    "large": (Tensor((50_000,), "float32"), [np.arange(50_000, dtype=np.float32)]),
}

ODD_KEYS = [
    *("plain", "größe/日本語", "a.b.c", "%2E", "../../etc/passwd", "/abs", "end/", "two//slashes", "__meta__/x"),
    *("name#0", "with space", "tab\tnew\nline", "back\\slash", "x" * 300, "ü" * 60, "d/" * 80 + "deep.name", "."),
]

MIXED = Features(
    {"image": Image((8, 6, 3)), "label": ClassLabel(num_classes=500), "boxes": BBoxes(), "caption": Text()}
)
TABLE = Features({"label": ClassLabel(num_classes=500), "x": Scalar("float64"), "caption": Text()})


def mixed(number):
    """Return a sample of `MIXED`, unlike all others."""
    return {
        "key": f"sample {number:05d}",
        "image": IMAGES[number % len(IMAGES)],
        "label": number % 500,
        "boxes": BOXES[: number % 3],
        "caption": f"number {number} " * (number % 5),
    }


IMAGES = [encode_png(np.roll(PIXELS[..., :3], shift)) for shift in range(7)]


def normal(record):
    """Return a record in a form that compares: numbers by their bits."""
    return {
        name: (value.dtype.name, value.tobytes())
        if isinstance(value, np.ndarray)
        else bytes(value if isinstance(value, bytes) else b"".join(value))
        for name, value in record.items()
    }


class Shard:
    """A shard that was made as a run makes it: parts by writers, and the driver's joining or assembling.

    Args:
        folder: where to put it.
        shard_format: bound to its features.
        features: of the samples.
        parts: samples, part by part.
    """

    def __init__(self, folder, shard_format, features, parts):
        self.format = shard_format
        self.features = features
        self.records = [features.encode(sample) for part in parts for sample in part]
        self.path = folder / f"data-train-00000-of-00001.{shard_format.extension}"
        self.parts = []
        written = []
        for number, part in enumerate(parts):
            self.parts.append(folder / f"{number:05d}.part")
            offsets = self.write_part(self.parts[-1], [features.encode(sample) for sample in part])
            written.append((offsets, self.parts[-1].stat().st_size))
        self.offsets = self.assemble(written)

    def write_part(self, path, records):
        with open(path, "wb", buffering=0) as file:
            writer = self.format.writer(file, self.features.columns)
            self.append(writer, records)
            assert writer.num_records == len(records)
            offsets = writer.finish()
            assert writer.num_bytes == file.tell()
        assert len(offsets) == len(records)
        return offsets

    @staticmethod
    def append(writer, records):
        for record in records:
            writer.append(record)

    def assemble(self, written):
        if self.format.joins_parts:
            self.path.write_bytes(b"".join(part.read_bytes() for part in self.parts) + self.format.trailer)
            return Offsets.joined(written)
        assembler = self.format.assembler(self.path)
        for part in self.parts:
            assembler.add(part)
        offsets = assembler.finish()
        assembler.close()
        return offsets

    def read(self):
        return [normal(record) for record in self.format.read(self.path)]


class FormatConformance:
    """The tests. Attributes say what a format promises beyond them.

    Attributes:
        name: of the format.
        hides_cuts: whether the bytes of a shard don't show where its parts began.
        shows_missing_tail: whether a file that lacks whole records at its end is told from a whole one.
    """

    name: ClassVar[str]
    hides_cuts: ClassVar[bool] = True
    shows_missing_tail: ClassVar[bool] = True

    @pytest.fixture
    def make(self, tmp_path):
        """Give a function that makes a shard of parts of samples."""
        counter = iter(range(1000))

        def make(features, *parts):
            folder = tmp_path / f"shard{next(counter)}"
            folder.mkdir()
            return Shard(
                folder, get_format(self.name).with_features(features), features, [list(part) for part in parts]
            )

        return make

    @pytest.mark.parametrize("case", CASES)
    def test_every_feature_type_survives(self, make, case):
        """Values come back bit by bit, in order and one by one, and decode to what they were."""
        feature, values = CASES[case]
        features = Features({"value": feature})
        samples = [{"key": f"k{number}", "value": value} for number, value in enumerate(values)]

        shard = make(features, samples)

        wanted = [normal(record) for record in shard.records]
        assert shard.read() == wanted
        reader = shard.format.reader(shard.path, shard.offsets)
        assert [normal(reader.read(number)) for number in range(len(samples))] == wanted
        for sample, record in zip(samples, shard.format.read(shard.path), strict=True):
            kinds = {
                name: value.dtype.name if isinstance(value, np.ndarray) else "bytes" for name, value in record.items()
            }
            assert kinds == dict(features.columns)
            expected, found = (features.decode(found)["value"] for found in (features.encode(sample), record))
            np.testing.assert_array_equal(found, expected)

    def test_shard_without_records_is_valid(self, make):
        """Neither a part without records nor a shard without any is an error, and both are read as nothing."""
        shard = make(MIXED, [], [])

        assert shard.read() == []
        assert len(shard.offsets) == 0
        with open(shard.path, "rb") as file:
            assert len(shard.format.find_offsets(file, path="s")) == 0
        shard.format.reader(shard.path, shard.offsets).close()

    def test_records_keep_their_order(self, make):
        """Records stand in the order in which they were appended, whatever part they were in."""
        shard = make(MIXED, *(map(mixed, range(start, start + 40)) for start in range(0, 200, 40)))

        assert [record["key"][0].decode() for record in shard.format.read(shard.path)] == [
            f"sample {number:05d}" for number in range(200)
        ]

    def test_offsets_tell_every_record(self, make):
        """The offsets are as many as the records, lie in the file, and reading the file finds the same."""
        shard = make(MIXED, map(mixed, range(30)), [], map(mixed, range(30, 150)))

        offsets = shard.offsets
        assert len(offsets) == 150
        assert int((offsets.offset + offsets.size).max()) <= shard.path.stat().st_size
        assert (np.diff(offsets.offset.astype(np.int64)) >= 0).all()
        assert Offsets.from_text(offsets.to_text()) == offsets
        with open(shard.path, "rb") as file:
            assert shard.format.find_offsets(file, path="s") == offsets

    def test_records_are_read_in_any_order(self, make):
        """A reader gives any record by its number, from several threads, and from a forked child."""
        shard = make(MIXED, map(mixed, range(70)), map(mixed, range(70, 150)))
        numbers = random.Random(0).sample(range(150), 150)
        wanted = [normal(shard.records[number]) for number in numbers]

        reader = shard.format.reader(shard.path, shard.offsets)
        with ThreadPoolExecutor(4) as pool:
            found = [normal(record) for record in pool.map(reader.read, numbers)]

        assert found == wanted
        assert in_forked_child(lambda: [normal(reader.read(number)) for number in numbers[:5]]) == wanted[:5]
        reader.close()

    def test_odd_keys_survive(self, make):
        """Keys of any script and length, with every character that means something to paths, come back as they were."""
        samples = [{**mixed(number), "key": key} for number, key in enumerate(ODD_KEYS)]

        shard = make(MIXED, samples)

        assert [record["key"][0].decode() for record in shard.format.read(shard.path)] == ODD_KEYS
        assert shard.read() == [normal(record) for record in shard.records]

    def test_cuts_between_parts_do_not_show(self, make):
        """However records are cut into parts, the records, and where promised the bytes and offsets, are the same."""
        whole = make(MIXED, map(mixed, range(150)))

        for cuts in ([1, 2, 100], [0, 63, 64, 65, 128], [149], list(range(150))):
            bounds = [0, *cuts, 150]
            parts = [map(mixed, range(a, b)) for a, b in itertools.pairwise(bounds)]
            shard = make(MIXED, *parts)

            assert shard.read() == whole.read()
            if self.hides_cuts:
                assert shard.path.read_bytes() == whole.path.read_bytes()
                assert shard.offsets == whole.offsets

    def test_blocks_and_single_records_make_the_same_shard(self, make, monkeypatch):
        """A table given by columns is the same file as the same rows given one by one."""
        samples = [{"key": f"row{n}", "label": n % 500, "x": n / 7, "caption": "é" * (n % 9)} for n in range(10_000)]
        by_rows = make(TABLE, samples[:9000], samples[9000:])

        def append_as_block(writer, records):
            block = {name: [record[name] for record in records] for name in TABLE.columns}
            writer.append_block({**block, "label": np.concatenate(block["label"])})

        monkeypatch.setattr(Shard, "append", staticmethod(append_as_block))
        by_blocks = make(TABLE, samples[:9000], samples[9000:])

        assert by_blocks.path.read_bytes() == by_rows.path.read_bytes()
        assert by_blocks.offsets == by_rows.offsets

    def test_truncated_file_is_noticed(self, make):
        """A file cut at any place is an error, or at least has fewer records than the manifest would say."""
        shard = make(MIXED, map(mixed, range(20)))
        data = shard.path.read_bytes()
        torn = shard.path.with_suffix(".torn")
        ends = {int(offset) for offset in shard.offsets.offset}

        for length in sorted({*range(0, len(data), max(len(data) // 60, 1)), len(data) - 1, *ends}):
            torn.write_bytes(data[:length])
            if self.shows_missing_tail or length not in ends:
                with pytest.raises(CorruptDataError, match=r"torn.*(record \d+ at byte|columns)"):
                    list(shard.format.read(torn))
            else:
                assert len(list(shard.format.read(torn))) < 20

    def test_no_record_is_read_wrong(self, make):
        """A flipped bit is an error that names file and record, or changes no record."""
        if not get_format(self.name).has_checksums:
            pytest.skip("the format has no checksums of its data; the manifest's digest shows damage")
        shard = make(MIXED, map(mixed, range(20)))
        data, wanted = shard.path.read_bytes(), shard.read()
        damaged = shard.path.with_suffix(".damaged")
        rng = random.Random(1)
        num_noticed = 0

        for _ in range(150):
            place = rng.randrange(int(shard.offsets.offset[-1] + shard.offsets.size[-1]))
            flipped = bytearray(data)
            flipped[place] ^= 1 << rng.randrange(8)
            damaged.write_bytes(flipped)
            found, message = outcome(shard.format, damaged)
            assert "damaged" in message or found == wanted, place
            num_noticed += bool(message)

        assert num_noticed > 100

    def test_other_files_are_refused(self, make, tmp_path):
        """A file that is not there is `FileNotFoundError`; one of another kind is said to be damaged."""
        shard = make(MIXED, [mixed(0)])
        other = tmp_path / "other"
        other.write_bytes(random.Random(0).randbytes(100_000))

        with pytest.raises(FileNotFoundError):
            shard.format.reader(tmp_path / "nothing", shard.offsets)
        with pytest.raises(CorruptDataError, match="other"):
            shard.format.reader(other, shard.offsets).read(0)
        with pytest.raises(CorruptDataError, match="other"):
            list(shard.format.read(other))

    def test_wrong_record_is_refused_and_leaves_no_trace(self, make, tmp_path):
        """What has other columns or types is a `SchemaError`, and the writer goes on."""
        shard = make(MIXED, [mixed(0), mixed(1)])
        first, second = shard.records
        with open(tmp_path / "part", "wb", buffering=0) as file:
            writer = shard.format.writer(file, MIXED.columns)
            writer.append(first)
            with pytest.raises(SchemaError, match="missing \\['label'\\]"):
                writer.append({name: value for name, value in second.items() if name != "label"})
            with pytest.raises(SchemaError, match="column 'label' holds list"):
                writer.append({**second, "label": [1]})
            with pytest.raises(SchemaError, match="column 'image' holds"):
                writer.append({**second, "image": np.array([1])})
            writer.append(second)
            writer.finish()

        assert (tmp_path / "part").read_bytes() == shard.parts[0].read_bytes()
        for late in (lambda: writer.append(first), lambda: writer.append_block({}), writer.finish):
            with pytest.raises(OptionError, match="finish was called"):
                late()

    def test_records_can_be_written_as_they_were_read(self, make, tmp_path):
        """Records that a reader gives, which hold their bytes in lists, go into another part unchanged."""
        shard = make(MIXED, map(mixed, range(30)))

        again = shard.write_part(tmp_path / "again", list(shard.format.read(shard.path)))

        assert len(again) == 30
        assert (tmp_path / "again").read_bytes() == shard.parts[0].read_bytes()

    def test_equal_formats_write_equal_bytes(self, make):
        """A format that went through pickle, as to a worker, writes the same; its options survive JSON."""
        shard = make(MIXED, map(mixed, range(30)))

        again = Shard(shard.path.parent, pickle.loads(pickle.dumps(shard.format)), MIXED, [list(map(mixed, range(30)))])

        assert again.path.read_bytes() == shard.path.read_bytes()
        assert all(value is None or type(value) in {str, int, float, bool} for value in shard.format.options().values())

    def test_part_can_be_assembled_again(self, make):
        """A run that was killed while it assembled begins anew, over what the killed one left."""
        shard = make(MIXED, map(mixed, range(60)), map(mixed, range(60, 100)))
        if shard.format.joins_parts:
            pytest.skip("parts of the format are joined byte for byte")
        data = shard.path.read_bytes()
        left = shard.format.assembler(shard.path)
        left.add(shard.parts[0])
        left.close()
        left.close()

        offsets = shard.assemble([])

        assert shard.path.read_bytes() == data
        assert offsets == shard.offsets

    def test_torn_part_is_refused(self, make):
        """A part that lacks its end is named, and does not become half a shard."""
        shard = make(MIXED, map(mixed, range(60)))
        if shard.format.joins_parts:
            pytest.skip("parts of the format are joined byte for byte")
        shard.parts[0].write_bytes(shard.parts[0].read_bytes()[:-100])
        assembler = shard.format.assembler(shard.path)

        with pytest.raises(CorruptDataError, match=r"00000\.part: not "):
            assembler.add(shard.parts[0])
        assembler.close()

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_offsets_go_beyond_two_gib(self, tmp_path):
        """Records behind the first 2 GiB of a shard are found and right."""
        features = Features({"data": Tensor((None,), "uint8", "raw")})
        shard_format = get_format(self.name).with_features(features)
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
    """Write 35 records of 64 MiB, one to a part, and return the offsets."""
    assembler = None if shard_format.joins_parts else shard_format.assembler(path)
    written = []
    for number in range(35):
        part = folder / "part"
        with open(part, "wb", buffering=0) as file:
            writer = shard_format.writer(file, features.columns)
            writer.append(features.encode({"key": f"k{number}", "data": np.roll(noise, number)}))
            written.append((writer.finish(), file.tell()))
        if assembler:
            assembler.add(part)
        else:
            with open(path, "ab") as file:
                file.write(part.read_bytes())
    return assembler.finish() if assembler else Offsets.joined(written)


def outcome(shard_format, path):
    """Return the records of a file, or what is said of its damage."""
    try:
        return [normal(record) for record in shard_format.read(path)], ""
    except CorruptDataError as error:
        return [], str(error)


def in_forked_child(fn):
    """Return what `fn` returns in a forked child."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sending, pickle.dumps(fn()))
        finally:
            os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data)
