"""Samples that hold dicts: which fields are in one, a list of them, or one that may be missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from datamat.errors import SchemaError, kind_of
from datamat.features.base import DictFields, join_names
from datamat.features.composed import Composed, checked_part

__all__ = ["FLAT", "Nesting", "chosen", "value_at", "with_value", "without_dicts"]


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
        children: Mapping[str, Sequence[str]],
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


def without_dicts(
    fields: Mapping[str, Any], groups: dict[str, str], children: dict[str, list[str]], may_miss: set[str]
) -> Iterator[tuple[str, Any]]:
    """Yield path and feature of each field that is no dict, and note the dicts."""

    def visit(path: str, feature: Any, wrap: Callable[[Any], Any], kind: str) -> Iterator[tuple[str, Any]]:
        inner = feature.feature if isinstance(feature, Composed) else feature
        if not isinstance(inner, Mapping):
            yield path, feature if wrap is _same else wrap(checked_part(feature, f"field {path!r}"))
            return
        if inner is not feature:
            if wrap is not _same:
                raise SchemaError(
                    f"field {path!r}: a list of dicts, or one that may be missing, cannot be in another; declare Json()"
                )
            wrap, kind = type(feature), feature.group
        parts = DictFields(inner)
        if not parts:
            raise SchemaError(f"field {path!r} is declared as a dict without fields; declare Json()")
        groups[path], children[path] = kind, [f"{path}/{name}" for name in parts]
        may_miss.update(f"{path}/{name}" for name, part in parts.items() if getattr(part, "takes_none", False))
        for name, part in parts.items():
            if not isinstance(name, str):
                raise SchemaError(f"field {path!r} is declared with the name {name!r}; want a str")
            yield from visit(f"{path}/{name}", part, wrap, kind)

    for name, feature in fields.items():
        yield from visit(name, feature, _same, "one")


def chosen(fields: Mapping[str, Any], names: set[str], prefix: str) -> dict[str, Any]:
    """Return the declarations of the fields with some paths."""
    found: dict[str, Any] = {}
    for name, feature in fields.items():
        inner = feature.feature if isinstance(feature, Composed) else feature
        if f"{prefix}{name}" in names:
            found[name] = feature
        elif isinstance(inner, Mapping) and (parts := chosen(DictFields(inner), names, f"{prefix}{name}/")):
            found[name] = parts if inner is feature else type(feature)(parts)
    return found


def _same(feature: Any) -> Any:
    return feature
