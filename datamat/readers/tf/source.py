"""What a pipeline reads, and how: the arguments of `to_tf`, checked."""

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

__all__ = [
    "COMPRESSION",
    "ReadOptions",
    "TfSource",
    "check_form",
    "wants_arrays",
]


def wants_arrays(transform: Any) -> bool:
    """Return True if a transform is called by Python with arrays; else TensorFlow traces it."""
    return takes_arrays(transform) or with_rng(transform) is not None


_SHUFFLE_WINDOW = 1024
COMPRESSION = {"tfrecord": "", "tfrecord.gz": "GZIP"}


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
        form: the options of batches; those that pad, bucket, pack or collate Python plans, so it reads them.
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
    seeds: Seeds | None = None

    def __post_init__(self) -> None:
        if self.snapshot is not None and (isinstance(self.snapshot, bool) or not self.snapshot):
            raise OptionError(f"snapshot is {self.snapshot!r}; want the path of a folder")
        if self.static_transform is not None and wants_arrays(self.static_transform):
            raise OptionError(
                "static_transform is traced by TensorFlow and wants a function of the sample alone, as what it returns "
                "is the same in each epoch; pass an albumentations pipeline or a callable (sample, rng) as transform"
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
    """Raise `OptionError` where batches that Python plans are asked for together with steps of TensorFlow."""
    planned = ("pack", "bucket", "pad", "collate_fn", "world_size")
    name = next((name for name in planned if getattr(form, name) is not None), None)
    if name is None:
        return
    if form.world_size is not None and not options.deterministic:
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
