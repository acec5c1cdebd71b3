"""Which start method is the fastest that is safe here and now.

fork starts a worker in a few milliseconds and needs no pickling, but copies only the calling thread: a lock that
another thread holds stays locked for ever in the child. After a single `tf.constant` in the parent, a matmul in a
forked child hangs every time; after a mere import of TensorFlow nothing does. So the choice asks what is *live*.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from datamat.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["START_METHODS", "choose_start_method"]

START_METHODS = ("fork", "forkserver", "spawn")


def choose_start_method(requested: str | None = None) -> tuple[str, str]:
    """Return the start method to use and, in words, why.

    Args:
        requested: "fork", "forkserver", "spawn", or None to choose.

    Raises:
        OptionError: `requested` is none of these, or this system does not have it.

    Example:
        >>> choose_start_method("spawn")
        ('spawn', 'asked for')
    """
    if requested is not None:
        if requested not in START_METHODS:
            raise OptionError(f"start_method is {requested!r}; pass one of {', '.join(START_METHODS)}, or None")
        if not hasattr(os, "fork"):
            raise OptionError("datamat.parallel needs a POSIX system (Linux or macOS); this one cannot pass sockets")
        return requested, "asked for"
    if sys.platform != "linux":
        return "spawn", f"{sys.platform} libraries are not safe to fork"
    for is_unsafe, reason in _REASONS_AGAINST_FORK:
        if is_unsafe():
            return "forkserver", f"fork is unsafe: {reason}"
    return "fork", "one thread, and no runtime that a fork would break"


def _has_other_threads() -> bool:
    return threading.active_count() > 1 or threading.current_thread() is not threading.main_thread()


def _has_live_tensorflow() -> bool:
    """Has TensorFlow made its context (and so its thread pools)? Importing it does not."""
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    return bool(getattr(context, "_initialized", False))


def _has_live_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _has_live_jax() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(getattr(bridge, "_backends", None))


def _has_live_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _has_native_threads() -> bool:
    """Has gRPC, which does not survive a fork, started threads? OpenBLAS and OpenCV do survive it."""
    return "grpc._cython.cygrpc" in sys.modules and _num_native_threads() > threading.active_count()


def _num_native_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


_REASONS_AGAINST_FORK: tuple[tuple[Callable[[], bool], str], ...] = (
    (_has_other_threads, "this process has other Python threads"),
    (_has_live_tensorflow, "the TensorFlow runtime is in use"),
    (_has_live_cuda, "CUDA is initialised by torch"),
    (_has_live_jax, "a JAX backend is in use"),
    (_has_live_ray, "ray is running"),
    (_has_native_threads, "gRPC has threads"),
)
