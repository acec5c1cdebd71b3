"""`to_tf`: finished shards as a `tf.data.Dataset`.

    plain        files ── interleave ── shuffle ── batch ── decode ── prefetch
    transformed  files ── interleave ── shuffle ── block ── decode ── unbatch ── transform ── batch ── prefetch
    kept         ... ── unbatch ── static transform ── snapshot, cache ── shuffle ── transform ── batch ── prefetch
    a service    the same in its workers ── over the network ── prefetch

Records are decoded many at once, a batch or a block of them: `tf.io.parse_example`, and datamat's decoders for pictures
(`tf_pictures`), which give the pixels of TensorFlow's in less time. One by one, and by TensorFlow alone, are decoded
records whose values are of any length, and pictures in the workers of a service.

What is shuffled is encoded records, a tenth of the memory of pixels, unless samples are kept decoded: then what is kept
is shuffled anew in each epoch. TFRecord is read by TensorFlow itself; all other formats, and what lies behind a URL,
by `ShardedDataset.to_numpy`, in threads of this process, and handed over in batches or blocks (`tf_handed`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import FingerprintError, OptionError
from datamat.fingerprint import fingerprint
from datamat.readers.collate import ragged_names
from datamat.readers.service import check_address, distribute
from datamat.readers.tf_damage import guarded
from datamat.readers.tf_features import decode_many, decode_one, is_fixed, signature, tensorflow
from datamat.readers.tf_handed import handed_over
from datamat.readers.tf_pictures import PictureDecoder, pictures_of
from datamat.readers.tf_snapshot import snapshotted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from datamat.features import Features

__all__ = ["ReadOptions", "TfSource", "make_dataset"]

_SHUFFLE_WINDOW = 1024
_MOST_FILES_AT_ONCE = 16
_CALLS_PER_CORE = 4  # with one, 1.91 of 2 cores were busy, with four 1.95
_BLOCKS_AT_WORK = 2  # of pictures, each decoded by all cores
_BLOCK_RECORDS = 32
_BLOCK_BYTES = 16 << 20
_FILES_OF_A_WORKER = 2  # of a service: the files that one has opened are not for the others
_WAITING = 2  # batches; what waits here is lost to the other consumers of a service
_BUFFER_BYTES = 1 << 20
_COMPRESSION = {"tfrecord": "", "tfrecord.gz": "GZIP"}


@dataclasses.dataclass(frozen=True, slots=True)
class TfSource:
    """What is read.

    Args:
        files: number of records of each shard, by its path.
        features: their schema.
        format_name: of the shards.
        identity: what changes when any record does.
        is_remote: whether the files lie behind a URL, which TensorFlow does not read.
        skips_damage: whether damaged records are left out and counted, which TensorFlow does not do.
        explain: returns what is wrong with a shard, by its path.
        read: returns what Python reads in an epoch, by its number, batch_size and drop_last as of `to_numpy`: in the
            order of the records if samples are kept, through files opened for it alone.
    """

    files: Mapping[str, int]
    features: Features
    format_name: str
    identity: str
    is_remote: bool
    skips_damage: bool
    explain: Callable[[str], Exception]
    read: Callable[[int, int | None, bool], Iterable[dict[str, Any]]]

    @property
    def num_records(self) -> int:
        """In all shards."""
        return sum(self.files.values())

    @property
    def is_native(self) -> bool:
        """Whether TensorFlow reads the shards itself."""
        return self.format_name in _COMPRESSION and not self.skips_damage and not self.is_remote


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    """The arguments of `ShardedDataset.to_tf`, checked.

    Raises:
        OptionError: one makes no sense, or not with another.
    """

    batch_size: int | None = None
    shuffle: bool | int = False
    seed: int | None = None
    transform: Callable[[Any], Any] | None = None
    static_transform: Callable[[Any], Any] | None = None
    cache: bool | str | os.PathLike[str] = False
    snapshot: str | os.PathLike[str] | None = None
    service: str | None = None
    job: str | None = None
    repeat: bool = False
    drop_remainder: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.batch_size is not None and not _is_count(self.batch_size):
            raise OptionError(f"batch_size is {self.batch_size!r}; want 1 or more, or None for single samples")
        if not isinstance(self.shuffle, bool) and not _is_count(self.shuffle):
            raise OptionError(f"shuffle is {self.shuffle!r}; want True, False or the size of the window")
        if self.snapshot is not None and (isinstance(self.snapshot, bool) or not self.snapshot):
            raise OptionError(f"snapshot is {self.snapshot!r}; want the path of a folder")
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
                "service together with cache or snapshot: each worker would keep the share of its first epoch and give "
                "it again in all others, records twice and records never; leave out cache and snapshot"
            )

    @property
    def window(self) -> int:
        """Records that are shuffled among each other; 0 for none."""
        return _SHUFFLE_WINDOW * self.shuffle if isinstance(self.shuffle, bool) else self.shuffle

    @property
    def keeps_samples(self) -> bool:
        """Whether decoded samples are kept for the next epoch."""
        return bool(self.cache or self.snapshot)

    @property
    def in_whole_batches(self) -> bool:
        """Whether nothing is done with single samples."""
        per_sample = self.transform or self.static_transform or self.keeps_samples
        return self.batch_size is not None and not per_sample


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def make_dataset(source: TfSource, options: ReadOptions) -> Any:
    """Return the records of a source as a `tf.data.Dataset` of dicts by feature name.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        OptionError: a service cannot read the format, cannot run the transform, or does not answer.
    """
    tf = tensorflow()
    if options.service is not None and source.skips_damage:
        raise OptionError("a service cannot leave damaged records out; load with errors='raise', or read without one")
    if options.service is not None and source.is_remote:
        raise OptionError(
            f"the workers of a service open the shards themselves, and {next(iter(source.files), 'these')} "
            "lies behind a URL; copy the directory to a disk that they share, or read without a service"
        )
    if options.service is not None and not source.is_native:
        raise OptionError(
            f"the workers of a service read {' and '.join(_COMPRESSION)}; these shards are {source.format_name}, which "
            "needs Python; convert them: datamat convert DIR --format tfrecord"
        )
    if options.in_whole_batches and _in_blocks(source, options):
        dataset = _batches(tf, source, options)
    else:
        dataset = _batched(tf, _samples(tf, source, options), source.features, options)
    if options.service is not None:
        dataset = distribute(dataset, options.service, options.job or _job_name(source, options))
        if options.repeat:
            dataset = dataset.repeat()
    # With the autotuner of TensorFlow 2.21 every other epoch of 3.4 s took 5.2 s: the end of an iterator waits for its
    # thread, which seems to sleep twice as long each time.
    without_tuner = tf.data.Options()
    without_tuner.autotune.enabled = False
    return dataset.with_options(without_tuner).prefetch(_WAITING)


def _job_name(source: TfSource, options: ReadOptions) -> str:
    """Return a name that all consumers who want the same of the same records come to by themselves."""
    cut = (source.identity, options.batch_size, options.shuffle, options.seed, options.drop_remainder)
    wanted = (*cut, options.static_transform, options.transform)
    try:
        return f"datamat-{fingerprint(wanted, where='transform')}"
    except FingerprintError as error:
        raise OptionError(
            f"no name for the job: {error}; or name it, alike for all consumers: to_tf(job='run-1')"
        ) from error


def _batches(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return whole batches, each decoded at once."""
    size, drop = options.batch_size or 1, options.drop_remainder
    if source.is_native:
        records = _repeated(_shuffled(_records(tf, source, options), options), options)
        return _decoded(tf, records.batch(size, drop_remainder=drop), size, source, options)
    if source.skips_damage or options.repeat:  # short batches in the middle are filled up
        samples = handed_over(source.read, source.features, size, drop_last=False).unbatch()
        return _repeated(samples, options).batch(size, drop_remainder=drop)
    whole, rest = divmod(source.num_records, size)
    batches = handed_over(source.read, source.features, size, drop_last=drop)
    return _counted(tf, batches, whole + bool(rest and not drop))


def _samples(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return decoded samples, what is kept of them kept, in the order of the epoch."""
    in_blocks = _in_blocks(source, options)
    if not source.is_native:
        size = _block_size(source.features) if in_blocks else None
        samples = handed_over(source.read, source.features, size, drop_last=False)
    else:
        records = _records(tf, source, options)
        if not options.keeps_samples:
            records = _shuffled(records, options)
        if in_blocks:
            size = _block_size(source.features)
            samples = _decoded(tf, records.batch(size), size, source, options)
        else:
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
    """Return the values of blocks of `size` records."""
    if not pictures_of(source.features):
        decode = _verbatim(tf, lambda block: decode_many(block, source.features))
        return blocks.map(decode, **_in_parallel(tf, options))
    pictures = PictureDecoder(source.features)
    decode = _verbatim(tf, lambda block: decode_many(block, source.features, pictures.decode))
    num_calls = max(_BLOCKS_AT_WORK, 2 * len(os.sched_getaffinity(0)) // size)  # of few records, more at a time
    decoded = blocks.map(decode, num_parallel_calls=num_calls, deterministic=options.deterministic)
    pictures.keep_memory_with(decoded)
    return decoded


def _in_blocks(source: TfSource, options: ReadOptions) -> bool:
    """Tell whether many records are decoded at once."""
    # The workers of a service have TensorFlow's decoders only, which take one picture.
    return is_fixed(source.features) and not (options.service is not None and pictures_of(source.features))


def _block_size(features: Features) -> int:
    """Return how many records are decoded at once where no batch size is given."""
    num_bytes: int = sum(spec.shape.num_elements() * max(1, spec.dtype.size) for spec in signature(features).values())
    return max(1, min(_BLOCK_RECORDS, _BLOCK_BYTES // num_bytes))


def _records(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return encoded records: of one file at a time where the order counts, else of many by turns."""
    # A service hands out the names of files one by one: to fill a window, one worker would take them all.
    is_local = options.service is None
    files = tf.data.Dataset.from_tensor_slices(
        (tf.constant(list(source.files), tf.string), tf.constant(list(source.files.values()), tf.int64))
    )
    if options.window and source.files and is_local:
        files = files.shuffle(len(source.files), seed=options.seed, reshuffle_each_iteration=True)
    most = _MOST_FILES_AT_ONCE if is_local else _FILES_OF_A_WORKER

    def opened(name: Any, num_records: Any) -> Any:
        compression = _COMPRESSION[source.format_name]
        records = tf.data.TFRecordDataset(name, compression_type=compression, buffer_size=_BUFFER_BYTES)
        return guarded(records, name, num_records, source.explain if is_local else None)

    num_files = max(1, min(most, len(source.files))) if _is_mixed(options) else 1
    records = files.interleave(
        _verbatim(tf, opened),
        cycle_length=num_files,
        num_parallel_calls=num_files,  # also on few cores: slow disks and networks answer many at once
        deterministic=options.deterministic,
    )
    return _counted(tf, records, source.num_records) if is_local else records


def _verbatim(tf: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ours as TensorFlow is to trace it: to rewrite its loops and branches takes 0.2 s."""
    traced: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return traced


def _counted(tf: Any, dataset: Any, number: int) -> Any:
    """Return a data set that knows how many elements it has, and raises if others come: of shards cut off, too."""
    return dataset.apply(tf.data.experimental.assert_cardinality(number))


def _kept(tf: Any, samples: Any, source: TfSource, options: ReadOptions) -> Any:
    if options.snapshot is not None:
        made_of = (source.identity, source.features.to_json(), _is_mixed(options), options.static_transform)
        samples = snapshotted(samples, options.snapshot, fingerprint(made_of, where="static_transform"))
        samples = samples if source.skips_damage else _counted(tf, samples, source.num_records)
    if options.cache:
        samples = samples.cache("" if options.cache is True else os.fspath(options.cache))
    return samples


def _is_mixed(options: ReadOptions) -> bool:
    """Tell whether records of several shards come by turns."""
    return bool(options.window) or not options.deterministic


def _batched(tf: Any, samples: Any, features: Features, options: ReadOptions) -> Any:
    samples = _repeated(samples, options)
    if options.transform is not None:
        samples = samples.map(options.transform, **_in_parallel(tf, options))
    if options.batch_size is None:
        return samples
    names = _open_names(tf, samples.element_spec, features)
    if not names:
        return samples.batch(options.batch_size, drop_remainder=options.drop_remainder)
    # A ragged tensor of one row each: those batch, whatever the length of the row.
    rows = samples.map(lambda sample: {**sample, **{name: _row(tf, sample[name]) for name in names}})
    batches = rows.batch(options.batch_size, drop_remainder=options.drop_remainder)
    return batches.map(lambda batch: {**batch, **{name: batch[name].merge_dims(0, 1) for name in names}})


def _open_names(tf: Any, spec: Any, features: Features) -> list[str]:
    """Return the fields whose values are of any length: boxes, lists, tensors of open shape."""
    if not isinstance(spec, dict):
        return []
    found = [name for name in spec if name in ragged_names(features) and isinstance(spec[name], tf.TensorSpec)]
    return [name for name in found if spec[name].shape.rank and not spec[name].shape.is_fully_defined()]


def _row(tf: Any, value: Any) -> Any:
    last = max(place for place, size in enumerate(value.shape) if size is None)
    return tf.RaggedTensor.from_tensor(value[None], ragged_rank=last + 1)


def _shuffled(dataset: Any, options: ReadOptions) -> Any:
    if not options.window:
        return dataset
    return dataset.shuffle(options.window, seed=options.seed, reshuffle_each_iteration=True)


def _repeated(dataset: Any, options: ReadOptions) -> Any:
    return dataset.repeat() if options.repeat and options.service is None else dataset


def _in_parallel(tf: Any, options: ReadOptions) -> dict[str, Any]:
    # The workers of a service may have other cores, and have the autotuner.
    num_calls = _CALLS_PER_CORE * len(os.sched_getaffinity(0)) if options.service is None else tf.data.AUTOTUNE
    return {"num_parallel_calls": num_calls, "deterministic": options.deterministic}
