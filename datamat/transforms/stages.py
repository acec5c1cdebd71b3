"""One step of drawing a copy of a sample, and the generators that it draws from."""

from __future__ import annotations

import abc
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Call", "Chance", "Hook", "Sample", "Stage"]

Sample: TypeAlias = dict[str, Any]
Hook: TypeAlias = Callable[[Sample, np.random.Generator], Any]


@final
class Chance:
    """The generators of one copy: independent streams of one `SeedSequence`.

    Args:
        sequence: of the copy.

    Attributes:
        rng: for the hook and for callables.
        global_seed: 32 bits for the generators that a process has anyway.
    """

    def __init__(self, sequence: np.random.SeedSequence) -> None:
        # PCG64 takes the first 8 of these words; the other streams share none with it.
        *_, self._numpy_word, self._random_word, self.global_seed = sequence.generate_state(11).tolist()
        self.rng = np.random.Generator(np.random.PCG64(sequence))

    @functools.cached_property
    def of_pipeline(self) -> tuple[np.random.Generator, random.Random]:
        """The two generators that an albumentations pipeline draws from; made only where there is one."""
        return np.random.Generator(np.random.PCG64(self._numpy_word)), random.Random(self._random_word)  # noqa: S311


class Stage(abc.ABC):
    """One step of the drawing; picklable by dill, and drawing from nothing but the `Chance` that it is given."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What messages call it."""

    @abc.abstractmethod
    def apply(self, sample: Sample, chance: Chance) -> Any:
        """Return a sample or an iterable of samples; may write to `sample`."""

    @abc.abstractmethod
    def parts(self) -> Iterator[Stage]:
        """Yield the steps it is made of, to find out which of them misbehaves."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Call(Stage):
    """A stage that is a function of (sample, rng)."""

    function: Hook

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def apply(self, sample: Sample, chance: Chance) -> Any:
        return self.function(sample, chance.rng)

    def parts(self) -> Iterator[Stage]:
        yield self
