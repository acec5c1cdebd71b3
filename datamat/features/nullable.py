"""`Nullable`: values that may be missing, and their storage in columns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from datamat.errors import SchemaError, count_of
from datamat.features.base import (
    ArrowType,
    Column,
    ColumnBlock,
    Feature,
    Kind,
    RaggedColumn,
    Shape,
    by_part,
    whole,
)
from datamat.features.composed import Composed, alone, as_ragged, checked_part, declared_as, encoded_texts
from datamat.features.registry import built_in
from datamat.features.statistics import FieldStatistics
from datamat.values import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Maybe(NamedTuple):
    """The layout of a column whose values may be missing.

    Attributes:
        type: its type.
        kind: its kind.
        of: kind of the column without missing values.
        raw: dtype of numbers that are stored as bytes, since a value may contain none; else None.
    """

    type: ArrowType
    kind: Kind
    of: Kind
    raw: np.dtype[Any] | None

    @classmethod
    def of_type(cls, one: ArrowType) -> Maybe:
        """Return the layout for a column of this type."""
        stored = dataclasses.replace(one, is_nullable=True)
        is_raw = one.kind in {"int64", "float32"} and None in one.sizes
        return cls(stored, stored.kind, one.kind, one.raw_dtype if is_raw else None)

    def nothing(self) -> Column:
        """Return the column of None."""
        return [] if self.kind == "bytes_list" else np.empty(0, self.kind)

    def wrap(self, value: Any) -> Column:
        """Return the column of a present value, given its plain column."""
        if self.raw is not None:
            return [value.astype(self.raw).tobytes()]
        found: Column = [value] if self.of == "bytes" else value
        return found

    def unwrap(self, column: Any) -> Column:
        """Invert `wrap`, for a record with a value."""
        if self.raw is None and self.of != "bytes":
            return column  # type: ignore[no-any-return]
        if not isinstance(column, bytes) and len(column) != 1:
            raise ValueError(f"{count_of(len(column), 'value')}, not one or none")
        value = column if isinstance(column, bytes) else column[0]
        return value if self.raw is None else np.frombuffer(value, self.raw).astype(self.of)

    def wrap_block(self, column: Any, is_there: NDArray[np.bool_]) -> RaggedColumn:
        """Return the column of n records, given bool (n,) and the plain column of those with a value."""
        if self.raw is not None:
            rows = column.rows() if isinstance(column, RaggedColumn) else list(column)
            column = [np.ravel(row).astype(self.raw).tobytes() for row in rows]
        found = as_ragged(column)
        lengths = np.zeros(len(is_there), np.int64)
        lengths[is_there] = found.lengths
        return RaggedColumn(found.values, lengths)

    def unwrap_block(self, column: RaggedColumn, is_there: NDArray[np.bool_]) -> ColumnBlock:
        """Invert `wrap_block`."""
        if self.raw is None and self.of != "bytes":
            return RaggedColumn(column.values, column.lengths[is_there])
        if (column.lengths > 1).any():
            raise SchemaError("a record holds several values, where one may be missing")
        values = encoded_texts(column.values)
        if self.raw is None:
            return values
        lengths = np.fromiter(map(len, values), np.int64, len(values)) // self.raw.itemsize
        return RaggedColumn(np.frombuffer(b"".join(values), self.raw).astype(self.of), lengths)


@frozen()
class Nullable(Composed):
    """A value that may be missing: None, or a value of another feature.

    In Parquet None is null, in the .json of a tar sample null, in a `tf.train.Example` an empty list. A batch holds the
    values as a list. TensorFlow, which has no None, gets a leading dimension with one value or none: int64 (0,) or (1,)
    for `Nullable(Scalar("int64"))`, a ragged tensor in batches. Lists of texts, bytes or pictures may be empty without
    being missing; for them the column `NAME/present` holds 1, and nothing for None.

    Args:
        feature: the feature of present values.

    Example:
        >>> from datamat import Scalar
        >>> Nullable(Scalar("int64")).encode(7)
        array([7])
        >>> Nullable(Scalar("int64")).encode(None)
        array([], dtype=int64)
    """

    takes_none = True

    type_name: ClassVar[str] = "Optional"  # on disk
    feature: Feature

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature", checked_part(self.feature, "Nullable"))
        if isinstance(self.feature, Nullable):
            raise SchemaError("Nullable: the feature is a Nullable itself; declare it once")
        if not isinstance(self.feature, Mapping):
            _ = self.layout  # refuses features that mark None themselves

    @property
    def stored(self) -> Feature:
        return alone(self.feature, "Nullable")

    @property
    def type(self) -> ArrowType | dict[str, ArrowType]:
        found: ArrowType | dict[str, ArrowType] = whole({part: how.type for part, how in self.layout.columns.items()})
        return found

    def value_type(self) -> tuple[str, Shape]:
        return self.stored.value_type()

    def encode(self, value: Any) -> Any:
        columns = self.layout.columns
        if value is None:
            return whole({part: how.nothing() for part, how in columns.items()})
        try:
            found = self.feature.encode(value)
        except SchemaError as error:
            raise declared_as(self, self.feature, error) from error
        if len(columns) == 1:
            return columns[""].wrap(found)
        parts = {"/present": np.ones(1, np.int64), **by_part(found)}
        return {part: how.wrap(parts[part]) for part, how in columns.items()}

    def encode_many(self, values: Any) -> Any:
        there: Any
        if isinstance(values, np.ndarray) and values.dtype != object:
            mask = np.broadcast_to(getattr(values, "mask", False), values.shape)  # of a masked array
            is_there = np.asarray((~mask).all(axis=tuple(range(1, values.ndim))))
            there = np.asarray(values)[is_there]
        else:
            rows = values.rows() if isinstance(values, RaggedColumn) else values
            is_there = np.array([value is not None for value in rows], bool)
            there = values if is_there.all() else [value for value in rows if value is not None]
        mark = RaggedColumn(np.ones(len(there), np.int64), np.ones(len(there), np.int64))
        try:
            block = {"/present": mark, **by_part(self.feature.encode_many(there))}
        except SchemaError as error:
            raise declared_as(self, self.feature, error) from error
        return whole({part: how.wrap_block(block[part], is_there) for part, how in self.layout.columns.items()})

    def decode_into(self, stored: Any, out: np.ndarray | None, *, are_intact: bool = False) -> Any:
        there = self._there(stored)
        return None if there is None else self.feature.decode_into(there, out, are_intact=are_intact)

    def decode_many(self, stored: Any) -> np.ndarray | list[Any] | None:
        block, is_there = self._block_there(stored)
        found: Any = self.feature.decode_many(block) if is_there.any() else ()
        values = iter(found)
        return [next(values) if one else None for one in is_there.tolist()]

    def observe(self, stored: Any) -> FieldStatistics:
        block, is_there = self._block_there(stored)
        found = self.feature.observe(block) if is_there.any() else {}
        return {**found, "missing": int(np.count_nonzero(~is_there))}

    def observe_value(self, value: Any) -> FieldStatistics:
        return {} if value is None else self.feature.observe_value(value)

    def encoded_value(self, stored: Any) -> Any:
        there = self._there(stored)
        return None if there is None else self.feature.encoded_value(there)

    def prepare(self, value: Any) -> Any:
        return None if value is None else self.feature.prepare(value)

    def declared(self) -> str:
        return f"{self.feature.declared()}, or None"

    @functools.cached_property
    def layout(self) -> _Layout:
        """The storage layout of the columns."""
        own = {part: Maybe.of_type(one) for part, one in self.stored.columns("").items()}
        if all(one.of != "bytes_list" for one in own.values()):
            return _Layout(own, own)
        if "/present" in own:
            raise SchemaError(
                f"Nullable: {self.stored.declared()} marks what is missing in itself; give an empty list for a list "
                "that is missing, or declare Json()"
            )
        return _Layout({**own, "/present": Maybe.of_type(ArrowType("int64"))}, own)

    def _there(self, stored: Any) -> Any:
        """Return the stored form of the value; None if it is missing."""
        columns, own = self.layout
        if not isinstance(stored, dict):  # like whole and by_part, which would double the time
            return own[""].unwrap(stored) if len(stored) else None
        if not len(stored[next(reversed(columns))]):
            return None
        return whole({part: how.unwrap(stored[part]) for part, how in own.items()})

    def _block_there(self, stored: Any) -> tuple[Any, NDArray[np.bool_]]:
        """Return the stored form of present values, and which of n records have one, bool (n,)."""
        columns, own = self.layout
        found = by_part(stored)
        is_there = found[next(reversed(columns))].lengths > 0
        return whole({part: how.unwrap_block(found[part], is_there) for part, how in own.items()}), is_there


class _Layout(NamedTuple):
    """The layout of a `Nullable`: in a record without a value, the last column is empty.

    Attributes:
        columns: all columns.
        own: columns of its feature, without the mark of present values.
    """

    columns: dict[str, Maybe]
    own: dict[str, Maybe]


built_in(Nullable)
