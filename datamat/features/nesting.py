"""Samples that contain dicts, lists of dicts, or optional dicts, and their fields."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from datamat.errors import SchemaError, kind_of
from datamat.features.base import DictFields, Feature, join_names
from datamat.features.composed import Composed, checked_part


class Group(NamedTuple):
    """A dict in a sample.

    Attributes:
        kind: "one", "list" for a list of such dicts, "optional" for a dict that may be missing.
        paths: path of each field in it, by name.
        may_miss: names of optional fields, which are None if missing.
    """

    kind: str
    paths: Mapping[str, str]
    may_miss: Collection[str]


class Nesting(dict[str, Group]):
    """The dicts in a sample by path, outer dicts before inner ones.

    Internally, a dict's fields are flattened under the names `DICT/FIELD`. Samples and batches contain dicts; lists of
    dicts are dicts of lists there.
    """

    def split(self, sample: Mapping[str, Any], *, strict: bool = False) -> Mapping[str, Any]:
        """Flatten the dicts of a sample or batch into their fields; flat ones stay unchanged.

        Args:
            sample: values by field.
            strict: whether to refuse values that do not match; otherwise they stay, such as results of transforms.

        Raises:
            SchemaError: a field is not a dict, or list of dicts, with the declared fields.
        """
        if not self:
            return sample
        found = dict(sample)
        for path, group in self.items():
            if path in found:
                try:
                    found.update(_parts(path, group, found[path]))
                except SchemaError:
                    if strict:
                        raise
                else:
                    del found[path]
        return found

    def split_block(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Flatten the columns of a block, in which a dict is a dict of columns or a list of n values."""
        found = dict(columns)
        for path, group in self.items():
            value = found.pop(path, None)
            if isinstance(value, Mapping):
                found.update(_parts(path, group, value))
            elif value is not None:
                rows = [_parts(path, group, row) for row in value]
                found.update({child: [row[child] for row in rows] for child in group.paths.values()})
        return found

    def join(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Invert `split`; lists of dicts become dicts of lists."""
        found = dict(values)
        for path, group in reversed(self.items()):
            parts = {name: found.pop(child) for name, child in group.paths.items() if child in found}
            if parts:
                is_missing = group.kind == "optional" and all(value is None for value in parts.values())
                found[path] = None if is_missing else parts
        return found

    def with_fields(self, names: Collection[str]) -> Nesting:
        """Return the nesting of batches whose dicts have the additional fields among these names, `DICT/FIELD`."""
        found = Nesting()
        for path, group in self.items():
            more = {name.removeprefix(f"{path}/"): name for name in names if name.rpartition("/")[0] == path}
            found[path] = group._replace(paths={**group.paths, **more})
        return found


def _parts(path: str, group: Group, value: Any) -> dict[str, Any]:
    """Return the fields of a dict, or of a list of dicts, by path."""
    if value is None and group.kind == "optional":
        return dict.fromkeys(group.paths.values())
    if group.kind == "list" and not isinstance(value, Mapping):
        if not isinstance(value, (list, tuple)):
            raise _no_dict(path, "a list of dicts", group, value)
        rows = [_checked(path, group, row, f", item {number}") for number, row in enumerate(value)]
        return {child: [row[name] for row in rows] for name, child in group.paths.items()}
    row = _checked(path, group, value, "")
    return {child: row[name] for name, child in group.paths.items()}


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


def nested(declared: Mapping[str, Any]) -> tuple[Nesting, dict[str, Feature]]:
    """Separate declared fields into dicts and plain fields, by path."""
    nesting, fields = Nesting(), dict[str, Feature]()

    def visit(path: str, feature: Any, wrap: Callable[[Any], Feature] | None, kind: str) -> None:
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
            wrap, kind = type(feature), feature.group
        parts = DictFields(inner)
        if not parts:
            raise SchemaError(f"field {path!r} is declared as a dict without fields; declare Json()")
        may_miss = {name for name, part in parts.items() if getattr(part, "takes_none", False)}
        nesting[path] = Group(kind, {name: f"{path}/{name}" for name in parts}, may_miss)
        for name, part in parts.items():
            if not isinstance(name, str):
                raise SchemaError(f"field {path!r} is declared with the name {name!r}; want a str")
            visit(f"{path}/{name}", part, wrap, kind)

    for name, feature in declared.items():
        visit(name, feature, None, "one")
    return nesting, fields


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
