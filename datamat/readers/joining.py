"""Implements `ShardedDataset.join`: finds the partner of each record, in another dataset or a table, by key.

    keys of the records ────┐
                            ├──> rows: the position of the partner of each ──> `Partner` of the records of each part
    keys of the `Other` ────┘

Only keys are read here or, with `on=`, one field; a table is read as a whole, and held in memory.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import xxhash

from datamat.directory.keys import RecordKey, original_key, safe_key
from datamat.errors import OptionError, SchemaError, SourceError, count_of, join_problems
from datamat.features import Features, Nullable, Statistics, Text
from datamat.features.base import RawColumn, by_column, ragged
from datamat.fingerprint import fingerprint
from datamat.readers.records import ChainedRecords, JoinedField, JoinedRecords, Partner, TableRecords
from datamat.readers.views import Records, values_at
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from datamat.features import Feature
    from datamat.readers.records import RecordFiles
    from datamat.readers.views import Part

How = Literal["exact", "inner", "left"]
"""What happens to records without a partner: they are refused or left out, or their new fields are None."""


@final
@frozen(eq=False)
class Other:
    """The other side of a join.

    Attributes:
        features: schema of its records; `key` and the field used for matching are not joined.
        keys: the value that each record is matched by; None for a record that matches nothing.
        places: int64 (n,), the position of each among `records`.
        records: its encoded records.
        digest: digest of the records, which changes when any record does.
        statistics: statistics of all its records; None if unknown.
        may_lack: whether records without a partner are expected, whatever `how` says.
    """

    features: Features
    keys: Sequence[str | None]
    places: NDArray[np.int64]
    records: RecordFiles | JoinedRecords | ChainedRecords | TableRecords
    digest: str
    statistics: Statistics | None
    may_lack: bool = False

    @classmethod
    def of_dataset(cls, records: Records, positions: NDArray[np.int64], on: str) -> Other:
        """Return some records of a dataset, matched by a field if they have it, otherwise by their keys."""
        keys, places = _keys_of(records, positions, on if on in records.features else "key")
        stored = [part.reader.records for part in records.parts]
        one = stored[0] if len(stored) == 1 else ChainedRecords(stored)
        return cls(records.features, keys, places, one, records.digest, records.statistics())

    def places_by_key(self) -> dict[str, int]:
        """Return the position of each record; raise `OptionError` if two have the same key."""
        found = {key: place for key, place in zip(self.keys, self.places.tolist(), strict=True) if key is not None}
        if len(found) < sum(key is not None for key in self.keys):
            seen: dict[str, int] = {}
            for number, key in enumerate(self.keys):
                if key is not None and seen.setdefault(key, number) != number:
                    raise OptionError(
                        f"join: the other has {key!r} twice, as its records {seen[key]} and {number}; a record has one "
                        "partner: leave one of them out"
                    )
        return found


# ---------------------------------------------------------------- tables


_TEXT = re.compile(r"\.(csv|tsv|jsonl)(\.\w+)?\Z", re.IGNORECASE)
_AS_COLUMN = {"split": " split"}
_INDEX_LEVEL = re.compile(r"__index_level_\d+__\Z")  # an unnamed index of pandas


def others_of_table(source: Any, on: str) -> list[Other]:
    """Return the rows of a table, encoded as in a run; columns with empty cells are separate, with rows of their own.

    Args:
        source: a table of pyarrow, pandas or polars, or anything else that exports Arrow; or the path of a Parquet file
            or folder, or of a CSV, TSV or JSON Lines file.
        on: name of the column of the keys.

    Raises:
        OptionError: it is not a table, it has no such column, or one of the column's cells is empty.
        SourceError: the table cannot be read, or no feature can store a column.
    """
    import datamat  # its writers read tables: their room is above this one, and is reached as users do

    facade: Any = datamat  # its modules load when they are named
    is_path = isinstance(source, (str, os.PathLike))
    if is_path and _TEXT.search(os.fspath(source)):
        return [_encoded(facade.writers.TableWriter(key=on), source, has_split=True)]
    table = _arrow_of(source, is_path=is_path)
    if on not in table.column_names:
        raise OptionError(
            f"join: the table has no column {on!r} to match records by; it has "
            f"{join_problems(table.column_names)}: rename one, or name another field that both have in on="
        )
    if count := table[on].null_count:
        raise OptionError(f"join: {count_of(count, 'cell')} of the column {on!r} {'is' if count == 1 else 'are'} empty")
    # For writers, the columns `key` and `split` describe the row, and are not fields.
    table = table.drop_columns([name for name in table.column_names if name == "key" != on])
    table = table.rename_columns([_AS_COLUMN.get(name, "key" if name == on else name) for name in table.column_names])
    rename = {new: name for name, new in _AS_COLUMN.items() if new in table.column_names}
    apart = [name for name in table.column_names if table[name].null_count]
    whole = table.drop_columns(apart)
    has_fields = len(whole.column_names) > 1
    found = [_encoded(facade.ImportWriter(rename=rename), whole) if has_fields else _keys_alone(whole)]
    for name in apart:
        filled = table.select(["key", name]).filter(table[name].is_valid())
        if not filled.num_rows:
            raise OptionError(f"join: the column {rename.get(name, name)!r} of the table is empty; leave it out")
        one = _encoded(facade.ImportWriter(rename=rename if name in rename else None), filled)
        found.append(dataclasses.replace(one, may_lack=True))
    return found


def _arrow_of(source: Any, *, is_path: bool) -> Any:
    """Return a table as a pyarrow table."""
    import pyarrow as pa

    if is_path:
        from pyarrow import parquet

        try:
            source = parquet.read_table(source, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"join: {os.fspath(source)} cannot be read as Parquet: {error}") from error
    if not hasattr(source, "__arrow_c_stream__"):
        raise OptionError(
            f"join: the other is a {type(source).__qualname__}; want what load returned, a table of pyarrow, pandas or "
            "polars, or the path of a table; of a list of dicts, pyarrow.Table.from_pylist(rows)"
        )
    try:
        table = pa.table(source)
    except pa.ArrowInvalid as error:
        raise OptionError(f"join: the other is a {type(source).__qualname__}, which is not a table: {error}") from error
    if len({*table.column_names}) < len(table.column_names):
        raise OptionError(f"join: two columns of the table have one name ({', '.join(table.column_names)}); rename one")
    table = table.drop_columns([name for name in table.column_names if _INDEX_LEVEL.match(name)])
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}  # no rows can be taken of these
    return table.cast(pa.schema([field.with_type(views.get(field.type, field.type)) for field in table.schema]))


def _keys_alone(table: Any) -> Other:
    """Return rows without any columns other than their keys."""
    keys = [*map(str, table["key"].to_pylist())]
    stored = TableRecords({"key": [key.encode() for key in keys]})
    return Other(Features({}), keys, np.arange(len(keys)), stored, fingerprint(keys, where="the table"), Statistics())


def _encoded(writer: Any, source: Any, *, has_split: bool = False) -> Other:
    """Return what a writer reads from a source; with `has_split`, including the splits that it names, as a field."""
    try:
        writer.bind(source)
    except SourceError as error:
        raise SourceError(
            f"join: {error}; here, change the table itself, or write it with such options, and join what load returns"
        ) from error
    rows = [*writer.index(source)]
    keys = [row.key for row in rows]
    values = writer.read_block(keys, {name: [row.fields[name] for row in rows] for name in rows[0].fields})
    if values is None:
        samples = [writer.read(row) for row in rows]
        values = {name: [sample[name] for sample in samples] for name in writer.features.as_declared if name != "key"}
    features = writer.features
    if has_split and rows[0].split is not None:
        values, features = {**values, "split": [row.split for row in rows]}, Features({**features, "split": Text()})
    block = features.encode_block({**values, "key": keys})
    columns = {
        name: column.rows() if isinstance(column, RawColumn) else ragged(column) for name, column in block.items()
    }
    digest, known = fingerprint(columns, where="the table"), features.observe(columns, len(keys))
    return Other(features, keys, np.arange(len(keys)), TableRecords(columns), digest, known)


# ---------------------------------------------------------------- the join


def joined(
    records: Records, positions: NDArray[np.int64], other: Other, *, on: str, how: How, prefix: str
) -> tuple[Records, NDArray[np.int64]]:
    """Return records with the fields of their partners, and int64 (len(records),): the partner of each, -1 for none.

    Args:
        records: the records.
        positions: int64 (n,): those of the records that need a partner.
        other: what is joined.
        on: "key", or the field that records are matched by.
        how: what to do about records without a partner; "inner" leaves that to the caller.
        prefix: beginning of the names of joined fields.

    Raises:
        OptionError: a record has no partner, a key occurs twice, or both sides have a field of the same name.
    """
    keys, places = _keys_of(records, positions, on)
    by_key = other.places_by_key()
    found = [-1 if key is None else _place_of(by_key, key) for key in keys]
    rows = np.full(len(records), -1, np.int64)
    rows[places] = found
    if how == "exact" and not other.may_lack and -1 in found:
        first = keys[found.index(-1)]
        raise OptionError(
            f"join: {found.count(-1):,} of {count_of(len(positions), 'record')} have no partner; the first is the one "
            f"with the {on} {first!r}; how='inner' leaves them out, how='left' gives them None"
        )
    names = [name for name in other.features if name not in ("key", on)]
    features = _features_of(records.features, other.features, on, prefix, may_lack=how == "left" or other.may_lack)
    fields = [_field_of(name, prefix + name, other.features[name], features[prefix + name]) for name in names]
    nothing: dict[str, Any] = {}
    for field in fields:
        if features[field.joined].takes_none:
            nothing.update(by_column(field.joined, features[field.joined].encode(None)))

    def changed(part: Part, own: NDArray[np.int64]) -> Part:
        partner = Partner(
            rows=own,
            records=other.records,
            kinds=_kinds(other.features, names),
            fields=fields,
            nothing=nothing,
            joined_kinds=_kinds(features, [prefix + name for name in names]),
            digest=xxhash.xxh3_64_hexdigest(f"{other.digest} {prefix!r} {names} {how} ".encode() + own.tobytes()),
            statistics=_renamed(other.statistics, {name: prefix + name for name in names}),
        )
        stored = JoinedRecords.of(part.reader.records, partner)
        return dataclasses.replace(part, reader=dataclasses.replace(part.reader, records=stored, features=features))

    of_parts = np.split(rows, records.starts[1:])
    return Records([changed(part, own) for part, own in zip(records.parts, of_parts, strict=True)]), rows


def _keys_of(records: Records, positions: NDArray[np.int64], on: str) -> tuple[Sequence[str | None], NDArray[np.int64]]:
    """Return the values that records are matched by, and their positions; skipped damaged records have none."""
    if on == "key":
        keys = records.keys()
        return [keys[position] for position in positions.tolist()], positions
    if on not in records.features:
        raise OptionError(f"join: on is {on!r}; want 'key' or a field: {', '.join(records.features)}")
    dtype, shape = records.features[on].value_type()
    if shape or not (dtype == "string" or np.dtype(dtype).kind in "iu"):
        raise OptionError(
            f"join: the field {on!r} is {records.features[on].declared()}; records are matched by text or integers"
        )
    values = values_at(records.changed(lambda part: part.with_fields([on])), positions)
    named = [value if value is None or isinstance(value, str) else str(int(value)) for value in values[on]]
    return named, positions[np.array(values[""], np.int64)]


def _place_of(places: Mapping[str, int], key: str) -> int:
    """Return the position of the record with a key, otherwise of the record with the key of its row; -1 for none.

    Keys of tables are as in the source, those of datasets as they are stored.
    """
    if key in places:
        return places[key]
    row_key = RecordKey.row_of(key)
    forms = (row_key, original_key(key), original_key(row_key), safe_key(key))
    return next((places[form] for form in forms if form in places), -1)


def _features_of(own: Features, other: Features, on: str, prefix: str, *, may_lack: bool) -> Features:
    """Return the schema of joined records."""
    found: dict[str, Any] = {}
    for name, declared in other.as_declared.items():
        if name in ("key", on):
            continue
        new = prefix + name
        if new in own.as_declared or new in own:
            raise OptionError(
                f"join: both have a field {new!r}; pass prefix=, which goes before the name of each joined field, or "
                "leave one out by columns(...)"
            )
        try:
            found[new] = Nullable(declared) if may_lack and not getattr(declared, "takes_none", False) else declared
        except SchemaError as error:
            raise OptionError(f"join: the field {name!r} cannot be None ({error}); leave it out by columns") from error
    try:
        return Features({**own.as_declared, **found})
    except SchemaError as error:
        raise OptionError(f"join: the fields do not fit together ({error}); pass another prefix=") from error


def _field_of(name: str, new: str, feature: Feature, changed: Feature) -> JoinedField:
    parts = [*feature.columns("")]
    maybe = None if changed == feature else changed.layout.columns  # type: ignore[attr-defined]  # it is a `Nullable`
    return JoinedField(name, new, parts, maybe)


def _kinds(features: Features, names: Sequence[str]) -> dict[str, Any]:
    return {column: one.kind for name in names for column, one in features[name].columns(name).items()}


def _renamed(known: Statistics | None, names: Mapping[str, str]) -> Statistics | None:
    if known is None:
        return None
    found = Statistics()
    found.num_records = known.num_records
    found.fields = {names[name]: one for name, one in known.fields.items() if name in names}
    return found
