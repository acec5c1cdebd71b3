"""The tests of a `ShardFormat`, on shards made as in a run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import pickle
import random
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from datamat.errors import CorruptDataError, OptionError, SchemaError
from datamat.features import Features
from datamat.formats import Offsets, ShardFormat
from datamat.testing.assertions import bits, compare, normal, raises
from datamat.testing.cases import CASES, MIXED, ODD_KEYS, TABLE, mixed

if TYPE_CHECKING:
    from datamat.formats import ShardWriter
    from datamat.writers.base import Sample


def _append_each(writer: ShardWriter, records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        writer.append(record)


def _append_as_block(writer: ShardWriter, records: Sequence[Mapping[str, Any]]) -> None:
    block = {name: [record[name] for record in records] for name in TABLE.columns}
    writer.append_block({**block, "label": np.concatenate(block["label"])})


class MadeShard:
    """A shard made as in a run: writers make parts, which are joined or assembled.

    Args:
        folder: folder for its files.
        shard_format: format of the shard, bound to its features.
        features: schema that encodes the samples.
        parts: the samples of each part, in order.
        append: function that appends the records of a part to its writer.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        shard_format: ShardFormat,
        features: Features,
        parts: Sequence[Iterable[Sample]],
        append: Callable[[ShardWriter, Sequence[Mapping[str, Any]]], None] = _append_each,
    ) -> None:
        self.format = shard_format
        self.features = features
        self.records: list[Any] = []
        self.path = folder / f"data-train-00000-of-00001.{shard_format.extension}"
        self.parts: list[pathlib.Path] = []
        written = []
        for number, part in enumerate(parts):
            records = [features.encode(sample) for sample in part]
            self.parts.append(folder / f"{number:05d}.part")
            offsets = self.write_part(self.parts[-1], records, append)
            self.records += records
            written.append((offsets, self.parts[-1].stat().st_size))
        self.offsets = self.assemble(written)

    def write_part(
        self,
        path: pathlib.Path,
        records: Sequence[Mapping[str, Any]],
        append: Callable[[ShardWriter, Sequence[Mapping[str, Any]]], None] = _append_each,
    ) -> Offsets:
        """Write a part, and return its offsets."""
        with open(path, "wb", buffering=0) as file:
            writer = self.format.writer(file, self.features.columns)
            append(writer, records)
            compare(writer.num_records, len(records), "num_records of the writer")
            offsets = writer.finish()
            compare(writer.num_bytes, file.tell(), "num_bytes of the writer")
        compare(len(offsets), len(records), "number of offsets of the part")
        return offsets

    def assemble(self, written: Sequence[tuple[Offsets, int]]) -> Offsets:
        """Make the shard from its parts, and return its offsets."""
        if self.format.joins_parts:
            sizes = [size for _, size in written]
            self.path.write_bytes(b"".join(part.read_bytes() for part in self.parts))
            with open(self.path, "rb") as file:
                starts = itertools.accumulate(sizes, initial=0)
                trailer = self.format.trailer(file, list(zip(starts, sizes, strict=False)))
            with open(self.path, "ab") as file:
                file.write(trailer)
            return Offsets.joined(written)
        assembler = self.format.assembler(self.path)
        for part in self.parts:
            assembler.add(part)
        offsets = assembler.finish()
        assembler.close()
        return offsets

    def keys(self) -> list[str]:
        """Return the key of each record."""
        return [bytes(record["key"][0]).decode() for record in self.format.read(self.path)]

    def read(self) -> list[dict[str, Any]]:
        """Return the records, in a form that can be compared."""
        return [normal(record) for record in self.format.read(self.path)]


class ShardFormatConformance:
    """What every `ShardFormat` does: records come back bit for bit, and damage is found and named.

    Attributes:
        hides_cuts: whether the bytes of a shard are the same however it was cut into parts.
        shows_missing_tail: whether reading a file that lacks whole records at its end raises.
    """

    hides_cuts: ClassVar[bool] = True
    shows_missing_tail: ClassVar[bool] = True

    def make_format(self) -> ShardFormat:
        """Return the format."""
        raise NotImplementedError(f"{type(self).__name__}: define make_format(self)")

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize tests that take a case with each built-in one."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(CASES))

    def test_every_feature_type_survives(self, tmp_path: pathlib.Path, case: str) -> None:
        """Values come back bit for bit, in order and one by one, and decode to the originals."""
        feature, values = CASES[case]
        features = Features({"value": feature})
        samples = [{"key": f"k{number}", "value": value} for number, value in enumerate(values)]

        shard = self._make(tmp_path, features, samples)

        expected = [normal(record) for record in shard.records]
        compare(shard.read(), expected, f"{case}: records of the file")
        reader = shard.format.reader(shard.path, shard.offsets)
        by_number = [normal(reader.read(number)) for number in range(len(samples))]
        compare(by_number, expected, f"{case}: records by number")
        for written, record in zip(shard.records, shard.format.read(shard.path), strict=True):
            kinds = {
                name: value.dtype.name if isinstance(value, np.ndarray) else "bytes" for name, value in record.items()
            }
            wanted = {name: "bytes" if kind == "bytes_list" else kind for name, kind in features.columns.items()}
            compare(kinds, wanted, f"{case}: kinds of the columns")
            found, expected = (bits(features.decode(one)["value"]) for one in (record, written))
            compare(found, expected, f"{case}: value")

    def test_shard_without_records_is_valid(self, tmp_path: pathlib.Path) -> None:
        """An empty part or shard is not an error, and reads as no records."""
        shard = self._make(tmp_path, MIXED, [], [])

        compare(shard.read(), [], "records of an empty shard")
        compare(len(shard.offsets), 0, "offsets of an empty shard")
        with open(shard.path, "rb") as file:
            compare(len(shard.format.find_offsets(file, path="s")), 0, "offsets that reading finds")
        shard.format.reader(shard.path, shard.offsets).close()

    def test_records_keep_their_order(self, tmp_path: pathlib.Path) -> None:
        """Records keep the order in which they were appended, across parts."""
        shard = self._make(tmp_path, MIXED, *(map(mixed, range(start, start + 40)) for start in range(0, 200, 40)))

        compare(shard.keys(), [f"sample {number:05d}" for number in range(200)], "keys of five parts")

    def test_offsets_cover_every_record(self, tmp_path: pathlib.Path) -> None:
        """There is one for each record, within the file, and reading the file finds the same offsets."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)), [], map(mixed, range(30, 150)))

        offsets = shard.offsets

        compare(len(offsets), 150, "number of offsets")
        end, size = int((offsets.offset + offsets.size).max()), shard.path.stat().st_size
        assert end <= size, f"offsets: found a record that ends at {end}, expected at most {size}, the file's size"
        assert (np.diff(offsets.offset.astype(np.int64)) >= 0).all(), "offsets: found a smaller one behind a larger"
        compare(Offsets.from_text(offsets.to_text()), offsets, "offsets, through text")
        with open(shard.path, "rb") as file:
            compare(shard.format.find_offsets(file, path="s"), offsets, "offsets that reading the file finds")

    def test_records_are_read_in_any_order(self, tmp_path: pathlib.Path) -> None:
        """A reader returns any record by number, in several threads and in a forked child."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(70)), map(mixed, range(70, 150)))
        numbers = random.Random(0).sample(range(150), 150)
        expected = [normal(shard.records[number]) for number in numbers]
        reader = shard.format.reader(shard.path, shard.offsets)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = [normal(record) for record in pool.map(reader.read, numbers)]
        in_child = _call_in_fork(lambda: [normal(reader.read(number)) for number in numbers[:5]])

        compare(found, expected, "records read in four threads")
        compare(in_child, expected[:5], "records read in a forked child")
        reader.close()

    def test_odd_keys_survive(self, tmp_path: pathlib.Path) -> None:
        """Keys of any script and length, with every character that is special in paths, come back."""
        samples = [{**mixed(number), "key": key} for number, key in enumerate(ODD_KEYS)]

        shard = self._make(tmp_path, MIXED, samples)

        compare(shard.keys(), ODD_KEYS, "keys")
        compare(shard.read(), [normal(record) for record in shard.records], "records")

    def test_cuts_between_parts_do_not_show(self, tmp_path: pathlib.Path) -> None:
        """However a shard is cut into parts, its records and, where promised, its bytes and offsets are the same."""
        whole = self._make(tmp_path, MIXED, map(mixed, range(150)))

        for cuts in ([1, 2, 100], [0, 63, 64, 65, 128], [149], list(range(150))):
            parts = [map(mixed, range(*bounds)) for bounds in itertools.pairwise([0, *cuts, 150])]
            shard = self._make(tmp_path, MIXED, *parts)

            place = f"shard of {len(parts)} parts"
            compare(shard.read(), whole.read(), f"{place}: records")
            if self.hides_cuts:
                compare(shard.path.read_bytes(), whole.path.read_bytes(), f"{place}: bytes (hides_cuts is True)")
                compare(shard.offsets, whole.offsets, f"{place}: offsets (hides_cuts is True)")

    def test_blocks_and_single_records_make_the_same_shard(self, tmp_path: pathlib.Path) -> None:
        """A table appended by columns makes the same file as its rows appended one by one."""
        samples = [{"key": f"row{n}", "label": n % 500, "x": n / 7, "caption": "é" * (n % 9)} for n in range(10_000)]
        by_rows = self._make(tmp_path, TABLE, samples[:9000], samples[9000:])

        by_blocks = self._make(tmp_path, TABLE, samples[:9000], samples[9000:], append=_append_as_block)

        compare(by_blocks.path.read_bytes(), by_rows.path.read_bytes(), "bytes of blocks, compared with records")
        compare(by_blocks.offsets, by_rows.offsets, "offsets of blocks, compared with records")

    def test_truncated_file_is_noticed(self, tmp_path: pathlib.Path) -> None:
        """A file cut anywhere raises, or at least has fewer records than the manifest counts."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(20)))
        data = shard.path.read_bytes()
        torn = shard.path.with_suffix(".torn")
        ends = {int(offset) for offset in shard.offsets.offset}

        for length in sorted({*range(0, len(data), max(len(data) // 60, 1)), len(data) - 1, *ends}):
            torn.write_bytes(data[:length])
            place = f"file of {len(data)} bytes, cut to {length}"
            if self.shows_missing_tail or length not in ends:
                with raises(CorruptDataError, r"torn.*(record \d+ at byte|columns)", place):
                    list(shard.format.read(torn))
            else:
                num_records = len(list(shard.format.read(torn)))
                assert num_records < 20, f"{place}: found {num_records} records, expected fewer than 20"

    def test_no_record_is_read_wrong(self, tmp_path: pathlib.Path) -> None:
        """A flipped bit raises an error that names file and record, or changes no record."""
        if not self.make_format().has_checksums:
            raise unittest.SkipTest("the format has no checksums of its data; the manifest's digest shows damage")
        shard = self._make(tmp_path, MIXED, map(mixed, range(20)))
        data, expected = shard.path.read_bytes(), shard.read()
        damaged = shard.path.with_suffix(".damaged")
        rng = random.Random(1)
        num_noticed = 0

        for _ in range(150):
            place = rng.randrange(int(shard.offsets.offset[-1] + shard.offsets.size[-1]))
            flipped = bytearray(data)
            flipped[place] ^= 1 << rng.randrange(8)
            damaged.write_bytes(flipped)
            found, message = _outcome(shard.format, damaged)
            num_noticed += bool(message)
            if "damaged" not in message:
                compare(found, expected, f"records of a file with a flipped bit in byte {place}")

        assert num_noticed > 100, f"flipped bits: found {num_noticed} of 150 noticed, expected more than 100"

    def test_other_files_are_refused(self, tmp_path: pathlib.Path) -> None:
        """A missing file raises `FileNotFoundError`; a file of another kind is reported as damaged, by name."""
        shard = self._make(tmp_path, MIXED, [mixed(0)])
        other = tmp_path / "other"
        other.write_bytes(random.Random(0).randbytes(100_000))

        with raises(FileNotFoundError, "nothing", "reader of a missing file"):
            shard.format.reader(tmp_path / "nothing", shard.offsets)
        with raises(CorruptDataError, "other", "reader of a file of another kind"):
            shard.format.reader(other, shard.offsets).read(0)
        with raises(CorruptDataError, "other", "read of a file of another kind"):
            list(shard.format.read(other))

    def test_wrong_record_is_refused_and_leaves_no_trace(self, tmp_path: pathlib.Path) -> None:
        """A record with other columns or types raises `SchemaError`; the writer then accepts the next one."""
        shard = self._make(tmp_path, MIXED, [mixed(0), mixed(1)])
        first, second = shard.records
        wrong: dict[str, dict[str, Any]] = {
            "missing \\['label'\\]": {name: value for name, value in second.items() if name != "label"},
            "column 'label' holds list": {**second, "label": [1]},
            "column 'image' holds": {**second, "image": np.array([1])},
        }
        with open(tmp_path / "part", "wb", buffering=0) as file:
            writer = shard.format.writer(file, MIXED.columns)
            writer.append(first)
            for pattern, record in wrong.items():
                with raises(SchemaError, pattern, "append of a wrong record"):
                    writer.append(record)
            writer.append(second)
            writer.finish()

        compare((tmp_path / "part").read_bytes(), shard.parts[0].read_bytes(), "bytes of a part that refused records")
        late: tuple[Callable[[], Any], ...] = (
            lambda: writer.append(first),
            lambda: writer.append_block(
                {name: [part] if isinstance(part, bytes) else part[None] for name, part in first.items()}
            ),
            writer.finish,
        )
        for call in late:
            with raises(OptionError, "finish was called", "call of a writer that has finished"):
                call()

    def test_arrays_of_a_record_may_be_filled_again(self, tmp_path: pathlib.Path) -> None:
        """Changes to a record's arrays after `append` has returned have no effect."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)))

        def append(writer: ShardWriter, records: Sequence[Mapping[str, Any]]) -> None:
            for record in records:
                lent = {
                    name: value.copy() if isinstance(value, np.ndarray) else value for name, value in record.items()
                }
                writer.append(lent)
                for value in lent.values():
                    if isinstance(value, np.ndarray):
                        value[...] = 0

        shard.write_part(tmp_path / "again", shard.records, append)

        compare((tmp_path / "again").read_bytes(), shard.parts[0].read_bytes(), "bytes of a part from reused arrays")

    def test_records_can_be_written_as_they_were_read(self, tmp_path: pathlib.Path) -> None:
        """Records from a reader, whose bytes are in lists, are written to another part unchanged."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)))

        shard.write_part(tmp_path / "again", list(shard.format.read(shard.path)))

        compare((tmp_path / "again").read_bytes(), shard.parts[0].read_bytes(), "bytes of a part written from a shard")

    def test_equal_formats_write_equal_bytes(self, tmp_path: pathlib.Path) -> None:
        """A pickled copy, such as a worker gets, writes the same bytes; its options survive JSON."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(30)))

        pickled = pickle.loads(pickle.dumps(shard.format))
        again = MadeShard(shard.path.parent, pickled, MIXED, [map(mixed, range(30))])

        compare(again.path.read_bytes(), shard.path.read_bytes(), "bytes from a pickled format")
        options = shard.format.options()
        compare(json.loads(json.dumps(options)), options, "options, through JSON")

    def test_part_can_be_assembled_again(self, tmp_path: pathlib.Path) -> None:
        """After a kill during assembly, the next run assembles the shard again over the leftovers."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(60)), map(mixed, range(60, 100)))
        self._skip_where_parts_are_joined(shard)
        data = shard.path.read_bytes()
        left = shard.format.assembler(shard.path)
        left.add(shard.parts[0])
        left.close()
        left.close()

        offsets = shard.assemble([])

        compare(shard.path.read_bytes(), data, "bytes of a shard assembled again")
        compare(offsets, shard.offsets, "offsets of a shard assembled again")

    def test_torn_part_is_refused(self, tmp_path: pathlib.Path) -> None:
        """A truncated part is named, and does not become half a shard."""
        shard = self._make(tmp_path, MIXED, map(mixed, range(60)))
        self._skip_where_parts_are_joined(shard)
        shard.parts[0].write_bytes(shard.parts[0].read_bytes()[:-100])

        with (
            contextlib.closing(shard.format.assembler(shard.path)) as assembler,
            raises(CorruptDataError, r"00000\.part: not ", "add of a truncated part"),
        ):
            assembler.add(shard.parts[0])

    def _make(self, tmp_path: pathlib.Path, features: Features, *parts: Iterable[Sample], **options: Any) -> MadeShard:
        folder = tmp_path / f"shard{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return MadeShard(folder, self.make_format().with_features(features), features, parts, **options)

    @staticmethod
    def _skip_where_parts_are_joined(shard: MadeShard) -> None:
        if shard.format.joins_parts:
            raise unittest.SkipTest("parts of the format are joined byte for byte")


def _outcome(shard_format: ShardFormat, path: pathlib.Path) -> tuple[list[dict[str, Any]], str]:
    """Return the records of a file and "", or no records and the message about its damage."""
    try:
        return [normal(record) for record in shard_format.read(path)], ""
    except CorruptDataError as error:
        return [], str(error)


def _call_in_fork(function: Callable[[], Any]) -> Any:
    """Call a function in a forked child, and return its result."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sending, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data)
