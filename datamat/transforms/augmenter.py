"""`Augmenter` draws the copies of a sample: each stage in turn, with every source of chance set for that copy."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import OptionError, SchemaError
from datamat.fingerprint import fingerprint
from datamat.seeding import sample_seed, seed_globals
from datamat.transforms.pipeline import is_pipeline, pipeline_of
from datamat.transforms.stages import Call, Chance, Hook, Sample, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.features import Features

__all__ = ["Augmenter"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Augmenter:
    """Draws the copies of a sample; equal arguments of `draw` give equal samples in any process and order.

    Picklable by dill. Not thread-safe where the transform is not: a pipeline holds the generators of one draw.

    Args:
        features: of the samples.
        transform: an albumentations pipeline, a callable `(sample, rng) -> sample | iterable of samples`, or None.
        augment: the writer's hook, of the same form, or None.

    Raises:
        OptionError: the transform is neither, or a pipeline would leave a field out of step with the image.

    Example:
        >>> from datamat.features import Features, Scalar
        >>> def shift(sample, rng):
        ...     return {**sample, "x": sample["x"] + int(rng.integers(100))}
        >>> augmenter = Augmenter(Features({"x": Scalar("int64")}), shift)
        >>> augmenter.draw({"key": "a", "x": 0}, key="a", copy=1, seed=7)
        [{'key': 'a', 'x': 10}]
    """

    features: Features
    transform: Any = None
    augment: Hook | None = None
    _stages: tuple[Stage, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages: list[Stage] = [] if self.augment is None else [Call(self.augment)]
        if self.transform is not None:
            stages.append(_stage_of(self.transform, self.features))
        object.__setattr__(self, "_stages", tuple(stages))

    def draw(self, sample: Mapping[str, Any], *, key: str, copy: int, seed: int, attempt: int = 0) -> list[Sample]:
        """Return one copy of a sample: as many samples as the hook and the transform make of it, mostly one.

        Sets the global random states of `random` and `numpy.random`.

        Args:
            sample: a value for each field; it is not written to, whatever hook and transform do.
            key: of the input row.
            copy: number of the copy, from 0.
            seed: of the run, not negative.
            attempt: above 0 to draw the copy anew.

        Raises:
            SchemaError: the hook or the transform returned no sample, or the sample lacks a field.
            InputError: an encoded image of the sample does not decode.
            OptionError: a label cannot pass through albumentations unchanged.
        """
        return _drawn(self._stages, self.features, sample, _chance(seed, key, copy, attempt))

    def check_determined(self, sample: Mapping[str, Any], *, key: str, seed: int) -> None:
        """Draw a copy twice and compare: chance of a transform's own would give other bytes in every run.

        Raises:
            OptionError: the two differ; the message names the transforms that do it.
        """

        def differs(stages: Sequence[Stage]) -> bool:
            first, again = (
                fingerprint(_drawn(stages, self.features, sample, _chance(seed, key, 0)), where="sample")
                for _ in range(2)
            )
            return first != again

        if not differs(self._stages):
            return
        wrong = []
        for part in [part for stage in self._stages for part in stage.parts()]:
            # A part taken alone may miss what those before it make, and fail: then it is not named.
            with contextlib.suppress(Exception):
                wrong += [part.name] if differs([part]) else []
        names = ", ".join(dict.fromkeys(wrong or [stage.name for stage in self._stages]))
        raise OptionError(
            f"{names}: drawing the same copy of sample {key!r} twice gave two results; want one that depends on "
            "(seed, key, copy) alone: draw from the rng that is handed over, from self.random_generator or "
            "self.py_random of the transform, or from random and numpy.random, which are seeded for each copy"
        )


def _chance(seed: int, key: str, copy: int, attempt: int = 0) -> Chance:
    """Return the generators of one copy and seed the global ones."""
    chance = Chance(sample_seed(seed, key, copy, attempt))
    seed_globals(chance.global_seed)
    return chance


def _drawn(stages: Sequence[Stage], features: Features, sample: Mapping[str, Any], chance: Chance) -> list[Sample]:
    samples = [dict(sample)]
    for stage in stages:
        inputs = [_owned(features.prepare(before)) for before in samples]
        samples = [after for before in inputs for after in _samples_of(stage.apply(before, chance), stage.name)]
    return samples


def _owned(sample: Sample) -> Sample:
    """Return the sample with arrays of its own: transforms write in place, and the copies share what was decoded.

    A copy is 11 us for uint8 (360, 480, 3). Read-only arrays would cost less, but cv2 and C extensions refuse them in
    so many ways that a second attempt with a copy cannot be told from an error of the user's.
    """
    return {name: value.copy() if isinstance(value, (np.ndarray, list)) else value for name, value in sample.items()}


def _samples_of(result: Any, name: str) -> list[Sample]:
    """Return what a hook or a transform made as a list of samples, with the random states still set."""
    if isinstance(result, Mapping):
        return [dict(result)]
    found = f"a {type(result).__name__}" if result is not None else "None: is a `return` missing?"
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes, np.ndarray)):
        samples = list(result)
        strangers = [sample for sample in samples if not isinstance(sample, Mapping)]
        if samples and not strangers:
            return [dict(sample) for sample in samples]
        found += f" that holds a {type(strangers[0]).__name__}" if strangers else " with no samples"
    raise SchemaError(
        f"{name} returned {found}; want a sample (a dict of values by feature name) or an iterable of them"
    )


def _stage_of(transform: Any, features: Features) -> Stage:
    if isinstance(transform, type) or not callable(transform):
        found = (
            f"the class {transform.__qualname__}" if isinstance(transform, type) else f"a {type(transform).__name__}"
        )
        raise OptionError(
            f"transform is {found}; want an albumentations pipeline (an instance) or a callable (sample, rng) -> sample"
        )
    if is_pipeline(transform):
        return pipeline_of(transform, features)
    call = Call(transform)
    try:
        signature = inspect.signature(transform)
    except ValueError:  # some callables written in C have none
        return call
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise OptionError(
            f"transform {call.name} cannot be called with (sample, rng): {error}; give it these two parameters"
        ) from error
    return call
