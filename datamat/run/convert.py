"""`convert`: rewrite a finished directory, or a part of it, in another format or other shards, as stored."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import operator
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, final

import numpy as np
import xxhash

from datamat.directory.files import locked, temporary_folder
from datamat.directory.index_files import column_values, field_of_column, read_index
from datamat.directory.keys import RecordKey, ShardName, original_key, records_by_row, stored_key
from datamat.directory.manifest import CONVERTED, Manifest, index_file
from datamat.directory.publication import finish_publication
from datamat.directory.sidecars import Sidecar
from datamat.errors import (
    CorruptDataError,
    InputError,
    OptionError,
    OutputError,
    SampleError,
    SchemaError,
    Skip,
    count_of,
    join_problems,
)
from datamat.features import Features, Statistics
from datamat.fingerprint import fingerprint
from datamat.folders import open_folder
from datamat.folders.base import ChangedError
from datamat.folders.urls import is_url
from datamat.formats import Offsets, ShardFormat, get_format
from datamat.options import (
    RUN_PARAMETERS,
    ErrorPolicy,
    Remedies,
    RunKeywords,
    RunOptions,
    ShardOptions,
    check_mappings,
    option,
    takes,
)
from datamat.plan.changes import measured_fields, with_seen
from datamat.plan.digests import as_drawn
from datamat.plan.job import Job, resolve_formats
from datamat.plan.pipeline import MadeColumns
from datamat.plan.plan import PartSpec, Plan, ShardSpec
from datamat.readers.cache import RecordCache, ShardStore
from datamat.readers.dataset import ShardedDataset, load
from datamat.readers.records import RecordFiles
from datamat.readers.remote import Loaded
from datamat.readers.views import mapped
from datamat.run.edit import Edit, edit
from datamat.run.materializer import options_of_source, output_place
from datamat.run.merge import check_whole
from datamat.run.report import RunReport
from datamat.run.run import work_folder
from datamat.run.stage import MOST_ROUNDS
from datamat.run.tasks import start
from datamat.run.upload import scratch_folder
from datamat.sources.rows import IndexRow
from datamat.values import frozen
from datamat.writers.samples import fill_lists

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, MutableMapping, MutableSet

    from datamat.directory.manifest import ShardInfo
    from datamat.features.base import Column
    from datamat.folders import Folder
    from datamat.readers.records import Partner
    from datamat.sources.store import RowStore
    from datamat.transforms.augmenter import SampleTransform

# ---------------------------------------------------------------- records as they are stored
#
#     _index/SPLIT.index  ──> StoredRecords.index: one row per input row, with the place of its records
#     shards, offsets     ──> StoredRecords.records: their columns, checksums verified, bit for bit


SHARD, _RECORD, _RECORDS = "from_shard", "from_record", "from_records"
"""Fields of a row: number of the shard in its split, number of its first record there, and how many it has."""
_PLACE = (SHARD, _RECORD, _RECORDS)
_SPLIT = "from_split"  # field of a row whose split is drawn anew: the split that holds its records

_BATCH_ROWS = 16_384


@frozen(slots=False)
class _Stored:
    """The inputs that decide the records of a conversion.

    Attributes:
        manifest: digest of the manifest of the directory that is converted, 32 hex digits.
    """

    manifest: str


@frozen(slots=False)
class _Mapped:
    """The inputs that decide the records of a conversion with functions of `map`.

    Attributes:
        manifest: as in `_Stored`.
        maps: the functions, each with seed, untouched fields and number.
    """

    manifest: str
    maps: tuple[tuple[Any, ...], ...]


@frozen(slots=False, eq=False)
class StoredView:
    """Some records of a finished dataset, and some of their fields, with the additions of `join` and `map`.

    Attributes:
        features: schema of the fields.
        stored: schema of the columns before the functions of `map`; others are left out.
        partners: the joined tables.
        starts: by split, the position of the first record of each shard, which locates partners.
        maps: the functions of `map`.
        digest: digest of the selected records and fields, and of the additions.
        is_in_order: whether the records are in the order in which they are stored.
        places: int64 (num_records,) of each shard, by split: the places of its records in the view, -1 for none.
        measured: by split, the fields whose values must be decoded for statistics.
    """

    features: Features
    stored: Features
    partners: Sequence[Partner]
    starts: Mapping[str, Sequence[int]]
    maps: Sequence[SampleTransform]
    digest: str
    is_in_order: bool
    places: Mapping[str, Sequence[np.ndarray]]
    measured: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, dataset: ShardedDataset, errors: ErrorPolicy) -> StoredView:
        """Return the view that a dataset is of its stored records.

        Args:
            dataset: the dataset; the fields that functions of `map` return are inferred from the first samples.
            errors: what happens to samples that fail.

        Raises:
            OptionError: it has a record twice, or comes from several directories.
            SampleError: a function fails.
        """
        part, positions = dataset.stored_part(), np.asarray(dataset.stored_positions(), np.int64)
        ends = np.cumsum([info.num_records for info in part.shards])
        places = np.full(int(ends[-1]), -1, np.int64)
        places[positions] = np.arange(len(positions))
        if len(positions) > np.count_nonzero(places >= 0):
            twice = int(positions[places[positions] != np.arange(len(positions))][0])
            raise OptionError(
                f"save: the dataset has the record {part.reader.records.key_at(twice)!r} twice, but keys are "
                "unique; select each record once"
            )
        names = [name for name in part.reader.features if name != "key"]
        stored = part.reader.features
        features = _mapped_features(dataset, stored, errors) if part.maps else stored
        by_split: dict[str, list[np.ndarray]] = {}
        starts: dict[str, list[int]] = {}
        measured: dict[str, set[tuple[str, ...]]] = {}
        for info, end, of_shard in zip(part.shards, ends.tolist(), np.split(places, ends[:-1]), strict=True):
            by_split.setdefault(info.split, []).append(of_shard)
            starts.setdefault(info.split, []).append(end - info.num_records)
            if info.num_records:
                measured.setdefault(info.split, set()).add(measured_fields(features, info) or ())
        joined = "".join(f"\n{partner.digest}" for partner in part.partners)
        return cls(
            features,
            stored,
            part.partners,
            starts,
            part.maps,
            xxhash.xxh3_128_hexdigest(places.tobytes() + "\n".join(names).encode() + joined.encode()),
            bool((np.diff(positions) > 0).all()),
            by_split,
            {split: found.pop() if len(found) == 1 else () for split, found in measured.items()},
        )

    def has(self, split: str) -> bool:
        """Return True if a record of a split is wanted."""
        return any((of_shard >= 0).any() for of_shard in self.places.get(split, ()))

    def place(self, split: str, shard: int, first: int, count: int) -> int | None:
        """Return the first place of some neighbouring records of a shard; None if none is wanted."""
        if split not in self.places:
            return None
        found = self.places[split][shard][first : first + count]
        found = found[found >= 0]
        return int(found.min()) if len(found) else None

    def changed(self, split: str, shard: int, number: int, columns: Mapping[str, Column]) -> dict[str, Column]:
        """Return the columns of a record in the view, from its stored columns, and their statistics.

        Raises:
            SampleError: a function fails, or its result does not fit the schema.
        """
        found: dict[str, Any] = dict(columns)
        for partner in self.partners:
            found.update(partner.columns_at(self.starts[split][shard] + number, partner.records.read_record) or {})
        kept = {name: column for name, column in found.items() if name in self.stored.columns}
        return self._mapped(kept, split) if self.maps else with_seen(kept, self.features, self.measured[split])

    def _mapped(self, columns: dict[str, Column], split: str) -> dict[str, Column]:
        """Return the columns of a sample after the functions of `map`; unchanged values keep their bytes."""
        sample = self.stored.decode(columns)
        made = mapped(self.maps, copy.deepcopy(sample), 0, True)  # functions may write to it
        try:
            before, values = self.stored.flatten(sample), dict(self.features.flatten(made))
            same = [
                name
                for name in values.keys() & before.keys()
                if self.features.get(name) == self.stored[name] and _is_same(values[name], before[name])
            ]
            measured = {name: before[name] for name in same if name in self.measured[split]}
            seen = {name: value for name, value in values.items() if name not in same} | measured
            for name in same:
                values[name] = self.stored[name].encoded_value(self.stored.stored(name, columns))
            found = self.features.encode(values)
        except (InputError, SchemaError) as error:
            raise SampleError(made["key"], f"{type(error).__name__}: {error}") from error
        found.update({column: columns[column] for name in same for column in self.stored[name].columns(name)})
        return MadeColumns.of(found, self.features.observe_values(seen))


def _mapped_features(dataset: ShardedDataset, stored: Features, errors: ErrorPolicy) -> Features:
    """Return the schema after the functions of `map`: fields whose values still fit keep their feature."""
    samples = _first_samples(dataset, errors)
    if (first := next(samples, None)) is None:
        raise _nothing_left(dataset)
    first = dict(first)
    known = {name: stored.as_declared[name] for name in first if _fits(stored.as_declared.get(name), name, first)}
    fill_lists(first, known, samples)
    new = Features.infer({name: value for name, value in first.items() if name not in known}).as_declared
    return Features({name: known.get(name, new.get(name)) for name in first})


def _nothing_left(dataset: ShardedDataset) -> OptionError:
    return OptionError(f"save: no records are left in the view of {dataset.path}")


def _first_samples(dataset: ShardedDataset, errors: ErrorPolicy) -> Iterator[Mapping[str, Any]]:
    """Yield samples; failing ones are skipped unless errors are raised."""
    for position in range(len(dataset)):
        try:
            yield dataset[position]
        except SampleError:
            if errors.action == "raise" or position + 1 == len(dataset):
                raise


def _fits(declared: Any, name: str, sample: Mapping[str, Any]) -> bool:
    """Return True if a value fits its declaration."""
    if declared is None:
        return False
    try:
        Features({name: declared}).encode({"key": "", name: sample[name]})
    except (InputError, SchemaError):
        return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two values are identical to the bit, so that they are stored alike."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) and one.dtype != object:
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one.tobytes() == other.tobytes() if isinstance(one, np.generic) else np.all(one == other))


@final
class StoredRecords:
    """The rows of a finished dataset and their records, keys included: the `RecordSource` of a conversion.

    Fingerprints cover the manifest, never the folder. One shard is open at a time: rows come in order, and no system
    opens thousands of files.

    Args:
        loaded: the finished directory to convert; only read.
        manifest: its manifest, whose digest counts in fingerprints.
        keeps_shards: whether each new shard holds the records of an old one.
        view: the wanted records and fields; None for all.
        draws_splits: whether splits are drawn, because rows name none.
        only: numbers of the shards to rebuild, by split, with all their rows, even those without records; None for all
            shards with records.
    """

    file_fields: Sequence[str] = ()
    url_fields: Sequence[str] = ()
    files: Sequence[str] = ()
    pipeline = None
    rows_at_once = 1

    def __init__(
        self,
        loaded: Loaded,
        manifest: Manifest,
        *,
        keeps_shards: bool,
        view: StoredView | None = None,
        draws_splits: bool = False,
        only: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._only = only
        self._loaded = loaded
        self._manifest = manifest
        self._view = view
        self._draws_splits = draws_splits
        self._keeps_shards = keeps_shards and not draws_splits and (view is None or view.is_in_order)
        self.name = manifest.name
        self.features = manifest.features if view is None else view.features
        wanted, maps = ("", ()) if view is None else (view.digest, view.maps)
        digest = xxhash.xxh3_128_hexdigest(manifest.render() + wanted.encode())
        self.writer = _Mapped(digest, tuple(map(_as_counted, maps))) if maps else _Stored(digest)
        self._format = get_format(manifest.format).with_features(manifest.features)
        self._opened: tuple[str, int, RecordFiles] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the open shard and the order of records: workers are told which records are wanted."""
        view = self._view
        if view is not None:
            wanted = {split: [np.minimum(one, 0).astype(np.int8) for one in of] for split, of in view.places.items()}
            view = dataclasses.replace(view, places=wanted)
        return {**self.__dict__, "_opened": None, "_view": view}

    def setup_worker(self) -> None:
        """Do nothing: shards are opened when their first record is read."""

    def index(self, source: Any) -> Iterator[IndexRow]:
        """Return the rows that gave records, with their fields, in the order of the shards or of the view.

        Raises:
            CorruptDataError: the index or a shard cannot be read.
        """
        del source  # the source is this object's folder
        only = self._only
        rows = (row for split in (self._manifest.splits if only is None else only) for row in self._rows(split))
        view = self._view
        if view is None or only is not None:
            yield from rows
            return
        placed = ((view.place(str(row.split), *(row.fields[name] for name in _PLACE)), row) for row in rows)
        wanted: Iterable[tuple[int, IndexRow]] = ((place, row) for place, row in placed if place is not None)
        if not view.is_in_order:
            wanted = sorted(wanted, key=operator.itemgetter(0))
        for _, row in wanted:
            if self._draws_splits:
                row = row._replace(split=None, fields={**row.fields, _SPLIT: row.split})  # noqa: PLW2901 -- the same row
            yield row

    def costs(self, store: RowStore) -> np.ndarray:
        """Return int64 (num_rows,): the mean size in bytes of a row's records in its shard."""
        if self._draws_splits:
            infos = self._manifest.shards
            mean = sum(info.num_bytes for info in infos) // max(sum(info.num_done for info in infos), 1)
            return np.full(len(store), mean, np.int64)
        costs = np.zeros(len(store), np.int64)
        shard_of = _shards_of(store)
        for code, split in enumerate(store.splits):
            infos = self._manifest.splits.get(split, ())
            rows = store.split_codes == code
            sizes = [info.num_bytes // max(info.num_done, 1) for info in infos]
            costs[rows] = np.array(sizes, np.int64)[shard_of[rows]]
        return costs

    def arrange(self, plan: Plan, store: RowStore, fingerprint: Mapping[str, str]) -> Plan:
        """Return the plan, with the old shard boundaries if they are kept; shards without records are left out."""
        if not self._keeps_shards:
            return plan
        shard_of = _shards_of(store)[store.order]
        shards: list[ShardSpec] = []
        for split, planned in plan.splits.items():
            start, stop = planned[0].start, planned[-1].stop
            sources, firsts = np.unique(shard_of[start:stop], return_index=True)
            bounds = [*(firsts + start).tolist(), stop]
            for number, source in enumerate(sources.tolist()):
                rows = store.digests[store.order[bounds[number] : bounds[number + 1]]]
                model = dataclasses.replace(
                    planned[0].parts[0],
                    shard=str(ShardName(plan.name, split, number, len(sources))),
                    start=bounds[number],
                    stop=bounds[number + 1],
                    cost=self._manifest.splits[split][source].num_bytes,
                    fingerprint=xxhash.xxh3_128_hexdigest(
                        fingerprint[split].encode() + np.ascontiguousarray(rows).tobytes()
                    ),
                )
                parts = _parts(model, self._old_bounds(split, source, store, model) or self._bounds(model))
                shards.append(ShardSpec(model.shard, split, number, model.fingerprint, parts))
        return Plan(plan.name, tuple(shards))

    def _old_bounds(self, split: str, shard: int, store: RowStore, whole: PartSpec) -> list[int] | None:
        """Return where parts of a shard begin that is made again, and its end; None where it is cut anew.

        They hold the rows that they did: so the shard has the bytes that a run gives it that leaves out the same rows,
        and `repair` makes them from the source.
        """
        if self._only is None:
            return None
        info = self._manifest.splits[split][shard]
        text = self._loaded.folder.read(info.index_file, _MOST_OFFSET_BYTES)
        ends = np.cumsum([part.num_bytes for part in info.parts])
        of_records = np.searchsorted(ends, Offsets.from_text(text.decode("ascii")).offset.astype(np.int64), "right")
        num_parts = len(ends) - (type(self._format).trailer is not ShardFormat.trailer)
        rows = store.columns(store.order[whole.start : whole.stop])
        _, firsts, counts = (np.asarray(values) for _, values in itertools.islice(rows, len(_PLACE)))
        found = _parts_of_rows(of_records, firsts, counts, num_parts)
        cuts = np.diff(found, prepend=-1, append=num_parts)
        if (cuts > 1).any():
            return None
        return [whole.start + row for row in np.flatnonzero(cuts).tolist()]

    def _bounds(self, whole: PartSpec) -> list[int]:
        """Return the bounds of even parts of a shard: by its bytes alone, never by the number of workers."""
        count = whole.stop - whole.start
        least = -(-_PARTS_PER_PLAN // len(self._manifest.shards))
        if isinstance(self.writer, _Stored):  # nobody knows how long functions take
            least = min(least, max(count // _LEAST_ROWS, whole.cost // _LEAST_BYTES))
        wanted = max(least, -(-whole.cost // _PART_BYTES), -(-count // _MOST_PART_ROWS))
        number = min(wanted, count)
        return [whole.start + count * part // number for part in range(number + 1)]

    def describe(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the old one's description of how the records were made."""
        return dataclasses.replace(
            manifest,
            augmented=tuple(
                split for split in manifest.splits if self._draws_splits or split in self._manifest.augmented
            )
            if self._manifest.augmented
            else (),
            made_by={**self._manifest.made_by, CONVERTED: self._manifest.format},
        )

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
        """Yield (key, columns) of each record of one row; raise `SampleError` if one is damaged."""
        del augmented, read, remarks
        shard, first, count = (int(row.fields[name]) for name in (SHARD, _RECORD, _RECORDS))
        split = str(row.fields[_SPLIT] if self._draws_splits else row.split)
        there: set[int | None] = set()
        num_records = 0
        try:
            stored = self._open(split, shard)
            for number in range(first, first + count):
                if self._view is not None and self._view.place(split, shard, number, 1) is None:
                    continue
                columns: Any = stored.read_record(number)
                key = stored_key(columns)
                if RecordKey.row_of(key) != row.key:
                    raise CorruptDataError(f"record {number} of {row.origin} is {key!r}, the index says {row.key!r}")
                num_records += 1
                if copies > 1:
                    there.add(RecordKey.parse(key).copy)
                yield key, columns if self._view is None else self._view.changed(split, shard, number, columns)
            missing: Iterable[str] = () if num_records else [row.key]
            if copies > 1:
                missing = [RecordKey.format(row.key, copy) for copy in range(copies) if copy not in there]
            if dropped is not None:
                dropped.update(dict.fromkeys(missing, Skip("left out of the dataset that was converted")))
        except CorruptDataError as error:
            raise SampleError(row.key, f"CorruptDataError: {error}") from error

    def check_determined(self, row: IndexRow, read: Mapping[str, str], *, augmented: bool) -> None:
        """Raise `OptionError` if functions of `map` are not deterministic; stored records are."""
        del read
        if self._view is None or not self._view.maps:
            return
        first, again = (
            fingerprint([*self.records(row, copies=1, augmented=augmented)], where="sample") for _ in range(2)
        )
        if first != again:
            raise OptionError(
                f"save: the functions of map returned two different results for sample {row.key!r}; want a result that "
                "depends only on the arguments: draw from the rng that it gets, or from random and numpy.random, which "
                "are seeded"
            )

    def known_statistics(self, row: IndexRow) -> Statistics | None:
        """Return the manifest's statistics of a split for the row of its first record, and 0 for other rows.

        So the split's statistics are exact without decoding a record. Shards are cut anew: theirs are unknown.
        """
        infos = self._manifest.splits[str(row.split)]
        first = next((number for number, info in enumerate(infos) if info.num_records), 0)
        if (int(row.fields[SHARD]), int(row.fields[_RECORD])) != (first, 0):
            return Statistics()
        return Statistics.total(info.statistics for info in infos)

    @property
    def is_observed(self) -> bool:
        """Whether only some records are wanted, so that the manifest's statistics do not apply."""
        return self._view is not None

    def _open(self, split: str, shard: int) -> RecordFiles:
        """Return the records of a shard, by number."""
        if self._opened is None or self._opened[:2] != (split, shard):
            self._opened = None
            info = self._manifest.splits[split][shard]
            if (store := self._loaded.store) is not None:
                store.need(0, [info])  # files that this process has finished with may be evicted
                store.fetch(info, self._loaded.folder)  # the whole file, compared with the manifest
            files = RecordFiles(self._loaded, [info], self._format, RecordCache(0))
            self._opened = split, shard, files
        return self._opened[2]

    def _rows(self, split: str) -> Iterator[IndexRow]:
        infos = self._manifest.splits[split]
        num_rows = sum(info.num_rows for info in infos)
        listed = self._manifest.index_infos[index_file(split)]
        table = self._loaded.opened(listed, functools.partial(read_index, num_rows=num_rows, info=listed))
        known = {name: field_of_column(name) for name in table.column_names}
        names = {name: field for name, field in known.items() if field and field not in (*_PLACE, _SPLIT)}
        copies, only = self._manifest.copies.get(split, 1), None if self._only is None else {*self._only[split]}
        places: Mapping[str, tuple[int, int]] = {}
        shard_of_places = -1
        for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
            columns = {name: column_values(batch, name) for name in ("key", "shard", "record", *names)}
            for key, shard, record, *values in zip(*columns.values(), strict=True):
                if only is not None and shard not in only:
                    continue
                first, count = record, copies
                if record is None:
                    if shard != shard_of_places:
                        shard_of_places, places = shard, records_by_row(self._open(split, shard).stored_keys(0))
                    first, count = places.get(key, (0, 0))
                if count or only is not None:  # else the row failed, and has no records
                    fields = {
                        SHARD: shard,
                        _RECORD: first,
                        _RECORDS: count,
                        **dict(zip(names.values(), values, strict=True)),
                    }
                    yield IndexRow(original_key(key), split, fields, infos[shard].file)


# ---------------------------------------------------------------- the conversion
#
#     finished directory ──> rows of its index ──> plan ──> workers: stored columns, read by number ──> shards
#                                                                                        manifest, index, offsets
#
# `convert` is an ordinary run with another `RecordSource`. So it uses all cores, resumes where it was stopped, and
# gives the same bytes with any number of workers.


_PART_BYTES = 32 << 20
_PARTS_PER_PLAN = 40
_LEAST_ROWS, _LEAST_BYTES = 256, 4 << 20  # either takes at least 10 ms to copy
_MOST_PART_ROWS = 65_536
_CACHE_BYTES = 100 << 30
_MOST_OFFSET_BYTES = 1 << 32


@takes(*RUN_PARAMETERS)
def convert(  # noqa: PLR0913 -- independent options, all but two by name
    path: str | os.PathLike[str] | ShardedDataset,
    output: str | os.PathLike[str] | None,
    *,
    format: str | ShardFormat | Sequence[str | ShardFormat] | None = None,  # noqa: A002 -- as for `Materializer`
    shards: int | str | ShardOptions | None = None,
    splits: Mapping[str, float] | None = None,
    sidecars: Sequence[Sidecar] = (),
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **run: Unpack[RunKeywords],
) -> RunReport:
    """Rewrite a finished directory in another format, or in another number of shards.

    Records are copied as stored: images keep their bytes, keys their copies (`KEY#COPY`), and splits their order. The
    new directory has everything that a run writes: shards, offsets, index, manifest, ledger. Its index keeps the fields
    of each row and the origin of its records (`from_shard`, `from_record`, `from_records`), but not the sizes and times
    of input files. Rows that failed or were left out are not in it.

    If it is stopped, the same call resumes it; with nothing to do, it returns at once.

    Args:
        path: the finished directory, or its URL; it is only read. Or a dataset returned by `load`, with its `select`,
            `filter`, `take`, `shard`, `drop`, `columns`, `join` and `map` applied: see `ShardedDataset.save`.
        output: path or URL of the new directory, as for `Materializer`. None saves a dataset returned by `load` in
            place.
        format: as for `Materializer`; None keeps the formats. If the directory has several, the first is read.
        shards: number of shards per split, their size, such as "256MB", or `ShardOptions`, whose `shuffle` is ignored
            because the order is kept. None keeps the shards: each holds the same records as before.
        splits: share of each split, as for `Materializer`: all records get a new split, drawn by the hash of their
            row's key. None keeps the splits.
        sidecars: functions that write additional files beside the shards, for other readers; see `Sidecar`.
        storage_options: fsspec options for the URL of the output.
        source_options: the same for the URL of the directory; None uses `storage_options`, unless the output is in
            another kind of store.
        cache_dir: folder that caches up to 100 GB of downloaded shards; None uses a temporary folder. With an
            `executor`, all hosts must share it.
        run: options of `Materializer.run`; for `existing`, the rows of the directory are the source. With `task_index`,
            each task makes the same call, and takes over the work of tasks that were killed. Damage that `convert`
            finds before it begins is raised regardless of `errors`; a record that fails later is left out if `errors`
            allows it, and `retry_failed` copies it once the directory is repaired.

    Returns:
        A report of what was done.

    Raises:
        OptionError: none of `format`, `shards` and `splits` is given, or the output is the directory itself; or a
            dataset comes from several directories, or has a record twice; or `splits` would mix rows with different
            numbers of copies.
        SampleError: a function of `map` fails for the first sample.
        OutputError: `path` is not finished, or the output cannot be written, or holds records that are not from a
            conversion of `path`.
        CorruptDataError: a file of the directory is damaged; names it and the record.

    Example:
        >>> convert("out/camvid", "out/camvid-parquet", format="parquet", shards=16)   # doctest: +SKIP
    """
    how = RunOptions.of(run, "convert")
    check_mappings(storage_options=storage_options, source_options=source_options)
    if output is None:
        others = {"format": format, "shards": shards, "splits": splits}
        others |= {"storage_options": storage_options, "source_options": source_options}
        return _saved_in_place(path, how, tuple(sidecars), cache_dir, others)
    place, target = output_place(output, storage_options, how.scratch)
    part, view = None, None
    if splits is not None and not isinstance(path, ShardedDataset):
        path = load(path, storage_options=source_options)
    if isinstance(path, ShardedDataset):
        part, view = path.stored_part(), StoredView.of(path, how.errors)
        folder = part.folder
        if not len(path):
            raise _nothing_left(path)
    else:
        if is_url(path):
            source_options = options_of_source(path, source_options, place, storage_options)
        folder = open_folder(path, source_options)
    if format is None and shards is None and view is None:
        raise OptionError(f"convert: nothing to change in {folder}; give a format, shards or splits")
    here = folder.local_path()
    is_inside = f"{place}/".startswith(f"{str(folder).rstrip('/')}/")
    if is_inside or (here is not None and here.resolve() in (target.resolve(), *target.resolve().parents)):
        raise OptionError(f"convert: output {place} is inside the directory to convert; give another output")
    before = Manifest.read(folder) if part is None else part.manifest
    copies = {
        split: number
        for split, number in before.copies.items()
        if any(info.num_records for info in before.splits.get(split, ())) and (view is None or view.has(split))
    }
    with _at_hand(folder, before, before.shards, cache_dir) as loaded:
        records = StoredRecords(loaded, before, keeps_shards=shards is None, view=view, draws_splits=splits is not None)
        job = Job(
            records=records,
            source=here,
            folder=place,
            output=target,
            formats=resolve_formats(list(before.by_format) if format is None else format, records.features),
            splits=splits,
            shards=dataclasses.replace(ShardOptions.of(shards), shuffle=False),
            copies=copies if splits is None else _copies_of(splits, copies, before),
            seed=before.seed,
            version=None,
            sidecars=tuple(sidecars),
            how=how,
            remedies=Remedies("convert(..., {})"),
        )
        return start(job)


@contextlib.contextmanager
def _at_hand(
    folder: Folder, manifest: Manifest, shards: Sequence[ShardInfo], cache_dir: str | os.PathLike[str] | None
) -> Iterator[Loaded]:
    """Yield the files of a directory: those on a disk once some shards are known to be whole, others by copies."""
    if (here := folder.local_path()) is not None:
        for info in shards:
            check_whole(here, info)
        yield Loaded(folder)
        return
    own = "" if cache_dir is not None else temporary_folder(folder)
    try:
        yield Loaded(folder, ShardStore(cache_dir or own, _CACHE_BYTES, [*manifest.shards, *manifest.index]))
    finally:
        if own:  # now: a stored error would keep this frame, and with it all fetched shards
            shutil.rmtree(own, ignore_errors=True)


def _saved_in_place(
    dataset: str | os.PathLike[str] | ShardedDataset,
    how: RunOptions,
    sidecars: tuple[Sidecar, ...],
    cache_dir: str | os.PathLike[str] | None,
    others: Mapping[str, Any],
) -> RunReport:
    """Write a view of a dataset back to its directory; see `ShardedDataset.save`.

    Args:
        dataset: the view.
        how: how it is made.
        sidecars: functions that write files for other readers.
        cache_dir: where the shards of a URL go.
        others: options that must not be given.
    """
    if not isinstance(dataset, ShardedDataset):
        raise OptionError(f"convert: no output is given for {os.fspath(dataset)}; give a folder or a URL")
    unfit = {**others, "include": how.include, "exclude": how.exclude, "task_index": how.task_index}
    unfit |= {"retry_failed": how.retry_failed or None}
    unfit |= {"errors": how.errors.action} if how.errors.action != "raise" else {}
    unfit |= {"existing": how.existing} if how.existing not in ("update", "replace") else {}
    if wrong := [option(name, value) for name, value in unfit.items() if value is not None]:
        raise OptionError(f"save: {wrong[0]} does not apply where a directory is changed in its place; give an output")
    for _ in range(MOST_ROUNDS):
        try:
            return _edited(dataset, how, sidecars, cache_dir)
        except ChangedError as error:
            if (renewed := dataset.renewed()) is None:
                raise OutputError(
                    f"{dataset.path} has changed since it was loaded, and this edit was not made; load it again, and "
                    "edit that"
                ) from error
            dataset = renewed
    raise OutputError(f"{dataset.path}: others have changed it {MOST_ROUNDS} times meanwhile; end them, and save again")


def _edited(
    dataset: ShardedDataset, how: RunOptions, sidecars: tuple[Sidecar, ...], cache_dir: str | os.PathLike[str] | None
) -> RunReport:
    """Write a view back to its directory; raise `ChangedError` if that is no longer as it was loaded."""
    part = dataset.stored_part()
    target = scratch_folder(part.folder, how.scratch)
    with locked(work_folder(target) / "lock"):
        finish_publication(part.folder)
    before = Manifest.read(part.folder)
    loaded_shards, shards_now = part.manifest.shards, before.of_format(part.manifest.format).shards
    if [(info.name, info.checksum) for info in loaded_shards] != [(info.name, info.checksum) for info in shards_now]:
        raise ChangedError(str(part.folder))
    change, view = _edit_of(dataset, before, how)
    changing = [before.splits[split][number] for split, numbers in change.shards.items() for number in numbers]
    with _at_hand(part.folder, before, changing, cache_dir) as loaded:
        records = StoredRecords(loaded, before, keeps_shards=True, view=view, only=change.shards)
        job = Job(
            records=records,
            source=part.folder.local_path(),
            folder=part.folder,
            output=target,
            formats=resolve_formats(list(before.by_format), records.features),
            splits=None,
            shards=ShardOptions(shuffle=False),
            copies={split: before.copies[split] for split in change.shards},
            seed=before.seed,
            version=None,
            sidecars=sidecars,
            how=how,
            remedies=Remedies("save({})"),
        )
        return start(job, through=functools.partial(edit, change=change))


def _edit_of(dataset: ShardedDataset, before: Manifest, how: RunOptions) -> tuple[Edit, StoredView]:
    """Return what a view changes of its directory.

    Raises:
        OptionError: it lacks records that `drop` has not left out, or has another order; or other splits would keep
            other fields.
    """
    part, positions = dataset.stored_part(), np.asarray(dataset.stored_positions(), np.int64)
    view = StoredView.of(dataset, how.errors)
    if not view.is_in_order:
        raise OptionError("save: records have another order in this view, and keep theirs in place; give an output")
    stays = np.zeros(len(part.reader.records), bool)
    stays[positions] = True
    lacking = ~stays
    lacking[dataset.dropped_positions()] = False
    if lacking.any() and how.existing != "replace":
        key = part.reader.records.key_at(int(np.flatnonzero(lacking)[0]))
        raise OptionError(
            f"save: {count_of(int(lacking.sum()), 'record')} of {part.folder} ({key!r}, ...) would go though drop does "
            f"not name them; name them by drop, pass {option('existing', 'replace')} to keep this view alone; or give "
            "an output"
        )
    old, new = before.features, view.features
    other = {name for name in {**old, **new} if old.get(name) != new.get(name)}
    if other and part.split is not None and len(before.splits) > 1:
        raise OptionError(
            f"save: the split {part.split!r} would have other fields ({', '.join(sorted(other))}) than "
            f"{join_problems(sorted(before.splits.keys() - {part.split}))}; load all splits, or give an output"
        )
    keys = [] if stays.all() else part.reader.keys.keys()
    fields = frozenset(other | (new.keys() - {"key"} if part.maps else set()))
    return Edit.of(before, part.split, stays, keys, new if other else old, fields), view


def _copies_of(splits: Mapping[str, float], copies: Mapping[str, int], before: Manifest) -> dict[str, int]:
    """Return the number of records per row in the new splits, which take rows of all old ones."""
    kinds = {(number, split in before.augmented) for split, number in copies.items()}
    if len(kinds) > 1:
        numbers = ", ".join(f"{split}: {number}" for split, number in copies.items())
        raise OptionError(
            f"save: splits= would mix rows with different copies ({numbers}); load one split, and save that, or draw "
            "the splits where copies are made: Materializer(splits=...)"
        )
    return dict.fromkeys(splits, kinds.pop()[0])


def _as_counted(function: SampleTransform) -> tuple[Any, ...]:
    """Return what decides the result of a function of `map`."""
    transform, *options = function.arguments
    return (as_drawn(transform), *options)


def _shards_of(store: RowStore) -> np.ndarray:
    """Return int64 (num_rows,): the number of the shard that holds the records of each row."""
    name, numbers = next(store.columns(np.arange(store.num_rows)))
    assert name == SHARD
    return np.asarray(numbers)


def _parts_of_rows(of_records: np.ndarray, firsts: np.ndarray, counts: np.ndarray, num_parts: int) -> np.ndarray:
    """Return int64 (n,): the part of each row of a shard; of parts without records, each has a row without.

    Args:
        of_records: int64 (num_records,), the part of each record.
        firsts: int64 (n,), the first record of each row.
        counts: int64 (n,), how many records it has.
        num_parts: number of parts.
    """
    rows, has_records = np.arange(len(counts)), counts > 0
    parts = np.full(len(counts) + 1, num_parts)
    parts[:-1][has_records] = of_records[firsts[has_records]]
    before = np.maximum.accumulate(np.where(has_records, parts[:-1], 0))
    behind = np.minimum.accumulate(np.where(has_records, rows, len(counts))[::-1])[::-1]  # the next row with records
    return np.maximum(before, parts[behind] - (behind - rows))


def _parts(whole: PartSpec, bounds: Sequence[int]) -> tuple[PartSpec, ...]:
    """Return a shard, given as one part, in parts with these bounds."""
    count, number = whole.stop - whole.start, len(bounds) - 1
    return tuple(
        dataclasses.replace(
            whole,
            number=part,
            start=start,
            stop=stop,
            cost=whole.cost * (stop - start) // count,
            num_parts=number,  # tells workers when the shard is complete
        )
        for part, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
