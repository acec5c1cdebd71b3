"""Data sets that exist already, as samples by position: what an index of one lists, and what its writer reads.

    a folder         finished by datamat, prepared by TFDS, or saved by Hugging Face `datasets`
    an object        with `len` and items: a list, a torch `Dataset`, a `datasets.Dataset`; or arrays, by column
    {split: ...}     several of these

Nothing is read before a sample is asked for but what says how many there are.
"""

from __future__ import annotations

import abc
import bisect
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import MissingDependencyError, SourceError
from datamat.features import ClassLabel, Image, Mask, Scalar, Tensor, Text
from datamat.formats import get_format
from datamat.manifest import MANIFEST_FILE, Manifest
from datamat.readers.cache import RecordCache
from datamat.readers.keys import KeyIndex
from datamat.readers.records import RecordFiles
from datamat.tfds_files import INFO_FILE, TfdsFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datamat.features import Feature

__all__ = ["Samples", "open_samples"]

_WANTED = (
    "a folder finished by datamat, prepared by TFDS or saved by Hugging Face datasets; an object with len() and "
    "items by position (list, torch Dataset, datasets.Dataset); equally long numpy arrays in a tuple or by name; or "
    "a dict of these by split"
)
_PAIR = ("x", "y")
_HF_MODULES = {"datasets.arrow_dataset", "datasets.iterable_dataset"}
_HF_FILES = ("state.json", "dataset_dict.json")  # beside a dataset_info.json, as TFDS has it


class Samples(abc.ABC):
    """Samples by position. Picklable where the data set is; a copy in another process opens files anew.

    Attributes:
        declared: features that the data set itself declares.
        identity: what decides the samples, for fingerprints: the object, or what stands for files.
    """

    declared: Mapping[str, Feature] = {}
    identity: Any

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abc.abstractmethod
    def read(self, number: int) -> dict[str, Any]:
        """Return one sample, by field name, as a writer's `read` does."""

    def places(self) -> Iterator[tuple[str, str | None]]:
        """Yield key and split of each sample, in order: here the position, and no split."""
        for number in range(len(self)):
            yield f"{number:08d}", None


def open_samples(dataset: Any, *, names: Sequence[str] | None = None) -> Samples:
    """Return the samples of a data set.

    Args:
        dataset: as the module says.
        names: of the fields, where samples are tuples or arrays without names; None: "x" and "y" for two, "x" for one,
            "field_0" and so on for more.

    Raises:
        SourceError: it is none of what can be read, or a folder is not complete.
        MissingDependencyError: the package that reads it is not installed.
    """
    if isinstance(dataset, (str, os.PathLike)):
        return _of_folder(pathlib.Path(dataset))
    if type(dataset).__module__ in _HF_MODULES:
        return _HfSamples(dataset)
    if isinstance(dataset, Mapping):
        if dataset and all(isinstance(column, np.ndarray) for column in dataset.values()):
            return _ColumnSamples(dict(dataset))
        return _SplitSamples({str(split): open_samples(part, names=names) for split, part in dataset.items()})
    if isinstance(dataset, tuple) and dataset and all(isinstance(column, np.ndarray) for column in dataset):
        return _ColumnSamples(dict(zip(_names(names, len(dataset)), dataset, strict=True)))
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, (str, bytes)):
        return _MapSamples(dataset, names)
    raise SourceError(f"the data set is a {type(dataset).__qualname__}; want {_WANTED}")


def _of_folder(folder: pathlib.Path) -> Samples:
    if (folder / MANIFEST_FILE).is_file():
        return _FinishedSamples(folder)
    if any((folder / name).is_file() for name in _HF_FILES):
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"{folder} was saved by Hugging Face datasets, which is not installed; install it with: "
                "pip install datasets"
            ) from error
        return open_samples(datasets.load_from_disk(str(folder)))
    if (folder / INFO_FILE).is_file():
        return _TfdsSamples(folder)
    raise SourceError(
        f"{folder} holds none of {', '.join([MANIFEST_FILE, *_HF_FILES, INFO_FILE])}, by which a data set is known; "
        f"want {_WANTED}"
    )


@final
class _MapSamples(Samples):
    """Items of an object that has a length."""

    def __init__(self, dataset: Any, names: Sequence[str] | None) -> None:
        self.identity = self._dataset = dataset
        self._names = names

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, number: int) -> dict[str, Any]:
        return _sample_of(self._dataset[number], self._names)


@final
class _ColumnSamples(Samples):
    """Rows of arrays (n, ...)."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SourceError(f"the arrays differ in length ({told}); give one row per sample in each")
        self.identity = self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def read(self, number: int) -> dict[str, Any]:
        return {name: column[number] for name, column in self._columns.items()}


@final
class _SplitSamples(Samples):
    """One data set per split."""

    def __init__(self, parts: dict[str, Samples]) -> None:
        if not parts:
            raise SourceError(f"the data set is an empty dict; want {_WANTED}")
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts.values())))
        self.identity = {split: part.identity for split, part in parts.items()}
        self.declared = next(iter(parts.values())).declared

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, number: int) -> dict[str, Any]:
        place = bisect.bisect_right(self._ends, number)
        return list(self._parts.values())[place].read(number - (self._ends[place - 1] if place else 0))

    def places(self) -> Iterator[tuple[str, str | None]]:
        for split, part in self._parts.items():
            for key, _ in part.places():
                yield f"{split}-{key}", split


@final
class _FinishedSamples(Samples):
    """Records of a finished directory: pictures as the files that they are, so that they are stored as they were."""

    def __init__(self, folder: pathlib.Path) -> None:
        manifest = Manifest.read(folder)
        shard_format = get_format(manifest.format).with_features(manifest.features)
        self._features = manifest.features
        self._records = RecordFiles(folder, manifest.shards, shard_format, RecordCache(0))
        self._keys = KeyIndex(folder / "index", manifest, None, self._records.stored_keys)
        self._splits = {split: sum(info.num_records for info in infos) for split, infos in manifest.splits.items()}
        self.declared = {name: feature for name, feature in manifest.features.items() if name != "key"}
        self.identity = [info.checksum for info in manifest.shards]

    def __len__(self) -> int:
        return len(self._records)

    def read(self, number: int) -> dict[str, Any]:
        columns: Any = self._records.read(number)
        return {
            name: bytes(columns[name][0]) if isinstance(feature, (Image, Mask)) else feature.decode(name, columns)
            for name, feature in self.declared.items()
        }

    def places(self) -> Iterator[tuple[str, str | None]]:
        splits = itertools.chain.from_iterable(itertools.repeat(*item) for item in self._splits.items())
        for key, split in zip(self._keys.keys(), splits, strict=True):
            yield key.replace("#", "-"), split  # a copy is a sample of its own here, and # is the mark of copies


@final
class _TfdsSamples(Samples):
    """Records of a directory that TFDS prepared, read without it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._files = TfdsFiles(folder)
        self.declared = self._files.features
        self.identity = self._files.identity

    def __len__(self) -> int:
        return sum(self._files.splits.values())

    def read(self, number: int) -> dict[str, Any]:
        return self._files.read(number)

    def places(self) -> Iterator[tuple[str, str | None]]:
        for split, count in self._files.splits.items():
            for number in range(count):
                yield f"{split}-{number:08d}", split


@final
class _HfSamples(Samples):
    """Rows of a `datasets.Dataset`: pictures as the files that they are."""

    def __init__(self, dataset: Any) -> None:
        import datasets

        if not hasattr(dataset, "__len__"):
            raise SourceError(
                f"the data set is a {type(dataset).__qualname__}, which has no length; load it without streaming=True"
            )
        for name, feature in dataset.features.items():
            if isinstance(feature, datasets.Image):
                dataset = dataset.cast_column(name, datasets.Image(decode=False))
        self._dataset = dataset.with_format(None)
        # What `datasets` itself names a table and all that was done to it by.
        self.identity = dataset._fingerprint
        found = {name: _hf_feature(feature) for name, feature in dataset.features.items()}
        self.declared = {name: feature for name, feature in found.items() if feature is not None}

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, number: int) -> dict[str, Any]:
        return {name: self._value(name, value) for name, value in self._dataset[number].items()}

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
            return value["bytes"] if value["bytes"] is not None else pathlib.Path(value["path"]).read_bytes()
        feature = self.declared.get(name)
        if isinstance(feature, Tensor):
            return np.asarray(value, feature.dtype)
        return _plain(value)


def _hf_feature(feature: Any) -> Feature | None:
    """Return the feature that holds a column of `datasets`; None where the first value is to tell."""
    kind = type(feature).__name__
    if kind == "ClassLabel":
        return ClassLabel(tuple(feature.names))
    if kind == "Value":
        return Text() if feature.dtype in {"string", "large_string"} else _scalar(feature.dtype)
    if kind in {"List", "LargeList", "Sequence"} and type(feature.feature).__name__ == "Value":
        scalar = _scalar(feature.feature.dtype)
        length = getattr(feature, "length", -1)
        return None if scalar is None else Tensor((None if length < 0 else length,), scalar.dtype)
    return None


def _scalar(dtype: str) -> Scalar | None:
    try:
        return Scalar(np.dtype(dtype).name)
    except (TypeError, ValueError):  # a type that numpy or Scalar does not have
        return None


def _names(names: Sequence[str] | None, count: int) -> Sequence[str]:
    if names is None:
        return _PAIR[:count] if count <= len(_PAIR) else [f"field_{number}" for number in range(count)]
    if len(names) != count:
        raise SourceError(f"names are {', '.join(names)}, but a sample has {count} values; give one name for each")
    return names


def _sample_of(item: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return an item of any data set as a sample."""
    if isinstance(item, Mapping):
        return dict(_flattened(item))
    if hasattr(item, "_asdict"):
        return dict(_flattened(item._asdict()))
    values = item if isinstance(item, (tuple, list)) else (item,)
    return {name: _plain(value) for name, value in zip(_names(names, len(values)), values, strict=True)}


def _flattened(item: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in item.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> Any:
    """Return a value as features take it: pictures of Pillow and tensors as arrays, lists of numbers, too."""
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # Pillow
        value = np.asarray(value if value.mode in {"L", "RGB", "RGBA"} else value.convert("RGB"))
    elif isinstance(value, (list, tuple)) or (hasattr(value, "__array__") and not isinstance(value, np.generic)):
        value = np.asarray(value)
    return value[()] if isinstance(value, np.ndarray) and not value.ndim else value
