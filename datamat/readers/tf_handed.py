"""What Python reads, handed over to `tf.data`: for formats that TensorFlow does not read, and files behind a URL."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from datamat.readers.memory import keep_freed_pages_again
from datamat.readers.tf_exit import free_iterators_at_exit
from datamat.readers.tf_features import signature, tensorflow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from datamat.features import Features

__all__ = ["handed_over"]


def handed_over(
    read: Callable[[int, int | None, bool], Iterable[dict[str, Any]]],
    features: Features,
    batch_size: int | None,
    *,
    drop_last: bool,
) -> Any:
    """Return samples or batches as a `tf.data.Dataset`, another epoch in each iteration.

    Args:
        read: returns those of an epoch by its number, `batch_size` and `drop_last`.
        features: their schema.
        batch_size: most samples in each batch; None for single samples.
        drop_last: leave out a last batch that is not full.
    """
    tf = tensorflow()
    free_iterators_at_exit()
    spec = signature(features)
    if batch_size is not None:
        rows = batch_size if drop_last else None
        spec = {name: tf.TensorSpec((rows, *one.shape), one.dtype) for name, one in spec.items()}
    numbers = itertools.count()

    # TensorFlow keeps it for the life of the process. So no epoch leaves anything in it: no file, no memory, no thread.
    def epoch() -> Iterator[dict[str, Any]]:
        keep_freed_pages_again()
        yield from read(next(numbers), batch_size, drop_last)

    return tf.data.Dataset.from_generator(epoch, output_signature=spec)
