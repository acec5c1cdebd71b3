"""One step of drawing a copy of a sample, and the generators that it draws from."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

__all__ = ["Call", "Chance", "Hook", "Sample", "Stage"]

Sample: TypeAlias = dict[str, Any]
Hook: TypeAlias = Callable[[Sample, np.random.Generator], Any]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Chance:
    """The generators of one copy: for the hook and callables, and the two that a pipeline draws from."""

    rng: np.random.Generator
    pipeline_rng: np.random.Generator
    pipeline_random: random.Random


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
