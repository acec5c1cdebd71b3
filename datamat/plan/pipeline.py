"""Process an input row into encoded records: read, augment, encode. Workers spend their time here.

    row ── writer.read ──> sample ──┬── as it is ────────────────────────────> encode ──> KEY
                                    └── decode once ── augment, per copy ────> encode ──> KEY#0 KEY#1 ...

If `read` or a transform gives several samples, each gets a number: KEY#0-0 KEY#0-1 ... A sample that is left out is a
`Skip` in its place, and keeps its number: it never changes the keys of the others.

Nothing here depends on files, processes or plans: a row gives the same records wherever it is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import xxhash

from datamat.codecs import note_made
from datamat.directory.keys import RecordKey, RecordNames, safe_key
from datamat.directory.row_values import nested_paths
from datamat.errors import DatamatError, OptionError, OutputError, SampleError, SchemaError, Skip, count_of, described
from datamat.features import Geometry
from datamat.features.base import TextColumn, as_array, dtype_of, holds_numbers, num_bytes_of, stored_size
from datamat.features.pictures import PictureFile
from datamat.fingerprint import fingerprint
from datamat.folders.urls import is_url, redacted, without_secrets
from datamat.plan.gather import SampleColumns
from datamat.sources.fetching import fetches_files, fill, remedy, with_urls
from datamat.sources.rows import stored_rows
from datamat.transforms import Augmenter
from datamat.transforms.augmenter import each_sample
from datamat.transforms.seeding import GlobalState, global_draws, loaded_libraries, row_rng, seed_row, with_rng
from datamat.values import frozen
from datamat.writers.base import DatasetWriter
from datamat.writers.function import MOST_CONCURRENCY, AsyncFunctionWriter, FunctionWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, MutableSet, Sequence
    from typing import TypeAlias

    from datamat.directory.manifest import Manifest
    from datamat.features import Features, Statistics
    from datamat.features.base import Column, Shape
    from datamat.features.statistics import FieldStatistics
    from datamat.plan.plan import Plan
    from datamat.sources.rows import IndexRow, RowBlock, Texts
    from datamat.sources.store import RowStore
    from datamat.transforms.seeding import RandomStreams
    from datamat.writers.base import Sample

    _Made: TypeAlias = "MadeColumns | Skip"
    """The columns of a record, or the reason why it was left out."""

OUTPUT_VERSION = 2
"""Incremented when rows give different records or keys: then all shards are rebuilt."""

_AS_IS = frozenset({np.ndarray, bytes, str, int, float, bool})  # types of values that need no conversion
_FIRST_SWAPPED = 5  # of the EXIF orientations that swap rows and columns
_GATHERED_S = 0.1  # after which rows are encoded: if one draws, or the run stops, no more work is lost
_MOST_READS = 3  # attempts before a second read counts as failed: disks and networks fail occasionally
_ROWS_COMPARED = 64  # rows of a block that are made twice
_BLOCK_BYTES, _LEAST_BLOCK_ROWS, _MOST_BLOCK_ROWS = 16 << 20, 64, 1 << 16
_COLUMN_BYTES = 16 << 10  # per column of a block, if there are more than a thousand: each costs as much as 800 values
_TYPICAL_SIZE = 256  # assumed size of a varying dimension, and of a text
_NOT_IN_BLOCKS = (
    "they would depend on how rows form blocks; draw in read, where they depend on (seed, key) alone, and "
    "return None from read_block"
)
_MOST_HELD_BYTES = 16 << 20  # of a copy with many samples, before it is known to differ from earlier ones
_MOST_ATTEMPTS = 8  # to draw a copy unlike earlier ones of its sample; halved after each that came out equal
_GIVES_EQUAL_COPIES = (
    "gives equal copies of some samples, also when they are drawn again; ask for fewer copies, or add a transform that "
    "differs from copy to copy"
)


class StageClock:
    """Adds up the time of a part's stages in this process, with two clock readings per sample and stage."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, stage: str, begun: float) -> float:
        """Add the time since `begun`, by `time.perf_counter`, to a stage; return the present time."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - begun
        return now

    def take(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call."""
        found, self._seconds = self._seconds, {}
        return found


stage_clock = StageClock()
"""The clock of this process, which makes one part at a time."""


class MadeColumns(dict[str, "Column"]):
    """The columns of a record or a block, with the statistics of the encoded values.

    Attributes:
        seen: their result of `Features.observe_values`.
    """

    __slots__ = ("seen",)

    seen: Mapping[str, FieldStatistics]

    @classmethod
    def of(cls, columns: Mapping[str, Any], seen: Mapping[str, FieldStatistics]) -> MadeColumns:
        """Return columns with the statistics of their values."""
        made = cls(columns)
        made.seen = seen
        return made


class GatheredRows:
    """Rows that were read into `SampleColumns`.

    Attributes:
        num_rows: number of rows, from the first, that gave samples to the columns, or none.
        num_without: number of those that gave none.
        dropped: reasons why samples were left out, by row number and key.
        alone: result of `read` for the next row, if it does not fit into columns.
        failure: error of the next row.
    """

    __slots__ = ("alone", "dropped", "failure", "num_rows", "num_without")

    def __init__(self) -> None:
        self.num_rows = self.num_without = 0
        self.dropped: dict[int, Mapping[str, Skip]] = {}
        self.alone: list[Sample | Skip] | None = None
        self.failure: SampleError | SystemExit | None = None

    def drop(self, key: str, skip: Skip) -> None:
        """Record that the row gives no sample."""
        self.dropped[self.num_rows] = {key: skip}
        self.num_without += 1

    def add_several(self, row: IndexRow, samples: Sequence[Sample | Skip], into: SampleColumns) -> bool:
        """Add the samples of a row; return False if one of them, and so all of them, must be encoded alone."""
        if all(isinstance(sample, Skip) for sample in samples):
            self.drop(row.key, samples[0])  # type: ignore[arg-type]
            return True
        if len(samples) == 1:
            return into.add(samples[0], row.key, row.key)  # type: ignore[arg-type]
        before, dropped = len(into), {}
        for number, sample in enumerate(samples):
            key = RecordKey.format(row.key, 0, number)
            if isinstance(sample, Skip):
                dropped[key] = sample
            elif not into.add(sample, row.key, key):
                into.cut(before)
                return False
        if dropped:
            self.dropped[self.num_rows] = dropped
        return True


class RecordSource(Protocol):
    """A source of rows and their encoded records, which a job writes into shards.

    There are two. `Pipeline` reads, transforms and encodes the samples of a writer; `StoredRecords` (`run/convert.py`)
    copies the records of a finished dataset. A source travels to each worker with its job, and gives the same records
    for a row in every process.
    """

    @property
    def name(self) -> str:
        """Name of the dataset, with which the names of its shards begin."""

    @property
    def features(self) -> Features:
        """Schema of the records, without `key`."""

    @property
    def file_fields(self) -> Sequence[str] | None:
        """Names of the index fields that hold paths of input files; None finds them by their values."""

    @property
    def url_fields(self) -> Sequence[str]:
        """Names of the index fields that hold URLs of input files."""

    @property
    def files(self) -> Sequence[str | os.PathLike[str]] | Mapping[str, str]:
        """Paths of further input files that every record depends on."""

    @property
    def writer(self) -> Any:
        """The object whose code and attributes decide the records: a writer, or a stand-in for copied records."""

    def setup_worker(self) -> None:
        """Prepare a worker process, once, before its first record."""

    def index(self, source: Any) -> Iterable[IndexRow] | Iterable[RowBlock]:
        """Return one row per input sample, always in the same order; or blocks of rows."""

    def costs(self, store: RowStore) -> np.ndarray:
        """Return int64 (num_rows,): the cost of each row in bytes, by which work is divided."""

    def arrange(self, plan: Plan, store: RowStore, fingerprint: Mapping[str, str]) -> Plan:
        """Return the plan with the shards that this source wants.

        Args:
            plan: plan by the options of the job.
            store: the rows, in the order of the plan.
            fingerprint: digest of everything except rows that decides the bytes of a shard, by split.
        """

    def describe(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the finished run, completed with this source's knowledge of its records."""

    def records(
        self,
        row: IndexRow,
        *,
        copies: int,
        augmented: bool,
        read: MutableMapping[str, str] | None = None,
        dropped: MutableMapping[str, Skip] | None = None,
        remarks: MutableSet[str] | None = None,
    ) -> Iterator[tuple[str, dict[str, Column]]]:
        """Yield (key, columns) of each record of one row; raise `SampleError`. See `Pipeline.records`."""

    def check_determined(self, row: IndexRow, read: Mapping[str, str], *, augmented: bool) -> None:
        """Raise `OptionError` if the row would give different records next time. See `Pipeline.check_determined`."""

    def known_statistics(self, row: IndexRow) -> Statistics | None:
        """Return the known statistics of a row's copied records; None if there are none.

        Over the rows of a split they add up to those of the split: a row may stand for others. Not called if records
        are observed.
        """

    @property
    def is_observed(self) -> bool:
        """Whether the records are observed for statistics."""

    @property
    def rows_at_once(self) -> int:
        """Number of rows that a worker may await together."""

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that reads samples, many rows at a time if possible; None if records are copied."""


@final
@frozen(slots=False)
class Pipeline:
    """Turns rows into records: the `RecordSource` of ordinary jobs.

    Use `Pipeline.of` to make that of a job.

    Args:
        writer: the writer, which indexes the source and reads samples.
        augmenter: draws the copies, by the writer's `augment` and the transform.
        seed: base seed; with key and copy it decides every random draw.
        turned: names of the fields whose pictures EXIF has rotated beside other pictures or boxes.
    """

    writer: DatasetWriter
    augmenter: Augmenter
    seed: int
    turned: set[str] = dataclasses.field(default_factory=set, init=False, repr=False, compare=False)
    _read_drawing: Callable[[Any, np.random.Generator], Any] | None = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_read_drawing", with_rng(self.writer.read))

    @classmethod
    def of(cls, writer: DatasetWriter, transform: Any, seed: int, untouched: tuple[str, ...] = ()) -> Pipeline:
        """Return the pipeline that draws copies by the writer's `augment`, if any, and then by the transform.

        Args:
            writer: the writer, bound to its source.
            transform: an albumentations pipeline, a callable of (sample) or (sample, rng), or None.
            seed: base seed; with key and copy it decides every random draw.
            untouched: names of the fields that an albumentations pipeline intentionally leaves alone.

        Raises:
            OptionError: features or transform are invalid, or do not fit together.
        """
        writer.features.check()
        augment = writer.augment if type(writer).augment is not DatasetWriter.augment else None
        return cls(writer, Augmenter(writer.features, transform, augment, untouched), seed)

    @property
    def is_observed(self) -> bool:
        """True."""
        return True

    @property
    def rows_at_once(self) -> int:
        """Number of rows that a worker may wait for together, or that it reads together from a table."""
        if self.augmenter.is_empty and self.writer.reads_cells:
            return 2 * self._rows_of(_BLOCK_BYTES)
        return MOST_CONCURRENCY if isinstance(self.writer, AsyncFunctionWriter) else 1

    @property
    def pipeline(self) -> Pipeline:
        """This pipeline."""
        return self

    @property
    def name(self) -> str:
        """The writer's own name, or that of its class in lower case."""
        return self.writer.name or type(self.writer).__name__.lower()

    @property
    def features(self) -> Features:
        """The writer's features."""
        return self.writer.features

    @property
    def file_fields(self) -> Sequence[str] | None:
        """The writer's file fields."""
        return self.writer.file_fields

    @property
    def url_fields(self) -> Sequence[str]:
        """The writer's URL fields."""
        return self.writer.url_fields

    @property
    def files(self) -> Sequence[str | os.PathLike[str]] | Mapping[str, str]:
        """The writer's further input files."""
        return self.writer.files

    @property
    def draws_in_read(self) -> bool:
        """Whether `read` takes a random generator."""
        return self._read_drawing is not None

    def setup_worker(self) -> None:
        """Prepare the writer for this process."""
        self.writer.setup_worker()

    def index(self, source: Any) -> Iterable[IndexRow] | Iterable[RowBlock]:
        """Return the rows of the writer's index, or blocks of them."""
        return stored_rows(self.writer.index(source))

    def costs(self, store: RowStore) -> np.ndarray:
        """Return int64 (num_rows,): the bytes of the input files of each row."""
        return store.input_bytes()

    def arrange(self, plan: Plan, store: RowStore, fingerprint: Mapping[str, str]) -> Plan:
        """Return the plan unchanged."""
        del store, fingerprint
        return plan

    def describe(self, manifest: Manifest) -> Manifest:
        """Return the manifest unchanged."""
        return manifest

    def records(
        self,
        row: IndexRow,
        *,
        copies: int,
        augmented: bool,
        read: MutableMapping[str, str] | None = None,
        dropped: MutableMapping[str, Skip] | None = None,
        remarks: MutableSet[str] | None = None,
    ) -> Iterator[tuple[str, dict[str, Column]]]:
        """Yield (key, columns) of each record of one row; none if `read` leaves it out.

        Args:
            row: the input row, with paths that can be opened.
            copies: number of records to draw.
            augmented: whether the writer's `augment` and the transform apply.
            read: receives the digest of each field that was read, for `check_determined`.
            dropped: receives the reasons why records were left out, by key.
            remarks: receives remarks for the user on the transform, worded alike for all rows.

        Raises:
            SampleError: any error, with the key of the row and the first of its files.
        """
        with _Naming(self, row):
            samples = self._read(row)
            if read is not None:
                read.update(_digests_of_all(samples))
            if remarks is not None and self.turned:
                remarks.add(
                    f"pictures in {', '.join(sorted(self.turned))} were turned upright, as their EXIF orientation "
                    "says; boxes, points and masks for them are stored as given and must fit the upright picture"
                )
            records = self._drawn(row, samples, copies, remarks) if augmented else self._kept(row, samples, copies)
            yield from _stored(records, dropped)

    def records_of(
        self, row: IndexRow, found: Sequence[Sample | Skip], dropped: MutableMapping[str, Skip]
    ) -> Iterator[tuple[str, dict[str, Column]]]:
        """Do what `records` does, for one untransformed copy of samples that `read` has returned.

        Raises:
            SampleError: any error, as for `records`.
        """
        with _Naming(self, row):
            yield from _stored(self._kept(row, self._all_checked(row, found), 1), dropped)

    def _failure(self, row: IndexRow, error: Exception) -> SampleError:
        _let_go(error)
        return SampleError(row.key, _reason(row, error, self.writer))

    @property
    def gathers_samples(self) -> bool:
        """Whether all features encode many values together faster than one by one."""
        features = self.writer.features
        return len(features) > 1 and all(feature.encodes_many() for feature in features.values())

    def sample_columns(self) -> SampleColumns:
        """Return empty columns for `gather`."""
        names = [name for name in self.writer.features.as_declared if name != "key"]
        return SampleColumns(names, {*filter(self._takes_none, names)})

    def gather(
        self, rows: Sequence[IndexRow], first: int, position: int, begin: Callable[[int], None], into: SampleColumns
    ) -> GatheredRows:
        """Read rows without input files until their samples, untransformed, fill a block.

        Reading a row never changes earlier samples. Global generators are not seeded for each row as long as no row
        draws from them: if one did, all rows are read again.

        Args:
            rows: rows, in order.
            first: number of the first row to read.
            position: position of that row in the plan.
            begin: called with the position of each row before it is read.
            into: receives the samples.

        Raises:
            OutputError: a disk is full, or there are no more descriptors.
        """
        if not (self.draws_in_read or global_draws.are_expected or loaded_libraries()):
            mark = global_draws.rest(self.seed)
            found = self._read_into(into, self.writer.read, rows, first, position, begin)
            global_draws.are_expected |= global_draws.mark() != mark
            if not global_draws.are_expected and not loaded_libraries():
                return found
            into.clear()
        return self._read_into(into, self._called, rows, first, position, begin)

    def _read_into(
        self,
        into: SampleColumns,
        read: Callable[[IndexRow], Any],
        rows: Sequence[IndexRow],
        first: int,
        position: int,
        begin: Callable[[int], None],
    ) -> GatheredRows:
        found = GatheredRows()
        until = time.perf_counter() + _GATHERED_S
        for number in range(first, len(rows)):
            row = rows[number]
            begin(position + number - first)
            try:
                sample = read(row)
                if type(sample) is dict:
                    is_added = into.add(sample, row.key, row.key)
                else:
                    sample = [_own(one) for one in each_sample(sample, "read")]
                    is_added = found.add_several(row, sample, into)
            except OutputError:
                raise
            except Skip as skip:
                found.drop(row.key, skip)
            except (SampleError, SystemExit) as error:
                found.failure = error
                break
            except Exception as error:  # noqa: BLE001 -- the key of its row is added
                found.failure = self._failure(row, error)
                found.failure.__cause__ = error
                break
            else:
                if not is_added:
                    found.alone = sample if isinstance(sample, list) else [sample]
                    break
            found.num_rows += 1
            if into.is_full or time.perf_counter() > until:
                break
        return found

    def encode_columns(self, columns: SampleColumns) -> dict[str, Any] | None:
        """Return gathered samples as a block, or None if one does not fit the schema."""
        begun = time.perf_counter()
        with contextlib.suppress(Exception):  # encoding each sample alone shows which one is to blame
            block = self._encoded_block(columns.take())
            stage_clock.add("encode", begun)
            return block
        return None

    @property
    def makes_blocks(self) -> bool:
        """Whether the writer overrides `read_block`, and needs no fetched files, which only `read` gets."""
        return type(self.writer).read_block is not DatasetWriter.read_block and not self.writer.url_fields

    @property
    def rows_per_block(self) -> int:
        """Number of rows that take about 16 MB according to the schema, and more if they have many columns."""
        return self._rows_of(max(_BLOCK_BYTES, _COLUMN_BYTES * len(self.writer.features)))

    def _rows_of(self, num_bytes: int) -> int:
        row_bytes = sum(_expected_bytes(*feature.value_type()) for feature in self.writer.features.values())
        return min(max(num_bytes // row_bytes, _LEAST_BLOCK_ROWS), _MOST_BLOCK_ROWS)

    def block(self, keys: Texts, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns of many untransformed rows at once, or None if the writer reads row by row.

        Raises:
            SampleError: the block does not fit the schema; the key is that of its first row.
            OptionError: random numbers were drawn; they would depend on how rows form blocks.
        """
        before = GlobalState.take()
        try:
            found = self.writer.read_block(keys.tolist(), fields)
            begun = time.perf_counter()
            own = {name: _own_column(column) for name, column in (found or {}).items()}
            lengths = np.diff(keys.ends, prepend=np.uint64(0)).astype(np.int64)
            own["key"] = TextColumn(np.frombuffer(keys.data, np.uint8), lengths)
            block = None if found is None else self._encoded_block(own)
            stage_clock.add("encode", begun)
        except OutputError:
            raise
        except Exception as error:
            _let_go(error)
            raise SampleError(
                keys[0], f"in a block of {count_of(len(keys), 'row')}: {with_urls(described(error))}"
            ) from error
        if block is not None and GlobalState.take() != before:
            raise OptionError(f"{self._name_of('read_block')} drew random numbers: {_NOT_IN_BLOCKS}")
        return block

    def _encoded_block(self, values: Mapping[str, Any]) -> MadeColumns:
        features = self.writer.features
        return MadeColumns.of(features.encode_block(values), features.observe_value_block(values))

    def check_block(self, keys: Texts, fields: Mapping[str, Any]) -> None:
        """Raise `OptionError` if the same rows give two results; rows of tables are read by no code of the user's."""
        if self.writer.reads_cells:
            return
        few = keys[:_ROWS_COMPARED].tolist()
        theirs = {name: values[:_ROWS_COMPARED] for name, values in fields.items()}
        first, again = (_digests(self.writer.read_block(few, dict(theirs)) or {}) for _ in range(2))
        differing = _differing(first, again)
        if differing:
            raise OptionError(
                f"{self._name_of('read_block')}: the same {len(few)} rows gave two results, in {differing}: "
                f"{_NOT_IN_BLOCKS}"
            )

    def check_determined(self, row: IndexRow, read: Mapping[str, str], *, augmented: bool) -> None:
        """Raise `OptionError` if random draws depend on anything but seed, key and copy.

        Args:
            row: a row whose records have been made.
            read: its digests from `records`.
            augmented: whether the transform applies and is also checked.
        """
        samples = self._read_again(row)
        differing = _differing(read, _digests_of_all(samples))
        if differing:
            raise OptionError(
                f"{self._name_of('read')}: reading sample {row.key!r} twice gave two results, in {differing}; want one "
                "that depends on (seed, key) alone: ask for a second argument, rng, and draw from it, or draw from "
                "random, numpy.random, torch or tf.random, which are seeded for each row; not from a generator that is "
                "kept from row to row, the clock, or a count of calls"
            )
        sample = next((sample for sample in samples if not isinstance(sample, Skip)), None)
        if augmented and sample is not None:
            self.augmenter.check_determined(self.writer.features.prepare(sample), key=row.key, seed=self.seed)

    def _read_again(self, row: IndexRow) -> list[Sample | Skip]:
        for attempt in range(1, _MOST_READS + 1):
            try:
                return self._read(row)
            except Exception as error:
                if attempt == _MOST_READS:
                    raise OptionError(
                        f"{self._name_of('read')}: sample {row.key!r} was read once, and cannot be read again "
                        f"({type(error).__name__}: {error}); want one that returns the same on every call: leave input "
                        "files unchanged, and take nothing from iterators"
                    ) from error
        raise AssertionError("unreachable")

    def _name_of(self, method: str) -> str:
        fn = getattr(self.writer, "fn", None)  # of `materialize`
        return f"{type(self.writer).__qualname__}.{method}" if fn is None else getattr(fn, "__qualname__", repr(fn))

    def samples(self, row: IndexRow) -> list[Sample | Skip]:
        """Return the samples of `read` for a row: one or several, each with its key, or the reason why it is left out.

        Raises:
            SampleError: any error, as for `records`.
        """
        with _Naming(self, row):
            found = self._read(row)
        if len(found) > 1:
            for number, sample in enumerate(found):
                if not isinstance(sample, Skip):
                    sample["key"] = RecordKey.format(row.key, 0, number)
        return found

    def _called(self, row: IndexRow) -> Any:
        """Return the result of `read`, a list if it yields, with all generators seeded for the row; or its error."""
        if fetches_files():
            fill(self._files_of(row))
        # Seeding takes as long as everything else for a small row, and few writers draw. So the generators are not
        # seeded until a row has drawn: that row is read again, and from then on they are seeded for each.
        is_seeded = global_draws.are_expected
        seeded = seed_row(self.seed, row.key, uses_globals=is_seeded)
        mark = global_draws.mark() if is_seeded else global_draws.rest(self.seed)
        read = self._read_drawing
        try:
            sample = self.writer.read(row) if read is None else read(row, row_rng(self.seed, row.key))
            if type(sample) is not dict:
                sample = [_own(one) for one in each_sample(sample, _name_of_read(self.writer))]
        except Skip as skip:
            sample = [skip]
        except Exception:
            if is_seeded or global_draws.mark() == mark:
                raise
        if isinstance(self.writer, AsyncFunctionWriter) and global_draws.mark() != mark:
            raise OptionError(
                f"{self._name_of('read')} is async, and drew from a generator that all calls share, which run at once: "
                "its numbers would be others each time; draw from a parameter rng, as in async def fn(item, rng)"
            )
        if not is_seeded and global_draws.mark() != mark:
            global_draws.are_expected = True
            return self._called(row)
        # A library imported by `read` itself was not seeded when `read` drew from it.
        return sample if loaded_libraries() == seeded else self._called(row)

    def _files_of(self, row: IndexRow) -> Iterator[str]:
        """Yield the declared paths of a row, among other texts."""
        names = self.writer.file_fields
        declared = row.fields if names is None else {*names, *self.writer.url_fields} & row.fields.keys()
        return nested_paths([*(row.fields[name] for name in declared), *row.files])

    def _read(self, row: IndexRow) -> list[Sample | Skip]:
        found = self._called(row)
        return self._all_checked(row, [found] if type(found) is dict else found)

    def _all_checked(self, row: IndexRow, found: Sequence[Sample | Skip]) -> list[Sample | Skip]:
        return [one if isinstance(one, Skip) else self._checked(row, one) for one in found]

    def _checked(self, row: IndexRow, sample: Sample) -> Sample:
        found = dict(sample)
        for name, value in sample.items():
            if type(value) not in _AS_IS:
                found[name] = as_array(value, are_ids=hasattr(value, "getbands") and self._holds_ids(name), name=name)
                # cv2.imread and cv2.imdecode return None for a file that they cannot decode.
                if found[name] is None and not self._takes_none(name):
                    raise SchemaError(
                        f"read returned None for the field {name!r}; want a value: did its file not decode? A field "
                        f"that may be missing is declared as Nullable: features={{{name!r}: Nullable(...)}}"
                    )
        with contextlib.suppress(OptionError):  # of `materialize`, before they are inferred
            names = self.writer.features.keys()
            if len(found.keys() - {"key"}) < len(names) - 1:
                found |= {name: None for name in names if name not in found and self._takes_none(name)}
        if (given := str(found.setdefault("key", row.key))) != row.key and safe_key(given) != row.key:
            raise SchemaError(
                f"read returned the key {found['key']!r}, but keys come from the index, where this sample is "
                f"{row.key!r}; leave the field out, or set the keys there (key= of materialize)"
            )
        found["key"] = row.key
        with contextlib.suppress(OptionError):  # likewise
            self._check_turned(sample)
        return found

    def _check_turned(self, sample: Sample) -> None:
        """Record pictures that EXIF rotates beside other pictures or boxes.

        Raises:
            SchemaError: rotation gives two pictures of one size different sizes, which their features do not declare.
        """
        places = _places_of(self.writer.features)
        if len(places) < 2:
            return
        pictures = [name for name, is_declared in places.items() if is_declared is not None]
        sizes = {name: found for name in pictures if (found := stored_size(sample.get(name))) is not None}
        for name, (size, orientation) in sizes.items():
            if orientation == 1:
                continue
            self.turned.add(repr(name))
            for other, (other_size, other_orientation) in sizes.items():
                height, width = size
                are_turned_alike = (orientation < _FIRST_SWAPPED) == (other_orientation < _FIRST_SWAPPED)
                are_declared = places[name] and places[other]
                if are_turned_alike or size != other_size or height == width or are_declared:
                    continue
                raise SchemaError(
                    f"field {name!r} is {height} x {width} as stored, as is {other!r}, and its EXIF orientation "
                    f"{orientation} turns it to {width} x {height}, but not {other!r}; turn both, or store both as "
                    "they are: without EXIF, or decoded with cv2.IMREAD_IGNORE_ORIENTATION; if their sizes are to "
                    "differ, declare height and width of both"
                )

    def _holds_ids(self, name: str) -> bool:
        from datamat.features import Mask

        try:
            feature = self.writer.features.get(name)
        except OptionError:  # of `materialize`, before they are inferred
            return False
        return isinstance(getattr(feature, "feature", feature), Mask)

    def _takes_none(self, name: str) -> bool:
        try:
            return name in self.writer.features and getattr(self.writer.features[name], "takes_none", False)
        except OptionError:  # of `materialize`, before they are inferred
            return False

    def _kept(self, row: IndexRow, samples: Sequence[Sample | Skip], copies: int) -> Iterator[tuple[str, _Made]]:
        for number, sample in enumerate(samples):
            begun = time.perf_counter()
            made = sample if isinstance(sample, Skip) else self._made(sample)
            stage_clock.add("encode", begun)
            names = RecordNames(copies, augmented=False).of(row.key)
            if len(samples) > 1:
                names = [RecordKey.format(row.key, copy, number) for copy in range(copies)]
            for key in names:
                yield key, made if isinstance(made, Skip) else MadeColumns.of(made, made.seen)

    def expect(self, rows: Sequence[IndexRow]) -> None:
        """Let an async function begin with the rows to read next, in this order."""
        if isinstance(self.writer, AsyncFunctionWriter):
            self.writer.expect(rows, self.seed)

    def known_statistics(self, row: IndexRow) -> Statistics | None:
        """Return None: records are observed as they are made."""
        del row
        return None

    def _made(self, sample: Sample) -> MadeColumns:
        features = self.writer.features
        return MadeColumns.of(features.encode(sample), features.observe_values(sample))

    def _drawn(
        self, row: IndexRow, samples: Sequence[Sample | Skip], copies: int, remarks: MutableSet[str] | None
    ) -> Iterator[tuple[str, _Made]]:
        remarks = set() if remarks is None else remarks
        if len(samples) == 1:
            for copy, found in self._copies(samples[0], row.key, copies, remarks):
                yield from _numbered(found, row.key, copy)
            return
        numbers: Counter[int] = Counter()
        for place, sample in enumerate(samples):
            # Each sample draws from its own streams. No row has such a key: row keys contain no "#".
            for copy, found in self._copies(sample, f"{row.key}#{place}", copies, remarks):
                for made in found:
                    yield RecordKey.format(row.key, copy, numbers[copy]), made
                    numbers[copy] += 1

    def _copies(
        self, sample: Sample | Skip, name: str, copies: int, remarks: MutableSet[str]
    ) -> Iterator[tuple[int, Iterable[_Made]]]:
        """Yield each copy of a sample, with its number; each must be consumed before the next is drawn.

        Args:
            sample: the sample as read.
            name: name of its random streams.
            copies: number of copies.
            remarks: receives a sentence if copies are equal.
        """
        if isinstance(sample, Skip):
            yield from ((copy, [sample]) for copy in range(copies))
            return
        begun = time.perf_counter()
        decoded = self.writer.features.prepare(sample)  # once, for all copies
        stage_clock.add("decode", begun)
        earlier: set[tuple[object, ...]] = set()
        attempts = _MOST_ATTEMPTS
        for copy in range(copies):
            if not copy:  # nothing to compare it with: its records are passed on as they are made
                digests: list[object] = []
                yield copy, self._encoded(decoded, name, copy, digests=digests if copies > 1 else None)
            else:
                digests, found = self._unlike(earlier, decoded, name, copy, attempts)
                yield copy, found
                if tuple(digests) in earlier:
                    attempts = max(attempts // 2, 1)  # no variation is left, or too rare a one
                    remarks.add(f"{self.augmenter.name} {_GIVES_EQUAL_COPIES}")
            if digests:  # otherwise no copy can be repeated
                earlier.add(tuple(digests))

    def _unlike(
        self, earlier: Collection[tuple[object, ...]], decoded: Sample, key: str, copy: int, attempts: int
    ) -> tuple[list[object], Iterable[_Made]]:
        """Return a copy that differs from earlier ones, if possible, as digests and columns of its records.

        Transforms with probabilities leave some copies unchanged: two of those would be identical records.
        """
        for attempt in range(attempts):
            streams = self.augmenter.seeded_streams(key, copy, self.seed, attempt)
            digests: list[object] = []
            held: list[_Made] | None = []
            num_bytes = 0
            for columns in self._encoded(decoded, key, copy, streams, digests=digests):
                num_bytes += 0 if isinstance(columns, Skip) else sum(map(num_bytes_of, columns.values()))
                if num_bytes > _MOST_HELD_BYTES:
                    held = None  # they will be rebuilt, with the same result
                if held is not None:
                    held.append(columns)
            if tuple(digests) not in earlier or self.augmenter.ignores_chance(streams, len(digests)):
                break
        return digests, self._encoded(decoded, key, copy, attempt=attempt) if held is None else held

    def _encoded(
        self,
        decoded: Sample,
        key: str,
        copy: int,
        streams: RandomStreams | None = None,
        *,
        attempt: int = 0,
        digests: list[object] | None = None,
    ) -> Iterator[_Made]:
        """Yield the columns of each sample of a copy.

        Args:
            decoded: the sample, with decoded images.
            key: key of the row.
            copy: number of the copy, from 0.
            streams: its freshly seeded generators; None makes them.
            attempt: above 0 to draw the copy again, if `streams` is None.
            digests: receives the digest of each sample.
        """
        if streams is None:
            streams = self.augmenter.seeded_streams(key, copy, self.seed, attempt)
        begun = time.perf_counter()
        for result in self.augmenter.stream(decoded, streams):
            begun = stage_clock.add("transform", begun)
            if isinstance(result, Skip):
                yield result
                begun = time.perf_counter()
                continue
            files = {name: value for name, value in result.items() if type(value) is bytes}
            note_made(value for name, value in files.items() if value is not decoded.get(name))
            columns = self._made({**result, "key": key})
            if digests is not None:
                digests.append(_digest_of(columns))
            stage_clock.add("encode", begun)
            # The next sample may reuse the arrays.
            own = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in columns.items()}
            yield MadeColumns.of(own, columns.seen)
            begun = time.perf_counter()


class _Naming:
    """Adds the key of a row, and its first file, to errors of the block."""

    # Not a `contextlib` generator, whose frames would precede the user's in a traceback.
    def __init__(self, pipeline: Pipeline, row: IndexRow) -> None:
        self._pipeline = pipeline
        self._row = row

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (SampleError, OutputError)):
            raise self._pipeline._failure(self._row, error) from error
        # Otherwise a disk is full, or there are no descriptors, for which no row is to blame.


def _stored(
    records: Iterable[tuple[str, _Made]], dropped: MutableMapping[str, Skip] | None
) -> Iterator[tuple[str, dict[str, Column]]]:
    """Yield the records with their keys added, and record those that are left out."""
    for key, columns in records:
        if not isinstance(columns, Skip):
            columns["key"] = key.encode()
            yield key, columns
        elif dropped is not None:
            dropped[key] = columns


def _numbered(records: Iterable[_Made], key: str, copy: int) -> Iterator[tuple[str, _Made]]:
    """Yield each record of a copy with its key, which has a number if there are several."""
    iterator = iter(records)
    first, second = next(iterator), next(iterator, None)
    if second is None:
        yield RecordKey.format(key, copy, None), first
        return
    for number, columns in enumerate(itertools.chain((first, second), iterator)):
        yield RecordKey.format(key, copy, number), columns


def _own(sample: Sample | Skip) -> Sample | Skip:
    """Return the sample with copied arrays: a generator may refill one for the next sample."""
    if isinstance(sample, Skip):
        return sample
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def _own_column(column: Any) -> Any:
    """Return a column of a block with copied arrays: `read_block` may refill one for the next block."""
    if isinstance(column, tuple):
        return tuple(map(_own_column, column))
    return column.copy() if isinstance(column, np.ndarray) and column.flags.writeable else column


def _digest_of(columns: Mapping[str, Column]) -> object:
    """Return a digest that equal records share; a record with NaN, which equals nothing, has a unique one."""
    digest = xxhash.xxh3_128()
    for name in sorted(columns):
        value = columns[name]
        if isinstance(value, np.ndarray):
            if value.dtype.kind == "f" and np.isnan(value).any():
                return object()
            value = (value + 0 if value.dtype.kind == "f" else value).tobytes()  # -0.0 equals 0.0
        for part in [value] if isinstance(value, bytes) else value:
            digest.update(b"%d " % len(part))
            digest.update(part)
    return digest.digest()


def _expected_bytes(dtype: str, shape: Shape) -> int:
    """Return the approximate bytes of a value, assuming a typical size for open dimensions."""
    if not holds_numbers(dtype):
        return _TYPICAL_SIZE
    return dtype_of(dtype).itemsize * math.prod(_TYPICAL_SIZE if size is None else size for size in shape)


def _digests_of_all(samples: Sequence[Sample | Skip]) -> dict[str, str]:
    """Return the digests of all samples of a row; see `_digests`."""
    if len(samples) == 1:
        return {} if isinstance(samples[0], Skip) else _digests(samples[0])
    return {
        f"{name} of sample {place}": digest
        for place, sample in enumerate(samples)
        if not isinstance(sample, Skip)
        for name, digest in _digests(sample).items()
    }


def _digests(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the values of a sample or block that consist of arrays, numbers, text and bytes."""
    plain = {name: _plain(value) for name, value in sample.items()}
    return {name: fingerprint(value, where=name) for name, value in plain.items() if value is not _OPAQUE}


_OPAQUE: Any = object()
_PLAIN = (np.ndarray, np.generic, str, bytes, bytearray, int, float, complex, type(None))


def _plain(value: Any) -> Any:
    """Return a value as arrays, numbers, text and bytes, in lists and dicts; otherwise `_OPAQUE`.

    Objects of other types cannot be compared by content.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    elif hasattr(value, "__array__"):  # tensors, images of Pillow
        return np.asarray(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        return _OPAQUE if any(part is _OPAQUE for part in parts) else parts
    return _OPAQUE


def _differing(some: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return the names of the fields in which two samples differ, for a message."""
    names = [name for name in {**some, **others} if some.get(name) != others.get(name)]
    fields = "field" if len(names) == 1 else "fields"
    return f"{fields} {', '.join(map(repr, names))}" if names else ""


def _let_go(error: BaseException) -> None:
    """Release the frames of a `MemoryError`: reporting it takes memory, and so do later rows."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)


def _name_of_read(writer: DatasetWriter) -> str:
    """Return the user's name for the function that makes samples."""
    if not isinstance(writer, FunctionWriter):
        return "read"
    name = getattr(writer.fn, "__name__", "<")
    return "the function" if name.startswith("<") else name


_READ = re.compile(r"\b(?:in|make) read\b|\bread returned\b")


def _reason(row: IndexRow, error: BaseException, writer: DatasetWriter) -> str:
    files = [path for value in (*row.fields.values(), list(row.files)) for path in nested_paths(value) if "/" in path]
    text = described(error)
    if isinstance(error, DatamatError):
        text = _READ.sub(lambda found: found[0].replace("read", _name_of_read(writer)), text)
    where = f" ({files[0]})" if files else ""
    said = remedy(text)
    return without_urls(f"{text}{'; ' if said else ''}{said}{where}", files)


@functools.lru_cache(maxsize=16)
def _places_of(features: Features) -> Mapping[str, bool | None]:
    """Return the picture fields, and whether they declare height and width; None for boxes and points."""
    found = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {
        name: None not in one.shape[:2] if isinstance(one, PictureFile) else None
        for name, one in found.items()
        if isinstance(one, Geometry)
    }


def without_urls(text: str, paths: Iterable[str]) -> str:
    """Return a message or traceback with URLs instead of paths of local copies, and without secrets.

    Args:
        text: text that may quote paths and URLs.
        paths: paths and URLs of its row.
    """
    text = with_urls(text)
    for url in filter(is_url, paths):  # opened by `read` itself: libraries quote them
        text = redacted(text.replace(url, without_secrets(url)), url, {})
    return text
