"""Send arrays to workers without the copies that pickle would make: by their file, or beside the stream.

numpy.memmap    by its file, where that is still the one that is mapped: the worker maps the same bytes, however many
                there are. What was mapped to be changed in private (`mode="c"`), or lost its file, goes as an array.
torch storages  as an array of bytes, which goes beside the stream. Tensors that share memory share it in the worker.

numpy and torch are imported by those who have such objects, not by this module.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

from datamat.parallel.affinity import find, mappings

ArrayReduction = Any  # as returned by `__reduce__`


@functools.lru_cache(maxsize=4096)
def rule_for(kind: Any) -> Callable[[Any], ArrayReduction] | None:
    """Return the rule for arrays of this type; None for a type that this module does not know."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((rule for name in names if (rule := _RULES.get(name)) is not None), None)


# ---------------------------------------------------------------- numpy.memmap


def _memmap(array: Any) -> ArrayReduction:
    """Return the reduction that maps the array again, or one of an ordinary copy."""
    numpy = sys.modules["numpy"]
    plain = array.view(numpy.ndarray)
    mapping, path = getattr(array, "_mmap", None), getattr(array, "filename", None)
    if mapping is None or path is None or array.mode == "c" or not array.size or array.dtype.hasobject:
        return plain.__reduce_ex__(5)
    begin = numpy.frombuffer(mapping, numpy.uint8).__array_interface__["data"][0]
    if not _is_mapped(os.path.realpath(path), begin):
        return plain.__reduce_ex__(5)
    first = array.__array_interface__["data"][0]
    low = first + sum(min(0, (length - 1) * stride) for length, stride in zip(array.shape, array.strides, strict=True))
    high = first + sum(max(0, (length - 1) * stride) for length, stride in zip(array.shape, array.strides, strict=True))
    offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + low - begin  # of `low` in the file
    mode = "r" if array.mode == "r" or not array.flags.writeable else "r+"  # never "w+", which empties the file
    layout = (array.dtype, array.shape, array.strides, first - low)
    return map_array, (os.path.abspath(path), mode, offset, high - low + array.itemsize, layout)


def _is_mapped(path: str, address: int) -> bool:
    """Return True if the file mapped at an address still has this path; it may have been replaced."""
    if not (mapped := mappings()):
        return os.path.exists(path)
    mapping = find(mapped, address)
    return mapping is not None and mapping.path == path.replace("\n", "\\012")


def map_array(path: str, mode: Any, offset: int, num_bytes: int, layout: tuple[Any, ...]) -> Any:
    """Return an array that is mapped from a file.

    Args:
        path: absolute path of the file to map.
        mode: mode of the mapping, "r" or "r+".
        offset: byte of the file at which the mapping begins.
        num_bytes: number of bytes to map.
        layout: type, shape and strides of the array, and where its first item is.
    """
    import numpy as np

    dtype, shape, strides, first = layout
    if first == 0 and num_bytes == math.prod(shape) * dtype.itemsize:
        ordered: Any = np.memmap(path, dtype, mode, offset, shape)
        if ordered.strides == strides:
            return ordered
    return np.ndarray(shape, dtype, np.memmap(path, np.uint8, mode, offset, (num_bytes,)), first, strides)


# ---------------------------------------------------------------- torch


def _storage(storage: Any) -> ArrayReduction:
    if storage.device.type != "cpu" or not storage.nbytes():
        return NotImplemented
    torch = sys.modules["torch"]
    return storage_of, (torch.empty(0, dtype=torch.uint8).set_(storage).numpy(),)


def _typed_storage(storage: Any) -> ArrayReduction:
    content = storage._untyped_storage  # everything else in this class raises a DeprecationWarning
    if content.device.type != "cpu" or not content.nbytes():
        return NotImplemented
    return typed_storage_of, (content, storage.dtype)


def storage_of(content: Any) -> Any:
    """Return the torch storage that is the memory of an array of bytes."""
    import torch

    return torch.from_numpy(content).untyped_storage()


def typed_storage_of(storage: Any, dtype: Any) -> Any:
    """Return a view of a torch storage as numbers of a type, as tensors are made from."""
    import torch

    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


_RULES: dict[str, Callable[[Any], ArrayReduction]] = {
    "numpy.memmap": _memmap,
    "torch.storage.UntypedStorage": _storage,
    "torch.storage.TypedStorage": _typed_storage,
}
