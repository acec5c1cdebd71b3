r"""The two files of Megatron-LM's token sets: the tokens of all documents, and the index that divides them.

    PREFIX.bin   the tokens, one after another
    PREFIX.idx   "MMIDIDX\0\0" | uint64 version, 1 | uint8 dtype | uint64 n | uint64 m
                 int32 (n,)      tokens of each sequence
                 int64 (n,)      byte at which it begins in PREFIX.bin
                 int64 (m,)      number of the first sequence of each document, and n

All of it is little-endian: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py. A
document has several sequences where `preprocess_data.py` was called with `--split-sentences`.

It is not a `ShardFormat`. PREFIX.bin can contain nothing but tokens, since `merge_datasets.py` joins such files byte
for
byte: neither records nor their keys can be found in it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""The dtypes of tokens, by their code."""

_AT_ONCE = 1 << 20  # documents whose places are computed together


def index_of(lengths: NDArray[np.int32], dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the content of PREFIX.idx, with one sequence per document.

    Args:
        lengths: int32 (n,), tokens of each document.
        dtype: dtype of the tokens.
    """
    code = next(code for code, name in DTYPES.items() if name == dtype.name)
    yield HEAD.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    yield lengths.astype("<i4").tobytes()
    start, windows = 0, range(0, len(lengths), _AT_ONCE)
    for some in (lengths[first : first + _AT_ONCE] for first in windows):
        ends = start + np.cumsum(some, dtype="<i8") * dtype.itemsize
        yield (ends - some * np.int64(dtype.itemsize)).tobytes()
        start = int(ends[-1])
    yield from (np.arange(first, min(first + _AT_ONCE, len(lengths)), dtype="<i8").tobytes() for first in windows)
    yield len(lengths).to_bytes(8, "little")
