"""Lets a program exit cleanly in the middle of a `tf.data` pipeline that calls Python.

When the interpreter shuts down, it frees the remaining iterators. TensorFlow then waits for calls into Python that can
no longer be made, and the program hangs or aborts. So these iterators are freed while Python still works, even those
that an uncaught exception keeps alive through the frames of its traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
from typing import Any

_MOST_SWEEPS = 10
_FEEDS = "_datamat_feeds_pipelines"
_RESOURCES = ("_iterator_resource", "_multi_device_iterator_resource", "_device_iterators")


@functools.cache
def free_iterators_at_exit() -> None:
    """Have all iterators of `tf.data` freed at exit, before the interpreter shuts down."""
    atexit.register(_free_iterators)


def feed_pipelines(iterator: Any) -> Any:
    """Register an iterator that the functions of pipelines read, so that it is freed after theirs; return it."""
    setattr(iterator, _FEEDS, True)
    return iterator


def _free_iterators() -> None:
    gc.unfreeze()  # `gc` does not list frozen objects
    for _ in range(_MOST_SWEEPS):  # other threads may be creating more
        iterators = _iterators_in_use()
        if not iterators:
            break
        for iterator in sorted(iterators, key=lambda each: hasattr(each, _FEEDS)):
            try:
                _restart_empty(iterator)
            finally:
                for name in _RESOURCES:
                    if getattr(iterator, name, None) is not None:
                        setattr(iterator, name, None)


def _iterators_in_use() -> list[Any]:
    """Return all live iterators, which TensorFlow does not list; a thread that uses one after this gets an error."""
    from tensorflow.python.data.ops import iterator_ops, multi_device_iterator_ops

    kinds = (iterator_ops.OwnedIterator, multi_device_iterator_ops.OwnedMultiDeviceIterator)
    objects = gc.get_objects()
    found = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    live = [thing for thing in objects if type(thing) in found]
    return [each for each in live if any(getattr(each, name, None) is not None for name in _RESOURCES)]


def _restart_empty(iterator: Any) -> None:
    """End the pipeline of an iterator that has other owners, such as a `tf.function` that uses it."""
    import tensorflow as tf
    from tensorflow.python.data.util import structure
    from tensorflow.python.ops import gen_dataset_ops

    resource = getattr(iterator, "_iterator_resource", None)  # an iterator over several devices has one for each
    if resource is None or tf.is_symbolic_tensor(resource):
        return
    types = structure.get_flat_tensor_types(iterator.element_spec)
    shapes = structure.get_flat_tensor_shapes(iterator.element_spec)
    # A failure here is harmless, as the iterator is freed anyway; some rare types have no zeros.
    with tf.init_scope(), tf.device(resource.device), contextlib.suppress(tf.errors.OpError, TypeError):
        columns = [_no_rows(kind, shape) for kind, shape in zip(types, shapes, strict=True)]
        gen_dataset_ops.make_iterator(gen_dataset_ops.tensor_slice_dataset(columns, shapes), resource)


def _no_rows(kind: Any, shape: Any) -> Any:
    """Return an empty column of tensors of a type and shape, whose sizes may be None."""
    import tensorflow as tf

    sizes = [0, *((size or 0) for size in (shape if shape.rank is not None else ()))]
    if kind != tf.variant:
        return tf.zeros(sizes, kind)
    # Ragged and sparse tensors travel as variants, which have no zeros.
    one = tf.reshape(tf.data.experimental.to_variant(tf.data.Dataset.range(0)), [1])
    return tf.reshape(tf.tile(one, [0]), sizes)
