"""Arrow arrays made from their buffers: `pa.array` imports pandas if it is installed, which takes 0.4 s and 40 MB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_ITEMS = (1 << 31) - 1
"""Numbers in lists, or bytes of texts, that one array holds."""


def numbers_array(values: np.ndarray, valid: np.ndarray | None = None) -> Any:
    """Return an array of numbers or booleans (n,); invalid ones are null."""
    import pyarrow as pa

    is_bool = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_bool else np.ascontiguousarray(values)
    kind = pa.bool_() if is_bool else pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [validity(valid), pa.py_buffer(data)])


def ends_array(lengths: np.ndarray) -> Any:
    """Return the offsets of lists of these lengths (n,): int32 (n + 1,); raise `ValueError` if they exceed 31 bits."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if ends[-1] > MOST_ITEMS:
        raise ValueError(f"one block holds {ends[-1]:,} items, where Arrow's lists end at {MOST_ITEMS:,}")
    return numbers_array(ends.astype(np.int32))


def texts_array(values: Sequence[str | None]) -> Any:
    """Return an array of texts; None is null."""
    import pyarrow as pa

    data = [b"" if value is None else value.encode() for value in values]
    return binary_array(data, pa.string(), np.array([value is not None for value in values], bool))


def binary_array(values: Sequence[bytes], kind: Any, valid: np.ndarray | None = None) -> Any:
    """Return an array of bytes or texts, in several pieces if they take more than 2 GiB; invalid ones are null.

    Raises:
        pyarrow.ArrowInvalid: a text is not UTF-8.
    """
    import pyarrow as pa

    lengths = np.fromiter(map(len, values), np.int64, len(values))
    if lengths.sum() > MOST_ITEMS:
        return pa.array(values, kind, mask=None if valid is None else ~valid)
    return packed_array(b"".join(values), lengths, kind, valid)


def packed_array(data: Any, lengths: np.ndarray, kind: Any, valid: np.ndarray | None = None) -> Any:
    """Return an array of bytes or texts that lie one after another in a buffer, which it shares, of less than 2 GiB.

    Raises:
        pyarrow.ArrowInvalid: a text is not UTF-8.
    """
    import pyarrow as pa

    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    found = pa.Array.from_buffers(kind, len(lengths), [validity(valid), pa.py_buffer(ends), pa.py_buffer(data)])
    found.validate(full=kind == pa.string())
    return found


def validity(valid: np.ndarray | None) -> Any:
    """Return the bitmap of an array that has nulls, or None."""
    import pyarrow as pa

    return None if valid is None or valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
