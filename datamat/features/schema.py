"""`Features`: the schema of a dataset."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from datamat.errors import InputError, SchemaError, kind_of
from datamat.features.base import (
    Column,
    ColumnBlock,
    Feature,
    Kind,
    RaggedColumn,
    as_array,
    by_column,
    holds_numbers,
    is_block_of_kind,
    is_of_kind,
    join_names,
    mismatch,
    named,
    put_name,
    ragged,
    shape_text,
)
from datamat.features.composed import innermost
from datamat.features.inference import inferred
from datamat.features.list_of import ListOf
from datamat.features.nesting import chosen, nested, parts_of
from datamat.features.nullable import Nullable
from datamat.features.protocols import Geometry, Preview, Target
from datamat.features.registry import BUILT_IN, declaration_of, feature_of, path_of
from datamat.features.statistics import FieldStatistics, Statistics, merged, shared_bounds
from datamat.features.values import ClassLabel, Scalar, Tensor, Text, Tokens

NO_MEMORY: Mapping[str, np.ndarray] = {}
"""No memory to decode into."""


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

    __slots__ = ("_columns", "_fields", "_foreign", "_parts", "as_declared", "dicts", "measured", "observed")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping):
            raise SchemaError(f"features is {kind_of(fields)}; want a dict of name to feature type")
        declared = fields.as_declared if isinstance(fields, Features) else fields
        self.as_declared: Mapping[str, Any] = {"key": Text(), **declared}
        self.dicts, self._fields = nested(self.as_declared)
        self._columns: dict[str, Kind] = {}
        for name, feature in self._fields.items():
            _check_name(name, feature)
            for column, stored in named(name, feature.columns, name).items():
                if column in self._columns:
                    raise SchemaError(
                        f"field {name!r} needs the column {column!r}, which another field has; rename one"
                    )
                self._columns[column] = stored.kind
        self._parts = {name: (feature, _parts_of(name, feature)) for name, feature in self._fields.items()}
        if not isinstance(self._fields["key"], Text):
            raise SchemaError(f"field 'key' is declared {self._fields['key'].declared()}; it must be Text()")
        self._foreign = {name: feature for name, feature in self._fields.items() if [*_foreign_parts(feature)]}
        self.observed = {
            name: feature for name, feature in self._fields.items() if name != "key" and _is_observed(feature)
        }
        self.measured = {
            name: feature
            for name, feature in self._fields.items()
            if type(innermost(feature)).observe_value is not Feature.observe_value
        }

    def __getitem__(self, name: str) -> Feature:
        """Return the feature of a field; for a dict, its declared fields."""
        found: Feature = self._fields[name] if name in self._fields else self.as_declared[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Features):
            return False
        return self._fields == other._fields and self.dicts == other.dicts

    def __hash__(self) -> int:
        return hash(len(self._columns))  # used for each record of tar shards; caches by schema are small

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}: {feature.declared()}' for name, feature in self._fields.items())})"

    @property
    def columns(self) -> Mapping[str, Kind]:
        """Kind of each stored column, by name."""
        return self._columns

    @property
    def foreign(self) -> Mapping[str, Feature]:
        """The third-party feature of each field that has one, as its type or as a part of it."""
        return {name: next(_foreign_parts(feature)) for name, feature in self._foreign.items()}

    def check(self) -> None:
        """Refuse third-party feature types that formats or readers could not handle; called by `plan()`.

        Raises:
            SchemaError: methods of a feature contradict each other, or its JSON does not give an equal feature.
            MissingDependencyError: the class of a feature is neither registered nor an entry point.
        """
        for name, feature in self._foreign.items():
            for part in [*_foreign_parts(feature), feature]:
                _check_foreign(name, part)

    def packages(self, *, drawn: bool) -> frozenset[str]:
        """Return the top-level modules of other packages that decide the bytes of the stored columns.

        Args:
            drawn: whether to answer for transformed copies.

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
        if self.dicts:
            sample = self.flatten(sample)
        if sample.keys() != self._fields.keys():
            raise self._wrong_fields(sample)
        columns: dict[str, Column] = {}
        name = ""
        try:
            for name, feature in self._fields.items():
                found = feature.encode(sample[name])
                if isinstance(found, dict):
                    columns.update(by_column(name, found))
                else:
                    columns[name] = found
        except (InputError, SchemaError) as error:
            put_name(error, name)
            raise
        self._check_lists(columns)
        for name, feature in self._foreign.items():
            _check_encoded(name, feature, columns, "encode")
        return columns

    def encode_block(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored columns of n samples, equal to those of `encode` for each.

        Args:
            columns: values of every field, as returned by `DatasetWriter.read_block`.

        Returns:
            For each column an array (n,) or (n, k), a `RaggedColumn`, or a list of n bytes.

        Raises:
            SchemaError: a field is missing or unknown, or does not match its declaration.
            InputError: the bytes of an image do not decode.
        """
        columns = self.flatten(columns, is_block=True)
        if columns.keys() != self._fields.keys():
            raise self._wrong_fields(columns, is_block=True)
        values = {name: named(name, _column_of, self._fields[name], value) for name, value in columns.items()}
        lengths = {name: len(value) for name, value in values.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SchemaError(f"the columns of a block differ in length ({found}); give one value per row in each")
        block: dict[str, Any] = {}
        for name, feature in self._fields.items():
            block.update(by_column(name, named(name, feature.encode_many, values[name])))
        self._check_lists(block)
        for name, feature in self._foreign.items():
            _check_encoded(name, feature, block, "encode_many")
        return block

    def observe(self, columns: Mapping[str, Any], num_records: int) -> Statistics:
        """Return statistics of n records, from their columns, for every field except `key`.

        Args:
            columns: columns from `encode_block`.
            num_records: number of records.
        """
        found = Statistics()
        found.num_records = num_records
        scalars: dict[Scalar, dict[str, ColumnBlock]] = {}
        for name, feature in self.observed.items():
            mine = {column: ragged(columns[column]) for column in feature.columns(name)}
            if type(feature) is Scalar:
                scalars.setdefault(feature, {})[name] = mine[name]
            else:
                found.fields[name] = feature.observe(self.stored(name, mine))
        for feature, alike in scalars.items():
            for name, one in zip(alike, feature.observe_each(list(alike.values())), strict=True):
                found.fields[name] = one
        return found

    def observe_values(self, sample: Mapping[str, Any]) -> Mapping[str, FieldStatistics]:
        """Return statistics of the values of a sample that its columns do not show, by field.

        Args:
            sample: values, as for `encode`.
        """
        if not self.measured:
            return {}
        values = self.flatten(sample)
        return {name: feature.observe_value(values[name]) for name, feature in self.measured.items() if name in values}

    def observe_value_block(self, columns: Mapping[str, Any]) -> Mapping[str, FieldStatistics]:
        """Do what `observe_values` does, for a block of n samples; see `encode_block`."""
        found: dict[str, FieldStatistics] = {}
        values = self.flatten(columns, is_block=True) if self.measured else {}
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
            columns: columns of one record, by column name, including `key`.
            memory: arrays that values may be decoded into, by field; such a value is that array.
            are_intact: whether a checksum has verified the columns; then encoded files are not checked again for
                completeness.

        Raises:
            SchemaError: a declared column is missing or does not match its declaration.
            InputError: the bytes of an image do not decode.
        """
        sample, name = {}, ""
        try:
            for name, (feature, parts) in self._parts.items():
                stored: Any
                if parts is None:
                    stored = columns[name]
                else:  # like `stored`, in half the time
                    stored = {}
                    for part, column in parts.items():
                        stored[part] = columns[column]
                sample[name] = feature.decode_into(stored, memory.get(name), are_intact=are_intact)
        except KeyError as error:
            raise SchemaError(
                f"the record has no column {error.args[0]!r}; it holds {join_names(columns)}: "
                "was it written with other features?"
            ) from error
        except (InputError, SchemaError) as error:
            put_name(error, name)
            raise
        except (TypeError, ValueError) as error:
            raise SchemaError(
                f"field {name!r} is declared {self[name].declared()} but its column does not hold that ({error}); "
                "was the record written with other features?"
            ) from error
        for name in self._foreign:
            if isinstance(sample[name], np.ndarray) and not sample[name].flags.writeable:  # `np.frombuffer`
                sample[name] = sample[name].copy()
        return self.unflatten(sample) if self.dicts else sample

    def stored(self, name: str, columns: Mapping[str, Any]) -> Any:
        """Return the columns of a field in its feature's form, given all columns of a record or block."""
        _, parts = self._parts[name]
        return columns[name] if parts is None else {part: columns[column] for part, column in parts.items()}

    @property
    def is_flat(self) -> bool:
        """Whether `decode_block` supports every field: numbers and text yes, picture files no."""
        return all(feature.decodes_many() for feature in self._fields.values())

    def decode_block(self, columns: Mapping[str, ColumnBlock]) -> dict[str, Any]:
        """Decode the columns of n samples, with the fields of dicts flattened.

        Args:
            columns: columns of n records, by column name, including `key`.

        Returns:
            For each field an array (n, ...), or a list of n values if their shapes may differ.

        Raises:
            SchemaError: a column does not match its declaration.
        """
        try:
            theirs = {part: ragged(columns[part]) for name, one in self._foreign.items() for part in one.columns(name)}
            columns = {**columns, **theirs} if theirs else columns
            return {name: feature.decode_many(self.stored(name, columns)) for name, feature in self._fields.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise SchemaError(
                f"the columns of a block do not hold what is declared: {error}; were they written with other features?"
            ) from error

    def flatten(self, values: Mapping[str, Any], *, is_block: bool = False) -> Mapping[str, Any]:
        """Replace the dicts of a sample or batch by their fields `DICT/FIELD`; a list of dicts becomes lists.

        What does not match its declaration, such as the result of a transform, stays unchanged.

        Args:
            values: values by field.
            is_block: whether they are columns as for `encode_block`, where a list holds n dicts, or n lists of dicts.
        """
        if not self.dicts:
            return values
        found = dict(values)
        for path, group in self.dicts.items():
            if path in found:
                try:
                    parts = parts_of(path, group, found[path], is_block=is_block)
                except SchemaError:
                    continue
                del found[path]
                for name, child in group.paths.items():
                    found[child] = parts[name]
        return found

    def unflatten(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Invert `flatten`; lists of dicts become dicts of lists."""
        found = dict(values)
        for path, group in reversed(self.dicts.items()):
            parts = {name: found.pop(child) for name, child in group.paths.items() if child in found}
            if parts:
                is_missing = group.wrap is Nullable and all(value is None for value in parts.values())
                found[path] = None if is_missing else parts
        return found

    def prepare(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sample with encoded images and masks decoded, for transforms."""
        values = self.flatten(sample).items()
        return self.unflatten(
            {
                name: named(name, self._fields[name].prepare, value) if name in self._fields else value
                for name, value in values
            }
        )

    def only(self, names: Iterable[str]) -> Features:
        """Return the schema of some fields and `key`; the path of a dict includes all its fields.

        Args:
            names: paths of the fields.

        Example:
            >>> features = Features({"camera": {"iso": Scalar("int32"), "lens": Text()}, "n": Scalar("int64")})
            >>> sorted(features.only(["camera/iso"]))
            ['camera/iso', 'key']
        """
        return Features(chosen(self.as_declared, {"key", *names}, ""))

    def as_found(self, each: Iterable[Sequence[str]]) -> Features:
        """Return the schema that reads the same columns, with open sizes fixed if all records share them.

        Boxes and points keep their open sizes: a transform may drop some of them.

        Args:
            each: lines of the statistics of all records, from `Statistics.to_lines`.
        """
        sizes = {
            name: names
            for name, feature in self._fields.items()
            if self._columns.get(name) != "bytes_list" and (names := _open_sizes(feature))  # not a single array
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
                found._parts = {**found._parts, name: (found._fields[name], None)}
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return {name: declaration_of(feature) for name, feature in self.as_declared.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Features:
        """Return the schema that `to_json` wrote.

        Raises:
            SchemaError: a type or an argument is unknown.
            MissingDependencyError: the type comes from a package that is not installed.
        """
        return cls({name: feature_of(name, declaration) for name, declaration in value.items()})

    @classmethod
    def infer(cls, sample: Mapping[str, Any]) -> Features:
        """Return a schema that stores `sample` exactly, for functions that declare none.

        Arrays of uint8 (height, width, 3 or 4) become lossless images. Every size but the number of channels may vary.
        Lists become a `ListOf` if all items are texts, numbers, lists of numbers, bytes, times or Pillow pictures;
        other lists, including empty ones, become `Json`. So do dicts, unless they contain arrays, pictures, bytes or
        times: then their items become separate fields, and lists of such dicts a `ListOf` of dicts. Times become
        `Timestamp`. `bytes` must be an image, audio or video file, so that a broken one is not mistaken for something
        else: declare `Bytes` for others. No field is inferred to be optional: declare `Nullable` for one that may be
        None.

        Raises:
            SchemaError: a value has no feature.
            InputError: bytes are not a supported file.
        """
        return cls({name: inferred(name, value) for name, value in sample.items() if name != "key"})

    def _check_lists(self, columns: Mapping[str, Any]) -> None:
        """Refuse a list of dicts given as a dict of lists of different lengths."""
        for path, group in self.dicts.items():
            if group.wrap is not ListOf:
                continue
            counts = {
                name: feature.num_items(self.stored(name, columns))
                for name, feature in self._fields.items()
                if isinstance(feature, ListOf) and name.startswith(f"{path}/")
            }
            if len({str(count) for count in counts.values()}) > 1:
                found = ", ".join(f"{name}: {count}" for name, count in counts.items())
                raise SchemaError(
                    f"the lists in field {path!r} differ in length ({found}); give a list of dicts, or lists of one "
                    "length"
                )

    def _wrong_fields(self, sample: Mapping[str, Any], *, is_block: bool = False) -> SchemaError:
        for path in [path for path in self.dicts if path in sample]:
            parts_of(path, self.dicts[path], sample[path], is_block=is_block)  # raises
        missing = sorted(self._fields.keys() - sample.keys())
        unknown = sorted(str(name) for name in sample.keys() - self._fields.keys())
        parts = [f"field {name!r} is declared {self[name].declared()} but the sample has none" for name in missing]
        parts += [f"field {name!r} is not declared but the sample holds it" for name in unknown]
        return SchemaError("; ".join(parts) + "; make read return exactly the declared fields")


def _foreign_parts(feature: Feature) -> Iterator[Feature]:
    """Yield the third-party features that a feature is or contains."""
    if BUILT_IN.get(feature.type_name) is not type(feature):
        yield feature
    for part in feature.parts():
        yield from _foreign_parts(part)


def _check_foreign(name: str, feature: Feature) -> None:
    where = f"field {name!r}, a {path_of(type(feature))}"
    dtype, shape = feature.value_type()
    types = feature.columns(name)
    wrong = {
        "value_type": not (_is_dtype(dtype) and (holds_numbers(dtype) or shape == () or feature.parts())),
        "type": not types or any(column != name and not column.startswith(f"{name}/") for column in types),
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
        again = feature_of(name, json.loads(json.dumps(declaration)))
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
    "encode_many": {
        "bytes": "n bytes",
        "bytes_list": "a RaggedColumn of bytes",
        "": "{} (n,) or (n, k), or a RaggedColumn",
    },
}
"""The required results of encoding methods for a column, by kind."""


def _check_encoded(name: str, feature: Feature, columns: Mapping[str, Any], method: str) -> None:
    """Refuse columns of a record or block that only some formats could store."""
    for column, stored in feature.columns(name).items():
        kind, value = stored.kind, columns.get(column)
        if not (is_of_kind if method == "encode" else is_block_of_kind)(value, kind):
            numbers = value.values if isinstance(value, RaggedColumn) else value
            found = f"{numbers.dtype} {numbers.shape}" if isinstance(numbers, np.ndarray) else type(value).__name__
            wanted = _WANTED[method].get(kind) or _WANTED[method][""].format(kind)
            raise SchemaError(
                f"field {name!r}: {method} of {path_of(type(feature))} gives {found} for the column {column!r}; want "
                f"{wanted}"
            )


def _column_of(feature: Feature, values: Any) -> Any:
    """Return a column of a block: a pair of values and lengths becomes a `RaggedColumn`."""
    is_masked = isinstance(values, np.ndarray) and hasattr(values, "mask")  # without an import of numpy.ma
    if not (is_masked and values.ndim == 1 and feature.takes_none):
        values = as_array(values)
    is_column = isinstance(values, (Sequence, RaggedColumn)) or (isinstance(values, np.ndarray) and values.ndim > 0)
    if isinstance(values, str) or not is_column:
        raise mismatch(feature, f"{kind_of(values)}", "give one value per row of the block")
    parts = [as_array(part) for part in values] if isinstance(values, tuple) and len(values) == 2 else []
    if not parts or not all(isinstance(part, np.ndarray) for part in parts):
        return values
    numbers, lengths = parts
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not numbers.ndim or (lengths < 0).any():
        found = f"a pair of {numbers.dtype} {shape_text(numbers.shape)} and {lengths.dtype} {shape_text(lengths.shape)}"
        raise mismatch(feature, found, "give values (total, ...) and lengths, int64 (n,), or a list of n arrays")
    if lengths.sum() != len(numbers):
        found = f"{len(numbers)} values, and lengths with the sum {lengths.sum()}"
        raise mismatch(feature, found, "give the length of the value of each row")
    return RaggedColumn(numbers, lengths.astype(np.int64, copy=False))


def _parts_of(name: str, feature: Feature) -> dict[str, str] | None:
    """Return the columns of a field by suffix; None for a single column with the field's name."""
    types = feature.type
    return {part: name + part for part in types} if isinstance(types, dict) else None


def _check_name(name: Any, feature: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise SchemaError(f"field name {name!r}: want a printable, non-empty str; rename the field")
    if not isinstance(feature, Feature):
        raise SchemaError(
            f"field {name!r} is declared as {feature!r}; want a feature such as Image() or Scalar('int64')"
        )


def _is_observed(feature: Feature) -> bool:
    feature = innermost(feature)
    is_fixed = isinstance(feature, Tensor) and None not in feature.shape
    return type(feature).observe is not Feature.observe and not is_fixed


def _open_sizes(feature: Feature) -> dict[int, str]:
    """Return the statistic of each open size of an array feature, by axis; empty for other features."""
    stored = feature.stored if isinstance(feature, ListOf) and not isinstance(feature.feature, Mapping) else feature
    places = [place for place, size in enumerate(feature.value_type()[1]) if size is None]
    if type(stored) is Tensor and stored.keeps_shape:
        return {place: f"size[{place}]" for place in places}
    name = {Tensor: "length", ClassLabel: "length", Tokens: "tokens"}.get(type(stored))
    return dict.fromkeys(places, name) if name else {}
