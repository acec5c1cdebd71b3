"""Defines the options of batches that `to_numpy`, `to_torch` and `to_tf` share; they are checked on creation."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

from datamat.errors import OptionError
from datamat.options import check_flags, refuse_others
from datamat.readers.batches import Cut, check_seed, check_shuffle, supervised_fields
from datamat.readers.sequences import Packing, Padding, check_chunk, check_padded, one_budget, packed_fields
from datamat.values import frozen

if TYPE_CHECKING:
    import numpy as np

    from datamat.features import Features


class BatchKeywords(TypedDict, total=False):
    """The keyword arguments of `to_numpy`, `to_torch` and `to_tf`; `BatchOptions` describes each."""

    shuffle: bool | int
    seed: int
    transform: Any
    untouched: Collection[str]
    drop_last: bool
    rank: int | None
    world_size: int | None
    num_workers: int
    num_threads: int | None
    prefetch: int
    pad: Mapping[str, float] | None
    bucket: Mapping[str, int] | None
    pack: Mapping[str, int] | None
    chunk: Literal["long", "all"] | None
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None
    as_supervised: Sequence[str] | None


@frozen(kw_only=True)
class BatchOptions:
    """How records become batches: in which order, in which form, and what reads them.

    Args:
        batch_size: maximum number of records in a batch; None yields single samples.
        shuffle: True shuffles all records. A number shuffles that many records at a time, from blocks of neighbours in
            random order, so that files are read in long runs, for spinning disks and slow file systems. True reads
            Parquet in this way as well, four row groups at a time, and gzip TFRecord, 2 MiB of small records at a time.
            There, too, a number sets how many; readers of Parquet keep twice as many in memory. TensorFlow's own
            readers shuffle the shards, and the records within a window of 1,024, or of that number.
        seed: base seed of the shuffling and of the random numbers of `transform`.
        transform: transform of single samples, as for `Materializer`: an albumentations pipeline, or a callable
            `(sample) -> sample` or `(sample, rng) -> sample`. The random numbers of `rng` and of a pipeline depend on
            (seed, key, epoch) alone; with `num_workers`, so do those of the global generators of `random`,
            `numpy.random`, torch and TensorFlow. In `to_tf`, TensorFlow traces a callable `(sample) -> sample`; see
            there.
        untouched: fields that geometric transforms leave alone on purpose, as for `Materializer`.
        drop_last: whether to drop the records that do not fill a batch on every rank. Otherwise they are divided
            evenly, and every record comes exactly once (`Schedule` describes the only exception).
        rank: which share of each step to read, from 0 to world_size - 1. None takes the rank in the `torch.distributed`
            process group in `to_torch`, if there is one, and otherwise reads everything.
        world_size: number of ranks, all of which get the same number of batches. None has the same meaning as for
            `rank`.
        num_workers: worker processes that decode and transform, for transforms that hold the GIL; 0 decodes in threads
            of this process. This and the next two are for readers in Python; TensorFlow has threads of its own.
        num_threads: decoding threads; None starts one per physical core, but only one for small uncompressed values,
            where more threads would only wait for each other.
        prefetch: number of batches to make ahead of their use.
        pad: fields whose values differ in their first dimension, each with the value that fills up shorter ones: the
            field becomes an array (n, longest, ...), and NAME_length int64 (n,) has the lengths.
        bucket: a field and the maximum number of tokens in a batch, as in `{"tokens": 4096}`: batches hold records of
            similar length, as many as fit when all are padded to the longest, but at most `batch_size`.
        pack: fields and the number of tokens in a row, as in `{"tokens": 2048}`: each row of a batch holds several
            records, one after another. A batch has `batch_size` rows (n, tokens, ...) of these fields, filled up with
            the value in `pad` or 0; `segment_ids`, int32 (n, tokens), number the records of a row from 1, and are 0 in
            the padding; `positions`, int32 (n, tokens), number the tokens of a record from 0. Every other field is a
            list of lists, one per row; in `to_tf`, a ragged tensor (rows, records, ...).
        chunk: which records `pack` cuts into pieces. None cuts no records, and refuses those longer than a row. "long"
            cuts those longer than a row; their last piece shares a row with others. "all" lets records follow each
            other in order, without a gap, and cuts them wherever a row ends, as in the training of GPT: every row but
            the last of the epoch is full. A piece has a segment and positions of its own, and the other fields of its
            record.
        collate_fn: function that makes a batch from a list of samples, called in the thread that reads batches; None
            stacks them. For `to_tf`, it returns arrays, numbers or text, or dicts and tuples of these, always in the
            form and with the dtypes of the first batch; sizes may vary.
        as_supervised: fields to deliver as a tuple instead of a dict, as in `("image", "mask")`, which the `fit` of
            Keras takes as inputs, targets and, if there is a third, weights.

    Raises:
        OptionError: an argument is invalid.
    """

    batch_size: int | None = None
    shuffle: bool | int = False
    seed: int = 0
    transform: Any = None
    untouched: Collection[str] = ()
    drop_last: bool = False
    rank: int | None = None
    world_size: int | None = None
    num_workers: int = 0
    num_threads: int | None = None
    prefetch: int = 2
    pad: Mapping[str, float] | None = None
    bucket: Mapping[str, int] | None = None
    pack: Mapping[str, int] | None = None
    chunk: Literal["long", "all"] | None = None
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None
    as_supervised: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_shuffle(self.shuffle)
        check_seed(self.seed)
        check_flags(drop_last=self.drop_last)
        if (self.rank is None) != (self.world_size is None):
            raise OptionError(
                f"rank is {self.rank!r} and world_size is {self.world_size!r}; give both or neither: under "
                "tf.distribute "
                "they are input_pipeline_id and num_input_pipelines of the InputContext"
            )

    @classmethod
    def of(cls, called: str, batch_size: int | None, given: BatchKeywords) -> Self:
        """Return the options for the arguments of a call.

        Args:
            called: what the user has called.
            batch_size: its first argument.
            given: the others.
        """
        refuse_others(called, given, {"batch_size", *BatchKeywords.__annotations__}, _where_option_is)
        return cls(batch_size=batch_size, **given)

    def cut(self, rank: int, world_size: int) -> Cut:
        """Return how records are cut into batches on one of several ranks; a given rank takes precedence."""
        rank = rank if self.rank is None else self.rank
        world_size = world_size if self.world_size is None else self.world_size
        return Cut(self.batch_size, self.drop_last, rank, world_size, self.num_workers, self.num_threads, self.prefetch)

    @property
    def makes_batches(self) -> bool:
        """Whether batches are made by anything other than stacking."""
        return any(one is not None for one in (self.pad, self.bucket, self.pack, self.collate_fn))

    @property
    def unit(self) -> tuple[str, int, bool] | None:
        """Field by which records are put together, the tokens of a unit, and whether units are packed rows."""
        if self.pack is not None:
            fields, tokens = packed_fields(self.pack)
            return fields[0], tokens, True
        return None if self.bucket is None else (*one_budget(self.bucket), False)

    @property
    def shapes(self) -> tuple[Callable[[dict[str, Any], np.ndarray], dict[str, Any]], ...]:
        """The functions that a finished batch goes through."""
        if self.pack is not None:
            return (Packing(*packed_fields(self.pack), dict(self.pad or {})),)
        return () if self.pad is None else (Padding(dict(self.pad)),)

    def check(self, features: Features | None, *, may_add: bool) -> None:
        """Raise `OptionError` if arguments contradict each other, or name a field that the features do not have.

        Args:
            features: fields of the samples to plan with; None if a function decides them.
            may_add: whether a transform may add fields to them.
        """
        given = [name for name in ("pad", "bucket", "pack") if getattr(self, name) is not None]
        if self.bucket is not None:
            one_budget(self.bucket, features)
        if self.pack is not None:
            packed_fields(self.pack, features)
            if self.bucket is not None:
                raise OptionError("bucket together with pack: both are ways to fill batches; choose one")
        check_chunk(self.chunk, self.pack)
        check_padded(self.pad, None if may_add else features)
        if self.pad is not None and self.pack is not None and not self.pad.keys() <= self.pack.keys():
            raise OptionError(f"pad is {self.pad!r} and pack is {self.pack!r}; with pack, pad names packed fields only")
        if given and self.batch_size is None and self.bucket is None:
            raise OptionError(f"{given[0]} is for batches, and batch_size is None; set the rows of a batch")
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise OptionError(f"collate_fn is {self.collate_fn!r}; want a function of a list of samples")
        if self.collate_fn is not None and self.shapes:
            raise OptionError(f"collate_fn together with {given[0]}: it gets samples and returns the batch; drop one")
        if self.collate_fn is not None and self.batch_size is None and self.bucket is None:
            raise OptionError("collate_fn is for batches, and batch_size is None; set the records of a batch")
        supervised_fields(self.as_supervised, None if may_add or self.pack is not None else features)
        if self.collate_fn is not None and self.as_supervised is not None:
            raise OptionError("collate_fn together with as_supervised: it returns the batch in any form; drop one")


@frozen(kw_only=True)
class TfOptions:
    """Options of `to_tf` alone, as in `train.to_tf(32, tf=TfOptions(cache=True))`.

    Args:
        cache: True caches decoded samples in memory and in each checkpoint; a path caches them on disk for the lifetime
            of this dataset.
        snapshot: folder that keeps decoded samples, with `static_transform` applied, for later programs with the same
            records and the same code. The first epoch that is read to its end writes it; an interrupted epoch leaves
            nothing to resume from. Old snapshots are not deleted.
        service: address `grpc://HOST:PORT` of a tf.data service (`datamat serve`) whose workers do all of this.
            The consumers of a job share each epoch: each record goes to one of them, in an order that always differs.
        job: name of the service's job; None derives a name shared by all consumers that read these records with the
            same options and transforms. A job delivers each epoch once, so that a new run needs a new name. The options
            of the first consumer apply to all.
        static_transform: callable `(sample) -> sample` on tensors, applied before the cache: its result is kept, and
            must be the same in each epoch.
        repeat: whether the dataset repeats forever.
        deterministic: whether every unshuffled epoch has the same order; False is slightly faster.
    """

    cache: bool | str | os.PathLike[str] = False
    snapshot: str | os.PathLike[str] | None = None
    service: str | None = None
    job: str | None = None
    static_transform: Callable[[Any], Any] | None = None
    repeat: bool = False
    deterministic: bool = True


def _shown(name: str) -> inspect.Parameter:
    default = BatchOptions.__dataclass_fields__[name].default
    annotation = BatchKeywords.__annotations__[name].__forward_arg__
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


BATCH_PARAMETERS = tuple(map(_shown, BatchKeywords.__annotations__))
"""The parameters of batches, for the signatures of functions that take them as `**options`."""


def _where_option_is(name: str) -> str | None:
    """Return how to write an option that exists elsewhere or under another name."""
    if name in TfOptions.__dataclass_fields__:
        return f"to_tf(..., tf=TfOptions({name}=...))"
    return "drop_last=..." if name == "drop_remainder" else None
