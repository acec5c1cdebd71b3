"""A sample or batch as users see it: a dict by feature name, whose repr gives types and shapes instead of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datamat.errors import count_of

_MOST_NUMBERS, _MOST_CHARACTERS, _MOST_ITEMS = 8, 60, 3


class Sample(dict[str, Any]):
    """A dict that shows types and shapes instead of large values.

    Example:
        >>> Sample(key="0001", image=np.zeros((360, 480, 3), np.uint8), box=np.array([0.1, 0.5]))
        {'key': '0001', 'image': <uint8 (360, 480, 3)>, 'box': [0.1, 0.5]}
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return _shown(self)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
            + (f"; write sample[{name!r}]" if name in self else ""),
            name=name,
            obj=self,
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_shown(inner)}' for name, inner in value.items())}}}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = tuple(value.shape)
        is_small = len(shape) < 2 and sum(shape) <= _MOST_NUMBERS and hasattr(value, "tolist")
        return repr(value.tolist()) if is_small else f"<{str(value.dtype).removeprefix('torch.')} {shape}>"
    if isinstance(value, (bytes, bytearray, memoryview)) and len(value) > _MOST_CHARACTERS:
        return f"<{count_of(len(value), 'byte')}>"
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return f"{value[:_MOST_CHARACTERS]!r}... ({len(value):,} characters)"
    if isinstance(value, (list, tuple)):
        more = f", ... ({count_of(len(value), 'item')})" if len(value) > _MOST_ITEMS else ""
        return f"[{', '.join(map(_shown, value[:_MOST_ITEMS]))}{more}]"
    return repr(value)
