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
import itertools
import os
import pathlib
import stat
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.files import regular_path
from datamat.errors import CorruptDataError, FingerprintError, OptionError, SampleError
from datamat.fingerprint import fingerprint
from datamat.parallel.affinity import num_cpus
from datamat.readers.batches import chosen_fields
from datamat.readers.loader import keep_freed_pages_again, ragged_names
from datamat.readers.tf.decode import (
    PictureDecoder,
    as_block,
    as_one,
    as_read,
    block_signature,
    decode_many,
    decode_one,
    decodes_in_blocks,
    is_fixed,
    pictures_of,
    signature,
    tensorflow,
)
from datamat.readers.tf.exit import free_iterators_at_exit
from datamat.readers.tf.service import check_address, distribute
from datamat.transforms.adapters import needs_torch
from datamat.transforms.augmenter import SampleTransform, takes_arrays
from datamat.transforms.seeding import with_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from datamat.features import Features


__all__ = [
    "ReadOptions",
    "TfSource",
    "check_shard",
    "from_batches",
    "guarded",
    "make_dataset",
    "wants_arrays",
]

# ---------------------------------------------------------------- damaged records
#
# Damaged TFRecord shards raise an error that names file, record and key.
#
# TensorFlow's own error names none of them, and it takes a shard that is cut off between two records for a shorter one.


def check_shard(folder: pathlib.Path, name: str, num_bytes: int) -> None:
    """Refuse a shard that TensorFlow must not open, or whose size differs from the manifest's.

    TensorFlow would open a FIFO, a device or a link out of the directory by its name. It is never asked for records
    past the last one. One system call answers all that for an ordinary file, since a dataset may have 10,000.

    Args:
        folder: directory of the shard.
        name: file name of the shard.
        num_bytes: size of the shard in the manifest.

    Raises:
        CorruptDataError: the shard is no regular file, lies elsewhere, has another size, or is missing.
    """
    path = f"{folder}/{name}"
    try:
        state = os.lstat(path)
        if not stat.S_ISREG(state.st_mode) or "/" in name:
            state = os.stat(regular_path(folder, name))
        found = f"has {state.st_size} bytes" if state.st_size != num_bytes else ""
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    if found:
        raise CorruptDataError(
            f"{path} {found}, the manifest says {num_bytes}; remove the file and run the job again, which rebuilds it"
        )


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


@final
class _Seeds:
    """The generator that the shuffles of a pipeline share.

    Args:
        tf: the imported module `tensorflow`.
        seed: base seed.
    """

    def __init__(self, tf: Any, seed: int) -> None:
        self._tf = tf
        # Seeds 0 and 0 together would mean random ones.
        self._seeds = {"seed": np.int64(seed % _MOST_SEED), "seed2": np.int64(1 + seed // _MOST_SEED % _MOST_SEED)}
        self._generator, self._deleter = tf.raw_ops.AnonymousSeedGenerator(**self._seeds, reshuffle=True)

    def shuffled(self, dataset: Any, window: int) -> Any:
        """Return a dataset whose elements mix within a window, in another order in each iteration."""
        tf = self._tf
        variant = tf.raw_ops.ShuffleDatasetV3(
            input_dataset=tf.data.experimental.to_variant(dataset),
            buffer_size=np.int64(window),
            **self._seeds,
            seed_generator=self._generator,
            reshuffle_each_iteration=True,
            **dataset._flat_structure,
        )
        found = tf.data.experimental.from_variant(variant, dataset.element_spec)
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


_FIRST = np.int64(0)


def _not_saved(source: TfSource, options: ReadOptions) -> str | None:
    """Return why a checkpoint cannot hold the position in a pipeline, or None where it can."""
    if options.service is not None:
        return "the workers of the service hold the position in the epoch"
    if options.snapshot is not None:
        return "TensorFlow does not resume in the middle of a snapshot; drop snapshot"
    if isinstance(options.transform, SampleTransform):
        return (
            f"transform {type(options.transform).__qualname__} is called by Python; write it in TensorFlow operations"
        )
    if source.is_native:
        return None
    if source.format_name not in _COMPRESSION:
        return f"these shards are {source.format_name}, which Python reads; datamat convert DIR --format tfrecord"
    return "Python reads what comes from a URL, errors='skip', map, filter, select, take, shard, concat and mix"


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


# ---------------------------------------------------------------- samples from Python
#
# Passes what Python reads to `tf.data`: for formats that TensorFlow does not read, and files behind a URL.


def from_batches(
    read_epoch: Callable[[int, int | None, bool], Iterable[dict[str, Any]]],
    features: Features,
    batch_size: int | None,
    *,
    drop_last: bool,
) -> Any:
    """Return samples or batches as a `tf.data.Dataset`, with the next epoch in each iteration.

    Args:
        read_epoch: returns the batches of an epoch by its number, `batch_size` and `drop_last`.
        features: schema of the samples, which gives dtypes and shapes of the tensors.
        batch_size: most samples in each batch; None yields single samples.
        drop_last: whether to drop a last batch that is not full.
    """
    tf = tensorflow()
    free_iterators_at_exit()
    is_batched = batch_size is not None
    join = features.nesting.join_batch
    spec = join(block_signature(features, batch_size if drop_last else None) if is_batched else signature(features))
    numbers = itertools.count()

    # TensorFlow keeps this function for the life of the process, so no epoch may leave files, memory or threads in it.
    def epoch() -> Iterator[dict[str, Any]]:
        keep_freed_pages_again()
        for values in read_epoch(next(numbers), batch_size, drop_last):
            yield as_block(values, features) if is_batched else join(as_one(values, features))

    return tf.data.Dataset.from_generator(epoch, output_signature=spec)


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
    """Return whether a transform is called by Python with arrays; else TensorFlow traces it.

    Raises:
        OptionError: it computes with torch, which crashes the process in the threads of tf.data.
    """
    # Seen in gdb with torch 2.13, TensorFlow 2.21 and Python 3.11: TensorFlow's `PyFuncOp` ends the Python thread
    # state of its thread after each call. `PyGILState_Release` sets the state's counter to 0, then clears the
    # state, and so frees what `threading.local` holds: the augmenter's copy of the transform, in which kornia keeps
    # what it drew last. If a tensor there is a view, torch takes the GIL by pybind11 to free it: the counter goes
    # to 1 and back to 0, which deletes the state, and `PyGILState_Release` deletes it again. With one copy for all
    # threads, called under a lock, kornia did not crash; but any tensor that a library keeps for its thread would
    # have the same end.
    if needs_torch(transform):
        raise OptionError(
            f"transform {type(transform).__qualname__} computes with torch, which does not work in the threads of "
            "tf.data; pass it to to_torch, to_numpy or Materializer, or pass an albumentations pipeline here"
        )
    return takes_arrays(transform) or with_rng(transform) is not None


def _with_epochs(tf: Any, samples: Any) -> Any:
    """Return (sample, number of the epoch) of each sample: the next number in each iteration, from 0."""
    numbers = itertools.count()

    def next_epoch(_: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(lambda: np.int64(next(numbers)), [], tf.int64), ())

    endless = (
        tf.data.Dataset.from_tensors(0).map(next_epoch).flat_map(lambda n: tf.data.Dataset.from_tensors(n).repeat())
    )
    epochs = endless.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return tf.data.Dataset.zip((samples, epochs))


def _called_by_python(
    tf: Any, transform: SampleTransform, spec: Mapping[str, Any], first: dict[str, Any], features: Features
) -> Any:
    """Return a function of (sample, epoch) in tensors that has Python apply a transform.

    Args:
        tf: the imported module `tensorflow`.
        transform: applied to arrays; its results have the fields, dtypes and ranks that the first one has.
        spec: the `tf.TensorSpec` of each field of a sample.
        first: a sample to learn from what the transform returns.
        features: schema of the samples.
    """
    made = _as_arrays(transform(dict(first), 0), features)
    nesting, names = features.nesting, tuple(features.nesting.split(spec))
    types, shapes = _types_of(tf, made)

    def call(epoch: Any, *values: Any) -> list[Any]:
        sample = as_read(dict(zip(names, values, strict=True)), features)
        key = sample["key"]
        result = as_one(transform(sample, int(epoch)), features)
        _check_like(made, result, key)
        return [_as_tensor(result[name]) for name in made]

    def traced(sample: Mapping[str, Any], epoch: Any) -> dict[str, Any]:
        flat = nesting.split(sample)
        values = tf.numpy_function(call, [epoch, *(flat[name] for name in names)], list(types.values()))
        return nesting.join_batch(
            {name: tf.ensure_shape(value, shapes[name]) for name, value in zip(made, values, strict=True)}
        )

    return _verbatim(tf, traced)


def _mapped(tf: Any, source: TfSource) -> Any:
    """Return the samples that functions of `map` return, one by one: what they are is learned from the first one."""
    free_iterators_at_exit()
    features, numbers = source.features, itertools.count()
    join = features.nesting.join_batch
    made = _as_arrays(next(iter(source.read_epoch(0, None, False))), features)
    types, shapes = _types_of(tf, made)

    def epoch() -> Iterator[dict[str, Any]]:
        keep_freed_pages_again()
        for sample in source.read_epoch(next(numbers), None, False):
            result = as_one(sample, features)
            _check_like(made, result, sample["key"])
            yield join({name: _as_tensor(result[name]) for name in made})

    spec = join({name: tf.TensorSpec(shapes[name], types[name]) for name in made})
    return tf.data.Dataset.from_generator(epoch, output_signature=spec)


def _as_arrays(sample: Mapping[str, Any], features: Features) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in as_one(sample, features).items()}


def _types_of(tf: Any, made: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, list[int | None]]]:
    """Return the dtype and the shape that tensors like these arrays have.

    Sizes may change from sample to sample; channels do not, and layers of Keras must know them.
    """
    types = {name: tf.as_dtype("string" if array.dtype.kind in "US" else array.dtype) for name, array in made.items()}
    shapes: dict[str, list[int | None]] = {name: [None] * array.ndim for name, array in made.items()}
    for name, array in made.items():
        if array.ndim > 2:
            shapes[name][-1] = array.shape[-1]
    return types, shapes


def _check_like(made: Mapping[str, np.ndarray], result: Mapping[str, Any], key: str) -> None:
    """Refuse a sample whose fields, dtypes and ranks are not those of the first one."""
    found = {name: (np.asarray(value).dtype, np.ndim(value)) for name, value in result.items()}
    for name in {**made, **found}:
        wanted = (made[name].dtype, made[name].ndim) if name in made else None
        is_text = wanted is not None and wanted[0].kind in "US"
        if found.get(name) != wanted and not (is_text and name in found and found[name][0].kind in "US"):
            raise SampleError(
                key,
                f"the transform returned {name!r} as {_in_words(found.get(name))}, and {_in_words(wanted)} for the "
                "first sample; tf.data wants the same fields, dtypes and ranks for all",
            )


def _in_words(found: tuple[Any, int] | None) -> str:
    return "nothing" if found is None else f"{found[0]} of rank {found[1]}"


def _as_tensor(value: Any) -> np.ndarray:
    """Return a value as `tf.numpy_function` takes it, which refuses str beyond ASCII: text as bytes."""
    array = np.asarray(value, object if isinstance(value, bytes) else None)
    return np.vectorize(str.encode, otypes=[object])(array) if array.dtype.kind == "U" else array


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


@dataclasses.dataclass(frozen=True, slots=True)
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
        is_remote: whether the files lie behind a URL, which TensorFlow does not read.
        skips_damage: whether damaged records are skipped and counted, which TensorFlow does not do.
        explain: function of the path of a shard that returns its damage.
        read_epoch: returns the batches that Python reads in an epoch, by its number, batch_size and drop_last of
            `to_numpy`: in the order of the records if samples are kept, through files opened for this epoch alone.
    """

    files: Mapping[str, int]
    num_records: int
    num_bytes: int
    features: Features
    format_name: str
    identity: str
    is_whole: bool
    is_mapped: bool
    is_remote: bool
    skips_damage: bool
    explain: Callable[[str], Exception]
    read_epoch: Callable[[int, int | None, bool], Iterable[dict[str, Any]]]

    @property
    def is_native(self) -> bool:
        """Whether TensorFlow reads the shards itself."""
        is_ours = self.skips_damage or self.is_remote or self.is_mapped or not self.is_whole
        return self.format_name in _COMPRESSION and not is_ours


@dataclasses.dataclass(frozen=True, slots=True)
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
            raise OptionError(f"batch_size is {self.batch_size!r}; want 1 or more, or None for single samples")
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
    def in_whole_batches(self) -> bool:
        """Whether no step works on single samples."""
        per_sample = self.transform or self.static_transform or self.keeps_samples
        return self.batch_size is not None and not per_sample


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


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
    if options.service is not None:
        _check_for_service(source)
    if options.window and options.service is None:  # a generator stays in this process
        options = dataclasses.replace(options, seeds=_Seeds(tf, options.seed))
    if options.in_whole_batches and _in_blocks(source, options):
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
    reason = _not_saved(source, options)
    return dataset if reason is None else _refusing_checkpoints(tf, dataset, reason)


def _untuned(tf: Any, dataset: Any) -> Any:
    # With the autotuner of TensorFlow 2.21, every other epoch of 3.4 s took 5.2 s: the end of an iterator waits for the
    # tuner's thread, which seems to sleep twice as long each time.
    without_tuner = tf.data.Options()
    without_tuner.autotune.enabled = False
    return dataset.with_options(without_tuner)


def _check_for_service(source: TfSource) -> None:
    """Raise `OptionError` where the workers of a service cannot read the records."""
    if source.skips_damage:
        raise OptionError("a service cannot skip damaged records; load with errors='raise', or read without a service")
    if source.is_remote:
        raise OptionError(
            f"the workers of a service open the shards themselves, and {next(iter(source.files), 'these')} "
            "lies behind a URL; copy the directory to a disk that they share, or read without a service"
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
    needs_python = [name for name, feature in source.features.items() if not feature.decodes_in_graph()]
    if needs_python:
        raise OptionError(
            f"the workers of a service have no Python, which field {needs_python[0]!r} is decoded by; write decode_tf "
            f"in {type(source.features[needs_python[0]]).__qualname__}, or read without a service"
        )


def _job_name(source: TfSource, options: ReadOptions) -> str:
    """Return a name that all consumers derive alike if they read the same records in the same way."""
    cut = (source.identity, options.batch_size, options.shuffle, options.seed, options.drop_remainder)
    wanted = (*cut, options.as_supervised, options.static_transform, options.transform)
    try:
        return f"datamat-{fingerprint(wanted, where='transform')}"
    except FingerprintError as error:
        raise OptionError(
            f"no name for the job: {error}; or name it yourself, the same for all consumers: to_tf(job='run-1')"
        ) from error


def _batches(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return the records in batches, each decoded as a whole."""
    size, drop = options.batch_size or 1, options.drop_remainder
    if source.is_native:
        return _decoded(tf, _record_blocks(tf, source, options, size), size, source, options)
    if source.skips_damage or options.repeat:  # fill up short batches in the middle
        samples = from_batches(source.read_epoch, source.features, size, drop_last=False).unbatch()
        return _repeated(samples, options).batch(size, drop_remainder=drop)
    whole, rest = divmod(source.num_records, size)
    batches = from_batches(source.read_epoch, source.features, size, drop_last=drop)
    return _counted(tf, batches, whole + bool(rest and not drop))


def _samples(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return decoded samples, cached as asked, in the order of the epoch."""
    in_blocks = _in_blocks(source, options)
    if source.is_mapped and source.num_records:
        samples = _mapped(tf, source)
    elif not source.is_native:
        size = _block_size(source.features) if in_blocks else None
        samples = from_batches(source.read_epoch, source.features, size, drop_last=False)
    elif in_blocks:
        once = dataclasses.replace(options, repeat=False, drop_remainder=False)
        size = _block_size(source.features)
        samples = _decoded(tf, _record_blocks(tf, source, once, size), size, source, options)
    else:
        records = _records(tf, source, options, 1)
        if not options.keeps_samples:
            records = _shuffled(records, options)
        decode = _verbatim(tf, lambda record: decode_one(record, source.features))
        samples = records.map(decode, **_in_parallel(tf, options))
    if in_blocks:
        samples = samples.unbatch()
    if options.service is None and not source.skips_damage:
        samples = _counted(tf, samples, source.num_records)
    if options.static_transform is not None:
        samples = samples.map(options.static_transform, **_in_parallel(tf, options))
    return _shuffled(_kept(tf, samples, source, options), options) if options.keeps_samples else samples


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
    if source.is_mapped:
        return False
    stays_whole = options.in_whole_batches and (source.is_native or not (source.skips_damage or options.repeat))
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
        records = _repeated(_shuffled(records, options) if is_shuffled else records, options)
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
        files = shuffled(files, options, len(source.files))
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
    return options.seeds.saved_beside(runs) if options.repeat and options.seeds is not None else runs


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


def _first_sample(tf: Any, source: TfSource, options: ReadOptions) -> dict[str, Any]:
    """Return a sample in arrays, as it reaches the transform."""
    samples = iter(source.read_epoch(0, None, False))
    sample = next(samples)
    del samples
    if options.static_transform is None:
        return sample
    features, nesting = source.features, source.features.nesting
    tensors = {name: tf.constant(value) for name, value in as_one(sample, features).items()}
    found = options.static_transform(nesting.join_batch(tensors))
    return as_read({name: tensor.numpy() for name, tensor in nesting.split(found).items()}, features)


def _batched(tf: Any, samples: Any, source: TfSource, options: ReadOptions) -> Any:
    if not isinstance(options.transform, SampleTransform):
        samples = _samples_repeated(samples, options)
        if options.transform is not None:
            samples = samples.map(options.transform, **_in_parallel(tf, options))
    elif source.num_records:
        first = _first_sample(tf, source, options)
        call = _called_by_python(tf, options.transform, samples.element_spec, first, source.features)
        samples = _samples_repeated(_with_epochs(tf, samples), options).map(call, **_in_parallel(tf, options))
    if options.batch_size is None:
        return samples
    names = _open_names(tf, samples.element_spec, source.features)
    if not names:
        return samples.batch(options.batch_size, drop_remainder=options.drop_remainder)
    nesting = source.features.nesting

    def each(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def changed(sample: Mapping[str, Any]) -> dict[str, Any]:
            flat = nesting.split(sample)
            return nesting.join_batch({**flat, **{name: function(flat[name]) for name in names}})

        return changed

    # A ragged tensor of one row each: those batch, whatever the length of the row.
    rows = samples.map(_verbatim(tf, each(lambda value: _row(tf, value))))
    batches = rows.batch(options.batch_size, drop_remainder=options.drop_remainder)
    return batches.map(_verbatim(tf, each(lambda value: value.merge_dims(0, 1))))


def _open_names(tf: Any, spec: Any, features: Features) -> list[str]:
    """Return the fields whose values are of any length: boxes, lists, tensors of open shape."""
    if not isinstance(spec, dict):
        return []
    spec = features.nesting.split(spec)
    found = [name for name in spec if name in ragged_names(features) and isinstance(spec[name], tf.TensorSpec)]
    return [name for name in found if spec[name].shape.rank and not spec[name].shape.is_fully_defined()]


def _row(tf: Any, value: Any) -> Any:
    last = max(place for place, size in enumerate(value.shape) if size is None)
    return tf.RaggedTensor.from_tensor(value[None], ragged_rank=last + 1)


def _shuffled(dataset: Any, options: ReadOptions, window: int | None = None) -> Any:
    if not options.window:
        return dataset
    window = options.window if window is None else window
    if options.seeds is not None:
        return options.seeds.shuffled(dataset, window)
    return dataset.shuffle(window, seed=options.seed, reshuffle_each_iteration=True)


def _shuffled_once(dataset: Any, options: ReadOptions, window: int) -> Any:
    return dataset.shuffle(window, seed=options.seed, reshuffle_each_iteration=False)


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
