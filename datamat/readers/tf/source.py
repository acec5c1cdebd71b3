"""What a pipeline reads, and how: the checked arguments of `to_tf`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from datamat.errors import OptionError
from datamat.readers.tf.service import check_address
from datamat.transforms.augmenter import SampleTransform, takes_arrays
from datamat.transforms.seeding import with_rng
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from datamat.features import Features
    from datamat.readers.batches import Batches
    from datamat.readers.options import BatchOptions
from datamat.readers.tf.shuffling import Seeds


def wants_arrays(transform: Any) -> bool:
    """Return True if Python calls a transform, with arrays; otherwise TensorFlow traces it."""
    return takes_arrays(transform) or with_rng(transform) is not None


_SHUFFLE_WINDOW = 1024
COMPRESSION = {"tfrecord": "", "tfrecord.gz": "GZIP"}


@frozen()
class TfSource:
    """The shards to read, and how Python reads them.

    Args:
        files: number of records in each shard, by path; empty unless all are read in order.
        num_records: number of records to read.
        num_bytes: size of all shards together.
        features: schema by which the records are parsed and decoded.
        format_name: name of the shards' format.
        identity: digest of the records; it changes when any record does.
        is_whole: whether all records of the shards are read, in their order.
        is_mapped: whether the samples go through functions of `map`, after which they may have any fields.
        has_paths: whether the files have paths on this machine, by which TensorFlow can open them.
        skips_damage: whether damaged records are skipped and counted, which TensorFlow does not do.
        explain: function of a shard's path that returns its damage as an error.
        form: the batch options; if they pad, bucket, pack or collate, Python plans and reads the batches.
        has_ranks: whether the batches belong to one of several ranks, which Python plans, too.
        is_changed: whether `open_batches` applies a transform that Python calls.
        open_batches: function of `to_numpy`'s batch_size and drop_last that returns the batches that Python reads, with
            their own open files, and in the order of the records if samples are kept.
        some_samples: function of a number that returns at most that many samples of the first epoch, spread over all
            records, processed as by `open_batches`.
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
    form: BatchOptions
    has_ranks: bool
    is_changed: bool
    open_batches: Callable[[int | None, bool], Batches]
    some_samples: Callable[[int], list[dict[str, Any]]]

    @property
    def is_native(self) -> bool:
        """Whether TensorFlow reads the shards itself."""
        is_ours = self.skips_damage or not self.has_paths or self.is_mapped or not self.is_whole or self.is_planned
        return self.format_name in COMPRESSION and not is_ours

    @property
    def is_planned(self) -> bool:
        """Whether Python decides which records make a batch."""
        return self.form.makes_batches or self.has_ranks

    @property
    def counts_steps(self) -> bool:
        """Whether all iterators have the same number of steps, including restored ones."""
        return not (self.skips_damage or self.form.unit is not None or self.has_ranks)


@frozen()
class ReadOptions:
    """The checked arguments of `ShardedDataset.to_tf`, which documents them, and the `seeds` that `make_dataset` adds.

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
    seeds: Seeds | None = None

    def __post_init__(self) -> None:
        if self.snapshot is not None and (isinstance(self.snapshot, bool) or not self.snapshot):
            raise OptionError(f"snapshot is {self.snapshot!r}; want the path of a folder")
        if self.static_transform is not None and wants_arrays(self.static_transform):
            raise OptionError(
                "static_transform is traced by TensorFlow and must be a function of the sample alone, because its "
                "result is the same in each epoch; pass an albumentations pipeline or a callable (sample, rng) as "
                "transform"
            )
        if self.service is None:
            if self.job is not None:
                raise OptionError(f"job is {self.job!r} but there is no service; also give service='grpc://HOST:PORT'")
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


def check_form(form: BatchOptions, options: ReadOptions) -> None:
    """Raise `OptionError` if batches that Python plans are combined with steps of TensorFlow."""
    planned = ("pack", "bucket", "pad", "collate_fn", "world_size")
    name = next((name for name in planned if getattr(form, name) is not None), None)
    if name is None:
        return
    if form.world_size is not None and not options.deterministic:
        raise OptionError(
            "deterministic=False together with world_size: all ranks share one order and one position in it, so that a "
            "checkpoint of any rank resumes all; leave deterministic out"
        )
    if options.static_transform is not None:
        raise OptionError(
            f"static_transform together with {name}: TensorFlow traces the one, but Python plans the other before it; "
            "pass the function to map, which Python calls, or to the map method of the dataset that to_tf returns"
        )
    if options.keeps_samples:
        raise OptionError(
            f"cache or snapshot together with {name}: they keep samples, which Python combines differently in each "
            "epoch; keep the batches of one epoch by to_tf(...).cache(), or encoded records by load(cache=BYTES)"
        )
