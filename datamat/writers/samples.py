"""Gives values of any dataset the form that features take: names of fields, arrays of numbers, content of files."""

from __future__ import annotations

import abc
import decimal
import importlib
import io
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.codecs import encode_png, probe
from datamat.errors import MissingDependencyError, SchemaError, SourceError, count_of
from datamat.features import Audio, Bytes, ClassLabel, Depth, Image, ListOf, Mask, Nullable, Scalar, Timestamp, Video
from datamat.features.audio import decoded_sound
from datamat.features.base import as_array, dtype_of, holds_numbers

if TYPE_CHECKING:
    from datamat.features import Feature


HF_FILE = {"bytes", "path"}  # of a struct that holds an encoded file
OF_FILES_ALONE = (Image, Audio, Video, Mask, Depth, Bytes)
_PAIR = ("x", "y")
_PLAIN_NUMBERS = {bool, int, float, type(None)}
_UNFIT = re.compile(r"[/\\#\x00-\x1f\x7f]+|\.\.+")  # of keys, where they become part of names


def field_names(names: Sequence[str] | None, count: int) -> Sequence[str]:
    """Return names for the values of a tuple: those given, or usual ones."""
    if names is None:
        return _PAIR[:count] if count <= len(_PAIR) else [f"field_{number}" for number in range(count)]
    if len(names) != count:
        raise SourceError(
            f"names are {', '.join(names)}, but a sample has {count_of(count, 'value')}; give one name for each"
        )
    return names


class Items(abc.ABC):
    """How the items of a source, of one kind, become samples.

    Attributes:
        features: features of fields, as far as the items show them.
        refused: why a field cannot be stored, and what to write instead, by field name.
    """

    features: Mapping[str, Feature] = {}
    refused: Mapping[str, str] = {}

    def declare(self, features: Mapping[str, Feature]) -> None:  # noqa: B027 -- most have no use for them
        """Take the features that the user declares, by field name."""

    @abc.abstractmethod
    def sample(self, item: Any) -> dict[str, Any]:
        """Return an item as a sample."""

    @abc.abstractmethod
    def dicts(self, item: Any) -> frozenset[str]:
        """Return the names of the fields of an item that are dicts."""


@final
class PlainItems(Items):
    """Dicts, named tuples, tuples, lists, and values alone.

    Args:
        names: names of the fields, for items without.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = names

    def sample(self, item: Any) -> dict[str, Any]:
        if isinstance(item, Mapping):
            fields = list(flattened(item))
            found = dict(fields)
            if len(found) < len(fields):
                names = [name for name, _ in fields]
                twice = next(name for name in names if names.count(name) > 1)
                raise SchemaError(f"the sample has two fields {twice!r}, one of them in a dict; rename one")
            return found
        if hasattr(item, "_asdict"):
            return dict(flattened(item._asdict()))
        values = item if isinstance(item, (tuple, list)) else (item,)
        named = zip(field_names(self._names, len(values)), values, strict=True)
        return {name: _plain(value, name) for name, value in named}

    def dicts(self, item: Any) -> frozenset[str]:
        return dicts_in(item)


def fit_key(key: str) -> str:
    """Return the key of a sample in a tar without what no key may hold, such as the slashes of its folders."""
    return _UNFIT.sub("-", key)


def dicts_in(item: Any, prefix: str = "") -> frozenset[str]:
    """Return the names of the dicts in an item of any dataset, as `flattened` calls them."""
    fields = item._asdict() if hasattr(item, "_asdict") else item
    if not isinstance(fields, Mapping):
        return frozenset()
    inner = {f"{prefix}{name}": value for name, value in fields.items() if isinstance(value, Mapping)}
    return frozenset(inner).union(*(dicts_in(value, f"{name}/") for name, value in inner.items()))


def flattened(item: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field, those of dicts as `DICT/FIELD`."""
    for name, value in item.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", _plain(value, f"{prefix}{name}")


def _plain(value: Any, name: str = "") -> Any:
    """Return a value as features accept it: tensors and lists of numbers as arrays, pictures of Pillow as they are."""
    if hasattr(value, "getbands"):
        return value
    value = _listed_numbers(value) if isinstance(value, (list, tuple)) else as_array(value, name=name)
    return value[()] if isinstance(value, np.ndarray) and not value.ndim else value


def _listed_numbers(value: Sequence[Any]) -> Any:
    """Return lists of numbers as an array, and any other list, even an empty one, unchanged: JSON holds it."""
    if not len(value) or hasattr(value[0], "getbands"):  # pictures of Pillow, one of which may be as large as another
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    return array if array.dtype.kind in "biufc" else value


def without_items(value: Any, feature: Feature | None) -> Any:
    """Return an empty list, which shows no type, as the array that its feature wants; any other value unchanged."""
    if feature is None or not isinstance(value, (list, tuple)) or value:
        return value
    if isinstance(getattr(feature, "feature", None), Mapping):  # a list of dicts, which needs no type
        return value
    dtype, shape = feature.value_type()
    if not shape or not holds_numbers(dtype):
        return value
    return np.empty((0, *(size or 0 for size in shape[1:])), dtype_of(dtype))


MOST_AHEAD = 100
"""Samples to search for a non-empty list."""


def fill_lists(first: dict[str, Any], known: Collection[str], rest: Iterable[Mapping[str, Any]]) -> None:
    """Fill the empty lists of a first sample with the first non-empty lists of the next samples.

    Args:
        first: the sample; changed in place.
        known: fields whose feature is known.
        rest: the samples after it; no more are asked for than needed, and at most a hundred.
    """
    empty = {name for name, value in first.items() if isinstance(value, (list, tuple)) and not value} - set(known)
    samples = iter(rest)
    for _ in range(MOST_AHEAD):
        if not empty or (sample := next(samples, None)) is None:
            return
        found = {name: sample[name] for name in empty if shows_type(sample.get(name))}
        first |= found
        empty -= found.keys()


def shows_type(value: Any) -> bool:
    """Return True if a value shows what lists of its field hold, as a non-empty list or an array does."""
    return (isinstance(value, (list, tuple)) and len(value) > 0) or (isinstance(value, np.ndarray) and value.ndim > 0)


def content_of_file(cell: Any) -> Any:
    """Return the content of the file that a cell of Hugging Face holds or names; a decoded picture as it is."""
    if not isinstance(cell, Mapping):  # a step of a stream that needs the picture, such as a filter, has decoded it
        return _plain(cell)
    return cell["bytes"] if cell["bytes"] is not None else pathlib.Path(cell["path"]).read_bytes()


def is_no_file(cell: Any) -> bool:
    """Return True if a cell of Hugging Face holds no file."""
    return cell is None or (isinstance(cell, Mapping) and cell["bytes"] is None and not cell["path"])


def empty_cell(column: str, place: str = "", name: str | None = None) -> str:
    """Return the error text for a cell that must not be empty.

    Args:
        column: name of its column.
        place: what the message begins with.
        name: name of the field; None if it is that of the column.
    """
    return (
        f"{place}column {column!r} of the table is empty; fill it in, or drop the row; or declare it with "
        f"features={{{name or column!r}: Nullable(...)}}"
    )


def in_mode(data: bytes, mode: str) -> bytes:
    """Return the file of a picture in a mode of Pillow, as `datasets.Image(mode=)` decodes it."""
    pillow = _needed("PIL.Image", "pillow", "Image(mode=...)")
    probe(data)  # which bounds the number of pixels
    with pillow.open(io.BytesIO(data)) as picture:
        if picture.mode == mode:
            return data
        return encode_png(as_array(importlib.import_module("PIL.ImageOps").exif_transpose(picture).convert(mode)))


def resampled(data: bytes, rate: int | None) -> Any:
    """Return a file of sound, or its samples at another rate, as `datasets.Audio(sampling_rate=)` decodes it."""
    if rate is None:
        return data
    samples, own = decoded_sound(data)
    return data if own == rate else _needed("soxr", "soxr", "Audio(sampling_rate=...)").resample(samples, own, rate)


def _needed(module: str, package: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{what} of Hugging Face needs the package {package}; install it with: pip install {package}"
        ) from error


_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def _parsed(text: str, feature: Feature) -> Any:
    """Return the number, truth value, time or class in a text; other text unchanged, which its feature refuses."""
    import pyarrow as pa

    try:
        match feature:
            case ClassLabel(shape=()):
                return text if text in feature.class_names() else int(text)
            case Timestamp(tz=zone):
                return pa.scalar(text).cast(pa.timestamp("us", zone)).as_py()  # which rounds nothing
            case Scalar(dtype="bool"):
                return _TRUTHS.get(text.lower(), text)
            case Scalar(dtype=dtype) if dtype_of(dtype).kind in "iu" and "." not in text:
                return int(text)
            case Scalar(dtype=dtype):
                number = float(text)
                return int(number) if dtype_of(dtype).kind in "iu" and number.is_integer() else number
    except ValueError:
        pass
    return text


def converted(value: Any, feature: Feature) -> Any:  # noqa: PLR0911 -- one for each kind of type
    """Return a value in the type of a declared feature, if only its type differs."""
    if value is None:
        return None
    if isinstance(feature, OF_FILES_ALONE) and isinstance(value, Mapping) and value.keys() == HF_FILE:
        return None if is_no_file(value) else content_of_file(value)
    inner = feature.feature if isinstance(feature, (Nullable, ListOf)) else feature
    if isinstance(feature, ListOf) and isinstance(inner, OF_FILES_ALONE):
        return [converted(item, inner) for item in value]
    if isinstance(inner, Mapping):  # a dict, or a list of dicts
        rows = [value] if isinstance(value, Mapping) else value
        made = [
            {name: converted(part, inner[name]) if name in inner else part for name, part in row.items()}
            if isinstance(row, Mapping) else row
            for row in rows
        ]  # fmt: skip
        return made[0] if isinstance(value, Mapping) else made
    if isinstance(feature, Nullable):
        return converted(value, feature.feature)
    if isinstance(value, str):
        return _parsed(value, feature)
    value = without_items(value, feature)
    dtype, shape = feature.value_type()
    if (dtype, shape) == ("string", ()) and not isinstance(value, str):
        return value.decode() if isinstance(value, bytes) else str(value)
    if isinstance(feature, Scalar) and isinstance(value, (decimal.Decimal, np.generic)):
        found = dtype_of(dtype).type(value)
        return found if found == value or dtype_of(dtype).kind in "fcV" else value
    if shape and holds_numbers(dtype) and isinstance(value, (list, tuple, np.ndarray)):
        return _in_dtype(value, dtype_of(dtype))
    return value


def converted_column(values: Any, feature: Feature) -> Any:
    """Return the values of a column as `converted` returns each."""
    inner = feature.feature if isinstance(feature, Nullable) else feature
    if isinstance(inner, Scalar):
        is_array = isinstance(values, np.ndarray)
        if values.dtype == dtype_of(inner.dtype) if is_array else {*map(type, values)} <= _PLAIN_NUMBERS:
            return values
    return [converted(value, feature) for value in values]


def _in_dtype(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return numbers in the declared dtype; unchanged, for the feature to refuse, if it cannot hold them."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    is_wider = array.dtype.kind in "biu" or dtype.kind in "fcV"
    if array.dtype.kind not in "biuf" or not is_wider:
        return value
    with np.errstate(over="ignore"):
        made = array.astype(dtype)
    same = (made, array) if dtype.kind in "biu" else (np.isfinite(made), np.isfinite(array))
    return made if np.array_equal(*same) else array
