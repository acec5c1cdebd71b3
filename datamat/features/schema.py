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
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, get_args

import numpy as np

from datamat import codecs
from datamat.errors import InputError, MissingDependencyError, SchemaError, count_of, kind_of
from datamat.features.base import (
    ArrowType,
    Column,
    ColumnBlock,
    Feature,
    Kind,
    RaggedColumn,
    Shape,
    as_array,
    bytes_array,
    dtype_of,
    encoded_block,
    gathered,
    holds_numbers,
    is_block_of_kind,
    is_of_kind,
    join_names,
    mismatch,
    one_bytes,
    ragged,
    rows_of,
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

    from numpy.typing import NDArray


__all__ = [
    "FLAT",
    "NO_MEMORY",
    "Features",
    "ListOf",
    "Nesting",
    "Nullable",
    "innermost",
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
            for column, stored in feature.columns(name).items():
                if not isinstance(stored, ArrowType):
                    raise SchemaError(
                        f"field {name!r}: the type of its column {column!r} is {stored!r}; want an ArrowType"
                    )
                if column in self._columns:
                    raise SchemaError(
                        f"field {name!r} needs the column {column!r}, which another field has; rename one"
                    )
                self._columns[column] = stored.kind
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
            _check_encoded(name, feature, columns, "encode")
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
            block.update(encoded_block(feature, name, values[name]))
        self._check_lists(block)
        for name, feature in self._foreign.items():
            _check_encoded(name, feature, block, "encode_block")
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
        sizes = {
            name: names
            for name, feature in self._fields.items()
            if self._columns.get(name) != "bytes_list" and (names := _open_sizes(feature))  # which is no one array
        }
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
# Nullable and ListOf hold none, one or many values of another type: null and list of Arrow, laid out in columns of
# numbers and bytes. A column of the other type becomes one column of all its values:
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
    if isinstance(feature, _OfAnother) and isinstance(feature.feature, Mapping):
        raise SchemaError(
            f"{where}: a list of dicts, or a dict that may be missing, cannot be in another; declare Json()"
        )
    return feature


class _OfAnother(Feature):
    """A type that answers most questions as another feature does."""

    __slots__ = ("_layouts",)  # neither compared nor pickled

    feature: Any
    _layouts: dict[str, Any]

    def _layout(self, name: str) -> Any:
        """Return what `_laid_out` does; kept, as it takes longer than to encode a value."""
        try:
            return self._layouts[name]
        except (AttributeError, KeyError):
            found = {**getattr(self, "_layouts", {}), name: self._laid_out(name)}
            object.__setattr__(self, "_layouts", found)
            return found[name]

    @abc.abstractmethod
    def _laid_out(self, name: str) -> Any:
        """Return how the columns of a field are stored."""

    @property
    @abc.abstractmethod
    def stored(self) -> Feature:
        """The feature of what is stored: of the values that are there, or of the one array that they form."""

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

    def packages(self, *, drawn: bool) -> frozenset[str]:
        return self.stored.packages(drawn=drawn)

    def class_names(self) -> tuple[str, ...] | None:
        return self.stored.class_names()

    def encodes_blocks(self) -> bool:
        return self.stored.encodes_blocks()

    def decodes_blocks(self) -> bool:
        return self.stored.decodes_blocks()


def innermost(feature: Feature) -> Feature:
    """Return the feature of the values in lists, and of those that may be missing."""
    while isinstance(feature, _OfAnother):
        feature = feature.stored
    return feature


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

    type_name: ClassVar[str] = "Optional"  # on disk
    feature: Feature

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature", _checked_part(self.feature, "Nullable"))
        if isinstance(self.feature, Nullable):
            raise SchemaError("Nullable: the feature is a Nullable itself; declare it once")
        if not isinstance(self.feature, Mapping):
            self._layout("value")  # which refuses what marks None in itself

    @property
    def stored(self) -> Feature:
        return _alone(self.feature, "Nullable")

    def columns(self, name: str) -> dict[str, ArrowType]:
        return {column: found.type for column, found in self._layout(name).items()}

    def value_type(self) -> tuple[str, Shape]:
        return self.stored.value_type()

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        columns = self._layout(name)
        if value is None:
            return {column: how.nothing() for column, how in columns.items()}
        try:
            found: dict[str, Any] = {f"{name}/present": np.ones(1, np.int64), **self.feature.encode(name, value)}
        except SchemaError as error:
            raise _declared_as(self, self.feature, error) from error
        return {column: how.wrap(found[column]) for column, how in columns.items()}

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        rows = values.rows() if isinstance(values, RaggedColumn) else values
        is_there = np.array([value is not None for value in rows], bool)
        there = values if is_there.all() else [value for value in rows if value is not None]
        mark = RaggedColumn(np.ones(len(there), np.int64), np.ones(len(there), np.int64))
        block = {f"{name}/present": mark, **encoded_block(self.feature, name, there)}
        columns = {}
        for column, how in self._layout(name).items():
            one = how.wrap_block(block[column])
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
        block, is_there = self._block_there(name, columns)
        values = iter(self.feature.decode_block(name, block) if is_there.any() else ())  # type: ignore[arg-type]
        return [next(values) if one else None for one in is_there.tolist()]

    def observe(self, name: str, columns: Mapping[str, ColumnBlock]) -> FieldStatistics:
        block, is_there = self._block_there(name, columns)
        found = self.feature.observe(name, block) if is_there.any() else {}
        return {**found, "missing": int(np.count_nonzero(~is_there))}

    def observe_value(self, value: Any) -> FieldStatistics:
        return {} if value is None else self.feature.observe_value(value)

    def encoded_value(self, name: str, columns: Mapping[str, Column]) -> Any:
        there = self._there(name, columns)
        return None if there is None else self.feature.encoded_value(name, there)

    def prepare(self, name: str, value: Any) -> Any:
        return None if value is None else self.feature.prepare(name, value)

    def declared(self) -> str:
        return f"{self.feature.declared()}, or None"

    def _laid_out(self, name: str) -> dict[str, _Maybe]:
        return _nullable_columns(self.stored, name)

    def _there(self, name: str, columns: Mapping[str, Column]) -> dict[str, Column] | None:
        """Return the columns of the value; None where there is none."""
        found = self._layout(name)
        if not len(columns[next(reversed(found))]):
            return None
        return {column: how.unwrap(columns[column]) for column, how in found.items()}

    def _block_there(
        self, name: str, columns: Mapping[str, ColumnBlock]
    ) -> tuple[dict[str, ColumnBlock], NDArray[np.bool_]]:
        """Return the block of the values that are there, and which records of n have one, bool (n,)."""
        found = self._layout(name)
        is_there = columns[next(reversed(found))].lengths > 0  # type: ignore[union-attr]
        return {column: how.unwrap_block(columns[column], is_there) for column, how in found.items()}, is_there


class _Maybe(NamedTuple):
    """How a `Nullable` stores a column of its feature, or the mark of what is there, which comes last.

    Attributes:
        type: type of its column.
        kind: kind of its column.
        of: kind of the column of the feature.
        raw: dtype of numbers, of which there may be none: they are stored as bytes; None for others.
    """

    type: ArrowType
    kind: Kind
    of: Kind
    raw: np.dtype[Any] | None

    def nothing(self) -> Column:
        """Return the column of None."""
        return [] if self.kind == "bytes_list" else np.empty(0, self.kind)

    def wrap(self, value: Any) -> Column:
        """Return the column of a value, given its column for the feature."""
        if self.raw is not None:
            return [value.astype(self.raw).tobytes()]
        found: Column = [value] if self.of == "bytes" else value
        return found

    def unwrap(self, column: Any) -> Column:
        """Return what `wrap` was given, of a record that holds a value."""
        if self.raw is None and self.of != "bytes":
            return column  # type: ignore[no-any-return]
        if not isinstance(column, bytes) and len(column) != 1:
            raise ValueError(f"{count_of(len(column), 'value')}, not one or none")
        value = column if isinstance(column, bytes) else column[0]
        return value if self.raw is None else np.frombuffer(value, self.raw).astype(self.of)

    def wrap_block(self, column: Any) -> RaggedColumn:
        """Return the column of n values, given that for the feature."""
        if self.raw is not None:
            rows = column.rows() if isinstance(column, RaggedColumn) else list(column)
            column = [np.ravel(row).astype(self.raw).tobytes() for row in rows]
        return _as_ragged(column)

    def unwrap_block(self, column: Any, is_there: NDArray[np.bool_]) -> ColumnBlock:
        """Return what `wrap_block` was given, of records of which some hold a value."""
        if self.raw is None and self.of != "bytes":
            return RaggedColumn(column.values, column.lengths[is_there])
        if (column.lengths > 1).any():
            raise SchemaError("a record holds several values, where one may be missing")
        values = _encoded_texts(column.values)
        if self.raw is None:
            return values
        lengths = np.fromiter(map(len, values), np.int64, len(values)) // self.raw.itemsize
        return RaggedColumn(np.frombuffer(b"".join(values), self.raw).astype(self.of), lengths)


def _nullable_columns(feature: Feature, name: str) -> dict[str, _Maybe]:
    """Return how a `Nullable` stores the columns of a feature."""
    found: dict[str, _Maybe] = {}
    for column, one in feature.columns(name).items():
        kind = dataclasses.replace(one, is_nullable=True)
        raw = one.raw_dtype if one.kind in {"int64", "float32"} and None in one.sizes else None
        found[column] = _Maybe(kind, kind.kind, one.kind, raw)
    if any(one.of == "bytes_list" for one in found.values()):
        if f"{name}/present" in found:
            raise SchemaError(
                f"Nullable: {feature.declared()} marks what is missing in itself; give an empty list for a list "
                "that is missing, or declare Json()"
            )
        found[f"{name}/present"] = _Maybe(ArrowType("int64", is_nullable=True), "int64", "int64", None)
    return found


def _as_ragged(column: Any) -> RaggedColumn:
    """Return a column of n values as one of lists: of one for each bytes value, of its numbers for each array."""
    if isinstance(column, list):
        return RaggedColumn(bytes_array(column), np.ones(len(column), np.int64))
    found = ragged(column)
    assert isinstance(found, RaggedColumn), "all else is numbers"
    return found


def _encoded_texts(values: np.ndarray) -> list[bytes]:
    """Return the bytes of an object array, which may hold text in their place."""
    return [value.encode() if isinstance(value, str) else value for value in values.tolist()]


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
    types = feature.columns(name)
    mark = next((mark for mark in (f"{name}/present", f"{name}/lengths") if mark in types), name)
    stored, column = types[mark], columns[mark]
    size = 1 if stored.kind == "bytes_list" else stored.width
    if isinstance(column, RaggedColumn):
        return (column.lengths // size).tolist()
    if stored.kind != "bytes":
        return len(column) // size
    size *= stored.raw_dtype.itemsize
    return len(column) // size if isinstance(column, bytes) else [len(value) // size for value in column]


def _json_of(feature: Any) -> dict[str, Any]:
    """Return the declaration of a field as JSON values: of a feature, or of a dict."""
    if not isinstance(feature, Mapping):
        found: dict[str, Any] = feature.to_json()
        return found
    return {"type": _DICT, "fields": {name: _json_of(part) for name, part in _parts_of(feature).items()}}


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
        if isinstance(self.feature, Mapping):
            return
        layout: _ListLayout = self._layout("value")
        if any(f"{column}/lengths" in layout.columns for column in layout.columns):
            raise SchemaError(
                f"ListOf: {self.item.declared()} is a list of lists itself; declare Json() for lists in lists in lists"
            )
        if self.has_gaps and "value/present" in self.stored.columns("value"):
            raise SchemaError(f"ListOf: {self.item.declared()} marks what is missing in itself; declare Json()")

    @property
    def item(self) -> Feature:
        """The feature of the items that are there."""
        found = _alone(self.feature, "ListOf")
        return found.stored if isinstance(found, Nullable) else found

    @property
    def has_gaps(self) -> bool:
        """Whether items may be missing: the column `NAME/present` says which are there."""
        return isinstance(self.feature, Nullable)

    @property
    def array(self) -> Feature | None:
        """The feature that stores the items that are there, where they are one array; else None."""
        return _array_of(self.item)

    @property
    def stored(self) -> Feature:
        return self.array or self.item

    def packed(self, name: str) -> Mapping[str, Packed]:
        """Return how each column of the items is stored; nothing where they are one array."""
        found: _ListLayout = self._layout(name)
        return found.columns

    def columns(self, name: str) -> dict[str, ArrowType]:
        found = self.array.columns(name) if self.array else {}
        found |= {column: how.type for column, how in self.packed(name).items()}
        found |= {f"{column}/lengths": _INTEGERS for column, how in self.packed(name).items() if how.has_lengths}
        return found | {f"{name}/present": _INTEGERS} if self.has_gaps else found

    def value_type(self) -> tuple[str, Shape]:
        dtype, shape = self.item.value_type()
        return dtype, (None, *shape)

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        items, layout = self._list(name, value), self._layout(name)
        there = [item for item in items if item is not None] if layout.has_gaps else items
        columns: dict[str, Any] = {}
        try:
            if layout.array:
                columns = layout.array.encode(name, _as_one(layout, there))
            else:
                block = encoded_block(layout.item, name, [as_array(item) for item in there])
        except SchemaError as error:
            raise self._refusal(name, items, error) from error
        for column, how in layout.columns.items():
            leaves = how.leaves(block[column])
            columns[column] = leaves.tolist() if how.kind == "bytes_list" and not isinstance(leaves, list) else leaves
            if how.has_lengths:
                columns[f"{column}/lengths"] = how.lengths(block[column])
        if layout.has_gaps:
            columns[f"{name}/present"] = np.array([item is not None for item in items], np.int64)
        return columns

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        if not isinstance(values, (np.ndarray, RaggedColumn)):
            values = [self._list(name, value) for value in values]
        rows = values.rows() if isinstance(values, RaggedColumn) else values
        try:
            return self._encoded_block(name, values, rows)
        except SchemaError:
            for value in rows:
                self.encode(name, value)  # which names the item
            raise

    def _encoded_block(self, name: str, values: Any, rows: Any) -> dict[str, Any]:
        layout: _ListLayout = self._layout(name)
        columns: dict[str, Any] = {}
        if layout.has_gaps:
            present = [np.array([item is not None for item in row], np.int64) for row in rows]
            columns[f"{name}/present"] = gathered(present, "int64")
            values = rows = [[item for item in row if item is not None] for row in rows]
        if layout.array:
            if not isinstance(values, (np.ndarray, RaggedColumn)):
                values = [_as_one(layout, row) for row in rows]
            return columns | layout.array.encode_block(name, values)
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        block = encoded_block(layout.item, name, [item for row in rows for item in row])
        for column, how in layout.columns.items():
            sizes = counts
            if how.has_lengths:
                lengths = how.lengths(block[column])
                columns[f"{column}/lengths"], sizes = RaggedColumn(lengths, counts), _sums(lengths, counts)
            columns[column] = how.rows(how.leaves(block[column]), sizes * how.unit)
        return columns

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> Any:
        layout: _ListLayout = self._layout(name)
        if layout.array:
            found = layout.array.decode_into(name, columns, None if layout.has_gaps else out, are_intact=are_intact)
        elif layout.decodes_blocks:
            found = layout.together(layout.item.decode_block(name, layout.items(columns)))
        else:
            rows = rows_of(layout.items(columns))
            found = layout.together([layout.item.decode_into(name, row, None, are_intact=are_intact) for row in rows])
        return _spread(found, columns[f"{name}/present"]) if layout.has_gaps else found

    def decode_block(self, name: str, columns: Mapping[str, ColumnBlock]) -> np.ndarray | list[Any] | None:
        layout: _ListLayout = self._layout(name)
        if layout.array:
            rows: Any = layout.array.decode_block(name, columns)
        else:
            block, counts = layout.block_of_items(columns)
            items: Any = layout.item.decode_block(name, block) if counts.any() else []
            bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
            rows = [items[start:stop] for start, stop in itertools.pairwise(bounds)]
            if layout.nothing is not None and not counts.any():
                rows = list(map(layout.together, rows))
        return list(map(_spread, rows, columns[f"{name}/present"].rows())) if layout.has_gaps else rows  # type: ignore[union-attr]

    def encoded_value(self, name: str, columns: Mapping[str, Column]) -> Any:
        layout: _ListLayout = self._layout(name)
        if layout.array:
            found = layout.array.encoded_value(name, columns)
        else:
            found = [layout.item.encoded_value(name, row) for row in rows_of(layout.items(columns))]
        return _spread(found, columns[f"{name}/present"]) if layout.has_gaps else found

    def prepare(self, name: str, value: Any) -> Any:
        if self.array and not self.has_gaps:
            return value
        return [None if item is None and self.has_gaps else self.item.prepare(name, item) for item in value]

    def together(self, items: Any) -> Any:
        """Return items as one array where they all have one shape by declaration."""
        return self._layout("value").together(items)

    def observe(self, name: str, columns: Mapping[str, ColumnBlock]) -> FieldStatistics:
        layout: _ListLayout = self._layout(name)
        lengths = [f"{column}/lengths" for column, how in layout.columns.items() if how.has_lengths]
        if layout.array:
            found = layout.array.observe(name, columns)
        elif lengths:  # items that are lists themselves
            found = {"items": Numbers.of(columns[lengths[0]].lengths, with_bins=True)}  # type: ignore[union-attr]
        else:
            block, counts = layout.block_of_items(columns)
            items = layout.item.observe(name, block) if counts.any() else {}
            found = {**items, "items": Numbers.of(counts, with_bins=True)}
        if not layout.has_gaps:
            return found
        present = columns[f"{name}/present"]
        assert isinstance(present, RaggedColumn)
        found = {key: one for key, one in found.items() if key not in _COUNTS_OF_ITEMS}
        missing = int(np.count_nonzero(present.values == 0))
        return {**found, "items": Numbers.of(present.lengths, with_bins=True), "missing": missing}

    def observe_value(self, value: Any) -> FieldStatistics:
        found: FieldStatistics = {}
        for item in value:
            merged(found, {} if item is None else self.item.observe_value(item))
        return found

    def declared(self) -> str:
        return f"list of {_alone(self.feature, 'ListOf').declared()}"

    def _list(self, name: str, value: Any) -> Any:
        value = as_array(value)
        if not (isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim)):
            raise mismatch(name, self, f"{kind_of(value)}", "give a list")
        return value

    def _refusal(self, name: str, items: Any, error: SchemaError) -> SchemaError:
        """Return the error of items that are refused: of the first of them, if one is to blame."""
        for number, item in enumerate(() if self.array and isinstance(items, np.ndarray) else items):
            try:
                if item is not None or not self.has_gaps:
                    self.item.encode(name, as_array(item))
            except SchemaError as found:
                return _of_item(name, self, number, item, found)
        return _declared_as(self, self.stored, error)

    def _laid_out(self, name: str) -> _ListLayout:
        item, array = self.item, self.array
        dtype, shape = item.value_type()
        sizes = [0, *(size for size in shape if size is not None)]
        is_one = array is None and holds_numbers(dtype) and None not in shape
        nothing = np.empty(sizes, dtype_of(dtype)) if is_one else None
        columns = {} if array else _packed_columns(item, name)
        return _ListLayout(item, array, self.has_gaps, item.decodes_blocks(), nothing, columns)


class _ListLayout(NamedTuple):
    """How a `ListOf` is stored.

    Attributes:
        item: feature of the items that are there.
        array: feature that stores them, where they are one array.
        has_gaps: whether items may be missing.
        decodes_blocks: whether the items decode many at once.
        nothing: the array of no items, where what is decoded is one array; else None.
        columns: how each column of the items is stored, where they are not one array.
    """

    item: Feature
    array: Feature | None
    has_gaps: bool
    decodes_blocks: bool
    nothing: np.ndarray | None
    columns: Mapping[str, Packed]

    def items(self, columns: Mapping[str, Any]) -> dict[str, ColumnBlock]:
        """Return the items of a record as a block."""
        found: dict[str, ColumnBlock] = {}
        for column, how in self.columns.items():
            lengths = np.asarray(columns[f"{column}/lengths"], np.int64) if how.has_lengths else None
            found[column] = how.items(one_bytes(column, columns) if how.kind == "bytes" else columns[column], lengths)
        return found

    def block_of_items(self, columns: Mapping[str, Any]) -> tuple[dict[str, ColumnBlock], NDArray[np.int64]]:
        """Return the items of n records as a block, and how many each record has, int64 (n,)."""
        found: dict[str, ColumnBlock] = {}
        counts = np.zeros(0, np.int64)
        for column, how in self.columns.items():
            stored, lengths = columns[column], columns.get(f"{column}/lengths")
            if how.kind == "bytes":
                leaves, sizes = b"".join(stored), np.fromiter(map(len, stored), np.int64, len(stored))
            else:
                leaves, sizes = stored.values, stored.lengths
            counts = sizes // how.unit if lengths is None else lengths.lengths
            wanted = counts if lengths is None else _sums(lengths.values, counts)
            if (sizes != wanted * how.unit).any():
                raise SchemaError(f"column {column!r} holds another number of values than the lengths of its items say")
            found[column] = how.items(leaves, None if lengths is None else lengths.values)
        return found, counts

    def together(self, items: Any) -> Any:
        """Return items as one array where they all have one shape by declaration."""
        if self.nothing is None or isinstance(items, np.ndarray):
            return items
        return np.stack(items) if items else self.nothing.copy()


def _spread(values: Any, present: Any) -> list[Any]:
    """Return the values that are there, with None where one is missing."""
    present = np.asarray(present, np.int64)
    if present.sum() != len(values):
        raise ValueError(f"{count_of(len(values), 'value')}, where {present.sum()} are marked as present")
    there = iter(values)
    return [next(there) if is_there else None for is_there in present.tolist()]


_INTEGERS = ArrowType("int64", (None,))
_COUNTS_OF_ITEMS = {"items", "length"}
"""Statistics of a list without gaps that count its items."""


class Packed(NamedTuple):
    """How a `ListOf` stores a column of its items: the leaves of all items, and how many each has, where they differ.

    Attributes:
        type: type of its column.
        kind: kind of its column.
        unit: how many leaves, which are numbers, bytes objects, or single bytes, make one value in an item.
        has_lengths: whether items differ in size; the column COLUMN/lengths says of how many values each is.
    """

    type: ArrowType
    kind: Kind
    unit: int
    has_lengths: bool

    def leaves(self, items: Any) -> Any:
        """Return the leaves of a block of items: an array (total,), a list of bytes objects, or bytes."""
        if isinstance(items, list):
            return b"".join(items) if self.kind == "bytes" else items
        return items.values if isinstance(items, RaggedColumn) else items.reshape(-1)

    def lengths(self, items: Any) -> NDArray[np.int64]:
        """Return of how many values each item of a block is, int64 (n,)."""
        if isinstance(items, list):
            return np.fromiter(map(len, items), np.int64, len(items)) // self.unit
        return _as_ragged(items).lengths // self.unit

    def items(self, leaves: Any, lengths: NDArray[np.int64] | None) -> ColumnBlock:
        """Return the block of items with some leaves, of which each is of some length."""
        if lengths is None and self.kind == "bytes_list":
            return leaves if isinstance(leaves, list) else _encoded_texts(leaves)
        if lengths is None:
            sizes = np.full(len(leaves) // self.unit, self.unit)
            total = self.unit * len(sizes)
        else:
            sizes = lengths * self.unit
            total = -1 if len(sizes) and sizes.min() < 0 else int(sizes.sum())
        if total != len(leaves):
            raise ValueError(f"{len(leaves)} numbers or bytes, where the lengths of the items say {total}")
        return self.rows(leaves, sizes)

    def rows(self, leaves: Any, lengths: NDArray[np.int64]) -> ColumnBlock:
        """Return leaves as a column of n rows, of which each has some number of them."""
        if self.kind == "bytes":
            return [leaves[start:stop] for start, stop in itertools.pairwise([0, *np.cumsum(lengths).tolist()])]
        return RaggedColumn(bytes_array(leaves) if isinstance(leaves, list) else leaves, lengths)


def _packed_columns(item: Feature, name: str) -> Mapping[str, Packed]:
    """Return how a `ListOf` stores the columns of its items."""
    found: dict[str, Packed] = {}
    for column, one in item.columns(name).items():
        is_open = None in one.sizes
        kind = one if is_open else dataclasses.replace(one, sizes=(None, *one.sizes))
        unit = one.width if one.holds_numbers else 1
        if kind.kind == "bytes":
            unit *= one.raw_dtype.itemsize
        found[column] = Packed(kind, kind.kind, unit, is_open or kind.kind == "bytes")
    return found


def _sums(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of lengths, of which so many at a time are added up, int64 (n,)."""
    ends = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=ends[1:])
    found: NDArray[np.int64] = ends[counts.cumsum()]
    found[1:] -= found[:-1].copy()
    return found


@functools.lru_cache(maxsize=1024)
def _array_of(item: Feature) -> Feature | None:
    """Return the feature whose values are arrays of all items of a list, where they can be one."""
    if type(item) is Scalar:
        return Tensor((None,), item.dtype)
    if type(item) is Tensor and None not in item.shape:
        return Tensor((None, *item.shape), item.dtype, item.encoding)
    if type(item) is ClassLabel and not item.shape:
        return dataclasses.replace(item, shape=(None,))
    return None


def _as_one(layout: _ListLayout, items: Any) -> Any:
    """Return items as the feature that stores them as one array takes them: numbers as an array."""
    if isinstance(items, np.ndarray) or not isinstance(layout.array, Tensor):
        return items
    dtype, item = dtype_of(layout.array.dtype), layout.item
    found = numbers_in(items, dtype) if isinstance(item, Scalar) and items else None
    if found is not None:
        return found
    arrays = []
    for one in map(as_array, items):
        item.encode("", one)  # which refuses others
        arrays.append(np.asarray(one, dtype))
    return np.stack(arrays) if arrays else np.empty((0, *item.value_type()[1]), dtype)


def _of_item(name: str, feature: ListOf, number: int, item: Any, error: SchemaError) -> SchemaError:
    """Return an error of an item with its number in it."""
    if item is None:
        return SchemaError(
            f"field {name!r} is declared {feature.declared()} but item {number} of the sample is None; give a "
            "value, or declare ListOf(Nullable(...))"
        )
    declared, outer = f"is declared {feature.item.declared()} but ", f"is declared {feature.declared()} but "
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
    types = feature.columns(name)
    wrong = {
        "value_type": not (_is_dtype(dtype) and (holds_numbers(dtype) or shape == () or feature.parts())),
        "columns": not types or any(column != name and not column.startswith(f"{name}/") for column in types),
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


_WANTED = {
    "encode": {"bytes": "bytes", "bytes_list": "a list of bytes", "": "a 1-D {} array"},
    "encode_block": {
        "bytes": "n bytes",
        "bytes_list": "a RaggedColumn of bytes",
        "": "{} (n,) or (n, k), or a RaggedColumn",
    },
}
"""What the methods that encode are to give for a column of some kind, and of any other."""


def _check_encoded(name: str, feature: Feature, columns: Mapping[str, Any], method: str) -> None:
    """Refuse columns of a record, or of a block, that only some formats could store."""
    for column, stored in feature.columns(name).items():
        kind, value = stored.kind, columns.get(column)
        if not (is_of_kind if method == "encode" else is_block_of_kind)(value, kind):
            numbers = value.values if isinstance(value, RaggedColumn) else value
            found = f"{numbers.dtype} {numbers.shape}" if isinstance(numbers, np.ndarray) else type(value).__name__
            wanted = _WANTED[method].get(kind) or _WANTED[method][""].format(kind)
            raise SchemaError(
                f"field {name!r}: {method} of {_path_of(type(feature))} gives {found} for the column {column!r}; want "
                f"{wanted}"
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
