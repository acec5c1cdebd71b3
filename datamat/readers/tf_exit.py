"""The end of a program in the middle of a `tf.data` pipeline that calls Python.

An iterator that is still there when the interpreter goes down is freed in the course of it. TensorFlow then waits for
calls of Python that cannot be made any more, and the program hangs, or is aborted. So these iterators are freed while
Python still works: also those that an uncaught exception keeps alive, with the frames of its traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
from typing import Any

__all__ = ["free_iterators_at_exit"]

_MOST_SWEEPS = 10
_RESOURCES = ("_iterator_resource", "_multi_device_iterator_resource", "_device_iterators")


@functools.cache
def free_iterators_at_exit() -> None:
    """Have all iterators of `tf.data` freed when the program ends, before the interpreter does."""
    atexit.register(_free_iterators)


def _free_iterators() -> None:
    gc.unfreeze()  # what is frozen is not told of
    for _ in range(_MOST_SWEEPS):  # threads may be about to make others
        iterators = _iterators_in_use()
        if not iterators:
            break
        for iterator in iterators:
            try:
                _begin_anew_with_nothing(iterator)
            finally:
                for name in _RESOURCES:
                    if getattr(iterator, name, None) is not None:
                        setattr(iterator, name, None)


def _iterators_in_use() -> list[Any]:
    """Return them all: TensorFlow keeps no list. One that another thread asks for more after this raises."""
    from tensorflow.python.data.ops import iterator_ops, multi_device_iterator_ops

    kinds = (iterator_ops.OwnedIterator, multi_device_iterator_ops.OwnedMultiDeviceIterator)
    objects = gc.get_objects()
    found = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    live = [thing for thing in objects if type(thing) in found]
    return [each for each in live if any(getattr(each, name, None) is not None for name in _RESOURCES)]


def _begin_anew_with_nothing(iterator: Any) -> None:
    """End the pipeline of an iterator that others hold as well: a `tf.function` keeps those that it uses."""
    import tensorflow as tf
    from tensorflow.python.data.util import structure
    from tensorflow.python.ops import gen_dataset_ops

    resource = getattr(iterator, "_iterator_resource", None)  # one of several devices has an iterator for each
    if resource is None or tf.is_symbolic_tensor(resource):
        return
    types = structure.get_flat_tensor_types(iterator.element_spec)
    shapes = structure.get_flat_tensor_shapes(iterator.element_spec)
    # It is freed in any case; of a rare type there are no zeros.
    with tf.init_scope(), tf.device(resource.device), contextlib.suppress(tf.errors.OpError, TypeError):
        columns = [_no_rows(kind, shape) for kind, shape in zip(types, shapes, strict=True)]
        gen_dataset_ops.make_iterator(gen_dataset_ops.tensor_slice_dataset(columns, shapes), resource)


def _no_rows(kind: Any, shape: Any) -> Any:
    """Return an empty column of tensors of a type and shape, any size of which may be open."""
    import tensorflow as tf

    sizes = [0, *((size or 0) for size in (shape if shape.rank is not None else ()))]
    if kind != tf.variant:
        return tf.zeros(sizes, kind)
    # What ragged and sparse tensors travel as, of which no zeros can be made.
    one = tf.reshape(tf.data.experimental.to_variant(tf.data.Dataset.range(0)), [1])
    return tf.reshape(tf.tile(one, [0]), sizes)
