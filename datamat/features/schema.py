"""The schema of a dataset as a whole, types that are made of others, and the look-up of types by name."""

from __future__ import annotations

import abc
import collections.abc
import copy
import dataclasses
import datetime
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, get_args

import numpy as np

from datamat import codecs
from datamat.errors import InputError, MissingDependencyError, SchemaError, count_of, kind_of
from datamat.features.base import (
    Column,
    ColumnBlock,
    Feature,
    Kind,
    RaggedColumn,
    Shape,
    as_array,
    bytes_array,
    dtype_of,
    holds_numbers,
    join_names,
    mismatch,
    one_bytes,
    ragged,
    shape_text,
)
from datamat.features.pictures import Depth, Image, Keypoints, Mask, Polygons, Video, video_extension
from datamat.features.protocols import Geometry, Preview, Target
from datamat.features.statistics import FieldStatistics, Numbers, Statistics, merged, shared_bounds
from datamat.features.values import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Json,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    numbers_in,
    sound_extension,
)
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = [
    "FLAT",
    "NO_MEMORY",
    "Features",
    "Gathered",
    "ListOf",
    "Listed",
    "Nesting",
    "Nullable",
    "WithGaps",
    "gathered_columns",
    "holds_lists",
    "register_feature",
    "value_at",
    "with_value",
]

_ENTRY_POINTS = "datamat.features"
_registered: dict[str, type[Feature]] = {}

NO_MEMORY: Mapping[str, np.ndarray] = {}
"""No memory to decode into."""


class Nesting:
    """Which fields of a sample are dicts of others, lists of dicts, or dicts that may be missing.

    Inside datamat a dict's field stands beside all others under the name `DICT/FIELD`. Samples and batches hold dicts;
    a list of dicts is a dict of lists there.

    Args:
        groups: kind of each dict by its path, before those of the dicts in it: "one", "list" or "optional".
        children: paths in each dict.
        may_miss: those of them that a dict may lack, which then is None.
    """

    __slots__ = ("children", "groups", "may_miss")

    def __init__(
        self,
        groups: Mapping[str, str],
        children: Mapping[str, collections.abc.Sequence[str]],
        may_miss: Collection[str] = frozenset(),
    ) -> None:
        self.groups = groups
        self.children = children
        self.may_miss = may_miss

    def split(self, sample: Mapping[str, Any], *, strict: bool = False) -> Mapping[str, Any]:
        """Return a sample, or a batch, with the fields of dicts in their place; what is split already stays.

        Args:
            sample: values by field.
            strict: whether to refuse what is not as declared; else it stays, as what a transform made of a field.

        Raises:
            SchemaError: a field is no dict, or no list of dicts, with the declared fields.
        """
        if not self.groups:
            return sample
        found = dict(sample)
        for path, kind in self.groups.items():
            try:
                parts = self._parts(path, kind, found[path]) if path in found else None
            except SchemaError:
                if strict:
                    raise
                continue
            if parts is not None:
                del found[path]
                found.update(parts)
        return found

    def split_block(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a block, in which a dict is a dict of columns, or a list of n values."""
        found = dict(columns)
        for path, kind in self.groups.items():
            value = found.get(path)
            if value is not None and not isinstance(value, Mapping):
                rows = [self._parts(path, kind, row) for row in value]
                found.update({child: [row[child] for row in rows] for child in self.children[path]})
                del found[path]
            elif value is not None:
                found.update(self._parts(path, "one", found.pop(path)))
        return found

    def join(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `split` was given, with each list of dicts as a dict of lists."""
        return self._joined(values, is_batch=False) if self.groups else dict(values)

    def join_batch(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch with a dict of columns for each dict."""
        return self._joined(columns, is_batch=True) if self.groups else dict(columns)

    def with_fields(self, names: Collection[str]) -> Nesting:
        """Return the nesting of batches whose dicts may hold more fields: those among these names, `DICT/FIELD`."""
        more = {path: [name for name in names if name.rpartition("/")[0] == path] for path in self.groups}
        children = {path: [*dict.fromkeys([*own, *more[path]])] for path, own in self.children.items()}
        return Nesting(self.groups, children, self.may_miss)

    def _joined(self, values: Mapping[str, Any], *, is_batch: bool) -> dict[str, Any]:
        found = dict(values)
        for path in reversed([*self.groups]):
            children = [child for child in self.children[path] if child in found]
            parts = {child.removeprefix(f"{path}/"): found.pop(child) for child in children}
            if parts:
                may_miss = self.groups[path] == "optional" and not is_batch
                found[path] = None if may_miss and all(value is None for value in parts.values()) else parts
        return found

    def _parts(self, path: str, kind: str, value: Any) -> dict[str, Any]:
        names = [child.removeprefix(f"{path}/") for child in self.children[path]]
        if value is None and kind == "optional":
            return dict.fromkeys(self.children[path])
        if kind == "list" and not isinstance(value, Mapping):
            if not isinstance(value, (list, tuple)):
                raise _no_dict(path, "a list of dicts", names, value)
            rows = [self._checked(path, names, row, f", item {number}") for number, row in enumerate(value)]
            return {f"{path}/{name}": [row[name] for row in rows] for name in names}
        row = self._checked(path, names, value, "")
        return {f"{path}/{name}": row[name] for name in names}

    def _checked(self, path: str, names: list[str], value: Any, place: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise _no_dict(path + place, "a dict", names, value)
        if value.keys() != set(names):
            left_out = [name for name in names if name not in value and f"{path}/{name}" in self.may_miss]
            found: dict[str, Any] = {**value, **dict.fromkeys(left_out)}
            missing = sorted(set(names) - found.keys())
            unknown = sorted(str(name) for name in found.keys() - set(names))
            if not (missing or unknown):
                return found
            parts = [f"field {path!r}{place} is declared with {name!r} but the sample has none" for name in missing]
            parts += [f"field {path!r}{place} is declared without {name!r} but the sample holds it" for name in unknown]
            raise SchemaError(
                "; ".join(parts)
                + "; make read return exactly the declared fields, or declare Json() for dicts that differ"
            )
        return value


FLAT = Nesting({}, {})
"""No field is a dict."""


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field of a sample or batch, also of one in a dict: `DICT/FIELD`.

    Raises:
        KeyError: there is none.
    """
    head, _, rest = name.partition("/")
    if name not in fields and rest and isinstance(fields.get(head), Mapping):
        return value_at(fields[head], rest)
    return fields[name]


def with_value(fields: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a sample or batch with another value of a field, also of one in a dict, if there is such a dict."""
    head, _, rest = name.partition("/")
    if name not in fields and rest and isinstance(fields.get(head), Mapping):
        return {**fields, head: with_value(fields[head], rest, value)}
    return {**fields, name: value}


def _no_dict(path: str, wanted: str, names: list[str], value: Any) -> SchemaError:
    return SchemaError(
        f"field {path!r} is declared {wanted} with {join_names(names)} but the sample holds {kind_of(value)}; "
        f"give {wanted}, or declare Json()"
    )


def _without_dicts(
    fields: Mapping[str, Any], groups: dict[str, str], children: dict[str, list[str]], may_miss: set[str]
) -> Iterator[tuple[str, Any]]:
    """Yield path and feature of each field that is no dict, and note the dicts."""

    def visit(path: str, feature: Any, wrap: Callable[[Any], Any], kind: str) -> Iterator[tuple[str, Any]]:
        inner = feature.feature if isinstance(feature, (Nullable, ListOf)) else feature
        if not isinstance(inner, Mapping):
            yield path, feature if wrap is _same else wrap(_checked_part(feature, f"field {path!r}"))
            return
        if inner is not feature:
            if wrap is not _same:
                raise SchemaError(
                    f"field {path!r}: a list of dicts, or one that may be missing, cannot be in another; declare Json()"
                )
            wrap, kind = type(feature), "list" if isinstance(feature, ListOf) else "optional"
        parts = _parts_of(inner)
        if not parts:
            raise SchemaError(f"field {path!r} is declared as a dict without fields; declare Json()")
        groups[path], children[path] = kind, [f"{path}/{name}" for name in parts]
        may_miss.update(f"{path}/{name}" for name, part in parts.items() if getattr(part, "takes_none", False))
        for name, part in parts.items():
            yield from visit(f"{path}/{name}", part, wrap, kind)

    for name, feature in fields.items():
        yield from visit(name, feature, _same, "one")


def _chosen(fields: Mapping[str, Any], names: set[str], prefix: str) -> dict[str, Any]:
    """Return the declarations of the fields with some paths."""
    found: dict[str, Any] = {}
    for name, feature in fields.items():
        inner = feature.feature if isinstance(feature, (Nullable, ListOf)) else feature
        if f"{prefix}{name}" in names:
            found[name] = feature
        elif isinstance(inner, Mapping) and (parts := _chosen(_parts_of(inner), names, f"{prefix}{name}/")):
            found[name] = parts if inner is feature else type(feature)(parts)
    return found


def _same(feature: Any) -> Any:
    return feature


def _parts_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dict in a sample; `key` is the whole sample's, which Features always have."""
    found = fields if isinstance(fields, Features) else Features(fields)
    return {name: feature for name, feature in found.as_declared.items() if name != "key"}


class Features(Mapping[str, Feature]):
    """The schema of a dataset: a feature type for each field, always including `key`.

    Features are immutable, compare by content, and convert to and from JSON. Names may contain `/` (`objects/bbox`).

    A field may be a dict of fields: pass `Features`, or a plain dict, instead of a feature. `ListOf({...})` is a list
    of such dicts, `Nullable({...})` a dict or None. Their fields are stored and listed as `DICT/FIELD`. A sample holds
    dicts, and reads back with them; a list of dicts reads back as a dict of lists or arrays, as in TFDS. A batch holds
    a dict of columns for each.

    Args:
        fields: feature of each field, by name; `key` (a `Text`) is added if it is missing, but not in a dict.

    Raises:
        SchemaError: a name is empty or unprintable, a value is not a feature, or two fields would share a column.

    Example:
        >>> features = Features({"image": Image(), "label": ClassLabel(names=("cat", "dog"))})
        >>> sorted(features)
        ['image', 'key', 'label']
        >>> Features.from_json(features.to_json()) == features
        True
        >>> sorted(Features({"camera": {"iso": Scalar("int32"), "lens": Text()}}))
        ['camera/iso', 'camera/lens', 'key']
    """

    __slots__ = ("_columns", "_fields", "_foreign", "as_declared", "measured", "nesting", "observed")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping):
            raise SchemaError(f"features is {kind_of(fields)}; want a dict of name to feature type")
        declared = fields.as_declared if isinstance(fields, Features) else fields
        self.as_declared: Mapping[str, Any] = {"key": Text(), **declared}
        groups: dict[str, str] = {}
        children: dict[str, list[str]] = {}
        may_miss: set[str] = set()
        self._fields: dict[str, Feature] = {}
        for name, feature in _without_dicts(self.as_declared, groups, children, may_miss):
            if name in self._fields:
                raise SchemaError(f"field {name!r} is declared twice: in a dict, and by its path; rename one")
            self._fields[name] = feature
        self.nesting = Nesting(groups, children, may_miss)
        self._columns: dict[str, Kind] = {}
        for name, feature in self._fields.items():
            _check_name(name, feature)
            for column, kind in feature.columns(name).items():
                if column in self._columns:
                    raise SchemaError(
                        f"field {name!r} needs the column {column!r}, which another field has; rename one"
                    )
                self._columns[column] = kind
        if not isinstance(self._fields["key"], Text):
            raise SchemaError(f"field 'key' is declared {self._fields['key'].declared()}; it must be Text()")
        self._foreign = {name: feature for name, feature in self._fields.items() if [*_foreign_parts(feature)]}
        self.observed = {
            name: feature for name, feature in self._fields.items() if name != "key" and _is_observed(feature)
        }
        self.measured = {name: feature for name, feature in self._fields.items() if _is_measured(feature)}

    def __getitem__(self, name: str) -> Feature:
        """Return the feature of a field; of one that is a dict, what was declared for it."""
        found: Feature = self._fields[name] if name in self._fields else self.as_declared[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Features):
            return False
        return self._fields == other._fields and self.nesting.groups == other.nesting.groups

    def __hash__(self) -> int:
        return hash(len(self._columns))  # a tar shard asks for each record, and caches by schema are small

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}: {feature.declared()}' for name, feature in self._fields.items())})"

    @property
    def columns(self) -> Mapping[str, Kind]:
        """Kind of each stored column, by name."""
        return self._columns

    @property
    def foreign(self) -> Mapping[str, Feature]:
        """The feature of another package in each field that has one, as its type or as a part of it."""
        return {name: next(_foreign_parts(feature)) for name, feature in self._foreign.items()}

    def check(self) -> None:
        """Refuse feature types of other packages that formats or readers could not handle; `plan()` calls it.

        Raises:
            SchemaError: the answers of a feature contradict each other, or its JSON does not give an equal feature.
            MissingDependencyError: the class of a feature is neither registered nor named by an entry point.
        """
        for name, feature in self._foreign.items():
            for part in [*_foreign_parts(feature), feature]:
                _check_foreign(name, part)

    def packages(self, *, drawn: bool) -> frozenset[str]:
        """Return the top-level modules of other packages that decide the bytes of the stored columns.

        Args:
            drawn: whether to answer for copies that went through a transform.

        Example:
            >>> sorted(Features({"x": Scalar("int64")}).packages(drawn=True))
            []
        """
        return frozenset[str]().union(*(feature.packages(drawn=drawn) for feature in self._fields.values()))

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns of one sample.

        Args:
            sample: value of every field, and nothing else.

        Raises:
            SchemaError: a field is missing or unknown, or does not match its declaration.
            InputError: the bytes of an image do not decode.
        """
        sample = self.nesting.split(sample, strict=True)
        if sample.keys() != self._fields.keys():
            raise self._wrong_fields(sample)
        columns: dict[str, Column] = {}
        for name, feature in self._fields.items():
            columns.update(feature.encode(name, sample[name]))
        self._check_lists(columns)
        for name, feature in self._foreign.items():
            _check_encoded(name, feature, columns)
        return columns

    def encode_block(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored columns of n samples: the same that `encode` gives for each of them.

        Args:
            columns: values of every field, as `DatasetWriter.read_block` returns them.

        Returns:
            For each column an array (n,) or (n, k), a `RaggedColumn`, or a list of n bytes.

        Raises:
            SchemaError: a field is missing or unknown, or does not match its declaration.
            InputError: the bytes of an image do not decode.
        """
        columns = self.nesting.split_block(columns)
        if columns.keys() != self._fields.keys():
            raise self._wrong_fields(columns)
        values = {name: _column_of(name, self._fields[name], value) for name, value in columns.items()}
        lengths = {name: len(value) for name, value in values.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SchemaError(f"the columns of a block differ in length ({found}); give one value per row in each")
        block: dict[str, Any] = {}
        for name, feature in self._fields.items():
            if feature.encodes_blocks():
                block.update(feature.encode_block(name, values[name]))
            else:
                block.update(Feature.encode_block(feature, name, values[name]))
        self._check_lists(block)
        for name, feature in self._foreign.items():
            _check_encoded_block(name, feature, block)
        return block

    def observe(self, columns: Mapping[str, Any], num_records: int) -> Statistics:
        """Return what statistics keep of n records, from their columns; of every field but `key`.

        Args:
            columns: columns as `encode_block` returns them.
            num_records: how many records there are.
        """
        found = Statistics()
        found.num_records = num_records
        for name, feature in self.observed.items():
            mine = {column: ragged(columns[column]) for column in feature.columns(name)}
            found.observe(name, feature.observe(name, mine))
        return found

    def observe_values(self, sample: Mapping[str, Any]) -> Mapping[str, FieldStatistics]:
        """Return what statistics keep of the values of a sample that its columns do not show, by field.

        Args:
            sample: values as `encode` takes them.
        """
        if not self.measured:
            return {}
        values = self.nesting.split(sample)
        return {name: feature.observe_value(values[name]) for name, feature in self.measured.items() if name in values}

    def observe_value_block(self, columns: Mapping[str, Any]) -> Mapping[str, FieldStatistics]:
        """Do what `observe_values` does, for n samples as `encode_block` takes them."""
        found: dict[str, FieldStatistics] = {}
        values = self.nesting.split_block(columns) if self.measured else {}
        for name, feature in self.measured.items():
            rows = values[name].rows() if isinstance(values[name], RaggedColumn) else values[name]
            for value in rows:
                merged(found.setdefault(name, {}), feature.observe_value(value))
        return found

    def decode(
        self,
        columns: Mapping[str, Column],
        memory: Mapping[str, np.ndarray] = NO_MEMORY,
        *,
        are_intact: bool = False,
    ) -> dict[str, Any]:
        """Return the sample in the columns of a record.

        Args:
            columns: columns of one record, by column name, `key` among them.
            memory: arrays that values may be decoded into, by field; such a value is that array.
            are_intact: whether a checksum has shown that the columns are what `encode` returned; encoded files are then
                not checked for completeness again.

        Raises:
            SchemaError: a declared column is missing, or does not hold what is declared.
            InputError: the bytes of an image do not decode.
        """
        sample, name = {}, ""
        try:
            for name, feature in self._fields.items():
                sample[name] = feature.decode_into(name, columns, memory.get(name), are_intact=are_intact)
        except KeyError as error:
            raise SchemaError(
                f"the record has no column {error.args[0]!r}; it holds {join_names(columns)}: "
                "was it written with other features?"
            ) from error
        except (InputError, SchemaError):
            raise
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"field {name!r} is declared {self[name].declared()} but its column does not hold that ({error}); "
                "was the record written with other features?"
            ) from error
        for name in self._foreign:
            if isinstance(sample[name], np.ndarray) and not sample[name].flags.writeable:  # as from `np.frombuffer`
                sample[name] = sample[name].copy()
        return self.nesting.join(sample) if self.nesting.groups else sample

    @property
    def is_flat(self) -> bool:
        """Whether `decode_block` knows every field: numbers and text do, files of pictures do not."""
        return all(feature.decodes_blocks() for feature in self._fields.values())

    def decode_block(self, columns: Mapping[str, ColumnBlock]) -> dict[str, Any]:
        """Return n samples by field, those of dicts beside all others, whose columns these are.

        Args:
            columns: columns of n records, by column name, `key` among them.

        Returns:
            For each field an array (n, ...), or a list of n values where their shapes may differ.

        Raises:
            SchemaError: a column does not hold what is declared.
        """
        try:
            return {name: feature.decode_block(name, columns) for name, feature in self._fields.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise SchemaError(
                f"the columns of a block do not hold what is declared: {error}; were they written with other features?"
            ) from error

    def prepare(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sample with every encoded image and mask decoded, as transforms expect it."""
        return self.nesting.join(
            {
                name: self._fields[name].prepare(name, value) if name in self._fields else value
                for name, value in self.nesting.split(sample).items()
            }
        )

    def only(self, names: collections.abc.Iterable[str]) -> Features:
        """Return the schema of some fields and `key`; the path of a dict stands for all fields in it.

        Args:
            names: paths of the fields.

        Example:
            >>> features = Features({"camera": {"iso": Scalar("int32"), "lens": Text()}, "n": Scalar("int64")})
            >>> sorted(features.only(["camera/iso"]))
            ['camera/iso', 'key']
        """
        return Features(_chosen(self.as_declared, {"key", *names}, ""))

    def as_found(self, each: collections.abc.Iterable[collections.abc.Sequence[str]]) -> Features:
        """Return the schema that reads the same columns as arrays of the sizes that all records share.

        Boxes and points keep their open sizes: a transform may drop some of them.

        Args:
            each: lines of the statistics of all records, as `Statistics.to_lines` gives them.
        """
        sizes = {name: names for name, feature in self._fields.items() if (names := _open_sizes(feature))}
        known = shared_bounds(each, [(name, size) for name, names in sizes.items() for size in names.values()])
        found = copy.copy(self)
        for name, names in sizes.items():
            dtype, shape = self._fields[name].value_type()
            whole = tuple(
                known.get((name, names[place]), 0) if size is None else size for place, size in enumerate(shape)
            )
            if 0 not in whole:
                encoding: Any = "raw" if self._columns[name] == "bytes" else "list"
                found._fields = {**found._fields, name: Tensor(whole, dtype, encoding)}
                found._columns = {column: kind for column, kind in found._columns.items() if column != f"{name}/shape"}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return {name: _json_of(feature) for name, feature in self.as_declared.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Features:
        """Return the schema that `to_json` wrote.

        Raises:
            SchemaError: a type or an argument is unknown.
            MissingDependencyError: the type comes from a package that is not installed.
        """
        return cls({name: _feature_from_json(name, declaration) for name, declaration in value.items()})

    @classmethod
    def infer(cls, sample: Mapping[str, Any]) -> Features:
        """Return a schema that stores `sample` exactly, for functions that declare none.

        Arrays of uint8 (height, width, 3 or 4) become lossless images. Every size but the number of channels may vary.
        Lists become a `ListOf` where all items are texts, numbers, lists of numbers, bytes, times or Pillow pictures;
        other lists, also empty ones, become `Json`. So do dicts, unless arrays, pictures, bytes or times are in them,
        which become fields of their own; lists of such dicts become a `ListOf` of dicts. Times are `Timestamp`. `bytes`
        must be a file of an image, of sound or a video, so that a broken one is not taken for something else: declare
        `Bytes` for others. Nothing is inferred to be missing in other samples: declare `Nullable` for a field that may
        be None.

        Raises:
            SchemaError: a value has no feature.
            InputError: bytes are no image file.
        """
        return cls({name: _inferred(name, value) for name, value in sample.items() if name != "key"})

    def _check_lists(self, columns: Mapping[str, Any]) -> None:
        """Refuse a list of dicts whose fields, given as lists, differ in length."""
        for path, kind in self.nesting.groups.items():
            if kind != "list":
                continue
            leaves = [name for name in self._fields if name.startswith(f"{path}/")]
            counts = {name: _num_items(self._fields[name], name, columns) for name in leaves}
            if len({str(count) for count in counts.values()}) > 1:
                found = ", ".join(f"{name}: {count}" for name, count in counts.items())
                raise SchemaError(
                    f"the lists in field {path!r} differ in length ({found}); give a list of dicts, or lists of one "
                    "length"
                )

    def _wrong_fields(self, sample: Mapping[str, Any]) -> SchemaError:
        missing = sorted(self._fields.keys() - sample.keys())
        unknown = sorted(str(name) for name in sample.keys() - self._fields.keys())
        parts = [f"field {name!r} is declared {self[name].declared()} but the sample has none" for name in missing]
        parts += [f"field {name!r} is not declared but the sample holds it" for name in unknown]
        return SchemaError("; ".join(parts) + "; make read return exactly the declared fields")


# ---------------------------------------------------------------- types made of others
#
# Nullable and ListOf hold none, one or many values of another type. A column of that type becomes one column of all
# its values:
#
#     of the other type                Nullable        ListOf          a record holds
#     bytes                            bytes_list      bytes_list      each value
#     numbers, as many in each         the same        the same        the numbers of all values
#     numbers, any number of them      bytes_list      the same        Nullable: the numbers as little-endian bytes;
#                                                                      ListOf: those of all values, one after another
#     numbers as little-endian bytes   bytes_list      bytes           the same
#     bytes_list                       bytes_list      bytes_list      the items of all values, one after another
#
# Where a ListOf joins values that differ in size, COLUMN/lengths says how many items each has. `Nullable` needs no
# mark for None, whose columns are empty, and null in Arrow, except for lists of bytes, which may be empty themselves.
# There, and in a ListOf of Nullable, NAME/present holds 1 for each value, and 0 for each None in a list.


class Gathered(NamedTuple):
    """How the values of a column are one column.

    Attributes:
        kind: kind of the one column.
        inner: kind of the column of each value.
        dtype: dtype of the numbers in it, where they are stored as bytes.
        width: how many numbers a value has, where they are stored as numbers.
    """

    kind: Kind
    inner: Kind
    dtype: np.dtype[Any]
    width: int

    def join(self, values: collections.abc.Sequence[Column]) -> Column:
        """Return the column of values, each in its own column."""
        if self.kind != "bytes_list":
            return np.concatenate([np.empty(0, self.kind), *values]).astype(self.kind, copy=False)
        if self.inner == "bytes":
            return [one_bytes("", {"": value}) for value in values]
        return [np.asarray(value).astype(self.dtype).tobytes() for value in values]

    def split(self, column: Column) -> list[Column]:
        """Return the values in a column, each as a column of its own."""
        if self.kind != "bytes_list":
            if len(column) % self.width:
                raise ValueError(f"{len(column)} numbers, where {self.width} make one value")
            return [column[at : at + self.width] for at in range(0, len(column), self.width)]
        values = [column] if isinstance(column, bytes) else column
        if self.inner == "bytes":
            return [value if isinstance(value, bytes) else bytes(value) for value in values]
        return [np.frombuffer(value, self.dtype).astype(self.inner) for value in values]

    def join_block(self, values: Any) -> RaggedColumn:
        """Return the column of a block of values as a column of single values: `lengths` counts numbers of each."""
        if self.kind != "bytes_list":
            if isinstance(values, RaggedColumn):
                return values
            return RaggedColumn(values.reshape(-1), np.full(len(values), math.prod(values.shape[1:])))
        if self.inner == "bytes":
            return RaggedColumn(bytes_array(values), np.ones(len(values), np.int64))
        rows = values.rows() if isinstance(values, RaggedColumn) else list(values)
        packed = [np.ravel(row).astype(self.dtype).tobytes() for row in rows]
        return RaggedColumn(bytes_array(packed), np.ones(len(packed), np.int64))

    def split_block(self, column: RaggedColumn) -> tuple[ColumnBlock, np.ndarray]:
        """Return all values in the column of a block, as a block of them, and how many each record has, int64 (n,)."""
        if self.kind != "bytes_list":
            if (column.lengths % self.width).any():
                raise SchemaError(f"a record holds a number of values that is no multiple of {self.width}")
            counts = column.lengths // self.width
            return RaggedColumn(column.values, np.full(counts.sum(), self.width)), counts
        values = [value.encode() if isinstance(value, str) else value for value in column.values.tolist()]
        if self.inner == "bytes":
            return values, column.lengths
        numbers = np.frombuffer(b"".join(values), self.dtype).astype(self.inner)
        lengths = np.fromiter(map(len, values), np.int64, len(values)) // self.dtype.itemsize
        return RaggedColumn(numbers, lengths), column.lengths


@functools.lru_cache(maxsize=1024)
def gathered_columns(feature: Feature, name: str) -> Mapping[str, Gathered]:
    """Return how a `Nullable` stores columns of a feature that are no lists, and a `ListOf` those of one size."""
    types = feature.arrow_types(name)
    found: dict[str, Gathered] = {}
    for column, kind in feature.columns(name).items():
        if kind == "bytes_list":
            continue
        dtype, sizes = types[column]
        is_open = kind != "bytes" and None in sizes
        raw = _raw_dtype(dtype) if is_open else np.dtype(np.uint8)
        found[column] = Gathered("bytes_list" if is_open or kind == "bytes" else kind, kind, raw, _width(sizes))
    return found


def _split_block(
    gathered: Mapping[str, Gathered], columns: Mapping[str, ColumnBlock]
) -> tuple[dict[str, ColumnBlock], np.ndarray]:
    """Return all values in the columns of a block, as a block of them, and how many each record has, int64 (n,)."""
    block: dict[str, ColumnBlock] = {}
    counts = np.zeros(0, np.int64)
    for column, found in gathered.items():
        block[column], counts = found.split_block(columns[column])  # type: ignore[arg-type]
    return block, counts


def _raw_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the numbers in a column of an Arrow type, where they are bytes."""
    return dtype_of("int64" if dtype.startswith("timestamp") else dtype).newbyteorder("<")


def _width(sizes: Shape) -> int:
    """Return how many numbers the lists of fixed size in an Arrow type hold."""
    return math.prod(size for size in sizes if size is not None)


def holds_lists(feature: Feature) -> bool:
    """Return whether a column of a feature holds any number of bytes, so that an empty list is a value."""
    return "bytes_list" in feature.columns("value").values()


def _alone(feature: Any, where: str) -> Feature:
    if isinstance(feature, Mapping):
        raise SchemaError(f"{where}: its fields are encoded by the Features that it is part of; call encode of those")
    found: Feature = feature
    return found


def _checked_part(feature: Any, where: str) -> Any:
    if isinstance(feature, Mapping):  # a dict of fields, which `Features` takes apart
        return Features(feature)
    if not isinstance(feature, Feature):
        raise SchemaError(f"{where}: {feature!r} is no feature; want one such as Text() or Scalar('int64')")
    return feature


class _OfAnother(Feature):
    """A type that answers most questions as another feature does."""

    __slots__ = ()

    feature: Any

    @property
    @abc.abstractmethod
    def stored(self) -> Feature:
        """The feature that answers."""

    def parts(self) -> tuple[Feature, ...]:
        return (self.feature,)

    def arguments(self) -> dict[str, Any]:
        return {"feature": _json_of(self.feature)}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Feature:
        return cls(**{**arguments, "feature": _feature_from_json("feature", arguments["feature"])})

    def decode(self, name: str, columns: Mapping[str, Column]) -> Any:
        return self.decode_into(name, columns, None)

    def is_ragged(self) -> bool:
        return True

    def value_type(self) -> tuple[str, Shape]:
        return self.stored.value_type()

    def packages(self, *, drawn: bool) -> frozenset[str]:
        return self.stored.packages(drawn=drawn)

    def class_names(self) -> tuple[str, ...] | None:
        return self.stored.class_names()

    def arrow_types(self, name: str) -> dict[str, tuple[str, Shape]]:
        return self.stored.arrow_types(name)

    def observe(self, name: str, columns: Mapping[str, ColumnBlock]) -> FieldStatistics:
        return self.stored.observe(name, columns)

    def observe_value(self, value: Any) -> FieldStatistics:
        return self.stored.observe_value(value)

    def encodes_blocks(self) -> bool:
        return self.stored.encodes_blocks()

    def decodes_blocks(self) -> bool:
        return self.stored.decodes_blocks()


@frozen()
class Nullable(_OfAnother):
    """A value that may be missing: None, or a value of another feature.

    In Parquet None is null, in the .json of a tar sample null, in a `tf.train.Example` an empty list. A batch holds the
    values as a list. TensorFlow, which has no None, gets a leading dimension with one value or none: int64 (0,) or (1,)
    for `Nullable(Scalar("int64"))`, a ragged tensor in batches. Lists of texts, bytes or pictures may be empty without
    being missing; for them the column `NAME/present` holds 1, and nothing for None.

    Args:
        feature: the feature of values that are there.

    Example:
        >>> Nullable(Scalar("int64")).encode("age", 7)
        {'age': array([7])}
        >>> Nullable(Scalar("int64")).encode("age", None)
        {'age': array([], dtype=int64)}
    """

    takes_none = True
    has_nulls = True

    type_name: ClassVar[str] = "Optional"  # on disk
    feature: Feature

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature", _checked_part(self.feature, "Nullable"))
        if isinstance(self.feature, Mapping):
            return
        if isinstance(self.feature, Nullable):
            raise SchemaError("Nullable: the feature is a Nullable itself; declare it once")
        _refuse_dicts_in(self.feature, "Nullable")
        if holds_lists(self.feature) and "value/present" in self.feature.columns("value"):
            raise SchemaError(
                f"Nullable: {self.feature.declared()} marks what is missing in itself; give an empty list for a list "
                "that is missing, or declare Json()"
            )

    @property
    def stored(self) -> Feature:
        return _alone(self.feature, "Nullable")

    def columns(self, name: str) -> dict[str, Kind]:
        found = {column: how.kind for column, how in gathered_columns(self.feature, name).items()}
        if not holds_lists(self.feature):
            return found
        kinds: dict[str, Kind] = {
            column: found.get(column, kind) for column, kind in self.feature.columns(name).items()
        }
        return {**kinds, f"{name}/present": "int64"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        values = [] if value is None else [self._encoded(name, value)]
        found: dict[str, Column] = {
            column: how.join([one[column] for one in values])
            for column, how in gathered_columns(self.feature, name).items()
        }
        if holds_lists(self.feature):
            lists = self.feature.columns(name).keys() - found.keys()
            found.update({column: values[0][column] if values else [] for column in lists})
            found[f"{name}/present"] = np.ones(len(values), np.int64)
        return found

    def encodes_blocks(self) -> bool:
        return not holds_lists(self.feature) and self.stored.encodes_blocks()

    def decodes_blocks(self) -> bool:
        return not holds_lists(self.feature) and self.stored.decodes_blocks()

    def arrow_types(self, name: str) -> dict[str, tuple[str, Shape]]:
        found = self.stored.arrow_types(name)
        return {**found, f"{name}/present": ("int64", ())} if holds_lists(self.feature) else found

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        rows = values.rows() if isinstance(values, RaggedColumn) else values
        is_there = np.array([value is not None for value in rows], bool)
        there = values if is_there.all() else [value for value in rows if value is not None]
        block = self._encoded_block(name, there)
        columns = {}
        for column, found in gathered_columns(self.feature, name).items():
            one = found.join_block(block[column])
            lengths = np.zeros(len(is_there), np.int64)
            lengths[is_there] = one.lengths
            columns[column] = RaggedColumn(one.values, lengths)
        return columns

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> Any:
        there = self._there(name, columns)
        return None if there is None else self.feature.decode_into(name, there, out, are_intact=are_intact)

    def decode_block(self, name: str, columns: Mapping[str, ColumnBlock]) -> np.ndarray | list[Any] | None:
        block, counts = _split_block(gathered_columns(self.feature, name), columns)
        if (counts > 1).any():
            raise SchemaError("a record holds several values, where one may be missing")
        values = iter(self.feature.decode_block(name, block) if counts.any() else ())  # type: ignore[arg-type]
        return [next(values) if count else None for count in counts.tolist()]

    def observe(self, name: str, columns: Mapping[str, ColumnBlock]) -> FieldStatistics:
        block, counts = _split_block(gathered_columns(self.feature, name), columns)
        if holds_lists(self.feature):
            mark = columns[f"{name}/present"]
            assert isinstance(mark, RaggedColumn)
            counts = mark.lengths
            there = np.flatnonzero(counts)
            lists = self.feature.columns(name).keys() - block.keys()
            block.update({column: columns[column].take(there) for column in lists})  # type: ignore[union-attr]
        found_in = self.feature.observe(name, block) if counts.any() else {}
        return {**found_in, "missing": int(np.count_nonzero(counts == 0))}

    def observe_value(self, value: Any) -> FieldStatistics:
        return {} if value is None else self.feature.observe_value(value)

    def encoded_value(self, name: str, columns: Mapping[str, Column]) -> Any:
        there = self._there(name, columns)
        return None if there is None else self.feature.encoded_value(name, there)

    def prepare(self, name: str, value: Any) -> Any:
        return None if value is None else self.feature.prepare(name, value)

    def declared(self) -> str:
        return f"{self.feature.declared()}, or None"

    def _encoded(self, name: str, value: Any) -> dict[str, Column]:
        try:
            return self.feature.encode(name, value)
        except SchemaError as error:
            raise _declared_as(self, self.feature, error) from error

    def _encoded_block(self, name: str, values: Any) -> dict[str, Any]:
        if self.feature.encodes_blocks():
            return self.feature.encode_block(name, values)
        return Feature.encode_block(self.feature, name, values)

    def _there(self, name: str, columns: Mapping[str, Column]) -> dict[str, Column] | None:
        """Return the columns of the value; None where there is none."""
        found = {column: how.split(columns[column]) for column, how in gathered_columns(self.feature, name).items()}
        counts = set(map(len, found.values()))
        if holds_lists(self.feature):
            lists = self.feature.columns(name).keys() - found.keys()
            found.update({column: [columns[column]] for column in lists})
            counts.add(len(columns[f"{name}/present"]))
        if counts == {0}:
            return None
        if counts != {1}:
            raise ValueError(f"{count_of(max(counts), 'value')}, not one or none")
        return {column: values[0] for column, values in found.items()}


def _refuse_dicts_in(feature: Feature, where: str) -> None:
    if isinstance(feature, (Nullable, ListOf)) and isinstance(feature.feature, Mapping):
        raise SchemaError(
            f"{where}: a list of dicts, or a dict that may be missing, cannot be in another; declare Json()"
        )


def innermost(feature: Feature) -> Feature:
    """Return the feature of the values in lists, and of those that may be missing."""
    while isinstance(feature, _OfAnother):
        feature = feature.stored
    return feature


def _is_observed(feature: Feature) -> bool:
    feature = innermost(feature)
    is_fixed = isinstance(feature, Tensor) and None not in feature.shape
    return type(feature).observe is not Feature.observe and not is_fixed


def _is_measured(feature: Feature) -> bool:
    return type(innermost(feature)).observe_value is not Feature.observe_value


def _open_sizes(feature: Feature) -> dict[int, str]:
    """Return the statistic of each size of arrays that a feature leaves open, by its axis; none for other features."""
    stored = feature.stored if isinstance(feature, ListOf) and not isinstance(feature.feature, Mapping) else feature
    places = [place for place, size in enumerate(feature.value_type()[1]) if size is None]
    if type(stored) is Tensor and stored.keeps_shape:
        return {place: f"size[{place}]" for place in places}
    name = {Tensor: "length", ClassLabel: "length", Tokens: "tokens"}.get(type(stored))
    return dict.fromkeys(places, name) if name else {}


def _declared_as(outer: Feature, inner: Feature, error: SchemaError) -> SchemaError:
    """Return an error of a value with the declaration of the whole field in it."""
    return SchemaError(str(error).replace(f"is declared {inner.declared()} ", f"is declared {outer.declared()} ", 1))


def _num_items(feature: Feature, name: str, columns: Mapping[str, Any]) -> Any:
    """Return how many items the lists of a field have: of one record, or of each in a block."""
    kinds, types = feature.columns(name), feature.arrow_types(name)
    mark = next((mark for mark in (f"{name}/present", f"{name}/lengths") if mark in kinds), name)
    (dtype, sizes), column = types[mark], columns[mark]
    width = 1 if kinds[mark] == "bytes_list" else _width(sizes)
    if isinstance(column, RaggedColumn):
        return (column.lengths // width).tolist()
    if kinds[mark] != "bytes":
        return len(column) // width
    size = width * dtype_of(dtype).itemsize
    return len(column) // size if isinstance(column, bytes) else [len(value) // size for value in column]


def _json_of(feature: Any) -> dict[str, Any]:
    """Return the declaration of a field as JSON values: of a feature, or of a dict."""
    if not isinstance(feature, Mapping):
        found: dict[str, Any] = feature.to_json()
        return found
    return {"type": _DICT, "fields": {name: _json_of(part) for name, part in _parts_of(feature).items()}}


class _Flattened(NamedTuple):
    """How the values of a column, which differ in size, are one column, beside another of their lengths.

    Attributes:
        kind: kind of the column, of one value and of all.
        unit: how many bytes or numbers an item of a value takes; its length counts items.
    """

    kind: Kind
    unit: int

    def join(self, values: collections.abc.Sequence[Any]) -> Column:
        """Return the column of values, each in its own column."""
        if self.kind == "bytes":
            return b"".join(one_bytes("", {"": value}) for value in values)
        if self.kind == "bytes_list":
            return [item for value in values for item in value]
        return np.concatenate([np.empty(0, self.kind), *values]).astype(self.kind, copy=False)

    def lengths(self, values: collections.abc.Sequence[Any]) -> np.ndarray:
        """Return the length of each value, int64 (n,)."""
        rows = [one_bytes("", {"": value}) for value in values] if self.kind == "bytes" else values
        return np.array([len(row) // self.unit for row in rows], np.int64)

    def split(self, column: Any, lengths: Any) -> list[Column]:
        """Return the values in a column, each as a column of its own."""
        data = one_bytes("", {"": column}) if self.kind == "bytes" else column
        ends = np.cumsum(np.concatenate([[0], np.asarray(lengths, np.int64)])) * self.unit
        if ends[-1] != len(data) or (np.diff(ends) < 0).any():
            raise ValueError(f"{len(data)} numbers or bytes, where the lengths say {ends[-1]}")
        return [data[start:stop] for start, stop in itertools.pairwise(ends.tolist())]


@functools.lru_cache(maxsize=1024)
def _flattened_columns(feature: Feature, name: str) -> Mapping[str, _Flattened]:
    """Return how a `ListOf` stores the columns of a feature whose values differ in size."""
    types = feature.arrow_types(name)
    found: dict[str, _Flattened] = {}
    for column, kind in feature.columns(name).items():
        dtype, sizes = types[column]
        holds_items = dtype not in _AS_THEY_ARE
        if kind == "bytes_list":
            found[column] = _Flattened(kind, 1)
        elif kind == "bytes" and holds_items:
            found[column] = _Flattened(kind, _raw_dtype(dtype).itemsize * _width(sizes))
        elif kind != "bytes" and None in sizes:
            found[column] = _Flattened(kind, _width(sizes))
    return found


_AS_THEY_ARE = {"binary", "string", "json"}
"""Arrow types of values that are no lists of items."""


class _ListOf(_OfAnother):
    """A list of values of a feature, which is stored by more than one array."""

    __slots__ = ()

    feature: Feature

    def value_type(self) -> tuple[str, Shape]:
        dtype, shape = self.feature.value_type()
        return dtype, (None, *shape)

    def observe_value(self, value: Any) -> FieldStatistics:
        found: FieldStatistics = {}
        for item in value:
            merged(found, {} if item is None else self.feature.observe_value(item))
        return found


@frozen()
class Listed(_ListOf):
    """Any number of values that no array holds: strings, bytes, JSON, times, pictures, lists, arrays of any size."""

    feature: Feature

    def __post_init__(self) -> None:
        kinds = self.feature.columns("value")
        if any(f"{column}/lengths" in kinds for column in _flattened_columns(self.feature, "value")):
            raise SchemaError(
                f"ListOf: {self.feature.declared()} is a list of lists itself; declare Json() for lists in lists in "
                "lists"
            )
        if any(kind == "bytes_list" and self.feature.arrow_types("value")[column][0] not in _AS_THEY_ARE
               for column, kind in kinds.items()):  # fmt: skip
            raise SchemaError(
                f"ListOf: {self.feature.declared()} is stored as numbers in a list of bytes, and cannot be an item; "
                "declare Json()"
            )

    @property
    def stored(self) -> Feature:
        return self.feature

    def columns(self, name: str) -> dict[str, Kind]:
        flattened, gathered = self.flattened(name), self.gathered(name)
        found: dict[str, Kind] = {}
        for column in self.feature.columns(name):
            found[column] = (flattened.get(column) or gathered[column]).kind
        return {**found, **dict.fromkeys(map("{}/lengths".format, flattened), "int64")}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        items = []
        for number, item in enumerate(value):
            try:
                items.append(self.feature.encode(name, as_array(item)))
            except SchemaError as error:
                raise _of_item(name, self.feature, number, item, error) from error
        columns: dict[str, Column] = {}
        for column, found in self.gathered(name).items():
            columns[column] = found.join([one[column] for one in items])
        for column, flattened in self.flattened(name).items():
            values = [one[column] for one in items]
            columns[column], columns[f"{column}/lengths"] = flattened.join(values), flattened.lengths(values)
        return columns

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        rows = values.rows() if isinstance(values, RaggedColumn) else [list(value) for value in values]
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        block = self.feature.encode_block(name, [item for row in rows for item in row])
        columns = {}
        for column, found in self.gathered(name).items():
            one = found.join_block(block[column])
            columns[column] = RaggedColumn(one.values, counts * (1 if found.kind == "bytes_list" else found.width))
        return columns

    def observe(self, name: str, columns: Mapping[str, ColumnBlock]) -> FieldStatistics:
        gathered, flattened = self.gathered(name), self.flattened(name)
        if flattened:  # items that are lists themselves
            lengths = columns[f"{next(iter(flattened))}/lengths"]
            assert isinstance(lengths, RaggedColumn)
            return {"items": Numbers.of(lengths.lengths, with_bins=True)}
        block: dict[str, ColumnBlock] = {}
        counts = np.zeros(0, np.int64)
        for column, found in gathered.items():
            block[column], counts = found.split_block(columns[column])  # type: ignore[arg-type]
        items = self.feature.observe(name, block) if counts.any() else {}
        return {**items, "items": Numbers.of(counts, with_bins=True)}

    def encodes_blocks(self) -> bool:
        return not self.flattened("value") and self.feature.encodes_blocks()

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> Any:
        del out
        items = self._items(name, columns)
        return self.together([self.feature.decode_into(name, one, None, are_intact=are_intact) for one in items])

    def decode_block(self, name: str, columns: Mapping[str, ColumnBlock]) -> np.ndarray | list[Any] | None:
        block, counts = _split_block(self.gathered(name), columns)
        items: Any = self.feature.decode_block(name, block) if counts.any() else []
        bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
        rows = [items[start:stop] for start, stop in itertools.pairwise(bounds)]
        return [row if len(row) and isinstance(row, np.ndarray) else self.together(list(row)) for row in rows]

    def decodes_blocks(self) -> bool:
        return not self.flattened("value") and self.feature.decodes_blocks()

    def encoded_value(self, name: str, columns: Mapping[str, Column]) -> Any:
        return [self.feature.encoded_value(name, one) for one in self._items(name, columns)]

    def prepare(self, name: str, value: Any) -> Any:
        return [self.feature.prepare(name, item) for item in value]

    def declared(self) -> str:
        return f"list of {self.feature.declared()}"

    def arrow_types(self, name: str) -> dict[str, tuple[str, Shape]]:
        flattened, found = self.flattened(name), {}
        for column, (dtype, sizes) in self.feature.arrow_types(name).items():
            is_list = column in flattened and sizes[:1] == (None,)
            found[column] = dtype, sizes if is_list else (None, *sizes)
        return {**found, **{f"{column}/lengths": ("int64", (None,)) for column in flattened}}

    def gathered(self, name: str) -> Mapping[str, Gathered]:
        """Return how the columns are stored whose values are all of one size."""
        flattened = self.flattened(name)
        found = gathered_columns(self.feature, name)
        return {column: how for column, how in found.items() if column not in flattened}

    def flattened(self, name: str) -> Mapping[str, _Flattened]:
        """Return how the others are stored."""
        return _flattened_columns(self.feature, name)

    def _items(self, name: str, columns: Mapping[str, Column]) -> Iterator[dict[str, Column]]:
        """Yield the columns of each item."""
        found = {column: how.split(columns[column]) for column, how in self.gathered(name).items()}
        for column, how in self.flattened(name).items():
            found[column] = how.split(columns[column], columns[f"{column}/lengths"])
        for values in zip(*found.values(), strict=True):
            yield dict(zip(found, values, strict=True))

    def together(self, items: list[Any]) -> Any:
        """Return items as one array where they all have one shape by declaration."""
        dtype, shape = self.feature.value_type()
        if not holds_numbers(dtype) or None in shape:
            return items
        return np.stack(items) if items else np.empty((0, *shape), dtype_of(dtype))


_COUNTS_OF_ITEMS = {"items", "length"}
"""Statistics of a list without gaps that count its items."""


@frozen()
class WithGaps(_ListOf):
    """A list in which each item is None or a value of a feature: a list of the values, and where they are."""

    feature: Feature

    def __post_init__(self) -> None:
        if "value/present" in self.stored.columns("value"):
            raise SchemaError(f"ListOf: {self.feature.declared()} marks what is missing in itself; declare Json()")

    @property
    def stored(self) -> ListOf:
        return ListOf(self.feature)

    def columns(self, name: str) -> dict[str, Kind]:
        return {**self.stored.columns(name), f"{name}/present": "int64"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        rows = list(value)
        present = np.array([row is not None for row in rows], np.int64)
        try:
            columns = self.stored.encode(name, [row for row in rows if row is not None])
        except SchemaError:
            for number in np.flatnonzero(present).tolist():
                try:
                    self.feature.encode(name, as_array(rows[number]))
                except SchemaError as error:
                    found = _of_item(name, self.feature, number, rows[number], error)
                    raise _declared_as(self, self.stored, found) from error
            raise
        return {**columns, f"{name}/present": present}

    def observe(self, name: str, columns: Mapping[str, ColumnBlock]) -> FieldStatistics:
        present = columns[f"{name}/present"]
        assert isinstance(present, RaggedColumn)
        found = {key: one for key, one in self.stored.observe(name, columns).items() if key not in _COUNTS_OF_ITEMS}
        items = Numbers.of(present.lengths, with_bins=True)
        return {**found, "items": items, "missing": int(np.count_nonzero(present.values == 0))}

    def encodes_blocks(self) -> bool:
        return False

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> Any:
        del out
        return self._spread(name, columns, self.stored.decode_into(name, columns, None, are_intact=are_intact))

    def decodes_blocks(self) -> bool:
        return False

    def encoded_value(self, name: str, columns: Mapping[str, Column]) -> Any:
        return self._spread(name, columns, self.stored.encoded_value(name, columns))

    def prepare(self, name: str, value: Any) -> Any:
        return [None if item is None else self.feature.prepare(name, item) for item in value]

    def declared(self) -> str:
        return f"list of {self.feature.declared()}, or None"

    def arrow_types(self, name: str) -> dict[str, tuple[str, Shape]]:
        return {**self.stored.arrow_types(name), f"{name}/present": ("int64", (None,))}

    def _spread(self, name: str, columns: Mapping[str, Column], values: Any) -> list[Any]:
        """Return values with None where one is missing."""
        present = np.asarray(columns[f"{name}/present"], np.int64)
        if present.sum() != len(values):
            raise ValueError(f"{count_of(len(values), 'value')}, where {present.sum()} are marked as present")
        there = iter(values)
        return [next(there) if is_there else None for is_there in present.tolist()]


@functools.lru_cache(maxsize=1024)
def _stored_list(feature: Feature) -> Feature:
    """Return the feature that stores lists of values of a feature: where they can be one array, one of arrays."""
    if type(feature) is Scalar:
        return Tensor((None,), feature.dtype)
    if type(feature) is Tensor and None not in feature.shape:
        return Tensor((None, *feature.shape), feature.dtype, feature.encoding)
    if type(feature) is ClassLabel and not feature.shape:
        return dataclasses.replace(feature, shape=(None,))
    return WithGaps(feature.feature) if isinstance(feature, Nullable) else Listed(feature)


@frozen()
class ListOf(_OfAnother):
    """A list of any length whose items are all values of one feature: texts, numbers, labels, times, files.

    A sample holds a list, a tuple or an array. It reads back as an array (n, ...) if the items are numbers or arrays of
    one shape, and otherwise as a list; a batch is a list of those, and a ragged tensor in TensorFlow.
    `ListOf( Scalar("int64"))` is stored as `Tensor((None,), "int64")` is, and `ListOf(ClassLabel(...))` as one with
    `shape=(None,)`.

    Args:
        feature: the feature of each item.

    Example:
        >>> ListOf(Text()).encode("tags", ["sea", "dusk"])
        {'tags': [b'sea', b'dusk']}
        >>> ListOf(Scalar("int32")).encode("ids", [1, 2, 3])
        {'ids': array([1, 2, 3])}
    """

    type_name: ClassVar[str] = "Sequence"  # on disk
    feature: Feature

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature", _checked_part(self.feature, "ListOf"))
        if not isinstance(self.feature, Mapping):
            _refuse_dicts_in(self.feature, "ListOf")
            _stored_list(self.feature)

    @property
    def stored(self) -> Feature:
        return _stored_list(_alone(self.feature, "ListOf"))

    def columns(self, name: str) -> dict[str, Kind]:
        return self.stored.columns(name)

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        found = self._list(name, value)
        try:
            return self.stored.encode(name, found)
        except SchemaError as error:
            raise _declared_as(self, self.stored, error) from error

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        if not isinstance(values, (np.ndarray, RaggedColumn)):
            values = [self._list(name, value) for value in values]
        try:
            return self.stored.encode_block(name, values)
        except SchemaError as error:
            raise _declared_as(self, self.stored, error) from error

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> Any:
        return self.stored.decode_into(name, columns, out, are_intact=are_intact)

    def decode_block(self, name: str, columns: Mapping[str, ColumnBlock]) -> np.ndarray | list[Any] | None:
        return self.stored.decode_block(name, columns)

    def encoded_value(self, name: str, columns: Mapping[str, Column]) -> Any:
        return self.stored.encoded_value(name, columns)

    def prepare(self, name: str, value: Any) -> Any:
        return self.stored.prepare(name, value)

    def declared(self) -> str:
        return f"list of {_alone(self.feature, 'ListOf').declared()}"

    def _list(self, name: str, value: Any) -> Any:
        """Return a value as the feature that stores it takes it: numbers as an array."""
        value = as_array(value)
        if isinstance(value, np.ndarray) and value.ndim:
            return value
        if not isinstance(value, (list, tuple)):
            raise mismatch(name, self, f"{kind_of(value)}", "give a list")
        stored = self.stored
        return _array_of_items(name, self, stored, value) if isinstance(stored, Tensor) else value


def _array_of_items(name: str, feature: ListOf, stored: Tensor, items: Any) -> np.ndarray:
    """Return numbers, or arrays of one shape, as one array."""
    dtype = dtype_of(stored.dtype)
    if isinstance(feature.feature, Scalar) and items:
        found = numbers_in(items, dtype)
        if found is not None:
            return found
    arrays = []
    for number, item in enumerate(items):
        try:
            feature.feature.encode(name, as_array(item))
        except SchemaError as error:
            raise _of_item(name, feature.feature, number, item, error) from error
        arrays.append(np.asarray(as_array(item), dtype))
    return np.stack(arrays) if arrays else np.empty((0, *stored.shape[1:]), dtype)  # type: ignore[arg-type]


def _of_item(name: str, feature: Feature, number: int, item: Any, error: SchemaError) -> SchemaError:
    """Return an error of an item with its number in it."""
    if item is None:
        return SchemaError(
            f"field {name!r} is declared list of {feature.declared()} but item {number} of the sample is None; give a "
            "value, or declare ListOf(Nullable(...))"
        )
    declared, outer = f"is declared {feature.declared()} but ", f"is declared list of {feature.declared()} but "
    text = str(error).replace(f"{declared}the sample holds", f"{outer}item {number} of the sample is", 1)
    return SchemaError(text.replace(f"{declared}item ", f"{outer}item {number}, item ", 1))


_BUILT_IN: dict[str, type[Feature]] = {
    kind.type_name: kind
    for kind in (
        *(Image, Mask, Depth, ClassLabel, BBoxes, Text, Scalar, Tensor, Tokens, Bytes, Json, Timestamp),
        *(Keypoints, Polygons),
        *(Audio, Video),
        *(Nullable, ListOf),
    )
}
_FeatureType = TypeVar("_FeatureType", bound=type[Feature])


def register_feature(feature_type: _FeatureType) -> _FeatureType:
    """Register a feature class under its `type_name`, so that `load` finds it; return the class, as a decorator does.

    Installed packages need no call: they list the class under the entry-point group `datamat.features`. A program that
    defines a class must register it before opening a directory with fields of that type.

    Args:
        feature_type: subclass of `Feature`. It replaces a class of the same module and name, such as one from a
            notebook cell that is run again.

    Raises:
        SchemaError: the argument is not a subclass of `Feature`, or another class has its `type_name`.

    Example:
        >>> @register_feature
        ... class Celsius(Scalar):
        ...     pass
        >>> Features.from_json({"t": {"type": "Celsius", "dtype": "float32"}})
        Features(key: str, t: float32 scalar)
    """
    if not (isinstance(feature_type, type) and issubclass(feature_type, Feature)):
        raise SchemaError(
            f"register_feature: {feature_type!r} is not a subclass of datamat.features.Feature; pass a class that is"
        )
    name = feature_type.type_name
    known = _BUILT_IN.get(name) or _registered.get(name)
    if known is not None and _path_of(known) != _path_of(feature_type):
        raise SchemaError(
            f"register_feature: the name {name!r} of {_path_of(feature_type)} is that of {_path_of(known)}; "
            "set type_name in the class"
        )
    _registered[name] = feature_type
    return feature_type


def _path_of(feature_type: type) -> str:
    return f"{feature_type.__module__}.{feature_type.__qualname__}"


def _type_of(name: str) -> type[Feature] | None:
    """Return the feature class with a `type_name`, importing the module that an entry point names."""
    found = _BUILT_IN.get(name) or _registered.get(name)
    if found is None:
        # Imported here because importlib.metadata costs more than this whole module, and built-in names never need it.
        from importlib.metadata import entry_points

        points = {point.value: point for point in entry_points(group=_ENTRY_POINTS, name=name)}
        if len(points) > 1:
            raise SchemaError(
                f"several installed packages have a feature {name!r}: {join_names(sorted(points))}; remove all but one"
            )
        for point in points.values():
            found = register_feature(point.load())
    return found


_DICT = "Features"  # in place of the name of a type


def _feature_from_json(name: str, declaration: Mapping[str, Any]) -> Feature | dict[str, Any]:
    arguments = dict(declaration) if isinstance(declaration, Mapping) else {}
    kind, module = arguments.pop("type", None), arguments.pop("module", None)
    if kind == _DICT and isinstance(fields := arguments.get("fields"), Mapping):
        return {part: _feature_from_json(f"{name}/{part}", one) for part, one in fields.items()}
    found = _type_of(kind) if isinstance(kind, str) else None
    if found is None and module is not None:
        raise MissingDependencyError(
            f"field {name!r} has the feature type {kind!r} of the module {module!r}, which is not known here; install "
            f"the package that brings it (its entry points name it under {_ENTRY_POINTS!r}), or call "
            "datamat.features.register_feature with the class first"
        )
    if found is None:
        raise SchemaError(
            f"field {name!r} has the type {kind!r}; want one of {join_names({**_BUILT_IN, **_registered})}"
        )
    try:
        return found.from_arguments(arguments)
    except TypeError as error:
        raise SchemaError(
            f"field {name!r} of type {kind}: {error}; want the arguments that its to_json gave"
        ) from error


def _foreign_parts(feature: Feature) -> Iterator[Feature]:
    """Yield the features of other packages that a feature is, or is made of."""
    if _BUILT_IN.get(feature.type_name) is not type(feature):
        yield feature
    for part in feature.parts():
        yield from _foreign_parts(part)


def _check_foreign(name: str, feature: Feature) -> None:
    where = f"field {name!r}, a {_path_of(type(feature))}"
    dtype, shape = feature.value_type()
    kinds = feature.columns(name)
    wrong = {
        "value_type": not (_is_dtype(dtype) and (holds_numbers(dtype) or shape == () or feature.parts())),
        "columns": not kinds or any(column != name and not column.startswith(f"{name}/") for column in kinds),
        "the kinds of columns": not set(kinds.values()) <= {*get_args(Kind)},
        "arrow_types": feature.arrow_types(name).keys() != kinds.keys(),
        "target": isinstance(feature, Geometry) and feature.target() not in {None, *get_args(Target)},
        "preview": isinstance(feature, Preview) and feature.preview not in {None, "image", "mask", "depth", "outlines"},
    }
    found = [part for part, is_wrong in wrong.items() if is_wrong]
    if found:
        raise SchemaError(
            f"{where}: {join_names(found)} does not follow the documentation of Feature; correct it there"
        )
    declaration = feature.to_json()
    try:
        again = _feature_from_json(name, json.loads(json.dumps(declaration)))
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{where} has a declaration that is not JSON ({error}); write arguments") from error
    if type(again) is not type(feature) or again != feature:
        raise SchemaError(
            f"{where} does not equal the feature that its JSON gives, {again!r}; make the class a frozen dataclass, or "
            "fix __eq__, arguments and from_arguments"
        )


_OTHER_DTYPES = {"bfloat16", "datetime64[us]"}


def _is_dtype(dtype: Any) -> bool:
    try:
        if not isinstance(dtype, str):
            return False
        return dtype in _OTHER_DTYPES or not holds_numbers(dtype) or np.dtype(dtype).kind in "biufc"
    except TypeError:
        return False


_DTYPES = {"int64": np.dtype(np.int64), "float32": np.dtype(np.float32)}


def _check_encoded(name: str, feature: Feature, columns: Mapping[str, Column]) -> None:
    """Refuse columns that only some formats could store."""
    for column, kind in feature.columns(name).items():
        value = columns.get(column)
        if kind == "bytes":
            fits = type(value) is bytes
        elif kind == "bytes_list":
            fits = isinstance(value, list) and set(map(type, value)) <= {bytes}
        else:
            fits = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == _DTYPES[kind]
        if not fits:
            wanted = {"bytes": "bytes", "bytes_list": "a list of bytes"}.get(kind, f"a 1-D {kind} array")
            found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise SchemaError(
                f"field {name!r}: encode of {_path_of(type(feature))} gives {found} for the column {column!r}; "
                f"want {wanted}"
            )


def _check_encoded_block(name: str, feature: Feature, block: Mapping[str, Any]) -> None:
    """Refuse columns of a block that a format could not store, as `_check_encoded` does those of a record."""
    for column, kind in feature.columns(name).items():
        values = block.get(column)
        numbers = values.values if isinstance(values, RaggedColumn) else values
        if kind == "bytes":
            fits = isinstance(values, list) and set(map(type, values)) <= {bytes}
        elif kind == "bytes_list":
            fits = isinstance(values, RaggedColumn) and set(map(type, values.values.tolist())) <= {bytes}
        else:
            fits = isinstance(numbers, np.ndarray) and numbers.ndim in {1, 2} and numbers.dtype == _DTYPES[kind]
        if not fits:
            found = f"{numbers.dtype} {numbers.shape}" if isinstance(numbers, np.ndarray) else type(values).__name__
            wanted = {"bytes": "n bytes", "bytes_list": "a RaggedColumn of bytes"}.get(
                kind, f"{kind} (n,) or (n, k), or a RaggedColumn"
            )
            raise SchemaError(
                f"field {name!r}: encode_block of {_path_of(type(feature))} gives {found} for the column {column!r}; "
                f"want {wanted}"
            )


def _column_of(name: str, feature: Feature, values: Any) -> Any:
    """Return a column of a block: a pair of arrays, which are values and lengths, as a `RaggedColumn`."""
    values = as_array(values)
    is_column = isinstance(values, (collections.abc.Sequence, RaggedColumn)) or (
        isinstance(values, np.ndarray) and values.ndim > 0
    )
    if isinstance(values, str) or not is_column:
        raise mismatch(name, feature, f"{kind_of(values)}", "give one value per row of the block")
    parts = [as_array(part) for part in values] if isinstance(values, tuple) and len(values) == 2 else []
    if not parts or not all(isinstance(part, np.ndarray) for part in parts):
        return values
    numbers, lengths = parts
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not numbers.ndim or (lengths < 0).any():
        found = f"a pair of {numbers.dtype} {shape_text(numbers.shape)} and {lengths.dtype} {shape_text(lengths.shape)}"
        raise mismatch(name, feature, found, "give values (total, ...) and lengths, int64 (n,), or a list of n arrays")
    if lengths.sum() != len(numbers):
        found = f"{len(numbers)} values, and lengths with the sum {lengths.sum()}"
        raise mismatch(name, feature, found, "give the length of the value of each row")
    return RaggedColumn(numbers, lengths.astype(np.int64, copy=False))


def _inferred(name: str, value: Any) -> Any:
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
        raise InputError(f"{error}; if it is to be no image, pass features= with {wanted}") from error
    if info.is_float:
        raise InputError(
            f"{name!r}: a TIFF of floats, of unknown unit; pass features=, with Depth(dtype='float32') for metres"
        )
    if info.bit_depth > 8:  # whose channels Image would not widen for others
        return Image((None, None, info.channels), dtype="uint16")
    return Image((None, None, 4 if info.alpha else 3))


def _of_time(_: str, value: Any) -> Feature:
    return Timestamp("UTC" if getattr(value, "tzinfo", None) else None)


def _of_list(name: str, value: Any) -> Feature:  # noqa: PLR0911 -- one for each kind of items
    if value and all(isinstance(item, dict) for item in value):
        return _of_dicts(name, value)
    if value and all(hasattr(item, "getbands") for item in value):  # Pillow
        return ListOf(_inferred(name, value[0]))
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
    return ListOf(_inferred("", first)) if isinstance(first, (str, int, float, np.generic)) else Json()


def _of_dicts(name: str, value: collections.abc.Sequence[dict[Any, Any]]) -> Feature:
    """Return the feature of a list of dicts: JSON, unless they share their fields, and hold what JSON has not."""
    columns = {key: [row.get(key) for row in value] for key in value[0]}
    are_alike = all(row.keys() == columns.keys() for row in value)
    is_full = not any(item is None for column in columns.values() for item in column)
    if not (are_alike and is_full and any(map(_is_no_json, value))):
        return Json()
    fields: Any = {key: _of_items(f"{name}[].{key}", column) for key, column in columns.items()}
    # Lists of dicts in lists of dicts have no feature.
    return Json() if any(map(_lists_dicts, fields.values())) else ListOf(fields)


def _of_items(name: str, values: list[Any]) -> Any:
    """Return the feature of a field in dicts of a list."""
    values = [value[()] if isinstance(value, np.ndarray) else value for value in map(as_array, values)]  # as numbers
    if any(map(_is_no_json, values)):
        return _inferred(name, values[0])
    found = _of_list(name, values)
    return found.feature if isinstance(found, ListOf) else Json()


def _lists_dicts(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_lists_dicts, feature.values()))
    return isinstance(feature, ListOf) and isinstance(feature.feature, Mapping)


def _of_dict(name: str, value: dict[Any, Any]) -> Any:
    if value and all(isinstance(key, str) for key in value) and any(map(_is_no_json, value.values())):
        return {key: _inferred(f"{name}/{key}", item) for key, item in value.items()}
    return Json()


def _is_no_json(value: Any) -> bool:
    """Return whether JSON would make another of it: an array, bytes, a time, or a dict or list of dicts with one."""
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
"""What a value of some types is stored as; the first that fits counts."""


def _check_name(name: Any, feature: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise SchemaError(f"field name {name!r}: want a printable, non-empty str; rename the field")
    if not isinstance(feature, Feature):
        raise SchemaError(
            f"field {name!r} is declared as {feature!r}; want a feature such as Image() or Scalar('int64')"
        )
