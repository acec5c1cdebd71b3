"""`to_tf`: finished shards as a `tf.data.Dataset`.

    plain        files ── interleave ── shuffle ── batch ── decode ── prefetch
    transformed  files ── interleave ── shuffle ── block ── decode ── unbatch ── transform ── batch ── prefetch
    kept         ... ── unbatch ── static transform ── snapshot, cache ── shuffle ── transform ── batch ── prefetch
    a service    the same in its workers ── over the network ── prefetch

Many records are decoded at once, a batch or a block of them: by `tf.io.parse_example`, and for images by datamat's
decoders (`decode`), which give the same pixels as TensorFlow's in less time. TensorFlow alone decodes, one by one,
records whose values vary in more than their length, lists that a step takes as single samples, and images in the
workers of a service.

The shuffle buffer holds encoded records, which take a tenth of the memory of pixels; where decoded samples are kept, it
shuffles those again in each epoch. TensorFlow itself reads TFRecord; `ShardedDataset.to_numpy` reads all other formats,
and files behind a URL, in threads of this process, and passes them on in batches or blocks (below).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import FingerprintError, OptionError, SampleError
from datamat.fingerprint import fingerprint
from datamat.parallel.affinity import num_cpus
from datamat.readers.batches import chosen_fields
from datamat.readers.loader import ragged_names
from datamat.readers.tf.decode import (
    PictureDecoder,
    as_column,
    as_one,
    as_read,
    decode_many,
    decode_one,
    decodes_in_blocks,
    is_fixed,
    pictures_of,
    signature,
    tensorflow,
)
from datamat.readers.tf.exit import feed_pipelines, free_iterators_at_exit
from datamat.readers.tf.fields import tf_dtype, tf_fields
from datamat.readers.tf.service import check_address, distribute
from datamat.transforms.augmenter import SampleTransform, takes_arrays
from datamat.transforms.seeding import with_rng
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from datamat.features import Features
    from datamat.readers.batches import Batches
    from datamat.readers.sequences import Form


__all__ = [
    "ReadOptions",
    "TfSource",
    "check_form",
    "guarded",
    "make_dataset",
    "wants_arrays",
]

# ---------------------------------------------------------------- damaged records
#
# Damaged TFRecord shards raise an error that names file, record and key.
#
# TensorFlow's own error names none of them, and it takes a shard that is cut off between two records for a shorter one.


def guarded(records: Any, name: Any, num_records: Any, explain: Callable[[str], Exception] | None) -> Any:
    """Return the records of one shard, followed by an error that gives the reason if there are too few.

    Args:
        records: `tf.data.Dataset` of the encoded records of one shard.
        name: string tensor (), path of the shard.
        num_records: int64 tensor (), number of records in the manifest.
        explain: returns what is wrong with the shard of a path; None where no Python runs, as in a service, whose error
            names only the file.
    """
    tf = tensorflow()

    def fail(path: Any) -> Any:
        if explain is not None:
            reason = tf.numpy_function(
                lambda found: _raise(explain(os.fsdecode(found))), [path], tf.string, stateful=False
            )
            return tf.ensure_shape(reason, ())
        message = [path, "is damaged; datamat verify of its directory names the record"]
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(path, ""), message)]):
            return tf.identity(path)

    # Evaluated only if the shard had too few records; those come first, except from a block that is not full.
    error = tf.data.Dataset.from_tensors(name).map(_verbatim(tf, fail))
    return records.ignore_errors().concatenate(error).take(num_records)


def _raise(error: Exception) -> None:
    raise error


# ---------------------------------------------------------------- shuffling, resumed exactly
#
# All shuffles of a pipeline draw their seeds from one generator, and a step that is restored last says how far that is.
#
# In a checkpoint, a shuffle saves its generator. But TensorFlow saves no step whose input has ended: the shuffle of
# the files has as soon as the last one is open, that of the records while the last batches wait to be taken. With
# generators of their own, an iterator that is restored would repeat orders of earlier epochs in the next ones. And
# whoever restores a shuffle makes its input first, whose shuffles then draw again.


def _as_seeds(seed: int) -> dict[str, Any]:
    """Return the two seeds of TensorFlow's ops that stand for one; 0 and 0 together would mean random ones."""
    return {"seed": np.int64(seed % _MOST_SEED), "seed2": np.int64(1 + seed // _MOST_SEED % _MOST_SEED)}


def _mixed(tf: Any, dataset: Any, window: int, seed: int, generator: Any = None, *, reshuffles: bool = True) -> Any:
    """Return a dataset whose elements mix within a window.

    `Dataset.shuffle` would draw by `tf.random.set_seed`, too, and the order be another where a program calls it.

    Args:
        tf: the imported module `tensorflow`.
        dataset: dataset of any elements.
        window: number of elements that mix.
        seed: base seed.
        generator: gives each iteration its seed; None makes one for this step alone.
        reshuffles: whether the order is another in each iteration.
    """
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=np.int64(window),
        **_as_seeds(seed),
        seed_generator=tf.raw_ops.DummySeedGenerator() if generator is None else generator,
        reshuffle_each_iteration=reshuffles,
        **dataset._flat_structure,
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


@final
class _Seeds:
    """The generator that the shuffles of a pipeline share, and the numbers of its epochs.

    Args:
        tf: the imported module `tensorflow`.
        seed: base seed.
    """

    def __init__(self, tf: Any, seed: int) -> None:
        self._tf = tf
        self._seed = seed
        self._seeds = _as_seeds(seed)
        self._generator, self._deleter = tf.raw_ops.AnonymousSeedGenerator(**self._seeds, reshuffle=True)
        self._num_users = 0  # steps that draw from the generator, once in each iteration

    def shuffled(self, dataset: Any, window: int) -> Any:
        """Return a dataset whose elements mix within a window, in another order in each iteration."""
        self._num_users += 1
        found = _mixed(self._tf, dataset, window, self._seed, self._generator)
        found.made_of = (dataset, self)  # what must live as long as this does
        return found

    def saved_beside(self, dataset: Any) -> Any:
        """Return a dataset whose iterators restore the generator, too, once they have restored all else."""
        tf = self._tf
        never = self.shuffled(dataset.take(0), 1)
        found = tf.data.Dataset.choose_from_datasets([dataset, never], tf.data.Dataset.from_tensors(_FIRST).repeat())
        number = dataset.cardinality().numpy()
        return found if number == tf.data.UNKNOWN_CARDINALITY else _counted(tf, found, number)

    def saved_with(self, dataset: Any) -> Any:
        """Return a dataset whose iterators restore the generator, too, also those that have ended."""
        return self.shuffled(self.saved_beside(dataset), 1)

    def epoch(self) -> Any:
        """Return a dataset of one number, int64 (): 0 in its first iteration, 1 in the next, and so on.

        It goes on after a restored iterator. A counter in Python would not: so the number is that of the draw from the
        generator, which a checkpoint holds, and another generator with the same seeds tells the numbers of draws.
        """
        tf = self._tf
        draws, lock = _Draws(tf, self._seed), threading.Lock()

        def number(drawn: Any) -> Any:
            with lock:
                return np.int64(draws.number(int(drawn)) // self._num_users)

        found = self._drawn().map(
            _verbatim(
                tf, lambda value: tf.ensure_shape(tf.numpy_function(number, [value], tf.int64, stateful=False), ())
            )
        )
        return _counted(tf, found, 1)

    def _drawn(self) -> Any:
        """Return a dataset of one number, another one in each iteration."""
        tf = self._tf
        self._num_users += 1
        shape = tf.TensorShape(())
        variant = tf.raw_ops.RandomDatasetV2(
            **self._seeds,
            seed_generator=self._generator,
            rerandomize_each_iteration=True,
            output_types=[tf.int64],
            output_shapes=[shape],
        )
        found = tf.data.experimental.from_variant(variant, tf.TensorSpec(shape, tf.int64))
        found.made_of = self
        return found.take(1)


@final
class _Draws:
    """The number of each draw from a generator, by what was drawn.

    Args:
        tf: the imported module `tensorflow`.
        seed: seed of the generator.
    """

    def __init__(self, tf: Any, seed: int) -> None:
        self._tf = tf
        self._seed = seed
        self._known: dict[int, int] = {}
        self._next: Iterator[Any] | None = None

    def number(self, drawn: int) -> int:
        """Return the number of a draw, from 0.

        Args:
            drawn: the number that came of it.
        """
        if self._next is None:
            draws = _Seeds(self._tf, self._seed)._drawn().repeat().batch(_DRAWS_AT_ONCE)
            self._next = feed_pipelines(iter(_untuned(self._tf, draws)))
        while drawn not in self._known:
            if len(self._known) > _MOST_DRAWS:
                raise OptionError(
                    "the iterator was restored from a checkpoint of a pipeline with another seed; make the dataset "
                    "with the arguments that it had when it was saved"
                )
            for value in next(self._next).numpy().tolist():
                self._known.setdefault(value, len(self._known))
        return self._known[drawn]


_DRAWS_AT_ONCE = 64
_MOST_DRAWS = 1 << 20  # several for each epoch


_FIRST, _AT_END = np.int64(0), np.int64(-1)


def _not_saved(options: ReadOptions) -> str | None:
    """Return why a checkpoint cannot hold the position in a pipeline, or None where it can."""
    if options.service is not None:
        return "the workers of the service hold the position in the epoch"
    if options.snapshot is not None:
        return "TensorFlow does not resume in the middle of a snapshot; drop snapshot"
    return None


def _refusing_checkpoints(tf: Any, dataset: Any, reason: str) -> Any:
    """Return a dataset whose iterators raise `OptionError` when a checkpoint is to save them.

    Iterators of datasets that are made of it raise TensorFlow's own error, which says that a `PyFunc` is stateful.
    """
    marked = dataset.take(0).map(_verbatim(tf, lambda *parts: _stateful(tf, parts if len(parts) > 1 else parts[0])))
    return _refusing()(marked.concatenate(dataset), reason)


def _stateful(tf: Any, value: Any) -> Any:
    with tf.control_dependencies([tf.numpy_function(lambda: None, [], [])]):
        return tf.nest.map_structure(tf.identity, value)


@functools.cache
def _refusing() -> Any:
    from tensorflow.python.data.ops import dataset_ops, iterator_ops

    class Refusing(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]  # TensorFlow has no types
        def __init__(self, dataset: Any, reason: str) -> None:
            self._reason = reason
            super().__init__(dataset, tensorflow().data.experimental.to_variant(dataset))

        def __iter__(self) -> Any:
            found = RefusingIterator(self)
            found.reason = self._reason
            return found

    class RefusingIterator(iterator_ops.OwnedIterator):  # type: ignore[misc]  # TensorFlow has no types
        reason = ""

        def _serialize_to_tensors(self) -> Any:
            raise OptionError(
                f"tf.train.Checkpoint cannot save this iterator of to_tf: {self.reason}; or read with to_numpy or "
                "to_torch, whose state_dict resumes in mid-epoch in any case"
            )

    return Refusing


_MOST_SEED = 2**63 - 1


# ---------------------------------------------------------------- functions of users
#
# Run in threads of this process, for which those of TensorFlow wait.
#
# TensorFlow's `PyFuncOp` ends the Python thread state of its thread after each call. `PyGILState_Release` then sets the
# state's counter to 0 and frees what `threading.local` holds: a transform's copy for the thread, in which kornia keeps
# what it drew last. If a tensor there is a view, torch takes the GIL by pybind11 to free it: the counter goes to 1 and
# back to 0, which deletes the state, and `PyGILState_Release` deletes it again (seen in gdb with torch 2.13, TensorFlow
# 2.21 and Python 3.11: the process dies). Also, a pipeline of albumentations would be copied for each sample.


@final
class _OwnThreads:
    """Threads of Python, as many as there are calls at a time. They do not keep the program from ending."""

    def __init__(self) -> None:
        self._idle: list[tuple[SimpleQueue[Callable[[], Any]], SimpleQueue[tuple[Any, BaseException | None]]]] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, or raise what it raises, in one of the threads."""
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = SimpleQueue(), SimpleQueue()
            threading.Thread(target=_answer, args=thread, name="datamat-call", daemon=True).start()
        calls, answers = thread
        calls.put(functools.partial(function, *arguments))
        found, error = answers.get()
        self._idle.append(thread)
        if error is not None:
            raise error
        return found


def _answer(calls: SimpleQueue[Callable[[], Any]], answers: SimpleQueue[tuple[Any, BaseException | None]]) -> None:
    while True:
        answers.put(_outcome(calls.get()))  # without a name for it: its memory is reused once nobody has it


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 -- `call` raises it where it is waited for
        return None, error


_own_threads = _OwnThreads()


def _in_own_thread(function: Callable[..., Any], *, is_cheap: bool = False) -> Callable[..., Any]:
    """Return a function that has one of the own threads run another.

    Args:
        function: the other one.
        is_cheap: whether it keeps nothing for a thread and may take less time than the way to another one, 50 us: then
            it goes there only where torch is loaded, of which some module may keep a tensor for the thread.
    """

    def call(*arguments: Any) -> Any:
        if is_cheap and "torch" not in sys.modules:
            return function(*arguments)
        return _own_threads.call(function, *arguments)

    return call


# ---------------------------------------------------------------- samples from Python
#
# Passes what Python reads to `tf.data`: formats that TensorFlow does not read, files behind a URL, functions of `map`,
# and batches of sequences, whose plan is Python's.
#
#     epoch        one number                       `_Seeds.epoch`: a checkpoint holds it
#     steps        (epoch, step) of each batch      `tf.data.Dataset.range`: a checkpoint holds that, too
#     batches      a call of Python for each one    a function of (epoch, step) alone, so nothing else is to be saved
#
# The checkpoint of one of several ranks fits any number of them:
#
#     steps        (epoch, place) of each one       `tf.data.Dataset.scan`: a checkpoint holds the place that all ranks
#                                                   have reached
#     batches      as above                         `_symbolic`: it holds none of those that wait, which are this rank's
#
# A generator of Python would be cheaper by a few microseconds a batch, and could not be resumed.


@final
@frozen()
class _Column:
    """What becomes of a field in tensors.

    Attributes:
        name: name of the field.
        dtype: name of TensorFlow's dtype.
        shape: shape of the tensor, with None for sizes that vary.
        ragged_rank: number of dimensions behind the first one whose sizes vary from row to row; 0 for plain tensors.
        is_packed: whether the values are a list for each packed row.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    ragged_rank: int = 0
    is_packed: bool = False

    def spec(self, tf: Any) -> Any:
        """Return what `tf.data` knows of the tensor."""
        if not self.ragged_rank:
            return tf.TensorSpec(self.shape, self.dtype)
        return tf.RaggedTensorSpec(self.shape, self.dtype, self.ragged_rank, tf.int64)

    def types(self, tf: Any) -> list[Any]:
        """Return the dtypes of the arrays that `arrays` returns."""
        return [tf.as_dtype(self.dtype)] + [tf.int64] * self.ragged_rank

    def arrays(self, values: Any, keys: Sequence[Any]) -> list[np.ndarray]:
        """Return values as arrays: all of them in one, and the lengths of rows in each ragged dimension.

        Args:
            values: an array; or a list of values, one for each record, or of lists of them.
            keys: keys of the records, for messages.

        Raises:
            SampleError: a value has another dtype or shape than those that the column was made for.
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
        """Return arrays that stand for no records, or for no sample."""
        if not is_batched:
            return [np.empty([size or 0 for size in self.shape], _numpy_dtype(self.dtype))]
        size = 0 if self.ragged_rank else self.shape[0] or 0
        return [self._empty(size, self.shape[self.ragged_rank + 1 :])] + [np.empty(0, np.int64)] * self.ragged_rank

    def tensor(self, tf: Any, parts: Sequence[Any]) -> Any:
        """Return the tensor, or ragged tensor, of the tensors of `arrays`."""
        values, *lengths = parts
        if not lengths:
            return tf.ensure_shape(values, self.shape)
        values = tf.ensure_shape(values, (None, *self.shape[self.ragged_rank + 1 :]))
        size = None if self.shape[0] is None else [self.shape[0]]
        lengths = [tf.ensure_shape(one, size if size and not place else [None]) for place, one in enumerate(lengths)]
        # Made of lengths that were found above: to check them again would take longer than to find them.
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
            f"its field {self.name!r} is {found}, and {self.dtype}{wanted} in the samples that were looked at first or "
            "in its batch: tf.data wants one dtype, and one size of what it stacks; return the same from map or the "
            f"transform, or fill up a first dimension that varies: to_tf(..., pad={{{self.name!r}: 0}})",
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
    """What the values of a field are in single samples.

    Attributes:
        dtype: name of TensorFlow's dtype.
        shape: shape of the values, with None for sizes that vary.
        is_list: whether sizes that vary make a batch ragged; otherwise its values have to be of one size.
    """

    dtype: str
    shape: tuple[int | None, ...]
    is_list: bool

    @property
    def ragged_rank(self) -> int:
        """Number of the last dimension that varies, from 1; 0 where none does."""
        return max((place + 1 for place, size in enumerate(self.shape) if size is None), default=0) * self.is_list


def _layouts(
    source: TfSource, samples: Sequence[Mapping[str, Any]], *, batches: bool, stacks: bool
) -> dict[str, _Layout]:
    """Return the layout of each field.

    Args:
        source: schema of the samples, which holds for all that no function has changed.
        samples: some samples as they are read, the fields of dicts beside all others; none where the schema holds.
        batches: whether several samples make a batch, so that sizes that vary make it ragged.
        stacks: whether the values reach the batch as they are: then sizes that all of these samples share are those of
            all.
    """
    features = source.features
    found = {}
    for name, field in tf_fields(features).items():
        is_other = (field.dtype, field.shape) != features[name].value_type()
        is_ragged = features[name].is_ragged() or (is_other and None in field.shape)
        found[name] = _Layout(tf_dtype(field.dtype), tuple(field.shape), is_ragged)
    if not samples:
        return found
    arrays = [_as_arrays(sample, features) for sample in samples]
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
                    f"its field {name!r} is {array.dtype}{list(array.shape)}, and {first.dtype}{list(first.shape)} in "
                    "another sample; tf.data wants one dtype and one number of dimensions: return the same for every "
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
    # Sizes may change from sample to sample; channels do not, and layers of Keras must know them.
    sizes = (None,) * (first.ndim - 1) + common[-1:] if first.ndim > 2 else (None,) * first.ndim
    return _Layout(dtype, common if batches and stacks and not is_list else sizes, is_list=is_list)


def _telling(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the first array whose dtype tells something: an empty list becomes one of float64, whatever it is of."""
    return next((one for one in arrays if one.size), arrays[0])


def _fits(found: Sequence[int], shape: Sequence[int | None]) -> bool:
    return len(found) == len(shape) and all(want in (None, size) for size, want in zip(found, shape, strict=True))


def _type_name(name: str, array: np.ndarray) -> str:
    """Return the name of TensorFlow's dtype for values.

    Raises:
        OptionError: it has none.
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
        f"map or the transform returns the field {name!r} as {found}, which TensorFlow has no tensor for; return "
        "numbers, text or arrays of them (JSON as text), or leave the field out"
    )


def _columns(source: TfSource, layouts: Mapping[str, _Layout], size: int | None, *, drops: bool) -> list[_Column]:
    """Return what becomes of the fields in batches of a size, or in single samples."""
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
    names = {column.name: column for column in found}  # a field of the samples gives way, as in `to_numpy`
    return list(names.values())


@final
class _Reader:
    """The batches of a source, for calls from the threads of TensorFlow, which keeps the function for good.

    Nothing stays open behind an epoch, nor once the dataset is gone.

    Args:
        open_batches: returns batches that open files of their own.
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
        """Return where the step at a place begins, and where the next one does, int64; `_AT_END` for none."""
        batches, epoch, start = self._opened(), int(epoch), int(start)
        left = batches.num_steps(epoch, start)
        if left < 1:
            self._release()
        after = batches.place_after(epoch, start) if left > 1 else _AT_END
        return np.int64(start if left > 0 else _AT_END), np.int64(after)

    def at(self, epoch: Any, step: Any, start: Any) -> dict[str, Any]:
        """Return a batch; empty where all of its records were skipped."""
        batches, epoch, step, start = self._opened(), int(epoch), int(step), int(start)
        found = batches.at(epoch, step, start)
        if step + 1 >= batches.num_steps(epoch, start):
            self._release()
        return found

    def close(self) -> None:
        """Keep nothing open from now on."""
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


def _from_python(
    tf: Any, source: TfSource, options: ReadOptions, size: int | None, *, drops: bool, stacks: bool = False
) -> Any:
    """Return samples or batches that Python reads: the next epoch in each iteration, the first one where it is kept.

    Args:
        tf: the imported module `tensorflow`.
        source: what to read.
        options: order, threads and the generator of the epochs.
        size: most samples in each batch; None reads single samples.
        drops: whether to drop a last batch that is not full.
        stacks: whether single samples are stacked later, as they are.
    """
    batches = source.open_batches(size, drops)  # raises what is wrong with the arguments
    reader = _Reader(functools.partial(source.open_batches, size, drops))
    if source.form.collate_fn is not None:
        return _collated(tf, source, options, batches, reader)
    is_batched = size is not None or source.form.bucket is not None
    samples = source.some_samples(_LOOKED_AT) if source.is_mapped or source.is_changed else []
    columns = _columns(
        source,
        _layouts(
            source, samples, batches=size != 1 and (is_batched or options.makes_batches), stacks=is_batched or stacks
        ),
        size,
        drops=drops,
    )
    features, names = source.features, {column.name for column in columns}
    nesting = features.nesting.with_fields(names)

    def read(*step: Any) -> list[np.ndarray]:
        found = reader.at(*step)
        if not found:
            return [np.array(False), *(array for column in columns for array in column.none(is_batched=is_batched))]
        flat = nesting.split(found) if is_batched else as_one(found, features)
        keys = flat.get("key", ()) if is_batched else [flat["key"]]
        if flat.keys() != names:
            raise SampleError(str(next(iter(keys), "?")), _other_fields(flat, names))
        if is_batched:
            packed = {column.name: column.is_packed for column in columns}
            flat = {name: as_column(name, one, features, is_packed=packed[name]) for name, one in flat.items()}
        return [np.array(True), *(array for column in columns for array in column.arrays(flat[column.name], keys))]

    types = [tf.bool, *(kind for column in columns for kind in column.types(tf))]
    call = _in_own_thread(read) if source.is_mapped or source.is_changed else read

    def traced(*step: Any) -> tuple[Any, dict[str, Any]]:
        is_there, *parts = tf.numpy_function(call, step, types, stateful=False)
        rest = iter(parts)
        made = {column.name: column.tensor(tf, [next(rest) for _ in column.types(tf)]) for column in columns}
        return tf.ensure_shape(is_there, ()), nesting.join_batch(made)

    found = _stepped(tf, source, options, reader, traced, size)
    return _counted(tf, found, batches.num_steps(0)) if source.counts_steps else found


def _stepped(
    tf: Any, source: TfSource, options: ReadOptions, reader: _Reader, traced: Callable[..., Any], size: int | None
) -> Any:
    """Return what a function of (epoch, step, place of step 0) makes at each step, and says that there is."""
    epochs = options.seeds.epoch() if options.seeds and not options.keeps_samples else _first_epoch(tf)

    def steps_of(epoch: Any) -> Any:
        if source.has_ranks:
            return _places_of(tf, epoch, reader)
        count = tf.numpy_function(reader.num_steps, [epoch], tf.int64, stateful=False)
        return tf.data.Dataset.range(tf.ensure_shape(count, ())).map(_verbatim(tf, lambda step: (epoch, step, _FIRST)))

    calls = max(_BLOCKS_AT_WORK, 2 * num_cpus() // (size or 1))  # more batches at once if they are small
    found = epochs.flat_map(_verbatim(tf, steps_of)).map(
        _verbatim(tf, traced), num_parallel_calls=calls, deterministic=options.deterministic
    )
    weakref.finalize(found, reader.close).atexit = False
    if source.skips_damage:
        found = found.filter(_verbatim(tf, lambda is_there, _: is_there))
    return found.map(_verbatim(tf, lambda _, made: made))


def _places_of(tf: Any, epoch: Any, reader: _Reader) -> Any:
    """Return (epoch, 0, place) of each step of an epoch: one that begins at a place is step 0 of what is left."""

    def next_step(start: Any) -> tuple[Any, Any]:
        found = tf.numpy_function(reader.step_at, [epoch, start], (tf.int64, tf.int64), stateful=False)
        here, after = (tf.ensure_shape(one, ()) for one in found)
        return after, here

    def scanned(start: Any, _: Any) -> Any:
        return tf.cond(start == _AT_END, lambda: (start, start), lambda: next_step(start))

    places = _first_epoch(tf).repeat().scan(_FIRST, _verbatim(tf, scanned))
    places = places.take_while(_verbatim(tf, lambda start: start != _AT_END))
    return places.map(_verbatim(tf, lambda start: (epoch, _FIRST, start)))


def _first_epoch(tf: Any) -> Any:
    return tf.data.Dataset.from_tensors(_FIRST)


def _other_fields(found: Iterable[str], names: Iterable[str]) -> str:
    more, less = sorted({*found} - {*names}), sorted({*names} - {*found})
    says = "; ".join(f"{verb} {', '.join(some)}" for verb, some in (("has", more), ("lacks", less)) if some)
    return f"beside the samples that were looked at first, it {says}; return the same fields for every sample"


def _collated(tf: Any, source: TfSource, options: ReadOptions, batches: Batches, reader: _Reader) -> Any:
    """Return what `collate_fn` of the user makes of each batch: what that is, is learned from the first one."""
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
                f"collate_fn returned {', '.join(name for name, _ in leaves)}, and "
                f"{', '.join(column.name for column in columns)} for the first batch; return the same for every batch"
            )
        values = zip(columns, leaves, strict=True)
        return [np.array(True), *(column.arrays(_as_leaf(name, one), ())[0] for column, (name, one) in values)]

    types = [tf.bool, *(column.types(tf)[0] for column in columns)]

    def traced(*step: Any) -> tuple[Any, Any]:
        is_there, *parts = tf.numpy_function(_in_own_thread(read), step, types, stateful=False)
        values = iter([column.tensor(tf, [part]) for column, part in zip(columns, parts, strict=True)])
        return tf.ensure_shape(is_there, ()), _refilled(first, values)

    found = _stepped(tf, source, options, reader, traced, options.batch_size)
    return _counted(tf, found, batches.num_steps(0)) if source.counts_steps else found


def _as_leaf(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise OptionError(
            f"collate_fn returned {name!r} as a {type(value).__name__} of values that differ in size, which is no "
            "tensor; fill them up there, or leave collate_fn out: to_tf makes ragged tensors of them"
        ) from error


def _leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return what stands in dicts and tuples, each by its place: all that becomes a tensor."""
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in _leaves(one, f"{name}/{key}" if name else str(key))]
    if isinstance(value, tuple):
        return [leaf for number, one in enumerate(value) for leaf in _leaves(one, f"{name}[{number}]")]
    return [(name or "batch", value)]


def _refilled(like: Any, values: Iterator[Any]) -> Any:
    if isinstance(like, dict):
        return {key: _refilled(one, values) for key, one in like.items()}
    return tuple(_refilled(one, values) for one in like) if isinstance(like, tuple) else next(values)


_LOOKED_AT = 16  # samples, from which the sizes that functions of Python return are learned


# ---------------------------------------------------------------- snapshots
#
# Decoded samples kept on disk for later programs, in the format of `tf.data.Dataset.snapshot`.
#
#     FOLDER/KEY/GRAPH_HASH/snapshot.metadata    complete once the first epoch was read to its end
#                          /RUN/...              the samples
#
# TensorFlow writes a snapshot while an epoch is read, and finds it again by a hash of the graph. That fails from one
# program to the next: equal graphs sometimes have different hashes (half the time with TensorFlow 2.21), and the graph
# knows shards by name, not by content. So KEY identifies what the samples are made of, and a complete snapshot below it
# is loaded directly.


_NUM_SHARDS = 8  # written and read by as many threads


def _snapshotted(samples: Any, folder: str | os.PathLike[str], key: str) -> Any:
    """Return `samples`, loaded from a snapshot if there is one; otherwise the first complete epoch writes it.

    Args:
        samples: `tf.data.Dataset` of decoded samples; the snapshot keeps their order.
        folder: folder of the snapshots, made if missing; each has a folder of its own in it.
        key: name that identifies these samples.
    """
    tf = tensorflow()
    numbered = samples.enumerate()
    place = pathlib.Path(folder, key)
    finished = [path.parent for path in sorted(place.glob("*/snapshot.metadata")) if _is_finished(path)]
    if finished:
        spec = numbered.element_spec
        found = tf.data.Dataset.load(str(finished[0]), element_spec=spec, compression=None, reader_func=_in_order)
    else:
        # The default compression fails on elements over 256 KiB
        # (https://github.com/tensorflow/tensorflow/issues/47056).
        found = numbered.snapshot(str(place), compression=None, reader_func=_in_order, shard_func=_shard_of)
    return found.map(_without_number)


def _is_finished(metadata: pathlib.Path) -> bool:
    from tensorflow.core.protobuf.snapshot_pb2 import SnapshotMetadataRecord

    return bool(SnapshotMetadataRecord.FromString(metadata.read_bytes()).finalized)


def _shard_of(number: Any, _sample: Any) -> Any:
    return number % _NUM_SHARDS


def _in_order(shards: Any) -> Any:
    """Return the samples in the order in which they were written, to each shard in turn."""
    tf = tensorflow()
    return shards.interleave(_itself, cycle_length=_NUM_SHARDS, num_parallel_calls=tf.data.AUTOTUNE)


def _itself(shard: Any) -> Any:
    return shard


def _without_number(_number: Any, sample: Any) -> Any:
    return sample


# ---------------------------------------------------------------- transforms that Python calls
#
# A pipeline of albumentations and a callable that asks for `rng` work on arrays: Python calls them, sample by sample.
# Any other transform is traced by TensorFlow and works on tensors.


def wants_arrays(transform: Any) -> bool:
    """Return whether a transform is called by Python with arrays; else TensorFlow traces it."""
    return takes_arrays(transform) or with_rng(transform) is not None


def _with_epochs(tf: Any, samples: Any, options: ReadOptions) -> Any:
    """Return (sample, number of the epoch) of each sample: the next number in each iteration, from 0."""
    epoch = options.seeds.epoch() if options.seeds else _first_epoch(tf)
    endless = epoch.flat_map(_verbatim(tf, lambda number: tf.data.Dataset.from_tensors(number).repeat()))
    return tf.data.Dataset.zip((samples, _counted(tf, endless, tf.data.INFINITE_CARDINALITY)))


def _called_by_python(
    tf: Any, transform: SampleTransform, spec: Mapping[str, Any], layouts: Mapping[str, _Layout], features: Features
) -> Any:
    """Return a function of (sample, epoch) in tensors that has Python apply a transform.

    Args:
        tf: the imported module `tensorflow`.
        transform: applied to arrays.
        spec: the `tf.TensorSpec` of each field of a sample.
        layouts: what the transform returns.
        features: schema of the samples.
    """
    nesting, names = features.nesting, tuple(features.nesting.split(spec))
    columns = [_Column(name, one.dtype, one.shape) for name, one in layouts.items()]

    def call(epoch: Any, *values: Any) -> list[Any]:
        sample = as_read(dict(zip(names, values, strict=True)), features)
        key = str(sample["key"])
        result = as_one(transform(sample, int(epoch)), features)
        if result.keys() != layouts.keys():
            raise SampleError(key, _other_fields(result, layouts))
        return [array for column in columns for array in column.arrays(result[column.name], [key])]

    def traced(sample: Mapping[str, Any], epoch: Any) -> dict[str, Any]:
        flat = nesting.split(sample)
        types = [kind for column in columns for kind in column.types(tf)]
        values = [epoch, *(flat[name] for name in names)]
        run = _in_own_thread(call, is_cheap=not transform.has_copies)
        found = tf.numpy_function(run, values, types, stateful=False)
        return nesting.join_batch(
            {column.name: column.tensor(tf, [one]) for column, one in zip(columns, found, strict=True)}
        )

    return _verbatim(tf, traced)


def _as_arrays(sample: Mapping[str, Any], features: Features) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in as_one(sample, features).items()}


_SHUFFLE_WINDOW = 1024
_MOST_FILES_AT_ONCE = 16
_CALLS_PER_CORE = 4  # with one, 1.91 of 2 cores were busy, with four 1.95
_BLOCKS_AT_WORK = 2  # blocks of images, each decoded by all cores
_BLOCK_RECORDS = 32
_BLOCK_BYTES = 16 << 20
_FILES_OF_A_WORKER = 2  # of a service: no other worker gets a file that one has opened
_WAITING = 2  # batches; other consumers of a service never get those that wait here
_BUFFER_BYTES = 1 << 20
_RUN_RECORDS, _RUN_BYTES = 256, 512 << 10  # small records that one thread hands to another at a time
_COMPRESSION = {"tfrecord": "", "tfrecord.gz": "GZIP"}


@frozen()
class TfSource:
    """The shards to read, and how Python reads them.

    Args:
        files: number of records in each shard, by its path; empty where not all of them are read in order.
        num_records: number of records to read.
        num_bytes: size of all shards together.
        features: schema of the records, by which they are parsed and decoded.
        format_name: name of the shards' format.
        identity: digest of the records; it changes when any record does.
        is_whole: whether all records of the shards are read, in their order.
        is_mapped: whether the samples go through functions of `map`, after which they may have any fields.
        has_paths: whether the files have paths on this machine, by which TensorFlow opens them.
        skips_damage: whether damaged records are skipped and counted, which TensorFlow does not do.
        explain: function of the path of a shard that returns its damage.
        form: what becomes of sequences in batches; Python plans these, so it reads them.
        has_ranks: whether the batches are those of one of several ranks, which Python plans, too.
        is_changed: whether a transform that Python calls is a part of `open_batches`.
        open_batches: returns the batches that Python reads, by batch_size and drop_last of `to_numpy`: in the order of
            the records if samples are kept, through files of their own.
        some_samples: returns at most so many samples of the first epoch, spread over all records; they go through all
            that `open_batches` has samples go through.
    """

    files: Mapping[str, int]
    num_records: int
    num_bytes: int
    features: Features
    format_name: str
    identity: str
    is_whole: bool
    is_mapped: bool
    has_paths: bool
    skips_damage: bool
    explain: Callable[[str], Exception]
    form: Form
    has_ranks: bool
    is_changed: bool
    open_batches: Callable[[int | None, bool], Batches]
    some_samples: Callable[[int], list[dict[str, Any]]]

    @property
    def is_native(self) -> bool:
        """Whether TensorFlow reads the shards itself."""
        is_ours = self.skips_damage or not self.has_paths or self.is_mapped or not self.is_whole or self.is_planned
        return self.format_name in _COMPRESSION and not is_ours

    @property
    def is_planned(self) -> bool:
        """Whether Python decides which records make a batch."""
        return self.form.makes_batches or self.has_ranks

    @property
    def counts_steps(self) -> bool:
        """Whether each iterator has as many steps as any other, also one that is restored."""
        return not (self.skips_damage or self.form.unit is not None or self.has_ranks)


@frozen()
class ReadOptions:
    """The checked arguments of `ShardedDataset.to_tf`, which documents them; and `seeds`, which `make_dataset` adds.

    Raises:
        OptionError: an argument is invalid, or contradicts another.
    """

    batch_size: int | None = None
    shuffle: bool | int = False
    seed: int = 0
    transform: Callable[[Any], Any] | SampleTransform | None = None
    static_transform: Callable[[Any], Any] | None = None
    cache: bool | str | os.PathLike[str] = False
    snapshot: str | os.PathLike[str] | None = None
    service: str | None = None
    job: str | None = None
    repeat: bool = False
    drop_remainder: bool = False
    deterministic: bool = True
    as_supervised: tuple[str, ...] | None = None
    seeds: _Seeds | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None and not _is_count(self.batch_size):
            raise OptionError(f"batch_size is {self.batch_size!r}; want an int, 1 or more, or None for single samples")
        if not isinstance(self.shuffle, bool) and not _is_count(self.shuffle):
            raise OptionError(f"shuffle is {self.shuffle!r}; want True, False or the size of the window")
        if self.snapshot is not None and (isinstance(self.snapshot, bool) or not self.snapshot):
            raise OptionError(f"snapshot is {self.snapshot!r}; want the path of a folder")
        if self.static_transform is not None and wants_arrays(self.static_transform):
            raise OptionError(
                "static_transform is traced by TensorFlow and wants a function of the sample alone, as what it returns "
                "is the same in each epoch; pass an albumentations pipeline or a callable (sample, rng) as transform"
            )
        self._check_service()

    def _check_service(self) -> None:
        if self.service is None:
            if self.job is not None:
                raise OptionError(f"job is {self.job!r} but there is no service; give service='grpc://HOST:PORT', too")
            return
        check_address(self.service)
        if self.job is not None and (not isinstance(self.job, str) or not self.job):
            raise OptionError(f"job is {self.job!r}; want a name, or None")
        if self.keeps_samples:
            raise OptionError(
                "service together with cache or snapshot: each worker would keep its share of the first epoch and "
                "repeat it in the others, so some records would come twice and others never; drop cache and snapshot"
            )

    @property
    def window(self) -> int:
        """Number of records in the shuffle buffer; 0 for no shuffling."""
        return _SHUFFLE_WINDOW * self.shuffle if isinstance(self.shuffle, bool) else self.shuffle

    @property
    def keeps_samples(self) -> bool:
        """Whether decoded samples are kept for the next epoch."""
        return bool(self.cache or self.snapshot)

    @property
    def makes_batches(self) -> bool:
        """Whether several samples make a batch."""
        return self.batch_size is not None and self.batch_size > 1

    @property
    def stacks_samples(self) -> bool:
        """Whether samples are stacked as they are read."""
        return self.transform is None and self.static_transform is None

    @property
    def in_whole_batches(self) -> bool:
        """Whether no step works on single samples."""
        per_sample = self.transform or self.static_transform or self.keeps_samples
        return self.batch_size is not None and not per_sample


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def check_form(form: Form, options: ReadOptions, world_size: int | None) -> None:
    """Raise `OptionError` where batches that Python plans are asked for together with steps of TensorFlow.

    Args:
        form: what becomes of sequences in batches.
        options: all other arguments of `to_tf`.
        world_size: number of ranks; None for a program that trains alone.
    """
    planned = {name: getattr(form, name) for name in ("pack", "bucket", "pad", "collate_fn")}
    planned["world_size"] = world_size
    name = next((name for name, value in planned.items() if value is not None), None)
    if name is None:
        return
    if world_size is not None and not options.deterministic:
        raise OptionError(
            "deterministic=False together with world_size: all ranks are at one place of the same order, where any of "
            "their checkpoints resumes; leave deterministic out"
        )
    if options.static_transform is not None:
        raise OptionError(
            f"static_transform together with {name}: TensorFlow traces the one, and Python plans the other before it; "
            "give the function to map, which Python calls, or to the map of what to_tf returns"
        )
    if options.keeps_samples:
        raise OptionError(
            f"cache or snapshot together with {name}: they keep samples, which Python puts together in another way in "
            "each epoch; keep the batches of one epoch by to_tf(...).cache(), or encoded records by load(cache=BYTES)"
        )


def make_dataset(source: TfSource, options: ReadOptions) -> Any:
    """Return the records of a source as a `tf.data.Dataset` of dicts by feature name.

    Args:
        source: shards to read, with their format and features.
        options: order, batches, transform and threads of the reading.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        OptionError: a service cannot read the format, cannot run the transform, or does not answer.
    """
    tf = tensorflow()
    free_iterators_at_exit()  # for every dataset: transforms that are traced may call Python, too
    if options.service is not None:
        _check_for_service(source)
    calls_python = not source.is_native or isinstance(options.transform, SampleTransform)
    if options.service is None and (options.window or calls_python):  # a generator stays in this process
        options = dataclasses.replace(options, seeds=_Seeds(tf, options.seed))
    if source.is_planned or (options.in_whole_batches and _in_blocks(source, options)):
        dataset = _batches(tf, source, options)
    else:
        dataset = _batched(tf, _samples(tf, source, options), source, options)
    if options.as_supervised is not None:
        names = options.as_supervised
        dataset = dataset.map(_verbatim(tf, lambda sample: tuple(chosen_fields(sample, names).values())))
    if options.service is not None:
        dataset = distribute(dataset, options.service, options.job or _job_name(source, options))
        if options.repeat:
            dataset = dataset.repeat()
    dataset = _untuned(tf, dataset).prefetch(_WAITING)
    if options.seeds is not None and not options.repeat:
        dataset = _untuned(tf, options.seeds.saved_with(dataset))
    if source.has_ranks:
        dataset = _symbolic(tf, dataset)
    reason = _not_saved(options)
    return dataset if reason is None else _refusing_checkpoints(tf, dataset, reason)


def _untuned(tf: Any, dataset: Any) -> Any:
    # With the autotuner of TensorFlow 2.21, every other epoch of 3.4 s took 5.2 s: the end of an iterator waits for the
    # tuner's thread, which seems to sleep twice as long each time.
    without_tuner = tf.data.Options()
    without_tuner.autotune.enabled = False
    return dataset.with_options(without_tuner)


def _symbolic(tf: Any, dataset: Any) -> Any:
    """Return a dataset whose checkpoints hold positions, and no batch that waits: also in steps that users add."""
    positions_only = tf.data.Options()
    positions_only.experimental_symbolic_checkpoint = True
    return dataset.with_options(positions_only)


def _check_for_service(source: TfSource) -> None:
    """Raise `OptionError` where the workers of a service cannot read the records."""
    if source.skips_damage:
        raise OptionError("a service cannot skip damaged records; load with errors='raise', or read without a service")
    if not source.has_paths:
        raise OptionError(
            f"the workers of a service open the shards themselves, and {next(iter(source.files), 'these')} "
            "has no path on this machine; copy the directory to a disk that they share, or read without a service"
        )
    if source.is_planned:
        raise OptionError(
            "the workers of a service have no Python, which plans pad, bucket, pack, collate_fn and ranks; read these "
            "without a service, whose consumers share each epoch in any case"
        )
    if source.is_mapped or not source.is_whole:
        raise OptionError(
            "the workers of a service read whole shards without Python; read what map, select, filter, take, shard and "
            "mix return without a service, or write it to a directory of its own"
        )
    if not source.is_native:
        raise OptionError(
            f"the workers of a service read {' and '.join(_COMPRESSION)}; these shards are {source.format_name}, which "
            "needs Python; convert them: datamat convert DIR --format tfrecord"
        )
    needs_python = [name for name, field in tf_fields(source.features).items() if field.needs_python]
    if needs_python:
        raise OptionError(
            f"the workers of a service have no Python, which field {needs_python[0]!r} is decoded by; register a "
            f"function for {type(source.features[needs_python[0]]).__qualname__} with datamat.readers.tf.tf_field, or "
            "read without a service"
        )


def _job_name(source: TfSource, options: ReadOptions) -> str:
    """Return a name that all consumers derive alike if they read the same records in the same way."""
    cut = (source.identity, options.batch_size, options.shuffle, options.seed, options.drop_remainder)
    wanted = (*cut, options.as_supervised, options.static_transform, options.transform)
    try:
        return f"datamat-{fingerprint(wanted, where='transform')}"
    except FingerprintError as error:
        raise OptionError(
            f"no name for the job: {error}; or name it yourself, the same for all consumers: TfOptions(job='run-1')"
        ) from error


def _batches(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return the records in batches, each decoded as a whole."""
    size, drop = options.batch_size or 1, options.drop_remainder
    if source.is_native:
        return _decoded(tf, _record_blocks(tf, source, options, size), size, source, options)
    if source.is_planned:
        return _samples_repeated(_from_python(tf, source, options, options.batch_size, drops=drop), options)
    if source.skips_damage or options.repeat:  # fill up short batches in the middle
        samples = _from_python(tf, source, options, size, drops=False).unbatch()
        return _samples_repeated(samples, options).batch(size, drop_remainder=drop)
    return _from_python(tf, source, options, size, drops=drop)


def _samples(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return decoded samples, cached as asked, in the order of the epoch."""
    in_blocks = _in_blocks(source, options)
    if not source.is_native:
        size = _block_size(source.features) if in_blocks else None
        samples = _from_python(tf, source, options, size, drops=False, stacks=options.stacks_samples)
    elif in_blocks:
        once = dataclasses.replace(options, repeat=False, drop_remainder=False)
        size = _block_size(source.features)
        samples = _decoded(tf, _record_blocks(tf, source, once, size), size, source, options)
    else:
        records = _records(tf, source, options, 1)
        if not options.keeps_samples:
            records = _shuffled(tf, records, options)
        decode = _verbatim(tf, lambda record: decode_one(record, source.features))
        samples = records.map(decode, **_in_parallel(tf, options))
    if in_blocks:
        samples = samples.unbatch()
    if options.service is None and not source.skips_damage:
        samples = _counted(tf, samples, source.num_records)
    if options.static_transform is not None:
        samples = samples.map(options.static_transform, **_in_parallel(tf, options))
    return _shuffled(tf, _kept(tf, samples, source, options), options) if options.keeps_samples else samples


def _decoded(tf: Any, blocks: Any, size: int, source: TfSource, options: ReadOptions) -> Any:
    """Return the decoded values of blocks of `size` records."""
    if not pictures_of(source.features):
        decode = _verbatim(tf, lambda block: decode_many(block, source.features))
        return blocks.map(decode, **_in_parallel(tf, options))
    pictures = PictureDecoder(source.features)
    decode = _verbatim(tf, lambda block: decode_many(block, source.features, pictures.decode))
    num_calls = max(_BLOCKS_AT_WORK, 2 * num_cpus() // size)  # more blocks at once if they are small
    decoded = blocks.map(decode, num_parallel_calls=num_calls, deterministic=options.deterministic)
    pictures.keep_memory_with(decoded)
    return decoded


def _in_blocks(source: TfSource, options: ReadOptions) -> bool:
    """Return whether many records are decoded at once."""
    # Python's batches are taken apart where damaged records have left some of them short.
    stays_whole = options.in_whole_batches and (source.is_native or not (source.skips_damage or options.repeat))
    if source.is_mapped:
        return stays_whole
    fits = decodes_in_blocks(source.features) if stays_whole else is_fixed(source.features)
    # The workers of a service have only TensorFlow's decoders, which take one image.
    return fits and not (options.service is not None and pictures_of(source.features))


def _block_size(features: Features) -> int:
    """Return how many records are decoded at once where no batch size is set."""
    num_bytes: int = sum(spec.shape.num_elements() * max(1, spec.dtype.size) for spec in signature(features).values())
    return max(1, min(_BLOCK_RECORDS, _BLOCK_BYTES // num_bytes))


def _record_blocks(tf: Any, source: TfSource, options: ReadOptions, size: int) -> Any:
    """Return encoded records in blocks of `size`, shuffled unless decoded samples are, repeated as asked."""
    drop, is_shuffled = options.drop_remainder, bool(options.window) and not options.keeps_samples
    run = min(_RUN_RECORDS, _RUN_BYTES * source.num_records // max(source.num_bytes, 1))
    # Where records are shuffled, those of all files that are open have to meet in the window.
    share = options.window // min(_MOST_FILES_AT_ONCE, max(1, len(source.files)))
    run = max(1, min(run, share if options.window else size))
    if is_shuffled or run == 1:
        records = _records(tf, source, options, run)
        records = _repeated(_shuffled(tf, records, options) if is_shuffled else records, options)
        return records.batch(size, drop_remainder=drop)
    blocks = _repeated(_runs(tf, source, options, run), options).rebatch(size, drop_remainder=drop)
    if options.service is not None:
        return blocks
    whole, rest = divmod(source.num_records, size)
    return _counted(tf, blocks, tf.data.INFINITE_CARDINALITY if options.repeat else whole + bool(rest and not drop))


def _records(tf: Any, source: TfSource, options: ReadOptions, run: int) -> Any:
    """Return encoded records one by one."""
    runs = _runs(tf, source, options, run)
    records = runs.unbatch() if run > 1 else runs
    return _counted(tf, records, source.num_records) if options.service is None else records


def _runs(tf: Any, source: TfSource, options: ReadOptions, run: int) -> Any:
    """Return runs of encoded records: of one file after the other where the order counts, else of many in turn.

    One thread hands what it has read to another, which for a row takes longer than reading it: so it does that with
    many rows at a time.

    Args:
        tf: the imported module `tensorflow`.
        source: shards to read, with their format and features.
        options: order, batches, transform and threads of the reading.
        run: most records in a run; 1 for single records, without a dimension for the run.
    """
    # A service hands out file names one by one: to fill a shuffle buffer, one worker would take them all.
    is_local = options.service is None
    files = tf.data.Dataset.from_tensor_slices(
        (tf.constant(list(source.files), tf.string), tf.constant(list(source.files.values()), tf.int64))
    )
    if options.window and source.files and is_local:
        shuffled = _shuffled if not options.keeps_samples else _shuffled_once  # kept samples are shuffled themselves
        files = shuffled(tf, files, options, len(source.files))
    most = _MOST_FILES_AT_ONCE if is_local else _FILES_OF_A_WORKER

    def opened(name: Any, num_records: Any) -> Any:
        compression = _COMPRESSION[source.format_name]
        records = tf.data.TFRecordDataset(name, compression_type=compression, buffer_size=_BUFFER_BYTES)
        whole = guarded(records, name, num_records, source.explain if is_local else None)
        return whole.batch(run) if run > 1 else whole

    num_files = max(1, min(most, len(source.files))) if _is_mixed(options) else 1
    runs = files.interleave(
        _verbatim(tf, opened),
        cycle_length=num_files,
        num_parallel_calls=num_files,  # on few cores, too: slow disks and networks serve many at once
        deterministic=options.deterministic,
    )
    is_repeated = options.repeat and not options.keeps_samples
    return options.seeds.saved_beside(runs) if is_repeated and options.seeds is not None else runs


def _verbatim(tf: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ours that TensorFlow traces without AutoGraph, whose rewriting takes 0.2 s."""
    traced: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return traced


def _counted(tf: Any, dataset: Any, number: int) -> Any:
    """Return a dataset that knows its number of elements, and raises if another number comes, as of shards cut off."""
    return dataset.apply(tf.data.experimental.assert_cardinality(number))


def _kept(tf: Any, samples: Any, source: TfSource, options: ReadOptions) -> Any:
    if options.snapshot is not None:
        made_of = (source.identity, source.features.to_json(), _is_mixed(options), options.static_transform)
        samples = _snapshotted(samples, options.snapshot, fingerprint(made_of, where="static_transform"))
        samples = samples if source.skips_damage else _counted(tf, samples, source.num_records)
    if options.cache:
        samples = samples.cache("" if options.cache is True else os.fspath(options.cache))
    return samples


def _is_mixed(options: ReadOptions) -> bool:
    """Return whether records of several shards alternate."""
    return bool(options.window) or not options.deterministic


def _made_by(tf: Any, transform: SampleTransform, source: TfSource, options: ReadOptions) -> dict[str, _Layout]:
    """Return the layouts of what a transform returns that Python calls, as some samples show them."""
    features, nesting, found = source.features, source.features.nesting, []
    for sample in source.some_samples(_LOOKED_AT):
        changed = sample
        if options.static_transform is not None:
            tensors = {name: tf.constant(value) for name, value in as_one(sample, features).items()}
            result = nesting.split(options.static_transform(nesting.join_batch(tensors)))
            changed = as_read({name: tensor.numpy() for name, tensor in result.items()}, features)
        found.append(transform(dict(changed), 0))
    return _layouts(source, found, batches=options.makes_batches, stacks=True)


def _batched(tf: Any, samples: Any, source: TfSource, options: ReadOptions) -> Any:
    ragged: set[str] = {*ragged_names(source.features)}
    alike: set[str] = set()
    if source.is_mapped:
        layouts = _layouts(
            source, source.some_samples(_LOOKED_AT), batches=options.makes_batches, stacks=options.stacks_samples
        )
        ragged |= {name for name, one in layouts.items() if one.is_list}
    if not isinstance(options.transform, SampleTransform):
        before = samples.element_spec
        samples = _samples_repeated(samples, options)
        if options.transform is not None:
            samples = samples.map(options.transform, **_in_parallel(tf, options))
            differing, alike = _varying(tf, before, samples.element_spec, source, options)
            ragged |= differing
    elif source.num_records:
        layouts = _made_by(tf, options.transform, source, options)
        ragged |= {name for name, one in layouts.items() if one.is_list}
        call = _called_by_python(tf, options.transform, samples.element_spec, layouts, source.features)
        samples = _samples_repeated(_with_epochs(tf, samples, options), options)
        samples = samples.map(call, **_in_parallel(tf, options))
    if options.batch_size is None:
        return samples
    names = _open_names(tf, samples.element_spec, source.features, ragged)
    if options.transform is None and options.batch_size > 1:
        _refuse_sizes_that_differ(
            source, {*_open_names(tf, samples.element_spec, source.features, source.features)} - ragged
        )
    if not names and not alike:
        return samples.batch(options.batch_size, drop_remainder=options.drop_remainder)
    nesting = source.features.nesting
    specs = nesting.split(samples.element_spec)

    # Rows are ragged tensors of one row each: those batch, whatever the length of the row. What was of one size in all
    # samples that were looked at is batched as flat rows beside its sizes, so that another size is said to be one.
    def row(sample: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        flat = nesting.split(sample)
        rows = {name: _row(tf, flat[name]) for name in names}
        beside = {name: (_row(tf, tf.reshape(flat[name], [-1])), tf.shape(flat[name])) for name in sorted(alike)}
        return nesting.join_batch({**flat, **rows, **dict.fromkeys(alike, tf.constant(0))}), beside

    def merged(batch: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
        flat = nesting.split(batch)
        rows = {name: flat[name].merge_dims(0, 1) for name in names}
        stacks = {name: _of_one_size(tf, name, parts, specs[name].shape) for name, parts in beside.items()}
        return nesting.join_batch({**flat, **rows, **stacks})

    rows = samples.map(_verbatim(tf, row))
    return rows.batch(options.batch_size, drop_remainder=options.drop_remainder).map(_verbatim(tf, merged))


def _refuse_sizes_that_differ(source: TfSource, names: Collection[str]) -> None:
    """Raise `OptionError` where pictures that a batch is to stack differ in size, as some samples show."""
    seen: dict[str, tuple[tuple[int, ...], str]] = {}
    for sample in source.some_samples(_LOOKED_AT) if names else ():
        for name in sorted(names & sample.keys()):
            shape, key = np.shape(sample[name]), str(sample.get("key", ""))
            first, other = seen.setdefault(name, (shape, key))
            if shape != first:
                raise OptionError(
                    f"field {name!r} has {first} in sample {other!r} and {shape} in {key!r}, and a batch of TensorFlow "
                    "holds one size; resize or crop in transform=, or leave batch_size out, and batch with "
                    "ragged_batch. to_numpy and to_torch give lists"
                )


def _of_one_size(tf: Any, name: str, parts: tuple[Any, Any], shape: Any) -> Any:
    """Return the values of a batch as one tensor; the pipeline raises where they differ in size.

    Args:
        tf: the imported module `tensorflow`.
        name: name of the field, for the message.
        parts: the values, each flat, in a ragged tensor (batch_size, 1, None), and the size of each dimension of each,
            int32 (batch_size, rank).
        shape: what is known of the shape of one.
    """
    values, sizes = parts
    message = (
        f"transform returned {name!r} in sizes that differ within a batch, and in one size for the first {_LOOKED_AT} "
        "samples, by which batches are made; return one size (tf.image.resize, tf.pad), or leave batch_size out, and "
        "batch with padded_batch or ragged_batch"
    )
    check = tf.debugging.Assert(tf.reduce_all(sizes == sizes[:1]), [message, sizes], summarize=64)
    with tf.control_dependencies([check] if check is not None else []):
        stack = tf.reshape(values.flat_values, tf.concat([[tf.shape(sizes)[0]], sizes[0]], 0))
    return tf.ensure_shape(stack, [None, *shape])


def _open_names(tf: Any, spec: Any, features: Features, ragged: Collection[str]) -> list[str]:
    """Return the fields among `ragged` whose values are of any length: boxes, lists, tensors of open shape."""
    if not isinstance(spec, dict):
        return []
    spec = features.nesting.split(spec)
    found = [name for name in spec if name in ragged and isinstance(spec[name], tf.TensorSpec)]
    return [name for name in found if spec[name].shape.rank and not spec[name].shape.is_fully_defined()]


def _varying(tf: Any, before: Any, after: Any, source: TfSource, options: ReadOptions) -> tuple[set[str], set[str]]:
    """Return the new fields of open size of a transform that TensorFlow traces: of differing sizes, and of one size.

    The first samples show which they are.

    Args:
        tf: the imported module `tensorflow`.
        before: spec of the samples that it gets.
        after: spec of the samples that it returns.
        source: shards to read.
        options: the transform, and how records are read.
    """
    if not isinstance(after, dict) or options.batch_size in (None, 1) or options.service is not None:
        return set(), set()
    nesting = source.features.nesting
    known, found = nesting.split(before), nesting.split(after)
    every = {*source.features, *known}
    new = [name for name in _open_names(tf, after, source.features, found) if name not in every]
    if not new:
        return set(), set()
    apart = dataclasses.replace(options, shuffle=False, seeds=None, cache=False, snapshot=None, repeat=False)
    some = _samples(tf, source, apart).map(options.transform).take(_LOOKED_AT)
    shapes = [{name: tuple(nesting.split(sample)[name].shape) for name in new} for sample in some]
    differing = {name for name in new if len({one[name] for one in shapes}) > 1}
    return differing, {*new} - differing


def _row(tf: Any, value: Any) -> Any:
    last = max(place for place, size in enumerate(value.shape) if size is None)
    return tf.RaggedTensor.from_tensor(value[None], ragged_rank=last + 1)


def _shuffled(tf: Any, dataset: Any, options: ReadOptions, window: int | None = None) -> Any:
    if not options.window:
        return dataset
    window = options.window if window is None else window
    if options.seeds is not None:
        return options.seeds.shuffled(dataset, window)
    return _mixed(tf, dataset, window, options.seed)


def _shuffled_once(tf: Any, dataset: Any, options: ReadOptions, window: int) -> Any:
    return _mixed(tf, dataset, window, options.seed, reshuffles=False)


def _repeated(dataset: Any, options: ReadOptions) -> Any:
    return dataset.repeat() if options.repeat and options.service is None else dataset


def _samples_repeated(samples: Any, options: ReadOptions) -> Any:
    """Return samples repeated as asked, whose shuffle may end long before the last sample is taken."""
    if options.repeat and options.seeds is not None:
        samples = options.seeds.saved_beside(samples)
    return _repeated(samples, options)


def _in_parallel(tf: Any, options: ReadOptions) -> dict[str, Any]:
    # The workers of a service may have other cores, and have the autotuner.
    num_calls = _CALLS_PER_CORE * num_cpus() if options.service is None else tf.data.AUTOTUNE
    return {"num_parallel_calls": num_calls, "deterministic": options.deterministic}
