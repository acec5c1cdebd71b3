"""Samples that contain dicts, lists of dicts, or optional dicts, and their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from datamat.errors import SchemaError, kind_of
from datamat.features.base import DictFields, Feature, join_names
from datamat.features.composed import Composed, checked_part
from datamat.features.list_of import ListOf
from datamat.features.nullable import Nullable


class Group(NamedTuple):
    """A dict in a sample.

    Attributes:
        wrap: `ListOf` for a list of such dicts, `Nullable` for a dict that may be missing, otherwise None.
        paths: path of each field in it, by name.
        may_miss: names of optional fields, which are None if missing.
    """

    wrap: type[Composed] | None
    paths: Mapping[str, str]
    may_miss: Collection[str]


def parts_of(path: str, group: Group, value: Any, *, is_block: bool) -> Mapping[str, Any]:
    """Return the fields of a dict by name; those of a list of dicts, or of n values in a block, as lists.

    Raises:
        SchemaError: the value is not a dict, or list of dicts, with the declared fields.
    """
    if value is None and group.wrap is Nullable:
        return dict.fromkeys(group.paths)
    if is_block and value is not None and not isinstance(value, Mapping):
        rows = [parts_of(path, group, row, is_block=False) for row in value]
    elif group.wrap is not ListOf or isinstance(value, Mapping):
        return _checked(path, group, value, "")
    elif isinstance(value, (list, tuple)):
        rows = [_checked(path, group, row, f", item {number}") for number, row in enumerate(value)]
    else:
        raise _no_dict(path, "a list of dicts", group, value)
    return {name: [row[name] for row in rows] for name in group.paths}


def _checked(path: str, group: Group, value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _no_dict(path + place, "a dict", group, value)
    if value.keys() == group.paths.keys():
        return value
    found: dict[str, Any] = {**dict.fromkeys(group.may_miss), **value}
    missing = sorted(group.paths.keys() - found.keys())
    unknown = sorted(str(name) for name in found.keys() - group.paths.keys())
    if not (missing or unknown):
        return found
    parts = [f"field {path!r}{place} is declared with {name!r} but the sample has none" for name in missing]
    parts += [f"field {path!r}{place} is declared without {name!r} but the sample holds it" for name in unknown]
    raise SchemaError(
        "; ".join(parts) + "; make read return exactly the declared fields, or declare Json() for dicts that differ"
    )


def _no_dict(path: str, wanted: str, group: Group, value: Any) -> SchemaError:
    return SchemaError(
        f"field {path!r} is declared {wanted} with {join_names(group.paths)} but the sample holds {kind_of(value)}; "
        f"give {wanted}, or declare Json()"
    )


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field of a sample or batch; `DICT/FIELD` names one in a dict.

    Raises:
        KeyError: there is none.
    """
    head, _, rest = name.partition("/")
    if name not in fields and rest and isinstance(fields.get(head), Mapping):
        return value_at(fields[head], rest)
    return fields[name]


def with_value(fields: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a sample or batch with another value of a field, which may be in an existing dict."""
    head, _, rest = name.partition("/")
    if name not in fields and rest and isinstance(fields.get(head), Mapping):
        return {**fields, head: with_value(fields[head], rest, value)}
    return {**fields, name: value}


def nested(declared: Mapping[str, Any]) -> tuple[dict[str, Group], dict[str, Feature]]:
    """Separate declared fields into dicts, outer before inner ones, and plain fields, by path."""
    dicts, fields = dict[str, Group](), dict[str, Feature]()

    def visit(path: str, feature: Any, wrap: Any) -> None:
        inner = feature.feature if isinstance(feature, Composed) else feature
        if not isinstance(inner, Mapping):
            if path in fields:
                raise SchemaError(f"field {path!r} is declared twice: in a dict, and by its path; rename one")
            fields[path] = wrap(checked_part(feature, f"field {path!r}")) if wrap else feature
            return
        if inner is not feature:
            if wrap:
                raise SchemaError(
                    f"field {path!r}: a list of dicts, or one that may be missing, cannot be in another; declare Json()"
                )
            wrap = type(feature)
        parts = DictFields(inner)
        if not parts:
            raise SchemaError(f"field {path!r} is declared as a dict without fields; declare Json()")
        may_miss = {name for name, part in parts.items() if getattr(part, "takes_none", False)}
        dicts[path] = Group(wrap, {name: f"{path}/{name}" for name in parts}, may_miss)
        for name, part in parts.items():
            if not isinstance(name, str):
                raise SchemaError(f"field {path!r} is declared with the name {name!r}; want a str")
            visit(f"{path}/{name}", part, wrap)

    for name, feature in declared.items():
        visit(name, feature, None)
    return dicts, fields


def chosen(fields: Mapping[str, Any], names: set[str], prefix: str) -> dict[str, Any]:
    """Return the declarations of the fields with these paths."""
    found: dict[str, Any] = {}
    for name, feature in fields.items():
        inner = feature.feature if isinstance(feature, Composed) else feature
        if f"{prefix}{name}" in names:
            found[name] = feature
        elif isinstance(inner, Mapping) and (parts := chosen(DictFields(inner), names, f"{prefix}{name}/")):
            found[name] = parts if inner is feature else type(feature)(parts)
    return found
