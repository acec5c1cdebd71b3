"""The user's transform of a sample that was read: a function, with or without random numbers, or albumentations.

Random numbers depend on (seed, key, epoch) alone: not on threads, workers, ranks, nor on where reading went on.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from datamat.errors import OptionError, SampleError
from datamat.seeding import sample_seed
from datamat.transforms.pipeline import is_pipeline, pipeline_of
from datamat.transforms.stages import Chance

if TYPE_CHECKING:
    from datamat.features import Features

__all__ = ["SampleTransform"]


@final
class SampleTransform:
    """Applies a transform to samples. Thread-safe if a function is; of a pipeline each thread has a copy.

    Args:
        transform: a function of a sample, or of a sample and a `numpy.random.Generator`, that returns a sample; or an
            albumentations pipeline.
        features: of the samples.
        seed: of the random numbers.

    Raises:
        OptionError: it is neither, or a pipeline would leave a field out of step with the image.
    """

    def __init__(self, transform: Any, features: Features, seed: int) -> None:
        self._transform = transform
        self._features = features
        self._seed = seed
        self._is_pipeline = is_pipeline(transform)
        if self._is_pipeline:
            pipeline_of(transform, features)
        self._takes_rng = not self._is_pipeline and _takes_rng(transform)
        self._of_thread = threading.local()

    def __call__(self, sample: dict[str, Any], epoch: int) -> dict[str, Any]:
        """Return the transformed sample.

        Raises:
            SampleError: the transform raised; names the key.
        """
        key = sample["key"]
        try:
            result = self._apply(sample, key, epoch)
        except Exception as error:
            raise SampleError(key, f"the transform raised {type(error).__name__}: {error}") from error
        if not isinstance(result, Mapping):
            found = f"a {type(result).__name__}" if result is not None else "None: is a `return` missing?"
            raise SampleError(key, f"the transform returned {found}; want a dict of values by name")
        return dict(result)

    def _apply(self, sample: dict[str, Any], key: str, epoch: int) -> Any:
        if not self._is_pipeline and not self._takes_rng:
            return self._transform(sample)
        chance = Chance(sample_seed(self._seed, key, epoch))
        return self._transform(sample, chance.rng) if self._takes_rng else self._pipeline().apply(sample, chance)

    def _pipeline(self) -> Any:
        # A pipeline holds the generators of the sample that it is at work on.
        if not hasattr(self._of_thread, "pipeline"):
            self._of_thread.pipeline = pipeline_of(copy.deepcopy(self._transform), self._features)
        return self._of_thread.pipeline

    def __reduce__(self) -> tuple[type[SampleTransform], tuple[Any, Features, int]]:
        return SampleTransform, (self._transform, self._features, self._seed)


def _takes_rng(transform: Any) -> bool:
    """Tell whether a callable asks for a second argument, or for one called `rng`."""
    if isinstance(transform, type) or not callable(transform):
        raise OptionError(
            f"transform is {transform!r}; want a callable (sample) -> sample or (sample, rng) -> sample, or an "
            "albumentations pipeline (an instance)"
        )
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except ValueError:  # some callables written in C have none
        return False
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(places) < 2:
        return False
    return places[1].name == "rng" or places[1].default is inspect.Parameter.empty
