"""Shuffling that resumes exactly.

All shuffles of a pipeline draw their seeds from one generator, whose position is restored by the step restored last.

A shuffle saves its generator in checkpoints. But TensorFlow does not save a step whose input has ended: the shuffle of
the files has ended once the last file is open, that of the records while the last batches wait to be taken. If each
shuffle had its own generator, a restored iterator would repeat the orders of earlier epochs. Moreover, restoring a
shuffle first recreates its input, whose shuffles then draw again.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import OptionError
from datamat.readers.tf.decode import (
    tensorflow,
)
from datamat.readers.tf.exit import feed_pipelines

if TYPE_CHECKING:
    from collections.abc import Iterator

from datamat.readers.tf.graph import counted, untuned, verbatim


def _as_seeds(seed: int) -> dict[str, Any]:
    """Split a seed into the two of TensorFlow's ops; 0 and 0 together would mean random seeds."""
    return {"seed": np.int64(seed % _MOST_SEED), "seed2": np.int64(1 + seed // _MOST_SEED % _MOST_SEED)}


def mixed(tf: Any, dataset: Any, window: int, seed: int, generator: Any = None, *, reshuffles: bool = True) -> Any:
    """Return a dataset whose elements are shuffled within a window.

    The order from `Dataset.shuffle` would also depend on the program's calls of `tf.random.set_seed`.

    Args:
        tf: the imported module `tensorflow`.
        dataset: dataset of any elements.
        window: size of the shuffle buffer, in elements.
        seed: base seed.
        generator: gives each iteration its seed; None creates one for this step alone.
        reshuffles: whether each iteration has another order.
    """
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=np.int64(window),
        **_as_seeds(seed),
        seed_generator=tf.raw_ops.DummySeedGenerator() if generator is None else generator,
        reshuffle_each_iteration=reshuffles,
        **dataset._flat_structure,
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


@final
class Seeds:
    """The generator that the shuffles of a pipeline share, and the numbers of its epochs."""

    def __init__(self, tf: Any, seed: int) -> None:
        self._tf = tf
        self._seed = seed
        self._seeds = _as_seeds(seed)
        self._generator, self._deleter = tf.raw_ops.AnonymousSeedGenerator(**self._seeds, reshuffle=True)
        self._num_users = 0  # steps that draw from the generator, each once per iteration

    def shuffled(self, dataset: Any, window: int) -> Any:
        """Return a dataset whose elements are shuffled within a window, differently in each iteration."""
        self._num_users += 1
        found = mixed(self._tf, dataset, window, self._seed, self._generator)
        found.made_of = (dataset, self)  # must live as long as this dataset
        return found

    def saved_beside(self, dataset: Any) -> Any:
        """Return a dataset whose iterators also restore the generator, after everything else."""
        tf = self._tf
        never = self.shuffled(dataset.take(0), 1)
        found = tf.data.Dataset.choose_from_datasets([dataset, never], tf.data.Dataset.from_tensors(FIRST).repeat())
        number = dataset.cardinality().numpy()
        return found if number == tf.data.UNKNOWN_CARDINALITY else counted(tf, found, number)

    def saved_with(self, dataset: Any) -> Any:
        """Return a dataset whose iterators also restore the generator, even those that have ended."""
        return self.shuffled(self.saved_beside(dataset), 1)

    def epoch(self) -> Any:
        """Return a dataset of one number, int64 (): 0 in its first iteration, 1 in the next, and so on.

        The count continues after an iterator is restored, unlike a counter in Python. So the number is that of the
        draw from the generator, which is saved in checkpoints; replaying an equally seeded generator gives the numbers.
        """
        tf = self._tf
        draws, lock = _Draws(tf, self._seed), threading.Lock()

        def number(drawn: Any) -> Any:
            with lock:
                return np.int64(draws.number(int(drawn)) // self._num_users)

        found = self._drawn().map(
            verbatim(
                tf, lambda value: tf.ensure_shape(tf.numpy_function(number, [value], tf.int64, stateful=False), ())
            )
        )
        return counted(tf, found, 1)

    def _drawn(self) -> Any:
        """Return a dataset of one number, which differs in each iteration."""
        tf = self._tf
        self._num_users += 1
        shape = tf.TensorShape(())
        variant = tf.raw_ops.RandomDatasetV2(
            **self._seeds,
            seed_generator=self._generator,
            rerandomize_each_iteration=True,
            output_types=[tf.int64],
            output_shapes=[shape],
        )
        found = tf.data.experimental.from_variant(variant, tf.TensorSpec(shape, tf.int64))
        found.made_of = self
        return found.take(1)


@final
class _Draws:
    """The number of each draw from the generator of a seed, by the drawn value."""

    def __init__(self, tf: Any, seed: int) -> None:
        self._tf = tf
        self._seed = seed
        self._known: dict[int, int] = {}
        self._next: Iterator[Any] | None = None

    def number(self, drawn: int) -> int:
        """Return the number, from 0, of the draw that gave a value."""
        if self._next is None:
            draws = Seeds(self._tf, self._seed)._drawn().repeat().batch(_DRAWS_AT_ONCE)
            self._next = feed_pipelines(iter(untuned(self._tf, draws)))
        while drawn not in self._known:
            if len(self._known) > _MOST_DRAWS:
                raise OptionError(
                    "the iterator was restored from a checkpoint of a pipeline with another seed; make the dataset "
                    "with the arguments that it had when it was saved"
                )
            for value in next(self._next).numpy().tolist():
                self._known.setdefault(value, len(self._known))
        return self._known[drawn]


_DRAWS_AT_ONCE = 64
_MOST_DRAWS = 1 << 20  # an epoch takes several


FIRST, AT_END = np.int64(0), np.int64(-1)


def refusing_checkpoints(tf: Any, dataset: Any, reason: str) -> Any:
    """Return a dataset whose iterators raise `OptionError` when a checkpoint saves them.

    Iterators of datasets derived from it raise TensorFlow's own error, which says that a `PyFunc` is stateful.
    """
    marked = dataset.take(0).map(verbatim(tf, lambda *parts: _stateful(tf, parts if len(parts) > 1 else parts[0])))
    return _refusing()(marked.concatenate(dataset), reason)


def _stateful(tf: Any, value: Any) -> Any:
    with tf.control_dependencies([tf.numpy_function(lambda: None, [], [])]):
        return tf.nest.map_structure(tf.identity, value)


@functools.cache
def _refusing() -> Any:
    from tensorflow.python.data.ops import dataset_ops, iterator_ops

    class Refusing(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]  # TensorFlow has no types
        def __init__(self, dataset: Any, reason: str) -> None:
            self._reason = reason
            super().__init__(dataset, tensorflow().data.experimental.to_variant(dataset))

        def __iter__(self) -> Any:
            found = RefusingIterator(self)
            found.reason = self._reason
            return found

    class RefusingIterator(iterator_ops.OwnedIterator):  # type: ignore[misc]  # TensorFlow has no types
        reason = ""

        def _serialize_to_tensors(self) -> Any:
            raise OptionError(
                f"tf.train.Checkpoint cannot save this iterator of to_tf: {self.reason}; or read with to_numpy or "
                "to_torch, whose state_dict resumes in mid-epoch in any case"
            )

    return Refusing


_MOST_SEED = 2**63 - 1
