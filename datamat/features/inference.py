"""Features inferred from one sample, for functions that declare none."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from datamat import codecs
from datamat.errors import InputError, SchemaError, kind_of
from datamat.features.audio import Audio, sound_extension
from datamat.features.base import Feature, as_array
from datamat.features.list_of import ListOf
from datamat.features.pictures import Image
from datamat.features.values import Bytes, Json, Scalar, Tensor, Text, Timestamp
from datamat.features.video import Video, video_extension


def inferred(name: str, value: Any) -> Any:
    """Return the feature of a value, or a dict of features; raise as `Features.infer` does."""
    value = as_array(value)
    if value is None:
        raise SchemaError(
            f"field {name!r} is None, which shows no type; fill it in, or pass features=, with Nullable(...) for it"
        )
    for kinds, feature_of in _FEATURE_OF_TYPES:
        if isinstance(value, kinds):
            return feature_of(name, value)
    raise SchemaError(
        f"field {name!r} holds {kind_of(value)}, for which no feature can be inferred; "
        "return a numpy array, number, str, bool, datetime, dict, list or encoded image bytes, or pass features="
    )


def _of_bytes(name: str, value: bytes) -> Feature:
    if sound_extension(value):
        return Audio()
    if video_extension(value):
        return Video()
    try:
        info = codecs.probe(value, name=name)
    except InputError as error:
        outer, _, inner = name.partition("[].")
        wanted = f"{outer!r}: ListOf({{{inner!r}: Bytes(), ...}})" if inner else f"{name!r}: Bytes()"
        raise InputError(f"{error}; if it is not meant to be an image, pass features= with {wanted}") from error
    if info.is_float:
        raise InputError(
            f"{name!r}: a TIFF of floats, of unknown unit; pass features=, with Depth(dtype='float32') for metres"
        )
    if info.bit_depth > 8:  # Image would not widen its channels for others
        return Image((None, None, info.channels), dtype="uint16")
    return Image((None, None, 4 if info.alpha else 3))


def _of_time(_: str, value: Any) -> Feature:
    return Timestamp("UTC" if getattr(value, "tzinfo", None) else None)


def _of_list(name: str, value: Any) -> Feature:  # noqa: PLR0911 -- one per kind of items
    if value and all(isinstance(item, dict) for item in value):
        return _of_dicts(name, value)
    if value and all(hasattr(item, "getbands") for item in value):  # Pillow
        return ListOf(inferred(name, value[0]))
    kinds = set(map(type, value))
    if kinds and kinds <= {list, tuple}:
        inner = _of_list(name, [item for items in value for item in items])
        holds_scalars = isinstance(inner, ListOf) and isinstance(inner.feature, Scalar)
        return ListOf(inner) if holds_scalars else Json()
    if kinds == {int, float} and all(abs(item) <= _EXACT for item in value if type(item) is int):
        return ListOf(Scalar("float64"))
    if len(kinds) != 1:
        return Json()
    first = value[0]
    if isinstance(first, int) and not isinstance(first, bool) and not all(-1 << 63 <= item < 1 << 63 for item in value):
        return Json()
    if isinstance(first, bytes):
        return ListOf(Bytes())
    if isinstance(first, datetime.date):
        zones = {getattr(item, "tzinfo", None) is None for item in value}
        return ListOf(_of_time("", first)) if len(zones) == 1 else Json()
    return ListOf(inferred("", first)) if isinstance(first, (str, int, float, np.generic)) else Json()


def _of_dicts(name: str, value: Sequence[dict[Any, Any]]) -> Feature:
    """Return the feature of a list of dicts: JSON, unless they have common fields with values that JSON lacks."""
    columns = {key: [row.get(key) for row in value] for key in value[0]}
    are_alike = all(row.keys() == columns.keys() for row in value)
    is_full = not any(item is None for column in columns.values() for item in column)
    if not (are_alike and is_full and any(map(_is_no_json, value))):
        return Json()
    fields: Any = {key: _of_items(f"{name}[].{key}", column) for key, column in columns.items()}
    # There is no feature for lists of dicts in lists of dicts.
    return Json() if any(map(_lists_dicts, fields.values())) else ListOf(fields)


def _of_items(name: str, values: list[Any]) -> Any:
    """Return the feature of a field in dicts of a list."""
    values = [value[()] if isinstance(value, np.ndarray) else value for value in map(as_array, values)]  # as numbers
    if any(map(_is_no_json, values)):
        return inferred(name, values[0])
    found = _of_list(name, values)
    return found.feature if isinstance(found, ListOf) else Json()


def _lists_dicts(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_lists_dicts, feature.values()))
    return isinstance(feature, ListOf) and isinstance(feature.feature, Mapping)


def _of_dict(name: str, value: dict[Any, Any]) -> Any:
    if value and all(isinstance(key, str) for key in value) and any(map(_is_no_json, value.values())):
        return {key: inferred(f"{name}/{key}", item) for key, item in value.items()}
    return Json()


def _is_no_json(value: Any) -> bool:
    """Return True if JSON would change the value: an array, bytes, a time, or a dict or list of dicts with one."""
    if isinstance(value, dict):
        return any(map(_is_no_json, value.values()))
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, dict) and _is_no_json(item) for item in value)
    value = as_array(value)
    return isinstance(value, (bytes, datetime.date, np.datetime64)) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )


def _of_array(_: str, value: np.ndarray) -> Feature:
    if value.ndim == 1 and value.dtype.kind in "UO" and all(isinstance(item, str) for item in value):
        return ListOf(Text())
    if value.ndim == 1 and value.dtype.kind == "M":
        return ListOf(Timestamp())
    if value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] in {3, 4} and value.size:
        return Image((None, None, value.shape[2]))
    return Tensor((None,) * value.ndim, value.dtype.name)


_EXACT = 1 << 53  # integers that float64 holds exactly
_FEATURE_OF_TYPES: tuple[tuple[tuple[type, ...], Callable[[str, Any], Any]], ...] = (
    ((str,), lambda _, value: Text()),
    ((bytes,), _of_bytes),
    ((bool, np.bool_), lambda _, value: Scalar("bool")),
    ((np.datetime64, datetime.date), _of_time),
    ((np.generic,), lambda _, value: Scalar(value.dtype.name)),
    ((int,), lambda _, value: Scalar("int64" if value < 1 << 63 else "uint64")),
    ((float,), lambda _, value: Scalar("float64")),
    ((np.ndarray,), _of_array),
    ((list, tuple), _of_list),
    ((dict,), _of_dict),
)
"""The feature for values of some types; the first match counts."""
