"""Provides `load` and what it returns: records by position, by key and in order; views of them, `concat` and `mix`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import os
import pathlib
import reprlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, final, overload

import numpy as np
import xxhash

from datamat.directory.display import Table, feature_table, render_html
from datamat.directory.keys import RecordKey
from datamat.directory.manifest import MANIFEST_FILE, Manifest, content_of_manifest, summarized_fields
from datamat.errors import OptionError, count_of
from datamat.features import Features, Geometry
from datamat.features.statistics import summarized_in_words
from datamat.folders import open_folder
from datamat.folders.local import expand_home
from datamat.formats import get_format
from datamat.options import ErrorPolicy, takes
from datamat.parallel.affinity import physical_cores
from datamat.readers import preview as drawing
from datamat.readers.batches import (
    Batches,
    Client,
    Mixed,
    Mixture,
    check_rank,
    check_seed,
    default_rank,
    records_at,
    register_iterable,
    supervised_fields,
)
from datamat.readers.cache import RecordCache, ShardStore, byte_limit, default_cache
from datamat.readers.joining import How, Other, joined, others_of_table
from datamat.readers.loader import BatchJob, BatchMaker, ragged_names
from datamat.readers.megatron import write_megatron
from datamat.readers.options import BATCH_PARAMETERS, BatchKeywords, BatchOptions, TfOptions
from datamat.readers.preview import Picture
from datamat.readers.records import KeyIndex, RecordFiles, SampleReader, SkippedRecords
from datamat.readers.remote import Loaded, ahead
from datamat.readers.sample import Sample
from datamat.readers.sequences import Budget, Planner, one_budget
from datamat.readers.tf import pipeline as tf_reader
from datamat.readers.tf import source as tf_source
from datamat.readers.views import (
    Part,
    Records,
    Selection,
    kept_by_expression,
    kept_by_function,
    kept_by_row,
    lengths_of,
    order_of,
)
from datamat.transforms.albumentations import FunctionStage
from datamat.transforms.augmenter import SampleTransform, field_names
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.directory.manifest import IndexInfo, ShardInfo
    from datamat.folders import Folder
    from datamat.readers.batches import EpochOrder


# ---------------------------------------------------------------- the dataset
#
# Random access to the records of a finished directory, and the ways to read all of them.
#
# Memory-mapped offsets next to a shard locate a record, which is read, checked against its checksums and decoded. No
# shard is scanned, and memory holds half a byte per record.


_SAID_ELSEWHERE = {
    "shuffle": "its readers shuffle in each epoch: to_torch(32, shuffle=True, seed=1)",
    "batch": "its readers batch: to_torch(32), to_numpy(32), to_tf(32)",
    "padded_batch": "its readers pad: to_tf(32, pad={'tokens': 0})",
    "repeat": "each iteration of to_torch(...) or to_numpy(...) is the next epoch; to_tf(tf=TfOptions(repeat=True)) "
    "has no end",
    "prefetch": "its readers make batches ahead: to_torch(32, prefetch=4)",
    "cache": "load(..., cache=BYTES) keeps records in memory, to_tf(tf=TfOptions(cache=True)) decoded samples",
    "skip": "a slice leaves the first records out: data[100:]",
    "train_test_split": "slices divide it: data[:-100] and data[-100:]; splits={'train': .9, 'test': .1} of a run does "
    "so by keys, once for all",
    "select_columns": "columns('image', 'label') keeps these fields",
    "remove_columns": "columns('image', 'label') keeps these fields, and no others",
    "add_column": "join(pyarrow.table({'key': keys, 'name': values})) adds the columns of a table by key",
    "zip": "join(other) adds the fields of another dataset by key",
    "with_format": "to_numpy, to_torch and to_tf give arrays or tensors",
    "set_format": "to_numpy, to_torch and to_tf give arrays or tensors",
    "as_numpy_iterator": "to_numpy() yields samples of arrays",
    "save_to_disk": "save('out/new') writes these records as a dataset of their own",
    "column_names": "list(data.features) names the fields",
    "num_rows": "len(data) counts the records",
}
"""What does here what a method of tf.data or of Hugging Face's datasets does."""

_Step: TypeAlias = "Callable[[ShardedDataset], ShardedDataset]"

_AT_ONCE = 64  # records of an iteration whose shards are asked for together


class ShardedDataset(Sequence[dict[str, Any]]):
    """All or some of the records of finished directories. Each is a dict by feature name, and always has `key`.

    `load` returns a dataset; `select`, `take`, `shard`, `filter`, `drop`, `map`, `columns` and `join` return another
    view of the same shards, and so do `concat` and `mix` of several datasets.

    Thread-safe and picklable: a copy in another process opens its own files. It works as a random-access data source
    for torch, grain and any code that needs `len` and items.

    Args:
        records: the records of one or more directories.
        selection: which of them, in this order; None for all.
        mix: members of a mix, each a selection of the records, and how they take turns; None if this is not a mix.
        dropped: positions of the records that `drop` has left out.
        steps: what made this view of all records of a directory, one function after another; None if `renewed` cannot
            make it again.
    """

    def __init__(
        self,
        records: Records,
        selection: Selection | None = None,
        mix: _Mix | None = None,
        dropped: tuple[np.ndarray, ...] = (),
        steps: tuple[_Step, ...] | None = None,
    ) -> None:
        self._records = records
        self._selection = Selection(range(len(records))) if selection is None else selection
        self._mix = mix
        self._dropped = dropped
        self._steps = steps
        self._place = self._next_place = 0
        self._known_lengths: dict[str, np.ndarray] = {}

    @property
    def path(self) -> pathlib.Path | str:
        """The directory, or its URL without secrets.

        Raises:
            OptionError: the records come from several directories.
        """
        return self._only_part.folder.address

    @property
    def manifest(self) -> Manifest:
        """Manifest of the directory when it was loaded; raises as `path` does."""
        return self._only_part.manifest

    @property
    def split(self) -> str | None:
        """The split that was loaded, or None for all; raises as `path` does."""
        return self._only_part.split

    @property
    def features(self) -> Features:
        """Schema of the stored samples, including `key`: the samples that functions of `map` get."""
        return self._records.features

    @property
    def files(self) -> list[str]:
        """Paths of the shards that the records come from, in order; URLs if a directory was loaded from one."""
        return [part.folder.place(info.file) for part in self._records.parts for info in part.shards]

    def __len__(self) -> int:
        return len(self._selection)

    @overload
    def __getitem__(self, item: int | str) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, item: slice) -> ShardedDataset: ...

    def __getitem__(self, item: int | str | slice) -> dict[str, Any] | ShardedDataset:
        """Return one sample by position (negative positions count from the end) or by key, or a dataset for a slice.

        Args:
            item: position or key of the sample, or a slice of positions, as for `select`.

        Raises:
            IndexError: the position is out of range.
            KeyError: no record has this key.
            TypeError: the item is none of these, such as a list.
            CorruptDataError: the record is damaged; the message names file, record and offset.

        Example:
            >>> most, rest = train[:-100], train[-100:]   # doctest: +SKIP
        """
        if isinstance(item, slice):
            return self.select(item)
        return Sample(self._records.sample(self._position(item)))

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples, as the data loaders of torch and Hugging Face ask of a map-style dataset.

        Damaged records are skipped if the dataset was loaded with `errors="skip"`; otherwise they raise, as in
        `__getitem__`.

        Args:
            items: positions of the samples, in any order; negative positions count from the end.
        """
        found = [self._records.sample_or_skip(self._position(item)) for item in items]
        return [sample for sample in found if sample is not None]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples shard by shard, and read each file from front to back."""
        start, self._next_place = self._next_place, 0
        with contextlib.closing(self._positions_from(start)) as positions:
            for place, position in enumerate(positions, start):
                sample = self._records.sample_or_skip(position)
                self._place = place + 1
                if sample is not None:
                    yield Sample(sample)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the most recently advanced iteration, as numbers and strings."""
        return {"version": 1, "position": self._place, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration start after the last sample that was yielded when `state` was taken.

        A state from the end of an iteration starts again at the first sample.

        Args:
            state: what `state_dict` of a dataset with the same records returned.

        Raises:
            OptionError: the state belongs to other records.
        """
        wanted = {"version": 1, **self._identity}
        found = state if isinstance(state, Mapping) else {}
        differing = [name for name, value in wanted.items() if found.get(name) != value]
        position = found.get("position")
        if differing or not isinstance(position, int) or not 0 <= position <= len(self):
            raise OptionError(
                f"{self._title}: the state belongs to other records ({', '.join(differing) or 'position'} differs); "
                "load the state of an iteration over the same records: directories, splits and what was selected"
            )
        self._place = position
        self._next_place = self._place % max(len(self), 1)

    @property
    def num_skipped(self) -> int:
        """Number of damaged records skipped so far, each counted once."""
        return len(self._records.positions)

    def __contains__(self, key: object) -> bool:
        """Return True if a record has this key."""
        return isinstance(key, str) and self._selection.place_of(self._records.positions_of(key)) is not None

    def keys(self) -> list[str]:
        """Return the keys of all records, in order, from the index files; no shard is read."""
        keys = self._records.keys()
        return keys if self._is_whole else [keys[position] for position in self._selection.positions]

    def select(self, items: Iterable[int | str] | slice) -> ShardedDataset:
        """Return a dataset of some records, in the order in which they are named; none is read.

        Args:
            items: positions (negative positions count from the end), keys, or a mixture of both, or a slice of
                positions. A record may be named more than once.

        Raises:
            IndexError: a position is out of range.
            KeyError: no record has this key.
            TypeError: an item is neither a position nor a key, such as a value of a mask, or the items are a set, which
                has no order.

        Example:
            >>> train.select(range(0, len(train), 2)).select(["0001TP_006690#2"])   # doctest: +SKIP
        """
        if isinstance(items, slice):
            return self._chosen(lambda selection: range(len(selection))[items])
        if isinstance(items, (str, bytes, int, np.integer)):
            raise TypeError(f"select wants several positions or keys, but {items!r} is one; write select([{items!r}])")
        if not isinstance(items, Iterable):
            raise TypeError(f"select wants positions, keys or a slice, not a {type(items).__name__}")
        if isinstance(items, (set, frozenset)):
            raise TypeError(
                "select wants positions or keys in an order, and a set has none that lasts; write select(sorted(items))"
            )
        if isinstance(items, range) and len(items) and 0 <= items[0] < len(self) and 0 <= items[-1] < len(self):
            places: range | np.ndarray = items
        elif isinstance(items, np.ndarray) and items.ndim == 1 and items.dtype.kind in "iu":
            outside = (items < -len(self)) | (items >= len(self))
            places = items.astype(np.int64) if not outside.any() else np.array([self._place_of(items[outside][0])])
            places = np.where(places < 0, places + len(self), places)
        else:
            found = [self._place_of(item) for item in items]
            places = np.array(found, np.int64)
        return self._chosen(lambda _: places)

    def take(self, count: int) -> ShardedDataset:
        """Return a dataset of the first records.

        Args:
            count: number of records, 0 or more; all records if there are fewer.

        Raises:
            OptionError: the number is negative.
        """
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise OptionError(f"take({count!r}); want a number of records, 0 or more")
        return self._chosen(lambda selection: range(min(int(count), len(selection))))

    def shard(self, rank: int, world: int) -> ShardedDataset:
        """Return one of several parts of neighbouring records, whose sizes differ by at most one.

        A part has the same records in every epoch, and a state belongs to the part. For training with several ranks,
        `rank` and `world_size` of the readers divide each epoch instead: shuffling then mixes all records, all ranks
        get the same number of batches, and a state fits any number of ranks.

        Args:
            rank: number of the part, from 0 to world - 1.
            world: number of parts.

        Raises:
            OptionError: one of them is out of range.
        """
        check_rank(rank, world, "world")

        def part(selection: Selection) -> range:
            size = len(selection)
            return range(size * rank // world, size * (rank + 1) // world)

        return self._chosen(part)

    def filter(self, condition: Any, *, on: str = "samples") -> ShardedDataset:
        """Return a dataset of the records for which a condition is true.

        The condition is evaluated when its result is first needed, once for each record, in threads.

        Args:
            condition: a function that gets a sample (as it is in the first epoch) and returns a truth value; or a
                `pyarrow.compute.Expression`, such as `pc.field("label") == 3`. An expression reads only the fields that
                it names. `key`, and fields that samples do not have, come from the index, for which no shard is read.
            on: "samples", or "index": names then stand for the fields of the rows in the index, and a function gets a
                dict of them with the `key` of the record. No shard is read.

        Raises:
            OptionError: the condition is neither of these, or an expression does not fit the fields.

        Example:
            >>> large = train.filter(lambda sample: sample["boxes"].shape[0] > 3)   # doctest: +SKIP
            >>> rainy = train.filter(pc.field("weather") == "rain")   # doctest: +SKIP
        """
        if on not in ("samples", "index"):
            raise OptionError(f"filter: on is {on!r}; want 'samples' or 'index'")
        records, on_index = self._records, on == "index"
        if callable(condition):
            kept = kept_by_row if on_index else kept_by_function
            return self._chosen(lambda selection: kept(condition, records, selection.positions))
        if type(condition).__name__ != "Expression":
            raise OptionError(
                f"filter: the condition is {reprlib.repr(condition)}; want a function of the sample, or an expression "
                "such as pyarrow.compute.field('label') == 3; for a mask: select(np.flatnonzero(mask))"
            )
        return self._chosen(
            lambda selection: kept_by_expression(condition, records, selection.positions, on_index=on_index)
        )

    def map(self, function: Any, *, seed: int = 0, untouched: Collection[str] = ()) -> ShardedDataset:
        """Return a dataset whose samples go through a function as they are read.

        A `transform=` of the readers comes afterwards. Batches collate what the function returns; `key` stays.

        Args:
            function: transform of single samples, as for `Materializer`: an albumentations pipeline, or a callable
                `(sample) -> sample` or `(sample, rng) -> sample`. Random numbers depend on (seed, key, epoch) alone;
                `self[0]` and `for sample in self` give those of the first epoch.
            seed: base seed of the random numbers.
            untouched: fields that geometric transforms leave alone on purpose, as for `Materializer`.

        Raises:
            OptionError: the function has another form.
        """
        names = field_names(untouched)

        def changed(part: Part) -> Part:
            made = SampleTransform(function, part.reader.features, seed, names, len(part.maps) + 1)
            return dataclasses.replace(part, maps=(*part.maps, made))

        return self._with_records(self._records.changed(changed))

    def columns(self, *names: str) -> ShardedDataset:
        """Return a dataset with some of the fields of each record; no others are decoded.

        Args:
            names: names of the fields; `key` stays in any case.

        Raises:
            OptionError: the records have no such field, or `map` comes earlier.
        """
        wrong = [name for name in names if not isinstance(name, str)]
        if wrong:
            raise OptionError(
                f"columns: {wrong[0]!r} is not a name; give each name by itself, as in columns('image', 'label')"
            )
        if self._records.is_mapped:
            raise OptionError("columns after map: the function of map gets the stored fields; call columns first")
        made = self._with_records(self._records.changed(lambda part: part.with_fields(names)))
        return self._then(made, lambda data: data.columns(*names))

    def join(self, other: Any, on: str = "key", how: How = "exact", prefix: str = "") -> ShardedDataset:
        """Return a dataset whose records also have the fields of a partner in another dataset or a table.

        Partners are found now, by the keys of the indexes; their fields are read with the records. If the partners do
        not lie in the order of the records, formats that keep many records together (Parquet, gzip) are slow to read:
        write such a dataset in another format or order.

        Args:
            other: a dataset; a table of pyarrow, pandas, polars or anything else that exports Arrow; or the path of a
                Parquet, CSV, TSV or JSON Lines file. A table is held in memory as a whole. An empty cell, except for
                text in CSV, becomes None, and its column `Nullable`.
            on: "key": the key of a row stands for all its copies, and a table has a column "key". Or a field of text
                or integers, which is matched with the field of that name in `other`, or with the keys of a dataset
                that has no such field.
            how: what happens to records without a partner: "exact" refuses them, "inner" leaves them out, "left" gives
                them None in the new fields, which become `Nullable`.
            prefix: put in front of the name of each joined field.

        Raises:
            OptionError: a record has no partner, or two partners have its key; both sides have a field of the same
                name; `map` comes earlier; or an argument is invalid.
            SourceError: the table cannot be read, or no feature can store a column.

        Example:
            >>> captioned = train.join(load("out/captions"), how="inner", prefix="blip_")   # doctest: +SKIP
        """
        if how not in ("exact", "inner", "left"):
            raise OptionError(f"join: how is {how!r}; want 'exact', 'inner' or 'left'")
        if not isinstance(on, str) or not isinstance(prefix, str):
            raise OptionError(f"join: on is {on!r} and prefix {prefix!r}; want the name of a field, and a str")
        if isinstance(other, (str, os.PathLike)) and os.path.isfile(os.path.join(other, MANIFEST_FILE)):
            other = load(other)
        if any(isinstance(one, ShardedDataset) and one._records.is_mapped for one in (self, other)):
            raise OptionError(
                "join after map: only stored fields can be joined; call join first, then map, or save the result of "
                "map and join that"
            )
        if isinstance(other, ShardedDataset):
            others = [Other.of_dataset(other._records, np.asarray(other._selection.positions, np.int64), on)]
        else:
            others = others_of_table(other, on)
        selections = [self._selection] if self._mix is None else self._mix.members
        positions = np.unique(np.concatenate([np.asarray(one.positions, np.int64) for one in selections]))
        records, rows = joined(self._records, positions, others[0], on=on, how=how, prefix=prefix)
        for one in others[1:]:
            records, _ = joined(records, positions, one, on=on, how=how, prefix=prefix)
        found = self._with_records(records)
        if how == "inner" and (rows[positions] < 0).any():
            found = found._chosen(
                lambda selection: np.flatnonzero(rows[np.asarray(selection.positions, np.int64)] >= 0)
            )
        return self._then(found, lambda data: data.join(other, on, how, prefix))

    def drop(self, keys: Iterable[str]) -> ShardedDataset:
        """Return the dataset without some records.

        Args:
            keys: keys of the records; that of a row stands for all its records. One that was removed from the directory
                before is no error.

        Raises:
            KeyError: no record or row has such a key.
            TypeError: a key is not a str.

        Example:
            >>> train.drop(["0001TP_006690"]).save()   # doctest: +SKIP
        """
        if isinstance(keys, (str, bytes)):
            raise TypeError(f"drop wants several keys, and {keys!r} is one; write drop([{keys!r}])")
        keys, known = list(keys), self.keys()
        there = {*known, *map(RecordKey.row_of, known)}
        before = {key for part in self._records.parts for key in part.manifest.removed}
        gone = {self._meant(key, there, before) for key in keys}
        stays = np.array([key not in gone and RecordKey.row_of(key) not in gone for key in known], bool)
        dropped = np.asarray(self._selection.positions, np.int64)[~stays]
        found = self._chosen(lambda _: np.flatnonzero(stays))
        found._dropped += (dropped,)
        return self._then(found, lambda data: data.drop(keys))

    def save(self, output: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        """Write these records as a dataset of their own: what nothing has changed is copied as it is stored.

        Keys, copies and splits stay, and so do the shards, each with what is left of its records. Where `select` has
        put records into another order, rows get the order of their first records; the copies of a row stay together.
        Functions of `map` run in workers, once for each sample, as in the first epoch. Fields that they leave equal
        keep their bytes; others keep their features where these fit, and get those that the first sample shows if not.

        Without an output, the directory itself is changed, as it is by then: what others have changed since it was
        loaded stays. Only shards that change are written again, and readers find the old dataset or the new one at any
        moment. Records that `drop` left out are gone for good: later runs do not
        bring them back, unless with `existing="replace"`. A view of one split changes that split alone.

        Args:
            output: folder of the new dataset, or a URL; None for the directory of these records.
            options: `format`, `shards`, `splits`, and all others of `convert`. Without an output, those of `run`;
                `existing="replace"` also removes the records that a view lacks otherwise, as after `filter`.

        Returns:
            The report of the run.

        Raises:
            OptionError: the records come from several directories, or one is here twice. Without an output: they lack
                others than `drop` left out, or are in another order.
            OutputError: without an output: the directory has changed since it was loaded, and the view is not made by
                `drop`, `columns` and `join` alone.
            Everything else is raised as `convert` does.

        Example:
            >>> load("out/camvid").filter(pc.field("weather") == "rain").save("out/rain")   # doctest: +SKIP
        """
        import datamat  # a run writes it: the room of runs is above this one, and is reached as users do

        return datamat.convert(self, output, **options)

    def stored_part(self) -> Part:
        """Return the directory that the records come from; raises `OptionError` if there are several."""
        return self._only_part

    def stored_positions(self) -> range | np.ndarray:
        """Return the positions of the records in the directory, int64 (n,), in their order here."""
        return self._selection.positions

    def dropped_positions(self) -> np.ndarray:
        """Return the positions of the records in the directory that `drop` has left out, int64 (n,)."""
        return np.concatenate([np.empty(0, np.int64), *self._dropped])

    def renewed(self) -> ShardedDataset | None:
        """Return the same view of what the directory holds now, if only `drop`, `columns` and `join` have made it.

        Else None: the records that `filter` and its like chose may be others now, and `map` may have been applied by
        whoever has changed the directory, such as an earlier `save` of this view.
        """
        if self._steps is None:
            return None
        part = self._only_part
        return functools.reduce(
            lambda data, step: step(data), self._steps, _opened(part.folder, part.split, part.manifest.format)
        )

    @takes(*BATCH_PARAMETERS)
    def to_tf(
        self, batch_size: int | None = None, *, tf: TfOptions | None = None, **options: Unpack[BatchKeywords]
    ) -> Any:
        """Return a `tf.data.Dataset` of dicts by feature name, decoded, batched and prefetched.

        TensorFlow itself reads TFRecord, plain or gzip, and interleaves the shards; datamat's decoders decode many
        images at a time, in threads of TensorFlow and of this process. Python reads other formats, directories behind a
        URL, views, batches of sequences and batches for several ranks, batch by batch. Iterators are saved and restored
        by `tf.train.Checkpoint`.

        Args:
            batch_size: records per batch; None yields single samples.
            tf: cache, snapshot, service and other options of TensorFlow alone; see `TfOptions`.
            options: how records become batches; `BatchOptions` describes each. With ranks, or with any of `pad`,
                `bucket`, `pack` and `collate_fn`, batches are those of `to_numpy` with the same arguments and seed:
                Python reads them, and calls any `transform` with arrays. Otherwise a `transform` that is a callable
                `(sample) -> sample` is traced by TensorFlow and gets tensors: after `tf.random.set_seed`, functions
                such as `tf.random.uniform` draw the same numbers in every epoch; a `tf.random.Generator` created
                outside the function continues its sequence. The checkpoint of any rank resumes all ranks, even if
                their number has changed; to continue with a single one, set rank=0 and world_size=1.

        Returns:
            images uint8 (height, width, channels), masks uint8 (height, width), labels int64, boxes float32 (n, 4),
            text as bytes. Batches add a leading dimension; boxes, and lists and tensors whose sizes differ between
            records, become ragged tensors.

        Raises:
            MissingDependencyError: TensorFlow is not installed.
            OptionError: an argument is invalid, or contradicts another; the service does not answer, cannot read the
                format, or cannot run the transform; or a function returns something that has no tensor.
            SampleError: samples differ in their fields, dtypes or dimensions. If that shows only while reading, the
                error is a `tf.errors.OpError` that names key and field.
            CorruptDataError: a shard's size differs from its size in the manifest. A damaged record found while reading
                raises `tf.errors.InvalidArgumentError`, which names file, record and key.
            FingerprintError: with `snapshot`, `static_transform` holds something that cannot be compared between
                programs, such as a function traced by `tf.function`.
        """
        given, of_tf = BatchOptions.of("to_tf", batch_size, options), TfOptions() if tf is None else tf
        if not isinstance(of_tf, TfOptions):
            raise OptionError(f"tf is {tf!r}; want something like TfOptions(cache=True)")
        given.cut(0, 1)  # raises if a number is out of range
        is_planned = given.makes_batches or given.world_size is not None
        transform = given.transform
        if transform is not None and (tf_source.wants_arrays(transform) or is_planned):
            transform = self._sample_transform(transform, given.seed, given.untouched)
        elif transform is not None:
            FunctionStage(transform)  # raises if it cannot be called
        is_changed = self._records.is_mapped or transform is not None or of_tf.static_transform is not None
        has_others = is_changed or given.makes_batches
        read = tf_source.ReadOptions(
            batch_size,
            given.shuffle,
            given.seed,
            transform,
            of_tf.static_transform,
            of_tf.cache,
            of_tf.snapshot,
            of_tf.service,
            of_tf.job,
            of_tf.repeat,
            given.drop_last,
            of_tf.deterministic,
            supervised_fields(given.as_supervised, None if has_others else self.features),
        )
        tf_source.check_form(given, read)
        shuffle = False if read.keeps_samples else given.shuffle
        in_python = dataclasses.replace(given, shuffle=shuffle, as_supervised=None)
        own_transform = transform if is_planned else None

        def own() -> ShardedDataset:
            apart = self._with_records(
                self._records.changed(lambda part: dataclasses.replace(part, reader=part.reader.with_own_files()))
            )
            apart._known_lengths = self._known_lengths
            return apart

        def open_batches(size: int | None, drop_last: bool) -> Batches:
            sized = dataclasses.replace(in_python, batch_size=size, drop_last=drop_last)
            return own()._batches(sized, own_transform, "numpy")

        @functools.cache
        def some_samples(count: int) -> list[dict[str, Any]]:
            places = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))
            return list(own().select(places)._batches(BatchOptions(seed=given.seed), own_transform, "numpy"))

        parts = self._records.parts
        shards = [info for part in parts for info in part.shards]
        formats = {part.manifest.format for part in parts}
        is_whole = self._is_whole and not self._records.is_joined
        source = tf_source.TfSource(
            dict(zip(self.files, [info.num_records for info in shards], strict=True)) if is_whole else {},
            len(self),
            sum(info.num_bytes for info in shards),
            self._features_of_batches(is_changed=is_changed),
            formats.pop() if len(formats) == 1 else " and ".join(sorted(formats)),
            self._identity["records"],
            is_whole,
            self._records.is_mapped,
            all(part.folder.local_path() is not None for part in parts),
            self._records.is_skipping,
            self._records.damage_in,
            in_python,
            given.world_size is not None,
            own_transform is not None,
            open_batches,
            some_samples,
        )
        # A snapshot outlives its shards.
        if source.is_native and of_tf.snapshot is None:
            for part in parts:
                part.reader.records.check_files()
        return tf_reader.make_dataset(source, read)

    @takes(*BATCH_PARAMETERS)
    def to_numpy(self, batch_size: int | None = None, **options: Unpack[BatchKeywords]) -> Batches:
        """Return an iterable of batches of numpy arrays, which threads decode straight into the memory of the batch.

        Each `iter` goes through the next epoch, in a new order if shuffled. `state_dict` and `load_state_dict` resume
        in the middle of an epoch, with any number of workers and ranks.

        Args:
            batch_size: maximum number of records in a batch; None yields single samples.
            options: how records become batches; `BatchOptions` describes each.

        Returns:
            Batches by feature name: images uint8 (n, height, width, channels) and masks uint8 (n, height, width), or
            lists of arrays if sizes differ; numbers (n,); tensors of one shape (n, ...). Boxes, and lists and
            tensors whose sizes differ between records, are lists of n arrays; text and keys are lists of n str.

        Raises:
            OptionError: an argument is invalid, or a single record has more tokens than `bucket` or `pack` allows.

        Example:
            >>> for batch in train.to_numpy(32, shuffle=True, seed=1):   # doctest: +SKIP
            ...     batch["image"].shape, batch["key"][:2]
            ((32, 360, 480, 3), ['0001TP_006690#2', '0016E5_01530#0'])
        """
        return self._loaded(BatchOptions.of("to_numpy", batch_size, options), "numpy", (0, 1))

    @takes(*BATCH_PARAMETERS)
    def to_torch(self, batch_size: int | None = None, **options: Unpack[BatchKeywords]) -> Batches:
        """Return an iterable of batches of tensors: `to_numpy` for PyTorch, with the same memory.

        The result is a complete loader that needs no `DataLoader`. It is also an `IterableDataset` for a `DataLoader`
        with `batch_size=None`, whose workers then share the batches. `ShardedDataset` itself is a map-style dataset.

        Args:
            batch_size: maximum number of records in a batch; None yields single samples.
            options: how records become batches; `BatchOptions` describes each.

        Returns:
            Batches like those of `to_numpy`, with tensors instead of arrays.

        Raises:
            MissingDependencyError: torch is not installed.
            OptionError: an argument is invalid.

        Example:
            >>> loader = train.to_torch(32, shuffle=True)   # doctest: +SKIP
            >>> images = next(iter(loader))["image"].permute(0, 3, 1, 2)   # doctest: +SKIP
        """
        register_iterable(Batches)
        return self._loaded(BatchOptions.of("to_torch", batch_size, options), "torch", default_rank())

    def to_megatron(
        self, prefix: str | os.PathLike[str], *, num_workers: int | None = None
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """Write the tokens of all records for Megatron-LM and its derivatives, as `PREFIX.bin` and `PREFIX.idx`.

        Each record becomes a document, in order, with the tokens that its only field of integers (n,) holds; other
        fields are left out. No tokens are added between documents: store them, as `preprocess_data.py` does with
        `--append-eod`. The bytes do not depend on the number of workers. Both files appear when they are complete; if
        the call is killed, it starts again from the beginning. `Materializer("megatron", prefix, output)` reads them.

        Args:
            prefix: common beginning of the paths of both files. A missing folder is made.
            num_workers: processes that read and call the functions of `map`; None starts one per physical core.

        Returns:
            The paths of both files.

        Raises:
            OptionError: there are no records, there is not exactly one field of integers (n,), or its dtype is uint32
                or uint64.
            OutputError: one of the files already exists.
            SampleError: a function of `map` returns another dtype or shape than for the first record.

        Example:
            >>> load("out/tokens", "train").to_megatron("gpt/train_text_document")   # doctest: +SKIP
        """
        return write_megatron(self, prefix, num_workers)

    def preview(self, count: int = 8, *, columns: int = 4, opacity: float = 0.5) -> Picture:
        """Return a picture of samples: images with their masks drawn over them, keys, labels, texts and classes.

        Args:
            count: number of samples, at least 1, spread evenly over the dataset.
            columns: number of samples per row, at least 1.
            opacity: opacity of the masks, from 0 (invisible) to 1 (the image is hidden).

        Returns:
            A picture that notebooks display; `.save(path)` writes a PNG, `.array` is uint8 (height, width, 3).

        Raises:
            OptionError: an argument is out of range.
        """
        if count < 1:
            raise OptionError(f"preview: count={count}; want at least 1 sample")
        count = min(count, len(self))
        positions = [place * len(self) // count for place in range(count)]
        return drawing.draw([self[position] for position in positions], self.features, columns, opacity)

    @property
    def statistics(self) -> dict[str, dict[str, Any]]:
        """Statistics of each field, which the manifest has for whole splits; no record is read.

        For a selection of records, they describe all records of its splits; {} if any of these are unknown.
        `Manifest.statistics` describes them for each type of feature.

        Example:
            >>> train.statistics["label"]["classes"]   # doctest: +SKIP
            {'cat': 120, 'dog': 131}
            >>> mean, std = (train.statistics["image"]["channels"][key] for key in ("mean", "std"))   # doctest: +SKIP
        """
        return summarized_fields(self.features, self._records.statistics()) or {}

    def __repr__(self) -> str:
        return f"ShardedDataset({self._title}, {count_of(len(self), 'record')}, {self.features!r})"

    def _repr_html_(self) -> str:
        facts: list[tuple[str, Any]] = []
        for part in self._records.parts:
            formats = ", ".join(part.manifest.by_format)
            facts += [("directory", str(part.folder)), ("split", part.split or "all"), ("format", formats)]
        rows = [[field, summarized_in_words(summary)] for field, summary in self.statistics.items()]
        tables = [feature_table(self.features), Table(["field", "statistics"], rows)]
        return render_html(f"ShardedDataset: {count_of(len(self), 'record')}", facts, tables)

    if not TYPE_CHECKING:  # where a misspelt name should be an error

        def __getattr__(self, name: str) -> Any:
            if name not in _SAID_ELSEWHERE:
                return object.__getattribute__(self, name)  # raises the original error, which may come from a property
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; {_SAID_ELSEWHERE[name]}",
                name=name,
                obj=self,
            )

    @property
    def _title(self) -> str:
        """Names of the directories, for messages."""
        return " + ".join(f"{str(part.folder)!r}, split={part.split!r}" for part in self._records.parts)

    @property
    def _only_part(self) -> Part:
        first, *others = self._records.parts
        if others:
            raise OptionError(
                f"these records come from {1 + len(others)} directories ({self._title}), each with a path, a manifest "
                "and a split of its own; ask the datasets that were put together"
            )
        return first

    @property
    def _is_whole(self) -> bool:
        """Whether it has all records of the directories, in their order."""
        return self._mix is None and self._selection.is_all(len(self._records))

    def _positions_from(self, start: int) -> Generator[int]:
        """Yield the positions of the records from a place on; fetch shards ahead where necessary."""
        look = self._records.look_ahead(isinstance(self._selection.positions, range))
        if look is None:
            yield from map(self._selection.at, range(start, len(self)))
            return
        places = (np.arange(first, min(first + _AT_ONCE, len(self))) for first in range(start, len(self), _AT_ONCE))
        jobs = (BatchJob(0, records_at(self._selection.positions, some)) for some in places)
        with contextlib.closing(ahead(jobs, look, 0)) as coming:
            for job in coming:
                yield from job.positions.tolist()

    def _chosen(self, choose: Callable[[Selection], range | np.ndarray]) -> ShardedDataset:
        return ShardedDataset(self._records, self._selection.then(choose), None, self._dropped)

    def _with_records(self, records: Records) -> ShardedDataset:
        return ShardedDataset(records, self._selection, self._mix, self._dropped)

    def _then(self, made: ShardedDataset, step: _Step) -> ShardedDataset:
        """Return a view of this one, with the step by which `renewed` makes it."""
        made._steps = None if self._steps is None else (*self._steps, step)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": None}  # a joined table would travel twice

    def _position(self, item: int | str) -> int:
        """Return the position of the record that is read next."""
        return self._selection.at(self._place_of(item, is_read=True))

    def _unknown_key(self, key: str) -> KeyError:
        """Return the error for an unknown key; for a split or a field, it says what to do."""
        error = KeyError(key)
        if key in self.features:
            error.add_note(f"{key!r} is a field, not a key: each sample has it, and columns({key!r}) reads no others")
        for part in self._records.parts:
            if part.split is None and key in part.manifest.splits:
                error.add_note(f"{key!r} is a split, not a key: load({str(part.folder)!r}, {key!r}) reads it")
        return error

    def _meant(self, key: Any, there: Collection[str], before: Collection[str]) -> str:
        """Return the stored form of a key of a record or row that is there, or was removed before."""
        if not isinstance(key, str):
            raise TypeError(f"drop wants keys, and {key!r} is none; for a position, write keys()[{key!r}]")
        forms = [key, *map(str, RecordKey.meant_by(key))]
        for form in forms:
            if form in there:
                return form
        if any(form in before or RecordKey.row_of(form) in before for form in forms):
            return key
        raise self._unknown_key(key)

    def _place_of(self, item: int | str, *, is_read: bool = False) -> int:
        if isinstance(item, str):
            found = self._selection.place_of(self._records.positions_of(item, is_read=is_read))
            if found is None:
                raise self._unknown_key(item)
            return found
        is_number = isinstance(item, (int, np.integer)) and not isinstance(item, bool)
        if not is_number and (isinstance(item, bool) or "bool" in str(getattr(item, "dtype", ""))):
            raise TypeError(
                f"a sample has a position and a key, but {item!r} is neither; for a mask: "
                "select(np.flatnonzero(mask)), where the mask has as many values as the dataset has records"
            )
        try:
            position = operator.index(item)
        except TypeError as error:
            raise TypeError(
                f"a sample has a position and a key, but {reprlib.repr(item)} is neither; for several samples: "
                "select([2, 5]) or [2:5]"
            ) from error
        size = len(self)
        if not -size <= position < size:
            raise IndexError(f"position {item} in a dataset of {count_of(size, 'record')}")
        return position % size

    def _sample_transform(self, transform: Any, seed: int, untouched: Collection[str]) -> SampleTransform | None:
        names = field_names(untouched)
        return None if transform is None else SampleTransform(transform, self.features, seed, names)

    def _loaded(self, options: BatchOptions, library: Literal["numpy", "torch"], default: tuple[int, int]) -> Batches:
        transform = self._sample_transform(options.transform, options.seed, options.untouched)
        return self._batches(options, transform, library, default)

    def _batches(
        self,
        options: BatchOptions,
        transform: SampleTransform | None,
        library: Literal["numpy", "torch"],
        default: tuple[int, int] = (0, 1),
    ) -> Batches:
        cut, changes = options.cut(*default), self._records.transformed(transform)
        options.check(None if self._records.is_mapped else self.features, may_add=changes is not None)
        order = self._order(options.shuffle, options.seed)
        units, shuffles = None, options.shuffle is not False
        if options.unit is not None:
            field, tokens, packs = options.unit
            lengths = self._lengths(field)
            most, seed, chunk = cut.batch_size, options.seed, options.chunk
            units = Planner(order, lengths, tokens, most, seed, packs=packs, shuffles=shuffles, chunk=chunk)
        shapes = options.shapes
        if options.bucket is not None and changes is not None:
            shapes = (Budget(*one_budget(options.bucket)), *shapes)
        found = self._features_of_batches(is_changed=changes is not None)
        maker = BatchMaker(
            self._records.read_or_skip,
            changes,
            ragged_names(found),
            self.features,
            options.batch_size is not None or options.unit is not None,
            self._records.changed(lambda part: part.read_as(found)).read_block if self._records.block_records else None,
            self._records.block_records,
            self._records.num_threads if changes is None else len(physical_cores()),
            shapes=shapes,
            keeps_samples=options.collate_fn is not None,
            reading=self._records.reading if self._records.is_joined else None,
        )
        return Batches(
            order,
            maker,
            cut,
            client=Client(library, supervised_fields(options.as_supervised, None)),
            skipped=self._records,
            identity={**self._identity, **order.identity},
            look_ahead=self._records.look_ahead,
            units=units,
            collate_fn=options.collate_fn,
        )

    def _features_of_batches(self, *, is_changed: bool) -> Features:
        """Return the schema with the sizes that all records share, which decide how batches are stacked.

        Args:
            is_changed: whether functions change the samples.
        """
        features = self.features
        if is_changed and any(isinstance(one, Geometry) and one.may_lose_rows() for one in features.values()):
            return features  # boxes bring their labels
        parts = self._records.parts
        features = features.as_found(info.statistics for part in parts for info in part.shards)
        for partners in zip(*(part.partners for part in parts), strict=False):
            known = [one.statistics for one in partners]
            features = features.as_found(() if one is None else one.to_lines() for one in known)
        return features

    def _lengths(self, field: str) -> np.ndarray:
        """Return int64 (records,): the length of a field in each record that is read, by position, in one pass."""
        if field not in self._known_lengths:
            records = self._records
            if not records.is_mapped:
                records = records.changed(lambda part: part.with_fields([field]))
            selections = [self._selection] if self._mix is None else self._mix.members
            positions = np.unique(np.concatenate([np.asarray(one.positions, np.int64) for one in selections]))
            self._known_lengths[field] = lengths_of(records, positions, field)
        return self._known_lengths[field]

    def _order(self, shuffle: bool | int, seed: int) -> EpochOrder:
        if self._mix is None:
            return order_of(self._records, self._selection, shuffle, seed)
        return self._mix.order(self._records, shuffle, seed)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """The records that a state belongs to, as the checksums of their shards and what was selected."""
        made_of = [self._records.digest]
        if self._mix is not None:
            made_of.append(self._mix.digest)
        elif not self._is_whole:
            made_of.append(self._selection.digest)
        records = made_of[0] if len(made_of) == 1 else xxhash.xxh3_64_hexdigest("|".join(made_of).encode())
        return {"num_records": len(self), "records": records}


# ---------------------------------------------------------------- several datasets as one


@final
@frozen(slots=False, eq=False)
class _Mix:
    """The members of a mix, and how they take turns.

    Attributes:
        members: selection of each member among all records.
        quotas: number of places that each member has in a block.
        seed: seed of the pattern.
        repeats: whether shorter members repeat until the longest is finished.
    """

    members: tuple[Selection, ...]
    quotas: tuple[int, ...]
    seed: int
    repeats: bool

    @functools.cached_property
    def mixture(self) -> Mixture:
        sizes = tuple(map(len, self.members))
        if not all(sizes):
            raise OptionError(f"mix: dataset {sizes.index(0)} has no records; leave it out")
        return Mixture(sizes, self.quotas, self.seed, self.repeats)

    @functools.cached_property
    def num_records(self) -> int:
        return self.mixture.num_records

    @property
    def digest(self) -> str:
        return f"{self.quotas}{self.seed}{self.repeats}{[member.digest for member in self.members]}"

    def order(self, records: Records, shuffle: bool | int, seed: int) -> EpochOrder:
        """Return the order of an epoch; the order of each member has a seed of its own."""
        count = len(self.members)
        orders = [order_of(records, member, shuffle, seed * count + k) for k, member in enumerate(self.members)]
        return Mixed(self.mixture, tuple(orders), self.num_records)

    def first_epoch(self, records: Records) -> np.ndarray:
        """Return the positions of the records of the first epoch without shuffling."""
        return self.order(records, False, 0).positions(0, np.arange(self.num_records))


def concat(datasets: Sequence[ShardedDataset]) -> ShardedDataset:
    """Return the records of several datasets as one dataset, one after another; none is read.

    Args:
        datasets: at least one dataset or selection, all with the same features. If several have a record with the same
            key, the key finds the first.

    Raises:
        OptionError: there are none, or they differ in their features.

    Example:
        >>> both = concat([load("out/day", "train"), load("out/night", "train")])   # doctest: +SKIP
    """
    members = _members("concat", datasets)
    records, selections = _together(members)
    if all(one._is_whole for one in members):
        return ShardedDataset(records)

    def positions() -> np.ndarray:
        return np.concatenate([np.asarray(selection.positions, np.int64) for selection in selections])

    return ShardedDataset(records, Selection(positions))


def mix(
    weights: Mapping[ShardedDataset, float],
    *,
    seed: int = 0,
    stop: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
) -> ShardedDataset:
    """Return the records of several datasets in given proportions.

    The proportions hold in each small block of an epoch: .7 and .3 give 7 and 3 of each 10 records, in a random order.
    Each dataset is read in its own order, shuffled if the reader is asked to shuffle, and from one epoch to the next:
    the records left over in one epoch come first in the next. Selecting from a mix, or reading it by position, gives
    the records of its first epoch, unshuffled.

    Args:
        weights: weight of each dataset, a positive number; all datasets have the same features.
        seed: seed of the order in which the datasets take turns.
        stop: when an epoch ends: "first_exhausted" before any dataset would repeat a record, "all_exhausted" once each
            dataset has given as many records as it has; shorter datasets repeat.

    Raises:
        OptionError: there is no dataset, a weight is not positive, or the datasets differ in their features.

    Example:
        >>> both = mix({day: 0.7, night: 0.3}, seed=1)   # doctest: +SKIP
        >>> for batch in both.to_torch(32, shuffle=True, seed=1): ...   # doctest: +SKIP
    """
    if not isinstance(weights, Mapping):
        raise OptionError(
            f"mix: weights is a {type(weights).__name__}; want a dict of dataset to weight, as in {{day: 3, night: 1}}"
        )
    members = _members("mix", list(weights))
    for weight in weights.values():
        if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < weight < math.inf:
            raise OptionError(f"mix: weight {weight!r}; want a positive number for each dataset")
    if stop not in ("first_exhausted", "all_exhausted"):
        raise OptionError(f"mix: stop is {stop!r}; want 'first_exhausted' or 'all_exhausted'")
    check_seed(seed)
    records, selections = _together(members)
    quotas = Mixture.quotas_of([float(weight) for weight in weights.values()])
    made = _Mix(tuple(selections), quotas, int(seed), stop == "all_exhausted")
    return ShardedDataset(records, Selection(lambda: made.first_epoch(records)), made)


def _members(name: str, datasets: Sequence[ShardedDataset]) -> list[ShardedDataset]:
    if isinstance(datasets, ShardedDataset):
        raise OptionError(f"{name}: this is a single dataset; want a list of datasets")
    members = list(datasets)
    wrong = next((member for member in members if not isinstance(member, ShardedDataset)), None)
    if wrong is not None:
        raise OptionError(f"{name}: {wrong!r} is not a dataset; want what load returned, or a selection from it")
    if not members:
        raise OptionError(f"{name}: no datasets; want at least one")
    return members


def _together(members: Sequence[ShardedDataset]) -> tuple[Records, list[Selection]]:
    """Return the records of all datasets, end to end, and the selection of each dataset among them."""
    parts = [part for member in members for part in member._records.parts]
    selections, start = [], 0
    for member in members:
        own = member._selection
        selections.append(Selection(functools.partial(_moved, own, start)))
        start += len(member._records)
    return Records(parts), selections


def _moved(selection: Selection, by: int) -> range | np.ndarray:
    found = selection.positions
    return range(found.start + by, found.stop + by, found.step) if isinstance(found, range) else found + by


_CACHE_BYTES = 100 << 30


def load(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    format: str | None = None,  # noqa: A002 -- as for `Materializer`
    errors: str | ErrorPolicy = "raise",
    cache: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardedDataset:
    """Open a finished directory.

    Args:
        path: the directory that a run wrote, or its URL, of any kind that fsspec supports, such as `s3://BUCKET/PATH`
            or `https://...`.
        split: split to read, or None for all splits, one after another.
        format: format to read, if the run wrote several; None takes the first one that the run named.
        errors: what to do about damaged records when many are read: "raise", or "skip", which skips and logs them, and
            counts them in `num_skipped`; `ErrorPolicy("skip", max_errors=...)` sets a limit. Reading a single damaged
            record always raises.
        cache: bytes of memory per process for encoded records; the records read first fill it.
        cache_dir: folder on a fast local disk to which shards are copied on first use, for directories on a slow file
            system. Any number of processes may share it. Epochs of a directory behind a URL fetch their shards ahead;
            for these, None takes `datamat` in your cache folder (`XDG_CACHE_HOME` or `~/.cache`), which only you can
            read.
        cache_bytes: maximum size of the copies in `cache_dir`; None means 100 GB or, in your cache folder, 10 GB or a
            tenth of the free space, whichever is less. A shard that does not fit is read in place; behind a URL, shards
            that an epoch has finished make room, and otherwise records are read by ranges.
        storage_options: options of fsspec for the URL, such as `{"key": ..., "secret": ...}` or `{"anon": True}`.

    Returns:
        The records: by position, by key, or in order.

    Raises:
        OutputError: the directory has no manifest because its run is not finished, or the URL cannot be read.
        OptionError: the directory has no such split or format, or an option is invalid.
        CorruptDataError: the manifest is damaged.
        MissingDependencyError: the package that reads such URLs is not installed.

    Example:
        >>> train = load("out/camvid", "train")   # doctest: +SKIP
        >>> train[0]["image"].shape, train["0001TP_006690#2"]["mask"].dtype   # doctest: +SKIP
        ((360, 480, 3), dtype('uint8'))
    """
    return _opened(open_folder(path, storage_options), split, format, errors, cache, cache_dir, cache_bytes)


def _opened(
    folder: Folder,
    split: str | None,
    format: str | None,  # noqa: A002 -- as for `load`
    errors: str | ErrorPolicy = "raise",
    cache: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> ShardedDataset:
    content = content_of_manifest(folder)
    found = Manifest.parse(content, folder.place(MANIFEST_FILE)).placed(folder)
    manifest = found.of_format(format or found.format)
    if split is not None and split not in manifest.splits:
        raise OptionError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits) or 'none'}")
    shards = manifest.shards if split is None else manifest.splits[split]
    files: list[ShardInfo | IndexInfo] = [*shards, *(info for info in manifest.index if split in (None, info.split))]
    store = None
    if cache_dir is not None or folder.local_path() is None:
        place, most = default_cache() if cache_dir is None else (os.path.abspath(expand_home(cache_dir)), _CACHE_BYTES)
        store = ShardStore(place, most if cache_bytes is None else byte_limit(cache_bytes, "cache_bytes"), files)
    loaded = Loaded(folder, store, content)
    shard_format = get_format(manifest.format).with_features(manifest.features)
    records = RecordFiles(loaded, shards, shard_format, RecordCache(byte_limit(cache, "cache")))
    keys = KeyIndex(loaded, manifest, split, records)
    samples = SampleReader(records, manifest.features, SkippedRecords(errors, len(records)), keys)
    return ShardedDataset(Records([Part(folder, manifest, split, samples)]), steps=())
