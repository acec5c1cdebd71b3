"""Applies transforms: to copies drawn for a shard, and to samples that are read."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from datamat.errors import OptionError, SampleError, SchemaError, Skip, count_of, described, kind_of
from datamat.fingerprint import fingerprint
from datamat.transforms.adapters import fields_passed, library_stage, of_a_library
from datamat.transforms.albumentations import (
    FunctionStage,
    Hook,
    albumentations_stage,
    is_pipeline,
    matched_fields,
)
from datamat.transforms.seeding import RandomStreams, Sample, Stage, seed_globals
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from datamat.features import Features

# ---------------------------------------------------------------- copies, as shards are written
#
# `Augmenter` draws the copies of a sample: each stage in turn, with every generator seeded for that copy.


@final
@frozen()
class Augmenter:
    """Draws the copies of a sample; equal arguments give equal samples in any process and order.

    Picklable by dill. Not thread-safe if the transform is not: a pipeline holds the generators of one draw.

    Args:
        features: schema of the samples, before and after the transform.
        transform: an albumentations pipeline, or a callable of (sample) or (sample, rng) that returns a sample or an
            iterable of samples, or None.
        augment: the writer's hook, a callable of the same form, or None.
        untouched: names of the fields that a pipeline deliberately does not change.

    Raises:
        OptionError: the transform is none of these, a pipeline would leave a field out of step with the image, or
            `untouched` names an unknown field.

    Example:
        >>> from datamat.features import Features, Scalar
        >>> def shift(sample, rng):
        ...     return {**sample, "x": sample["x"] + int(rng.integers(100))}
        >>> augmenter = Augmenter(Features({"x": Scalar("int64")}), shift)
        >>> list(augmenter.stream({"key": "a", "x": 0}, augmenter.seeded_streams("a", copy=1, seed=7)))
        [{'key': 'a', 'x': 10}]
    """

    _datamat_name: ClassVar[str] = ""  # users know only `transform`
    features: Features
    transform: Any = None
    augment: Hook | None = None
    untouched: tuple[str, ...] = ()
    _stages: tuple[Stage, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_untouched(self.untouched, self.features)
        stages: list[Stage] = [] if self.augment is None else [FunctionStage(self.augment)]
        if self.transform is not None:
            stages.append(_stage_of(self.transform, self.features, self.untouched))
        object.__setattr__(self, "_stages", tuple(stages))

    @property
    def is_empty(self) -> bool:
        """Whether there is neither hook nor transform, so that every copy is the sample as read."""
        return not self._stages

    @property
    def withheld(self) -> tuple[tuple[str, str], ...]:
        """The fields passed to a pipeline, with their keywords, if `untouched` makes a difference; else nothing."""
        matched = fields_passed if of_a_library(self.transform) else matched_fields
        if not self.untouched or not takes_arrays(self.transform):
            return ()
        plain, found = (matched(self.transform, self.features, names) for names in ((), self.untouched))
        return () if plain == found else tuple(sorted(found.items()))

    def seeded_streams(self, key: str, copy: int, seed: int, attempt: int = 0) -> RandomStreams:
        """Return the generators of one copy for `stream`, and seed the global ones; arguments as for `sample_seed`."""
        streams = RandomStreams(seed, key, copy, attempt)
        seed_globals(streams.global_seed)
        return streams

    def stream(self, sample: Mapping[str, Any], streams: RandomStreams) -> Iterator[Sample | Skip]:
        """Yield at least one sample of one copy, as they are made, or a `Skip` in place of each one left out.

        Args:
            sample: a value for each field; never modified, whatever hook and transform do.
            streams: a fresh result of `seeded_streams`; nothing else may draw until the last sample is made.

        Raises:
            SchemaError: the hook or the transform returned anything but samples, or a sample lacks a field.
            InputError: an encoded image of the sample does not decode.
            OptionError: a label cannot pass through albumentations unchanged.
        """
        return _drawn(self._stages, self.features, sample, streams)

    def ignores_chance(self, streams: RandomStreams, num_samples: int) -> bool:
        """Return True if the copy just drawn, of `num_samples` samples, did not depend on random numbers."""
        return streams.decided_nothing(num_samples * sum(stage.num_coins for stage in self._stages))

    @property
    def name(self) -> str:
        """The names of hook and transform, for messages."""
        return ", ".join(stage.name for stage in self._stages)

    def check_determined(self, sample: Mapping[str, Any], *, key: str, seed: int) -> None:
        """Draw a copy twice and compare: a transform with its own generator would give other bytes in every run.

        Raises:
            OptionError: the two differ; the message names the transforms that cause it.
        """

        def differs(stages: Sequence[Stage]) -> bool:
            first, again = (digests(stages) for _ in range(2))
            return first != again

        def digests(stages: Sequence[Stage]) -> list[str]:
            return [
                "" if isinstance(drawn, Skip) else fingerprint(drawn, where="sample")
                for drawn in _drawn(stages, self.features, sample, self.seeded_streams(key, 0, seed))
            ]  # digests, as there may be too many samples to keep

        if not differs(self._stages):
            return
        wrong = []
        for part in [part for stage in self._stages for part in stage.parts()]:
            # A part on its own may fail for lack of the earlier ones' output; then it is not named.
            with contextlib.suppress(Exception):
                wrong += [part.name] if differs([part]) else []
        names = ", ".join(dict.fromkeys(wrong or [stage.name for stage in self._stages]))
        raise OptionError(
            f"{names}: drawing the same copy of sample {key!r} twice gave two results; want one that depends on "
            "(seed, key, copy) alone: draw from the rng that it gets, from self.random_generator or "
            "self.py_random of the transform, or from random and numpy.random, which are seeded for each copy"
        )


def _drawn(
    stages: Sequence[Stage], features: Features, sample: Mapping[str, Any], streams: RandomStreams
) -> Iterator[Sample | Skip]:
    samples: Iterable[Sample | Skip] = [dict(sample)]
    for place, stage in enumerate(stages):
        if place and isinstance(stage, FunctionStage):
            # The stage draws from the same generators as the one before, which must finish drawing first.
            samples = list(samples)
        samples = _applied(stage, features, samples, streams)
    return iter(samples)


def _applied(
    stage: Stage, features: Features, samples: Iterable[Sample | Skip], streams: RandomStreams
) -> Iterator[Sample | Skip]:
    for before in samples:
        if isinstance(before, Skip):
            yield before
            continue
        owned = _owned(features.prepare(before))
        try:
            result = stage.apply(owned, streams)
        except Skip as skip:
            result = skip
        yield from each_sample(result, stage.name)


def _owned(sample: Sample) -> Sample:
    """Copy the arrays of a sample: transforms write in place, and all copies start from one decoded sample.

    Copying uint8 (360, 480, 3) takes 11 us. Read-only arrays would cost less, but cv2 and C extensions reject them in
    too many ways to tell that from a mistake in the user's code.
    """
    return {name: value.copy() if isinstance(value, (np.ndarray, list)) else value for name, value in sample.items()}


class NoSample(Skip):
    """A function returned None, or no samples: on purpose, or for lack of a `return`."""


_WANTED = "want a sample (a dict of values by feature name) or an iterable of them"


def each_sample(result: Any, name: str) -> Iterator[Sample | Skip]:
    """Yield the samples in the result of a user's function, with a `Skip` in place of each one left out.

    Yields at least one item: None, an empty iterable, and a generator that raises `Skip`, all give a `Skip`.

    Args:
        result: sample, `Skip`, None, or an iterable of samples and `Skip`s.
        name: name of the function, for messages.

    Raises:
        SchemaError: the result is something else.
    """
    if isinstance(result, Mapping):
        yield dict(result)
        return
    if result is None:
        yield NoSample(f"{name} returned None")
        return
    if (skip := _as_skip(result)) is not None:
        yield skip
        return
    found = kind_of(result)
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes, np.ndarray)):
        raise SchemaError(f"{name} returned {found}; {_WANTED}")
    is_empty = True
    try:
        for one in result:
            found_one = dict(one) if isinstance(one, Mapping) else _as_skip(one)
            if found_one is None:
                raise SchemaError(f"{name} returned {found} that holds {kind_of(one)}; {_WANTED}")
            yield found_one
            is_empty = False
    except Skip as raised:
        yield raised
        is_empty = False
    if is_empty:
        yield NoSample(f"{name} returned {found} with no samples")


def _as_skip(result: Any) -> Skip | None:
    """Return a `Skip`, given an instance or, as in `raise`, the class; None for anything else."""
    if isinstance(result, type) and issubclass(result, Skip):
        return result()
    return result if isinstance(result, Skip) else None


def field_names(untouched: Collection[str]) -> tuple[str, ...]:
    """Return the names in `untouched=` as a tuple; raise `OptionError` if it is a str."""
    if isinstance(untouched, str):
        raise OptionError(f"untouched is {untouched!r}; want a tuple of fields, as in untouched=({untouched!r},)")
    return tuple(untouched)


def _check_untouched(untouched: tuple[str, ...], features: Features) -> None:
    unknown = [name for name in untouched if name not in features]
    if unknown:
        raise OptionError(f"untouched names {unknown[0]!r}; want fields of the features: {', '.join(features)}")


def _stage_of(transform: Any, features: Features, untouched: tuple[str, ...]) -> Stage:
    """Return the stage for a user's transform; raise `OptionError` if there is none."""
    if not isinstance(transform, type):
        if of_a_library(transform):
            return library_stage(transform, features, untouched)
        if is_pipeline(transform):
            return albumentations_stage(transform, features, untouched)
    return FunctionStage(transform)


def takes_arrays(transform: Any) -> bool:
    """Return True if a transform belongs to a library, and so gets fields as arrays."""
    return of_a_library(transform) or is_pipeline(transform)


# ---------------------------------------------------------------- samples, as they are read
#
# The same transforms, applied to each sample as a finished dataset is read.


@final
class SampleTransform:
    """Applies a transform to samples that are read, under the same contract as for writing.

    Random draws depend on (seed, key, epoch) alone: not on threads, workers, ranks or where reading was resumed.
    Thread-safe if the function is; each thread has its own copy of a pipeline. Picklable if the transform is.

    Args:
        transform: an albumentations pipeline, or a callable `(sample) -> sample` or `(sample, rng) -> sample`.
        features: the schema of the samples.
        seed: base seed; with key and epoch it decides every random draw.
        untouched: names of the fields that a pipeline deliberately does not change.
        number: position of the transform among those that a sample goes through, so that no two draw the same numbers.

    Attributes:
        arguments: transform, seed, untouched and number, which together decide the result.

    Raises:
        OptionError: the transform is none of these, a pipeline would leave a field out of step with the image, or
            `untouched` names an unknown field.
    """

    def __init__(
        self, transform: Any, features: Features, seed: int, untouched: tuple[str, ...] = (), number: int = 0
    ) -> None:
        _check_untouched(untouched, features)
        self._features = features
        self.arguments = transform, seed, untouched, number
        self._seed = seed
        self._number = number
        self._stage = _stage_of(transform, features, untouched)
        self._of_thread = threading.local()

    @property
    def has_copies(self) -> bool:
        """Whether each thread has its own copy of the transform."""
        return takes_arrays(self.arguments[0])

    def __call__(self, sample: dict[str, Any], epoch: int, *, seeds_globals: bool = False) -> dict[str, Any]:
        """Return the transformed sample.

        Args:
            sample: decoded sample, which must hold its `key`, and may be modified.
            epoch: number of the pass over the dataset, from 0.
            seeds_globals: also seed the global generators of `random`, `numpy.random`, torch and TensorFlow; only for a
                process in which nothing else draws from them.

        Raises:
            SampleError: the transform raised, or did not return one sample; names the key.
        """
        key = sample["key"]
        streams = RandomStreams(self._seed, key, epoch, self._number)
        if seeds_globals:
            seed_globals(streams.global_seed)
        try:
            samples = self._applied_to(sample, streams)
        except SchemaError as error:
            raise SampleError(key, str(error)) from error
        except NoSample as skip:
            raise SampleError(key, f"{skip.reason}: is a `return` missing?; {_WANTED}") from skip
        except Skip as skip:
            raise SampleError(
                key,
                f"{self._stage.name} left it out ({skip.reason}), but a reader wants one sample for each record; leave "
                "samples out when they are written, or choose the records to read",
            ) from skip
        except Exception as error:
            raise SampleError(key, f"the transform raised {described(error)}") from error
        if len(samples) > 1:
            raise SampleError(
                key,
                f"{self._stage.name} returned {count_of(len(samples), 'sample')}, but a reader wants one for each "
                "record; return "
                "one, or write them with Materializer",
            )
        return samples[0]

    def _applied_to(self, sample: dict[str, Any], streams: RandomStreams) -> list[Sample]:
        """Return the samples as a list, so that a generator runs while its random state is set."""
        samples = []
        for one in each_sample(self._stage_here().apply(sample, streams), self._stage.name):
            if isinstance(one, Skip):
                raise one
            samples.append(one)
        return samples

    def _stage_here(self) -> Stage:
        """Return this thread's stage."""
        found: Stage | None = getattr(self._of_thread, "stage", None)
        if found is None:
            found = self._of_thread.stage = self._stage.for_thread()
        return found

    def __reduce__(self) -> tuple[type[SampleTransform], tuple[Any, Features, int, tuple[str, ...], int]]:
        transform, *others = self.arguments
        return SampleTransform, (transform, self._features, *others)
