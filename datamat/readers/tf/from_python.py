"""Passes samples and batches that Python reads to `tf.data`.

Python reads what TensorFlow cannot: other formats, files behind a URL, samples changed by `map`, and batches of
sequences, which it also plans.

    epoch        one number                       `Seeds.epoch`: saved in checkpoints
    steps        (epoch, step) of each batch      `tf.data.Dataset.range`: also saved in checkpoints
    batches      one call of Python each          a function of (epoch, step) alone, so there is nothing else to save

The checkpoint of one of several ranks fits any number of ranks:

    steps        (epoch, position) of each one    `tf.data.Dataset.scan`: a checkpoint holds the position that all ranks
                                                  have reached
    batches      as above                         `symbolic`: a checkpoint holds no waiting batches, which are this
                                                  rank's own

A Python generator would save a few microseconds per batch, but could not be resumed.

Pipelines of albumentations and callables that ask for `rng` work on arrays: Python calls them, sample by sample.
Any other transform is traced by TensorFlow and works on tensors.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import OptionError, SampleError
from datamat.features.nesting import with_value
from datamat.parallel.affinity import num_cpus
from datamat.readers.tf.decode import (
    as_column,
    as_one,
    as_read,
    tensorflow,
)
from datamat.readers.tf.fields import tf_dtype, tf_fields
from datamat.transforms.augmenter import SampleTransform
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from datamat.features import Features
    from datamat.readers.batches import Batches
from datamat.readers.tf.graph import counted, verbatim
from datamat.readers.tf.shuffling import AT_END, FIRST
from datamat.readers.tf.source import ReadOptions, TfSource
from datamat.readers.tf.threads import in_own_thread


@final
@frozen()
class _Column:
    """How a field becomes tensors.

    Attributes:
        name: name of the field.
        dtype: name of TensorFlow's dtype.
        shape: shape of the tensor, with None for sizes that vary.
        ragged_rank: number of dimensions after the first whose sizes vary from row to row; 0 for plain tensors.
        is_packed: whether there is a list of values for each packed row.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    ragged_rank: int = 0
    is_packed: bool = False

    def types(self, tf: Any) -> list[Any]:
        """Return the dtypes of the result of `arrays`."""
        return [tf.as_dtype(self.dtype)] + [tf.int64] * self.ragged_rank

    def arrays(self, values: Any, keys: Sequence[Any]) -> list[np.ndarray]:
        """Return all values in one array, followed by the row lengths of each ragged dimension.

        Args:
            values: an array; or a list with a value, or a list of values, for each record.
            keys: keys of the records, for messages.

        Raises:
            SampleError: a value does not have the column's dtype or shape.
        """
        if not self.ragged_rank:
            return [self._plain(values, keys)]
        lengths, rows, owners = [], list(values), list(range(len(values)))
        for depth in range(self.ragged_rank):
            if any(not isinstance(row, list) and np.ndim(row) == 0 for row in rows):
                raise self._unlike(values, keys, 0)
            lengths.append(np.array([len(row) for row in rows], np.int64))
            if depth < self.ragged_rank - 1:
                owners = [owner for owner, row in zip(owners, rows, strict=True) for _ in row]
                rows = [one for row in rows for one in row]
        parts = [self._empty(0, self.shape[self.ragged_rank + 1 :])]
        for owner, row in zip(owners, rows, strict=True):
            part = self._array(row)
            if not part.size:
                continue
            self._check(part, (None, *self.shape[self.ragged_rank + 1 :]), values, keys, owner)
            parts.append(part)
        return [np.concatenate(parts), *lengths]

    def none(self, *, is_batched: bool) -> list[np.ndarray]:
        """Return arrays for an empty batch, or for a missing sample."""
        if not is_batched:
            return [np.empty([size or 0 for size in self.shape], _numpy_dtype(self.dtype))]
        size = 0 if self.ragged_rank else self.shape[0] or 0
        return [self._empty(size, self.shape[self.ragged_rank + 1 :])] + [np.empty(0, np.int64)] * self.ragged_rank

    def tensor(self, tf: Any, parts: Sequence[Any]) -> Any:
        """Return the tensor, or ragged tensor, made of the tensors of `arrays`."""
        values, *lengths = parts
        if not lengths:
            return tf.ensure_shape(values, self.shape)
        values = tf.ensure_shape(values, (None, *self.shape[self.ragged_rank + 1 :]))
        size = None if self.shape[0] is None else [self.shape[0]]
        lengths = [tf.ensure_shape(one, size if size and not place else [None]) for place, one in enumerate(lengths)]
        # The lengths were computed above; validating them would take longer than computing them.
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths, validate=False)

    def _plain(self, values: Any, keys: Sequence[Any]) -> np.ndarray:
        if not isinstance(values, list) or len(self.shape) == 0:
            found = self._array(values)
            self._check(found, self.shape, values, keys, 0)
            return found
        rows = [self._array(one) for one in values]
        if not rows:
            return self._empty(0, self.shape[1:])
        for owner, row in enumerate(rows):
            self._check(row, self.shape[1:], values, keys, owner)
            self._check(row, rows[0].shape, values, keys, owner)
        return np.stack(rows)

    def _array(self, value: Any) -> np.ndarray:
        if self.dtype != "string":
            array = np.asarray(value)
            return array if array.size else array.astype(_numpy_dtype(self.dtype))
        if isinstance(value, (str, bytes)):
            return np.array(_encoded(value), object)
        array = np.array(value, object)
        return np.array([_encoded(one) for one in array.ravel().tolist()], object).reshape(array.shape)

    def _empty(self, size: int, shape: Sequence[int | None]) -> np.ndarray:
        return np.empty((size, *(one or 0 for one in shape)), _numpy_dtype(self.dtype))

    def _check(
        self, found: np.ndarray, shape: Sequence[int | None], values: Any, keys: Sequence[Any], owner: int
    ) -> None:
        fits = found.ndim == len(shape) and all(
            wanted in (None, size) for size, wanted in zip(found.shape, shape, strict=True)
        )
        if not fits or found.dtype != _numpy_dtype(self.dtype):
            raise self._unlike(values, keys, owner)

    def _unlike(self, values: Any, keys: Sequence[Any], owner: int) -> SampleError:
        is_batch = isinstance(values, list) or len(keys) > 1
        value = values[owner] if is_batch and len(values) > owner else values
        wanted = list(self.shape[1:] if is_batch else self.shape)
        try:
            found = f"{np.asarray(value).dtype}{list(np.shape(value))}"
        except ValueError:
            found = f"a {type(value).__name__} of parts that differ in shape"
        return SampleError(
            str(keys[owner]) if owner < len(keys) else "?",
            f"its field {self.name!r} is {found}, but {self.dtype}{wanted} in the first samples or in its batch: "
            "tf.data needs one dtype, and one size for what it stacks; return the same from map or the "
            f"transform, or pad a first dimension that varies: to_tf(..., pad={{{self.name!r}: 0}})",
        )


def _encoded(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


@functools.cache
def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(tensorflow().as_dtype(dtype).as_numpy_dtype)
    return found


@final
@frozen()
class _Layout:
    """The form of a field's values in single samples.

    Attributes:
        dtype: name of TensorFlow's dtype.
        shape: shape of the values, with None for sizes that vary.
        is_list: whether varying sizes make a batch ragged; otherwise all values must have the same size.
    """

    dtype: str
    shape: tuple[int | None, ...]
    is_list: bool

    @property
    def ragged_rank(self) -> int:
        """Number, from 1, of the last dimension that varies; 0 if none does."""
        return max((place + 1 for place, size in enumerate(self.shape) if size is None), default=0) * self.is_list


def learn_layouts(
    source: TfSource, samples: Sequence[Mapping[str, Any]], *, batches: bool, stacks: bool
) -> dict[str, _Layout]:
    """Return the layout of each field.

    Args:
        source: schema of the samples, valid for fields that no function has changed.
        samples: some samples as read, with the fields of dicts at the top level; none if the schema is valid.
        batches: whether several samples make a batch, which varying sizes make ragged.
        stacks: whether values reach the batch unchanged: then sizes that these samples share are assumed for all.
    """
    features = source.features
    found = {}
    for name, field in tf_fields(features).items():
        is_other = (field.dtype, field.shape) != features[name].value_type()
        is_ragged = features[name].is_ragged() or (is_other and None in field.shape)
        found[name] = _Layout(tf_dtype(field.dtype), tuple(field.shape), is_ragged)
    if not samples:
        return found
    arrays = [{name: np.asarray(value) for name, value in as_one(sample, features).items()} for sample in samples]
    for sample, made in zip(samples, arrays, strict=True):
        if made.keys() != arrays[0].keys():
            raise SampleError(str(sample.get("key", "?")), _other_fields(made, arrays[0]))
        for name, array in made.items():
            first = _telling([one[name] for one in arrays if name in one])
            if not array.size and array.ndim == first.ndim:
                continue
            if array.ndim != first.ndim or _type_name(name, array) != _type_name(name, first):
                raise SampleError(
                    str(sample.get("key", "?")),
                    f"its field {name!r} is {array.dtype}{list(array.shape)}, but {first.dtype}{list(first.shape)} in "
                    "another sample; tf.data needs one dtype and one number of dimensions: return the same for every "
                    "sample",
                )
    return {
        name: _learned(name, [one[name] for one in arrays], found.get(name), batches=batches, stacks=stacks)
        for name in arrays[0]
    }


def _learned(
    name: str, arrays: Sequence[np.ndarray], declared: _Layout | None, *, batches: bool, stacks: bool
) -> _Layout:
    first = _telling(arrays)
    dtype = _type_name(name, first)
    if declared is not None and declared.dtype == dtype and all(_fits(one.shape, declared.shape) for one in arrays):
        return declared
    common = tuple(
        size if all(one.shape[place] == size for one in arrays) else None for place, size in enumerate(first.shape)
    )
    if batches and None in common:
        return _Layout(dtype, common, is_list=True)
    is_list = declared is not None and declared.is_list and bool(common)
    # Sizes may change from sample to sample, but channels do not, and Keras layers need their number.
    sizes = (None,) * (first.ndim - 1) + common[-1:] if first.ndim > 2 else (None,) * first.ndim
    return _Layout(dtype, common if batches and stacks and not is_list else sizes, is_list=is_list)


def _telling(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the first array with a meaningful dtype: an empty list always becomes float64."""
    return next((one for one in arrays if one.size), arrays[0])


def _fits(found: Sequence[int], shape: Sequence[int | None]) -> bool:
    return len(found) == len(shape) and all(want in (None, size) for size, want in zip(found, shape, strict=True))


def _type_name(name: str, array: np.ndarray) -> str:
    """Return the name of TensorFlow's dtype for an array.

    Raises:
        OptionError: there is none.
    """
    if array.dtype.kind in "US" or (
        array.dtype.kind == "O" and all(isinstance(one, (str, bytes)) for one in array.ravel().tolist())
    ):
        return "string"
    try:
        return str(tensorflow().as_dtype(array.dtype).name) if array.dtype.kind != "O" else _no_type(name, array)
    except TypeError:
        return _no_type(name, array)


def _no_type(name: str, array: np.ndarray) -> str:
    found = type(array.flat[0]).__name__ if array.dtype.kind == "O" and array.size else str(array.dtype)
    raise OptionError(
        f"map or the transform returns field {name!r} as {found}, which cannot be a TensorFlow tensor; return "
        "numbers, text or arrays of them (JSON as text), or leave the field out"
    )


def _columns(source: TfSource, layouts: Mapping[str, _Layout], size: int | None, *, drops: bool) -> list[_Column]:
    """Return the columns of batches of a given size, or of single samples."""
    form = source.form
    if size is None and form.bucket is None:
        return [_Column(name, one.dtype, one.shape) for name, one in layouts.items()]
    num_rows = size if drops and form.bucket is None else None
    packed = dict.fromkeys(form.pack or {}, next(iter((form.pack or {}).values()), 0))
    found = []
    for name, one in layouts.items():
        if name in packed:
            found.append(_Column(name, one.dtype, (num_rows, int(packed[name]), *one.shape[1:])))
        elif packed:
            rank = one.ragged_rank
            sizes = (None,) * (rank + 1) + one.shape[rank:]
            found.append(_Column(name, one.dtype, (num_rows, *sizes), 1 + rank, is_packed=True))
        elif name in (form.pad or {}):
            found.append(_Column(name, one.dtype, (num_rows, None, *one.shape[1:])))
            found.append(_Column(f"{name}_length", "int64", (num_rows,)))
        else:
            rank = one.ragged_rank
            found.append(_Column(name, one.dtype, (num_rows, *((None,) * rank), *one.shape[rank:]), rank))
    for name in ("segment_ids", "positions") if packed else ():
        found.append(_Column(name, "int32", (num_rows, next(iter(packed.values())))))
    names = {column.name: column for column in found}  # an added column replaces a field of its name, as in `to_numpy`
    return list(names.values())


@final
class _Reader:
    """Reads the batches of a source when called from TensorFlow's threads, which never free the function.

    Closes its files after an epoch, and once the dataset is gone.

    Args:
        open_batches: function that returns batches with their own open files.
    """

    def __init__(self, open_batches: Callable[[], Batches]) -> None:
        self._open_batches = open_batches
        self._lock = threading.Lock()
        self._batches: Batches | None = None
        self._is_closed = False

    def num_steps(self, epoch: Any) -> Any:
        """Return the number of batches in an epoch, int64."""
        return np.int64(self._opened().num_steps(int(epoch)))

    def step_at(self, epoch: Any, start: Any) -> tuple[Any, Any]:
        """Return the start of the step at a position, and of the next one, int64; `AT_END` if there is none."""
        batches, epoch, start = self._opened(), int(epoch), int(start)
        left = batches.num_steps(epoch, start)
        if left < 1:
            self._release()
        after = batches.place_after(epoch, start) if left > 1 else AT_END
        return np.int64(start if left > 0 else AT_END), np.int64(after)

    def at(self, epoch: Any, step: Any, start: Any) -> dict[str, Any]:
        """Return a batch; empty if all of its records were skipped."""
        batches, epoch, step, start = self._opened(), int(epoch), int(step), int(start)
        found = batches.at(epoch, step, start)
        if step + 1 >= batches.num_steps(epoch, start):
            self._release()
        return found

    def close(self) -> None:
        """Close everything, and keep nothing open from now on."""
        self._is_closed = True
        self._release()

    def _opened(self) -> Batches:
        with self._lock:
            batches = self._batches or self._open_batches()
            self._batches = None if self._is_closed else batches
            return batches

    def _release(self) -> None:
        with self._lock:
            self._batches = None


def from_python(
    tf: Any, source: TfSource, options: ReadOptions, size: int | None, *, drops: bool, stacks: bool = False
) -> Any:
    """Return samples or batches that Python reads: each iteration is the next epoch, or the first if samples are kept.

    Args:
        tf: the imported module `tensorflow`.
        source: what to read.
        options: order, threads and the generator of the epochs.
        size: most samples in each batch; None reads single samples.
        drops: whether to drop a last batch that is not full.
        stacks: whether single samples are later stacked unchanged.
    """
    batches = source.open_batches(size, drops)  # checks the arguments
    reader = _Reader(functools.partial(source.open_batches, size, drops))
    if source.form.collate_fn is not None:
        return _collated(tf, source, options, batches, reader)
    is_batched = size is not None or source.form.bucket is not None
    samples = source.some_samples(LOOKED_AT) if source.is_mapped or source.is_changed else []
    columns = _columns(
        source,
        learn_layouts(
            source, samples, batches=size != 1 and (is_batched or options.makes_batches), stacks=is_batched or stacks
        ),
        size,
        drops=drops,
    )
    features, names = source.features, {column.name for column in columns}

    def read(*step: Any) -> list[np.ndarray]:
        found = reader.at(*step)
        if not found:
            return [np.array(False), *(array for column in columns for array in column.none(is_batched=is_batched))]
        flat = dict(_leaves(found)) if is_batched else as_one(found, features)
        keys = flat.get("key", ()) if is_batched else [flat["key"]]
        if flat.keys() != names:
            raise SampleError(str(next(iter(keys), "?")), _other_fields(flat, names))
        if is_batched:
            packed = {column.name: column.is_packed for column in columns}
            flat = {name: as_column(name, one, features, is_packed=packed[name]) for name, one in flat.items()}
        return [np.array(True), *(array for column in columns for array in column.arrays(flat[column.name], keys))]

    types = [tf.bool, *(kind for column in columns for kind in column.types(tf))]
    call = in_own_thread(read) if source.is_mapped or source.is_changed else read

    def traced(*step: Any) -> tuple[Any, dict[str, Any]]:
        is_there, *parts = tf.numpy_function(call, step, types, stateful=False)
        rest = iter(parts)
        made = {column.name: column.tensor(tf, [next(rest) for _ in column.types(tf)]) for column in columns}
        nested = features.unflatten(made)
        for name in made.keys() - features.keys():  # padding adds lengths, also to dicts
            nested = with_value(nested, name, nested.pop(name))
        return tf.ensure_shape(is_there, ()), nested

    found = _stepped(tf, source, options, reader, traced, size)
    return counted(tf, found, batches.num_steps(0)) if source.counts_steps else found


def _stepped(
    tf: Any, source: TfSource, options: ReadOptions, reader: _Reader, traced: Callable[..., Any], size: int | None
) -> Any:
    """Return the results of a function of (epoch, step, position of step 0) at each step, without the absent ones."""
    epochs = options.seeds.epoch() if options.seeds and not options.keeps_samples else _first_epoch(tf)

    def steps_of(epoch: Any) -> Any:
        if source.has_ranks:
            return _places_of(tf, epoch, reader)
        count = tf.numpy_function(reader.num_steps, [epoch], tf.int64, stateful=False)
        return tf.data.Dataset.range(tf.ensure_shape(count, ())).map(verbatim(tf, lambda step: (epoch, step, FIRST)))

    calls = max(BLOCKS_AT_WORK, 2 * num_cpus() // (size or 1))  # more batches at once if they are small
    found = epochs.flat_map(verbatim(tf, steps_of)).map(
        verbatim(tf, traced), num_parallel_calls=calls, deterministic=options.deterministic
    )
    weakref.finalize(found, reader.close).atexit = False
    if source.skips_damage:
        found = found.filter(verbatim(tf, lambda is_there, _: is_there))
    return found.map(verbatim(tf, lambda _, made: made))


def _places_of(tf: Any, epoch: Any, reader: _Reader) -> Any:
    """Return (epoch, 0, position) for each step of an epoch: the step at a position is step 0 of the remainder."""

    def next_step(start: Any) -> tuple[Any, Any]:
        found = tf.numpy_function(reader.step_at, [epoch, start], (tf.int64, tf.int64), stateful=False)
        here, after = (tf.ensure_shape(one, ()) for one in found)
        return after, here

    def scanned(start: Any, _: Any) -> Any:
        return tf.cond(start == AT_END, lambda: (start, start), lambda: next_step(start))

    places = _first_epoch(tf).repeat().scan(FIRST, verbatim(tf, scanned))
    places = places.take_while(verbatim(tf, lambda start: start != AT_END))
    return places.map(verbatim(tf, lambda start: (epoch, FIRST, start)))


def _first_epoch(tf: Any) -> Any:
    return tf.data.Dataset.from_tensors(FIRST)


def _other_fields(found: Iterable[str], names: Iterable[str]) -> str:
    more, less = sorted({*found} - {*names}), sorted({*names} - {*found})
    says = "; ".join(f"{verb} {', '.join(some)}" for verb, some in (("has", more), ("lacks", less)) if some)
    return f"compared with the first samples, it {says}; return the same fields for every sample"


def _collated(tf: Any, source: TfSource, options: ReadOptions, batches: Batches, reader: _Reader) -> Any:
    """Return the results of the user's `collate_fn` for each batch; the first batch tells their structure."""
    first = batches.at(0, 0)[""] if source.num_records else {}
    made = [(name, _as_leaf(name, value)) for name, value in _leaves(first)]
    columns = []
    for name, array in made:
        sizes = (None,) * array.ndim if array.ndim < 3 else (None,) * (array.ndim - 1) + array.shape[-1:]
        columns.append(_Column(name, _type_name(name, array), sizes))

    def read(*step: Any) -> list[np.ndarray]:
        found = reader.at(*step)
        if not found:
            return [np.array(False), *(column.none(is_batched=False)[0] for column in columns)]
        leaves = _leaves(found[""])
        if [name for name, _ in leaves] != [column.name for column in columns]:
            raise OptionError(
                f"collate_fn returned {', '.join(name for name, _ in leaves)}, but "
                f"{', '.join(column.name for column in columns)} for the first batch; return the same for every batch"
            )
        values = zip(columns, leaves, strict=True)
        return [np.array(True), *(column.arrays(_as_leaf(name, one), ())[0] for column, (name, one) in values)]

    types = [tf.bool, *(column.types(tf)[0] for column in columns)]

    def traced(*step: Any) -> tuple[Any, Any]:
        is_there, *parts = tf.numpy_function(in_own_thread(read), step, types, stateful=False)
        values = iter([column.tensor(tf, [part]) for column, part in zip(columns, parts, strict=True)])
        return tf.ensure_shape(is_there, ()), _refilled(first, values)

    found = _stepped(tf, source, options, reader, traced, options.batch_size)
    return counted(tf, found, batches.num_steps(0)) if source.counts_steps else found


def _as_leaf(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise OptionError(
            f"collate_fn returned {name!r} as a {type(value).__name__} of values that differ in size, which cannot be "
            "a tensor; pad them in collate_fn, or leave it out: to_tf makes ragged tensors"
        ) from error


def _leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested dicts and tuples, each with its path; every leaf becomes a tensor."""
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in _leaves(one, f"{name}/{key}" if name else str(key))]
    if isinstance(value, tuple):
        return [leaf for number, one in enumerate(value) for leaf in _leaves(one, f"{name}[{number}]")]
    return [(name or "batch", value)]


def _refilled(like: Any, values: Iterator[Any]) -> Any:
    if isinstance(like, dict):
        return {key: _refilled(one, values) for key, one in like.items()}
    return tuple(_refilled(one, values) for one in like) if isinstance(like, tuple) else next(values)


LOOKED_AT = 16  # samples from which the sizes returned by Python functions are inferred


def with_epochs(tf: Any, samples: Any, options: ReadOptions) -> Any:
    """Pair each sample with the number of its epoch, which counts the iterations from 0."""
    epoch = options.seeds.epoch() if options.seeds else _first_epoch(tf)
    endless = epoch.flat_map(verbatim(tf, lambda number: tf.data.Dataset.from_tensors(number).repeat()))
    return tf.data.Dataset.zip((samples, counted(tf, endless, tf.data.INFINITE_CARDINALITY)))


def called_by_python(
    tf: Any, transform: SampleTransform, spec: Mapping[str, Any], layouts: Mapping[str, _Layout], features: Features
) -> Any:
    """Return a function of the tensors (sample, epoch) that calls Python to transform samples of a spec."""
    names = tuple(features.flatten(spec))
    columns = [_Column(name, one.dtype, one.shape) for name, one in layouts.items()]

    def call(epoch: Any, *values: Any) -> list[Any]:
        sample = as_read(dict(zip(names, values, strict=True)), features)
        key = str(sample["key"])
        result = as_one(transform(sample, int(epoch)), features)
        if result.keys() != layouts.keys():
            raise SampleError(key, _other_fields(result, layouts))
        return [array for column in columns for array in column.arrays(result[column.name], [key])]

    def traced(sample: Mapping[str, Any], epoch: Any) -> dict[str, Any]:
        flat = features.flatten(sample)
        types = [kind for column in columns for kind in column.types(tf)]
        values = [epoch, *(flat[name] for name in names)]
        run = in_own_thread(call, is_cheap=not transform.has_copies)
        found = tf.numpy_function(run, values, types, stateful=False)
        made = {column.name: column.tensor(tf, [one]) for column, one in zip(columns, found, strict=True)}
        return features.unflatten(made)

    return verbatim(tf, traced)


BLOCKS_AT_WORK = 2  # blocks of images, each decoded by all cores


def made_by(tf: Any, transform: SampleTransform, source: TfSource, options: ReadOptions) -> dict[str, _Layout]:
    """Return the layouts of a Python transform's results, inferred from some samples."""
    features, found = source.features, []
    for sample in source.some_samples(LOOKED_AT):
        changed = sample
        if options.static_transform is not None:
            tensors = {name: tf.constant(value) for name, value in as_one(sample, features).items()}
            result = features.flatten(options.static_transform(features.unflatten(tensors)))
            changed = as_read({name: tensor.numpy() for name, tensor in result.items()}, features)
        found.append(transform(dict(changed), 0))
    return learn_layouts(source, found, batches=options.makes_batches, stacks=True)
