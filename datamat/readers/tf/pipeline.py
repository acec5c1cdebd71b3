"""Implements `to_tf`: finished shards as a `tf.data.Dataset`.

    plain        files ── interleave ── shuffle ── batch ── decode ── prefetch
    transformed  files ── interleave ── shuffle ── block ── decode ── unbatch ── transform ── batch ── prefetch
    kept         ... ── unbatch ── static transform ── snapshot, cache ── shuffle ── transform ── batch ── prefetch
    a service    the same in its workers ── over the network ── prefetch

Records are decoded many at a time, in batches or blocks: by `tf.io.parse_example`, and images by datamat's decoders
(`decode`), which give the same pixels as TensorFlow's in less time. TensorFlow alone, one record at a time, decodes
records whose values vary in more than their length, lists in steps that work on single samples, and images in the
workers of a service.

The shuffle buffer holds encoded records, which take a tenth of the memory of pixels; if decoded samples are kept, it
shuffles those again in each epoch. TensorFlow itself reads TFRecord; all other formats, and files behind a URL, are
read by `ShardedDataset.to_numpy` in threads of this process and passed on in batches or blocks (below).
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import FingerprintError, OptionError
from datamat.fingerprint import fingerprint
from datamat.parallel.affinity import num_cpus
from datamat.readers.batches import chosen_fields
from datamat.readers.loader import ragged_names
from datamat.readers.tf.decode import (
    PictureDecoder,
    decode_many,
    decode_one,
    decodes_in_blocks,
    is_fixed,
    pictures_of,
    signature,
    tensorflow,
)
from datamat.readers.tf.exit import free_iterators_at_exit
from datamat.readers.tf.fields import tf_fields
from datamat.readers.tf.service import distribute
from datamat.transforms.augmenter import SampleTransform

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from datamat.features import Features
from datamat.readers.tf.from_python import (
    BLOCKS_AT_WORK,
    LOOKED_AT,
    called_by_python,
    from_python,
    learn_layouts,
    made_by,
    with_epochs,
)
from datamat.readers.tf.graph import counted, symbolic, untuned, verbatim
from datamat.readers.tf.shuffling import Seeds, mixed, refusing_checkpoints
from datamat.readers.tf.snapshots import snapshotted
from datamat.readers.tf.source import COMPRESSION, ReadOptions, TfSource

# ---------------------------------------------------------------- damaged records
#
# Damaged TFRecord shards raise an error that names file, record and key.
#
# TensorFlow's own error names none of them, and it accepts a shard truncated between two records as a shorter one.


def guarded(records: Any, name: Any, num_records: Any, explain: Callable[[str], Exception] | None) -> Any:
    """Return the records of one shard, followed by an error with the reason if there are too few.

    Args:
        records: `tf.data.Dataset` of the encoded records of one shard.
        name: string tensor (), path of the shard.
        num_records: int64 tensor (), number of records in the manifest.
        explain: function of a shard's path that returns what is wrong with it; None without Python, as in a service,
            where the error only names the file.
    """
    tf = tensorflow()

    def fail(path: Any) -> Any:
        if explain is not None:
            reason = tf.numpy_function(
                lambda found: _raise(explain(os.fsdecode(found))), [path], tf.string, stateful=False
            )
            return tf.ensure_shape(reason, ())
        message = [path, "is damaged; run datamat verify on its directory to find the record"]
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(path, ""), message)]):
            return tf.identity(path)

    # Evaluated only if the shard has too few records, after those records, except for a block that is not full.
    error = tf.data.Dataset.from_tensors(name).map(verbatim(tf, fail))
    return records.ignore_errors().concatenate(error).take(num_records)


def _raise(error: Exception) -> None:
    raise error


_MOST_FILES_AT_ONCE = 16
_CALLS_PER_CORE = 4  # with one, 1.91 of 2 cores were busy, with four 1.95
_BLOCK_RECORDS = 32
_BLOCK_BYTES = 16 << 20
_FILES_OF_A_WORKER = 2  # of a service: a file opened by one worker goes to no other
_WAITING = 2  # batches; other consumers of a service do not get batches that wait here
_BUFFER_BYTES = 1 << 20
_RUN_RECORDS, _RUN_BYTES = 256, 512 << 10  # small records that one thread passes to another at a time


def make_dataset(source: TfSource, options: ReadOptions) -> Any:
    """Return the records of a source as a `tf.data.Dataset` of dicts by feature name.

    Args:
        source: shards to read, with their format and features.
        options: order, batches, transform and threads.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        OptionError: a service cannot read the format, cannot run the transform, or does not answer.
    """
    tf = tensorflow()
    free_iterators_at_exit()  # for every dataset, as traced transforms may call Python, too
    if options.service is not None:
        _check_for_service(source)
    calls_python = not source.is_native or isinstance(options.transform, SampleTransform)
    if options.service is None and (options.window or calls_python):  # generators cannot leave this process
        options = dataclasses.replace(options, seeds=Seeds(tf, options.seed))
    if source.is_planned or (options.in_whole_batches and _in_blocks(source, options)):
        dataset = _batches(tf, source, options)
    else:
        dataset = _batched(tf, _samples(tf, source, options), source, options)
    if options.as_supervised is not None:
        names = options.as_supervised
        dataset = dataset.map(verbatim(tf, lambda sample: tuple(chosen_fields(sample, names).values())))
    if options.service is not None:
        dataset = distribute(dataset, options.service, options.job or _job_name(source, options))
        if options.repeat:
            dataset = dataset.repeat()
    dataset = untuned(tf, dataset).prefetch(_WAITING)
    if options.seeds is not None and not options.repeat:
        dataset = untuned(tf, options.seeds.saved_with(dataset))
    if source.has_ranks:
        dataset = symbolic(tf, dataset)
    reason = "TensorFlow does not resume in the middle of a snapshot; drop snapshot" if options.snapshot else None
    reason = reason if options.service is None else "the workers of the service hold the position in the epoch"
    return dataset if reason is None else refusing_checkpoints(tf, dataset, reason)


def _check_for_service(source: TfSource) -> None:
    """Raise `OptionError` if the workers of a service cannot read the records."""
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
            "without a service (its consumers share each epoch in any case)"
        )
    if source.is_mapped or not source.is_whole:
        raise OptionError(
            "the workers of a service read whole shards without Python; read what map, select, filter, take, shard and "
            "mix return without a service, or write it to a directory of its own"
        )
    if not source.is_native:
        raise OptionError(
            f"the workers of a service read {' and '.join(COMPRESSION)}; these shards are {source.format_name}, which "
            "needs Python; convert them: datamat convert DIR --format tfrecord"
        )
    needs_python = [name for name, field in tf_fields(source.features).items() if field.needs_python]
    if needs_python:
        raise OptionError(
            f"the workers of a service have no Python, which decodes field {needs_python[0]!r}; register a "
            f"function for {type(source.features[needs_python[0]]).__qualname__} with datamat.readers.tf.tf_field, or "
            "read without a service"
        )


def _job_name(source: TfSource, options: ReadOptions) -> str:
    """Return a name that is the same for all consumers that read the same records in the same way."""
    cut = (source.identity, options.batch_size, options.shuffle, options.seed, options.drop_remainder)
    wanted = (*cut, options.as_supervised, options.static_transform, options.transform)
    try:
        return f"datamat-{fingerprint(wanted, where='transform')}"
    except FingerprintError as error:
        raise OptionError(
            f"cannot name the job: {error}; or give one name to all consumers: TfOptions(job='run-1')"
        ) from error


def _batches(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return the records in batches, each decoded as a whole."""
    size, drop = options.batch_size or 1, options.drop_remainder
    if source.is_native:
        return _decoded(tf, _record_blocks(tf, source, options, size), size, source, options)
    if source.is_planned:
        return _samples_repeated(from_python(tf, source, options, options.batch_size, drops=drop), options)
    if source.skips_damage or options.repeat:  # rebatch, to fill short batches in the middle
        samples = from_python(tf, source, options, size, drops=False).unbatch()
        return _samples_repeated(samples, options).batch(size, drop_remainder=drop)
    return from_python(tf, source, options, size, drops=drop)


def _samples(tf: Any, source: TfSource, options: ReadOptions) -> Any:
    """Return decoded samples, cached as requested, in the order of the epoch."""
    in_blocks = _in_blocks(source, options)
    if not source.is_native:
        size = _block_size(source.features) if in_blocks else None
        samples = from_python(tf, source, options, size, drops=False, stacks=options.stacks_samples)
    elif in_blocks:
        once = dataclasses.replace(options, repeat=False, drop_remainder=False)
        size = _block_size(source.features)
        samples = _decoded(tf, _record_blocks(tf, source, once, size), size, source, options)
    else:
        records = _records(tf, source, options, 1)
        if not options.keeps_samples:
            records = _shuffled(tf, records, options)
        decode = verbatim(tf, lambda record: decode_one(record, source.features))
        samples = records.map(decode, **_in_parallel(tf, options))
    if in_blocks:
        samples = samples.unbatch()
    if options.service is None and not source.skips_damage:
        samples = counted(tf, samples, source.num_records)
    if options.static_transform is not None:
        samples = samples.map(options.static_transform, **_in_parallel(tf, options))
    return _shuffled(tf, _kept(tf, samples, source, options), options) if options.keeps_samples else samples


def _decoded(tf: Any, blocks: Any, size: int, source: TfSource, options: ReadOptions) -> Any:
    """Return the decoded values of blocks of `size` records."""
    if not pictures_of(source.features):
        decode = verbatim(tf, lambda block: decode_many(block, source.features))
        return blocks.map(decode, **_in_parallel(tf, options))
    pictures = PictureDecoder(source.features)
    decode = verbatim(tf, lambda block: decode_many(block, source.features, pictures.decode))
    num_calls = max(BLOCKS_AT_WORK, 2 * num_cpus() // size)  # more blocks at once if they are small
    decoded = blocks.map(decode, num_parallel_calls=num_calls, deterministic=options.deterministic)
    pictures.keep_memory_with(decoded)
    return decoded


def _in_blocks(source: TfSource, options: ReadOptions) -> bool:
    """Return True if many records are decoded at once."""
    # Python's batches are split up if skipped records or repetition may leave some of them short.
    stays_whole = options.in_whole_batches and (source.is_native or not (source.skips_damage or options.repeat))
    if source.is_mapped:
        return stays_whole
    fits = decodes_in_blocks(source.features) if stays_whole else is_fixed(source.features)
    # The workers of a service have only TensorFlow's decoders, which take one image.
    return fits and not (options.service is not None and pictures_of(source.features))


def _block_size(features: Features) -> int:
    """Return the number of records that are decoded at once if there is no batch size."""
    num_bytes: int = sum(spec.shape.num_elements() * max(1, spec.dtype.size) for spec in signature(features).values())
    return max(1, min(_BLOCK_RECORDS, _BLOCK_BYTES // num_bytes))


def _record_blocks(tf: Any, source: TfSource, options: ReadOptions, size: int) -> Any:
    """Return encoded records in blocks of `size`, shuffled unless decoded samples are, repeated as requested."""
    drop, is_shuffled = options.drop_remainder, bool(options.window) and not options.keeps_samples
    run = min(_RUN_RECORDS, _RUN_BYTES * source.num_records // max(source.num_bytes, 1))
    # If records are shuffled, the window must span all open files.
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
    return counted(tf, blocks, tf.data.INFINITE_CARDINALITY if options.repeat else whole + bool(rest and not drop))


def _records(tf: Any, source: TfSource, options: ReadOptions, run: int) -> Any:
    """Return encoded records one by one."""
    runs = _runs(tf, source, options, run)
    records = runs.unbatch() if run > 1 else runs
    return counted(tf, records, source.num_records) if options.service is None else records


def _runs(tf: Any, source: TfSource, options: ReadOptions, run: int) -> Any:
    """Return runs of encoded records: from one file after the other if the order counts, else from many in turn.

    Passing a row from one thread to another takes longer than reading it, so up to `run` rows are passed at a time.
    With a `run` of 1, records are single, without a dimension for the run.
    """
    # A service hands out file names one by one; to fill a shuffle buffer, one worker would take them all.
    is_local = options.service is None
    files = tf.data.Dataset.from_tensor_slices(
        (tf.constant(list(source.files), tf.string), tf.constant(list(source.files.values()), tf.int64))
    )
    if options.window and source.files and is_local:
        shuffled = _shuffled if not options.keeps_samples else _shuffled_once  # kept samples are shuffled themselves
        files = shuffled(tf, files, options, len(source.files))
    most = _MOST_FILES_AT_ONCE if is_local else _FILES_OF_A_WORKER

    def opened(name: Any, num_records: Any) -> Any:
        compression = COMPRESSION[source.format_name]
        records = tf.data.TFRecordDataset(name, compression_type=compression, buffer_size=_BUFFER_BYTES)
        whole = guarded(records, name, num_records, source.explain if is_local else None)
        return whole.batch(run) if run > 1 else whole

    num_files = max(1, min(most, len(source.files))) if _is_mixed(options) else 1
    runs = files.interleave(
        verbatim(tf, opened),
        cycle_length=num_files,
        num_parallel_calls=num_files,  # even on few cores, as slow disks and networks serve many at once
        deterministic=options.deterministic,
    )
    is_repeated = options.repeat and not options.keeps_samples
    return options.seeds.saved_beside(runs) if is_repeated and options.seeds is not None else runs


def _kept(tf: Any, samples: Any, source: TfSource, options: ReadOptions) -> Any:
    if options.snapshot is not None:
        made_of = (source.identity, source.features.to_json(), _is_mixed(options), options.static_transform)
        samples = snapshotted(samples, options.snapshot, fingerprint(made_of, where="static_transform"))
        samples = samples if source.skips_damage else counted(tf, samples, source.num_records)
    if options.cache:
        samples = samples.cache("" if options.cache is True else os.fspath(options.cache))
    return samples


def _is_mixed(options: ReadOptions) -> bool:
    """Return True if records of several shards alternate."""
    return bool(options.window) or not options.deterministic


def _batched(tf: Any, samples: Any, source: TfSource, options: ReadOptions) -> Any:
    ragged: set[str] = {*ragged_names(source.features)}
    alike: set[str] = set()
    if source.is_mapped:
        layouts = learn_layouts(
            source, source.some_samples(LOOKED_AT), batches=options.makes_batches, stacks=options.stacks_samples
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
        layouts = made_by(tf, options.transform, source, options)
        ragged |= {name for name, one in layouts.items() if one.is_list}
        call = called_by_python(tf, options.transform, samples.element_spec, layouts, source.features)
        samples = _samples_repeated(with_epochs(tf, samples, options), options)
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
    features = source.features
    specs = features.flatten(samples.element_spec)

    # Each value becomes a ragged tensor of one row, which can be batched whatever its length. Fields that had one size
    # in all inspected samples are batched as flat rows with their sizes, so that an error can name a different size.
    def row(sample: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        flat = features.flatten(sample)
        rows = {name: _row(tf, flat[name]) for name in names}
        beside = {name: (_row(tf, tf.reshape(flat[name], [-1])), tf.shape(flat[name])) for name in sorted(alike)}
        return features.unflatten({**flat, **rows, **dict.fromkeys(alike, tf.constant(0))}), beside

    def merged(batch: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
        flat = features.flatten(batch)
        rows = {name: flat[name].merge_dims(0, 1) for name in names}
        stacks = {name: _of_one_size(tf, name, parts, specs[name].shape) for name, parts in beside.items()}
        return features.unflatten({**flat, **rows, **stacks})

    rows = samples.map(verbatim(tf, row))
    return rows.batch(options.batch_size, drop_remainder=options.drop_remainder).map(verbatim(tf, merged))


def _refuse_sizes_that_differ(source: TfSource, names: Collection[str]) -> None:
    """Raise `OptionError` if pictures that a batch would stack differ in size between samples."""
    seen: dict[str, tuple[tuple[int, ...], str]] = {}
    for sample in source.some_samples(LOOKED_AT) if names else ():
        for name in sorted(names & sample.keys()):
            shape, key = np.shape(sample[name]), str(sample.get("key", ""))
            first, other = seen.setdefault(name, (shape, key))
            if shape != first:
                raise OptionError(
                    f"field {name!r} has {first} in sample {other!r} and {shape} in {key!r}, but a batch of TensorFlow "
                    "holds one size; resize or crop in transform=, or leave batch_size out, and batch with "
                    "ragged_batch. to_numpy and to_torch give lists"
                )


def _of_one_size(tf: Any, name: str, parts: tuple[Any, Any], shape: Any) -> Any:
    """Return the values of a batch as one tensor; the pipeline raises if they differ in size.

    The parts are the flattened values, a ragged tensor (batch_size, 1, None), and their shapes, int32 (batch_size,
    rank); `shape` is the static shape of a value.
    """
    values, sizes = parts
    message = (
        f"transform returned {name!r} in sizes that differ within a batch, but in one size for the first {LOOKED_AT} "
        "samples, from which batches are laid out; return one size (tf.image.resize, tf.pad), or leave out batch_size, "
        "and batch with padded_batch or ragged_batch"
    )
    check = tf.debugging.Assert(tf.reduce_all(sizes == sizes[:1]), [message, sizes], summarize=64)
    with tf.control_dependencies([check] if check is not None else []):
        stack = tf.reshape(values.flat_values, tf.concat([[tf.shape(sizes)[0]], sizes[0]], 0))
    return tf.ensure_shape(stack, [None, *shape])


def _open_names(tf: Any, spec: Any, features: Features, ragged: Collection[str]) -> list[str]:
    """Return the fields among `ragged` whose values have any length: boxes, lists, tensors of open shape."""
    if not isinstance(spec, dict):
        return []
    spec = features.flatten(spec)
    found = [name for name in spec if name in ragged and isinstance(spec[name], tf.TensorSpec)]
    return [name for name in found if spec[name].shape.rank and not spec[name].shape.is_fully_defined()]


def _varying(tf: Any, before: Any, after: Any, source: TfSource, options: ReadOptions) -> tuple[set[str], set[str]]:
    """Return a traced transform's new fields of open size: those whose sizes differ, and those of one size.

    The first samples tell which is which; `before` and `after` are the specs of its input and result.
    """
    if not isinstance(after, dict) or options.batch_size in (None, 1) or options.service is not None:
        return set(), set()
    flatten = source.features.flatten
    known, found = flatten(before), flatten(after)
    every = {*source.features, *known}
    new = [name for name in _open_names(tf, after, source.features, found) if name not in every]
    if not new:
        return set(), set()
    apart = dataclasses.replace(options, shuffle=False, seeds=None, cache=False, snapshot=None, repeat=False)
    some = _samples(tf, source, apart).map(options.transform).take(LOOKED_AT)
    shapes = [{name: tuple(flatten(sample)[name].shape) for name in new} for sample in some]
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
    return mixed(tf, dataset, window, options.seed)


def _shuffled_once(tf: Any, dataset: Any, options: ReadOptions, window: int) -> Any:
    return mixed(tf, dataset, window, options.seed, reshuffles=False)


def _repeated(dataset: Any, options: ReadOptions) -> Any:
    return dataset.repeat() if options.repeat and options.service is None else dataset


def _samples_repeated(samples: Any, options: ReadOptions) -> Any:
    """Return samples repeated as requested, whose shuffle may end long before the last sample is taken."""
    if options.repeat and options.seeds is not None:
        samples = options.seeds.saved_beside(samples)
    return _repeated(samples, options)


def _in_parallel(tf: Any, options: ReadOptions) -> dict[str, Any]:
    # The workers of a service may have another number of cores, and use the autotuner.
    num_calls = _CALLS_PER_CORE * num_cpus() if options.service is None else tf.data.AUTOTUNE
    return {"num_parallel_calls": num_calls, "deterministic": options.deterministic}
