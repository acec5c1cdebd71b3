"""Turns existing data, in any form that needs no class of its own, into finished shards.

    Materializer(ImportWriter(columns=["image", "label"]), source="rows/", output="out/rows").run()
    Materializer(source=torch_dataset, output="out/mine", transform=augment, copies=4).run()
    Materializer(ImportWriter("mnist"), source="tensorflow_datasets/mnist/3.0.1", output="out/mnist").run()

The source declares the features, and the first sample decides the rest. Images that the source stores as
files keep their bytes. `docs/writers.md` lists the sources.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from datamat.errors import FingerprintError, InputError, OptionError, SchemaError, SourceError, join_problems
from datamat.features import BBoxes, Bytes, ClassLabel, Feature, Features, Image, ListOf, Scalar, Tensor
from datamat.features.base import TextColumn
from datamat.fingerprint import fingerprint
from datamat.sources.files import output_lies_in
from datamat.sources.rows import IndexRow
from datamat.values import frozen
from datamat.writers.arrow import ArrowSource
from datamat.writers.base import DatasetWriter, DataSource, Sample, identity_of
from datamat.writers.index import Index
from datamat.writers.samples import converted, converted_column, fill_lists, without_items
from datamat.writers.sources import open_source
from datamat.writers.spool import SpooledSource
from datamat.writers.unpacking import SpoolOptions

OUTPUT_VERSION = 3
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""


@frozen()
class _Choice:
    """The fields of a source to store, and their new names.

    A name means the field or, for a struct or a nested dict, all fields below it.

    Args:
        columns: fields to store; None for all.
        rename: new names by old ones.
        drop: fields to leave out.
    """

    columns: tuple[str, ...] | None = None
    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()

    def of(self, names: Sequence[str]) -> dict[str, str]:
        """Return the fields to store: names in the source, by their new names.

        Raises:
            OptionError: the source has no such field, two fields get the same name, or none is left.
        """
        wanted = None if self.columns is None else [name for name in self.columns if name in names or name != "key"]
        for option, asked in (("columns", wanted or ()), ("drop", self.drop), ("rename", dict(self.rename))):
            for name in asked:
                if name in {"key", "split"} and name not in names:
                    raise OptionError(
                        f"{option}= names {name!r}, which is not a field: it holds the {name} of each sample; leave it "
                        f"out of {option}=. The fields are {join_problems(names)}"
                    )
                if not any(_is_at(name, field) for field in names):
                    raise OptionError(
                        f"{option}= names {name!r}; want names of fields, which are {join_problems(names)}"
                    )
        chosen = list(names)
        if wanted is not None:  # in the order asked for
            chosen = list(dict.fromkeys(field for name in wanted for field in names if _is_at(name, field)))
        chosen = [field for field in chosen if not any(_is_at(name, field) for name in self.drop)]
        found: dict[str, str] = {}
        for field in chosen:
            new = next((new + field[len(old) :] for old, new in self.rename if _is_at(old, field)), field)
            if new in found:
                raise OptionError(f"rename= calls two fields {new!r}: {found[new]!r} and {field!r}; give each its own")
            found[new] = field
        if not found.keys() - {"key"}:
            what = (
                f"columns= and drop= leave no field of {join_problems(names)}" if names else "the source has no field"
            )
            raise OptionError(f"{what}; want at least one besides the key")
        return found


def _is_at(name: str, field: str) -> bool:
    return field == name or field.startswith(f"{name}/")


class ImportWriter(DatasetWriter):
    """Reads the samples of existing data, by position.

    Args:
        name: name of the dataset; the names of its shards begin with it.
        kind: kind of the source, as in `Materializer("parquet", ...)`; None finds out.
        key: name of the field that holds the keys, which is then stored only as the key; None takes the keys of
            `Index.from_dataset`.
        names: names of the fields, for samples that are tuples or arrays without names; None names two of them "x" and
            "y".
        columns: names of the fields to store, in this order; None stores all. A name includes all fields below it.
        rename: new names of fields, by their names in the source.
        drop: names of fields to leave out.
        features: features of fields, by their new names, instead of those that the source declares or its first sample
            implies. Fields that no feature stores exactly, such as decimal numbers, need one.
        each: name of a dict of lists, such as `steps` in TFDS datasets of episodes (RLDS): each of its items becomes a
            record, with the other fields of the sample. The keys are `KEY#0-0`, `KEY#0-1`, and so on, in one shard.
        spool: folder for the rows of an iterator, which are written to disk as they arrive, and kept: the iterator is
            not asked again for rows that are there, and a source that can resume continues after them. None uses a
            temporary folder.
        max_unpack_ratio: how many times its own size a compressed file may unpack to, if it unpacks to over 8 MiB;
            larger files are refused, because they may be made to fill the disk.
        version: text that stands for the content of the source in fingerprints; change it when the samples change.
            None takes the content itself: all of it for files, and what they hold for objects.

    Example:
        >>> writer = ImportWriter(names=("image", "label"))
        >>> writer.bind([(np.zeros((4, 4, 3), np.uint8), 1)])
        >>> writer.features
        Features(key: str, image: uint8 (?, ?, 3), label: int64 scalar)
    """

    name = "data"
    file_fields = ()

    def __init__(  # noqa: PLR0913 -- all options of a source that needs no class
        self,
        name: str = "data",
        *,
        kind: str | None = None,
        key: str | None = None,
        names: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        drop: Sequence[str] = (),
        features: Mapping[str, Feature] | None = None,
        each: str | None = None,
        spool: str | os.PathLike[str] | None = None,
        max_unpack_ratio: float = 500,
        version: str | None = None,
    ) -> None:
        self.name = name
        self._kind = kind
        self._key = key
        self._names = names
        self._declared = dict(_declared_fields(features or {}))
        self._each = each
        self._spool = SpoolOptions(None if spool is None else os.fspath(spool), max_unpack_ratio)
        self._version = version
        for option, given in (("columns", columns), ("drop", drop)):
            if isinstance(given, str):
                raise OptionError(f"{option} is {given!r}; want a list of names, as in {option}=[{given!r}]")
        if rename is not None and not isinstance(rename, Mapping):
            raise OptionError(f"rename is {rename!r}; want new names by old ones, as in rename={{'img': 'image'}}")
        self._choice = _Choice(None if columns is None else tuple(columns), tuple((rename or {}).items()), tuple(drop))

    @property
    def spool(self) -> str | None:
        """The folder for rows of iterators and unpacked files; None for a temporary folder."""
        return self._spool.folder

    @functools.cached_property
    def _samples(self) -> DataSource:
        """The dataset; fingerprints ignore it, since `content` and `files` stand for it."""
        raise OptionError("ImportWriter has no dataset yet; pass it as source= to Materializer")

    @functools.cached_property
    def _was_indexed(self) -> bool:
        """Whether the source was indexed since it was opened; not part of the fingerprint."""
        return False

    @property
    def files(self) -> Mapping[str, str]:  # type: ignore[override]  # as the samples declare them
        """The files that hold the samples; their content counts unless a version stands for it."""
        samples = self.__dict__.get("_samples")
        return {} if samples is None or self._version is not None else samples.files

    def bind(self, source: Any) -> None:
        """Open the source, and derive the features.

        Raises:
            SourceError: the source cannot be read, has no samples, or has a field that no feature stores.
            OptionError: a named field is not in the source.
            FingerprintError: the content cannot be fingerprinted, and no version stands for it.
        """
        samples = open_source(source, names=self._names, kind=self._kind, spool=self._spool)
        if samples.is_empty:
            place = os.fspath(source) if isinstance(source, (str, os.PathLike)) else f"the {type(source).__qualname__}"
            raise SourceError(f"{place} has no samples; pass a source that has some")
        self.__dict__["_samples"] = samples
        self.__dict__["_was_indexed"] = False
        names = samples.field_names()
        first = samples[0] if names is None else None
        known = list(first or ()) if names is None else names
        self._known = frozenset(known)
        has_own_keys = type(samples).keys_and_splits is not DataSource.keys_and_splits
        of_keys = {self._key, "key"} if has_own_keys and not samples.keys_are_places else {self._key}
        self._fields = self._choice.of([name for name in known if name not in of_keys])
        if self._fields.pop("key", self._key_field) != self._key_field:
            raise SourceError(
                f"the samples of the {type(source).__qualname__} have a field 'key', but their keys are their "
                "positions or places; pass ImportWriter(key='key') to take it for the keys, which reads each sample "
                "once more, rename={'key': 'id'} to store it, or drop=['key']"
            )
        if not samples.has_schema:  # then any sample, even the first, may lack fields that are declared as nullable
            may_miss = [name for name, feature in self._declared.items() if feature.takes_none]
            self._fields |= {name: name for name in may_miss if name not in self._fields}
            self._known |= {*may_miss}
        self.features = self._found(samples, first)
        self.content = self._version or _content_of(samples)

    @property
    def _key_field(self) -> str | None:
        """The field that holds the keys: `key=`, or the field that `rename=` calls "key"."""
        return self._key or next((old for old, new in self._choice.rename if new == "key"), None)

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per sample, in order."""
        if "_samples" not in self.__dict__:
            return Index.from_dataset(source, key=self._key_field)
        if isinstance(source, (str, os.PathLike)) and (self._was_indexed or output_lies_in(os.fspath(source))):
            self.bind(source)  # its files may have changed, or be the output
        self.__dict__["_was_indexed"] = True
        return Index.from_dataset(self._samples, key=self._key_field)

    @property
    def reads_cells(self) -> bool:
        return self._each is None and isinstance(self._samples, ArrowSource)

    def contents_of(self, groups: Any) -> Iterator[Mapping[str, Any]]:
        """Return what `groups=` sees of each sample: the stored fields, or only one column of a table."""
        field = self._fields.get(groups) if isinstance(groups, str) else None
        if field is not None and isinstance(self._samples, ArrowSource):
            return ({groups: value} for value in self._samples.cells(field))
        return (self._sample(number) for number in range(len(self._samples)))

    def read(self, row: IndexRow) -> Sample | list[Sample]:
        """Return the sample of a row, or the samples of its items."""
        sample = self._sample(int(row.fields["number"]))
        return sample if self._each is None else _items_of(sample, self._each)

    def _sample(self, number: int) -> dict[str, Any]:
        sample = self._samples[number]
        found: dict[str, Any] = {}
        for name, field in self._fields.items():
            if field in sample:
                found[name] = self._value(name, sample[field])
            elif name in self._declared and self._declared[name].takes_none:
                found[name] = None
            else:
                raise SchemaError(
                    f"field {field!r} is missing; the sample has {join_problems(list(sample))}; add it, declare it "
                    f"with features={{{name!r}: Nullable(...)}}, or leave it out with drop=[{field!r}]"
                )
        if self._choice.columns is None:  # fields that the first sample does not have are refused when encoded
            found |= {name: sample[name] for name in sample.keys() - self._known - {"key"}}
        return found

    def read_block(self, keys: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the columns of some rows of a table; None for other sources."""
        del keys
        if self._each is not None:
            return None
        block = self._samples.block(np.asarray(fields["number"], np.int64))
        if block is None:
            return None
        return {name: self._column(name, block[field]) for name, field in self._fields.items()}

    def _found(self, samples: DataSource, first: Sample | None) -> Features:
        """Return the features: declared by the user or the source, or implied by the first sample."""
        unknown = [name for name in self._declared if name not in self._fields]
        if unknown:
            raise OptionError(
                f"features= names {unknown[0]!r}; want names of fields, which are {join_problems(list(self._fields))}"
            )
        refused = samples.refused
        wrong = [field for name, field in self._fields.items() if field in refused and name not in self._declared]
        if wrong:
            raise SourceError(refused[wrong[0]])
        if first is None:
            samples.narrow({*self._fields.values(), self._key_field or "key"})
        samples.declare({self._fields[name]: feature for name, feature in self._declared.items()})
        features: dict[str, Feature] = dict(self._declared)
        has_columns = isinstance(samples, ArrowSource) or (isinstance(samples, SpooledSource) and samples.has_columns)
        implied = {field for name, field in self._fields.items() if name not in features} - samples.features.keys()
        if implied and not isinstance(samples, SpooledSource):  # which has looked ahead
            first = dict(samples[0] if first is None else first)
            fill_lists(first, first.keys() - implied, _rest_of(samples))
        for name, field in self._fields.items():
            if name not in features and field in samples.features:
                features[name] = samples.features[field]
                if _lists_pictures(features[name]):
                    first = samples[0] if first is None else first
                    features[name] = _as_shown(name, features[name], first[field])
            elif name not in features:
                first = samples[0] if first is None else first
                features[name] = _implied(name, first[field], is_cell=has_columns)
        order = self._declared if self._declared.keys() == self._fields.keys() else self._fields
        nested = _nested({name: features[name] for name in order}, self._fields, samples.dicts)
        return Features(nested if self._each is None else _features_of_items(nested, self._each))

    def _value(self, name: str, value: Any) -> Any:
        """Return a value in the form that the feature declared by the user takes."""
        feature = self._declared.get(name)
        # A list of dicts in a dict is not one field, but one per field of the dicts, and none of these needs a type.
        return without_items(value, self.features.get(name)) if feature is None else converted(value, feature)

    def _column(self, name: str, column: Any) -> Any:
        feature = self._declared.get(name)
        if feature is None or isinstance(column, (tuple, TextColumn)):
            return column
        return converted_column(column, feature)


def _nested(features: Mapping[str, Feature], fields: Mapping[str, str], dicts: Collection[str]) -> dict[str, Any]:
    """Return features with a dict of features for each dict of the source, as in its samples."""
    paths = {new: _path_of(new, field, dicts) for new, field in fields.items()}
    # A field `key` in a dict would be taken for the sample's key, and two fields cannot have the same name.
    flat = {path[0] for path in paths.values() if "key" in path[1:]} | {
        path[0] for path in paths.values()
    } & fields.keys()
    found: dict[str, Any] = {}
    for name, feature in features.items():
        path = (name,) if paths[name][0] in flat else paths[name]
        place = found
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = feature
    return found


def _path_of(new: str, field: str, dicts: Collection[str]) -> tuple[str, ...]:
    """Return the new names of the dicts that a field lies in, and its own."""
    path, start = [], 0
    for end in [place for place, letter in enumerate(field) if letter == "/" and field[:place] in dicts]:
        below = len(new) - len(field[end:])
        if below > start and new.endswith(field[end:]):  # at most the dict is renamed, and its fields stay in it
            path.append(new[start:below])
            start = below + 1
    return (*path, new[start:])


def _features_of_items(features: Mapping[str, Any], each: str) -> dict[str, Any]:
    """Return the features of the items of a dict of lists, together with those of the other fields."""
    if not isinstance(features.get(each), Mapping):
        dicts = ", ".join(sorted(name for name, feature in features.items() if isinstance(feature, Mapping)))
        raise OptionError(f"each= names {each!r}; want a dict of lists, and the dicts are {dicts or 'none'}")
    others = {name: feature for name, feature in features.items() if name != each}
    if twice := others.keys() & features[each].keys():
        raise OptionError(
            f"each={each!r}: there is a field {min(twice)!r} next to it and in it; leave one out, as in "
            f"drop=[{min(twice)!r}]"
        )
    return {**_feature_of_item(features[each], each), **others}


def _feature_of_item(feature: Any, name: str) -> Any:
    match feature:
        case Mapping():
            return {part: _feature_of_item(inner, f"{name}/{part}") for part, inner in feature.items()}
        case ListOf(feature=item):
            return item
        case BBoxes():
            return Tensor((4,), "float32")
        case ClassLabel(shape=(None,)):
            return dataclasses.replace(feature, shape=())
        case Tensor(shape=(None, *sizes)):
            return dataclasses.replace(feature, shape=tuple(sizes)) if sizes else Scalar(feature.dtype)
    raise OptionError(f"each=: field {name!r} is {feature.declared()}, which is not a list; leave it out of columns=")


def _items_of(sample: Sample, each: str) -> list[Sample]:
    """Return a sample for each item of a dict of lists, with the other fields of the sample."""
    lists = {name: value for name, value in sample.items() if _is_at(each, name)}
    counts = {name: len(value) for name, value in lists.items()}
    if len({*counts.values()}) != 1:
        raise SchemaError(f"the lists in {each!r} differ in length: {counts}; leave the odd one out with drop=")
    others = {name: value for name, value in sample.items() if name not in lists}
    names = {name: name.removeprefix(f"{each}/") for name in lists}
    return [
        {**others, **{names[name]: value[number] for name, value in lists.items()}}
        for number in range(next(iter(counts.values())))
    ]


def _declared_fields(features: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Feature]]:
    """Yield path and feature of each field; a dict of fields counts as its fields, as sources give structs."""
    for name, feature in features.items():
        if isinstance(feature, Mapping):
            yield from _declared_fields(feature, f"{prefix}{name}/")
        elif name != "key":
            yield f"{prefix}{name}", feature


def _rest_of(samples: DataSource) -> Iterator[Sample]:
    """Yield the samples after the first, until one cannot be read."""
    for number in range(1, len(samples)):
        try:
            yield samples[number]
        except Exception:  # noqa: BLE001 -- the run reports what is wrong with it
            return


def _implied(name: str, value: Any, *, is_cell: bool) -> Feature:
    """Return the feature that a value implies; bytes in a column declared as bytes may hold anything."""
    try:
        return Features.infer({name: value})[name]
    except InputError:
        if not is_cell:
            raise
        return Bytes()
    except SchemaError as error:
        raise SourceError(
            f"the first sample: {error}; or declare the field with features={{{name!r}: ...}}, or leave it out with "
            f"drop=[{name!r}]"
        ) from error


def _lists_pictures(feature: Any) -> bool:
    """Return True if a feature is a list of pictures, or of dicts that hold pictures."""
    match feature:
        case ListOf(feature=item):
            parts = item.values() if isinstance(item, Mapping) else [item]
            return any(part == Image() or _lists_pictures(part) for part in parts)
    return False


def _as_shown(name: str, feature: Any, value: Any) -> Any:
    """Return a feature with the dtype and channels of pictures, which a value shows and sources do not declare."""
    if isinstance(feature, ListOf):
        return ListOf(_as_shown(name, feature.feature, value[0])) if value else feature
    if isinstance(feature, Mapping):
        return {
            part: _as_shown(f"{name}/{part}", inner, value[part]) for part, inner in feature.items() if part in value
        }
    return _implied(name, value, is_cell=True) if feature == Image() else feature


def _content_of(samples: DataSource) -> str:
    try:
        return fingerprint(identity_of(samples), where="source")
    except FingerprintError as error:
        raise FingerprintError(
            f"{error}. Or pass ImportWriter(version='1') to stand for the content of the dataset"
        ) from error
