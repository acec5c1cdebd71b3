"""Small building blocks of `tf.data` graphs, shared by several parts of the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def untuned(tf: Any, dataset: Any) -> Any:
    """Return a dataset without autotuning."""
    # With the autotuner of TensorFlow 2.21, every other epoch of 3.4 s took 5.2 s: an iterator's end waits for the
    # tuner's thread, which seems to sleep twice as long each time.
    without_tuner = tf.data.Options()
    without_tuner.autotune.enabled = False
    return dataset.with_options(without_tuner)


def symbolic(tf: Any, dataset: Any) -> Any:
    """Return a dataset whose checkpoints hold positions and not waiting batches, even in steps that users add."""
    positions_only = tf.data.Options()
    positions_only.experimental_symbolic_checkpoint = True
    return dataset.with_options(positions_only)


def verbatim(tf: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of our functions, to be traced without AutoGraph, whose rewriting takes 0.2 s."""
    traced: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return traced


def counted(tf: Any, dataset: Any, number: int) -> Any:
    """Return a dataset that declares its number of elements, and raises if the number differs, as if shards are cut."""
    return dataset.apply(tf.data.experimental.assert_cardinality(number))
