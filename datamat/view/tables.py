"""The fields of a sample on a page: text, or a table if a value has rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.display import Table
from datamat.features.list_of import ListOf
from datamat.readers.preview import in_words, preview_of

if TYPE_CHECKING:
    from datamat.features import Feature, Features

_MOST_COLUMNS = 16


def fields_of(features: Features, values: Mapping[str, Any], rows: int) -> Iterator[tuple[str, str | Table, str]]:
    """Yield name, value and declaration of each field. Lists of equal length in a dict form one table.

    Args:
        features: schema of the sample.
        values: decoded values by path.
        rows: maximum number of rows of a table.
    """
    lists = dict(_lists_in_dicts(features, values))
    in_lists = {path for paths in lists.values() for path in paths}
    for name, feature in features.items():
        if name not in in_lists:
            value = values.get(name)
            yield name, _table_of(feature, value, rows) or in_words(feature, value, in_full=True), feature.declared()
    for parent, paths in lists.items():
        names = [path.removeprefix(f"{parent}/") for path in paths]
        columns = [[in_words(features[path], item) for item in values[path][:rows]] for path in paths]
        declared = [f"{name}: {features[path].declared()}" for name, path in zip(names, paths, strict=True)]
        yield parent, _cut(names, zip(*columns, strict=True), len(values[paths[0]]) - rows), "\n".join(declared)


def _lists_in_dicts(features: Features, values: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each dict that holds lists of equal length, and the paths of these."""
    for parent, group in features.dicts.items():
        of_length: dict[int, list[str]] = {}
        for path in group.paths.values():
            if path in features and _is_list(features[path]) and values.get(path) is not None:
                of_length.setdefault(len(values[path]), []).append(path)
        paths = max(of_length.values(), key=len, default=[])
        if paths and (group.wrap is ListOf or len(paths) > 1):
            yield parent, paths[:_MOST_COLUMNS]


def _is_list(feature: Feature) -> bool:
    """Return True if values have any number of items and are not pictures."""
    preview = preview_of(feature)
    shape = feature.value_type()[1]
    return bool(shape) and shape[0] is None and (preview is None or preview.preview == "outlines")


def _table_of(feature: Feature, value: Any, rows: int) -> Table | None:
    """Return a table of numbers or of JSON; None if text shows it better."""
    preview = preview_of(feature)
    if preview is not None and preview.preview != "outlines":
        return None
    if isinstance(value, np.ndarray):
        is_table = value.ndim == 2 and value.size and value.shape[1] <= _MOST_COLUMNS
        cells = ([in_words(feature, item) for item in row] for row in value[:rows]) if is_table else ()
        return _cut((), cells, len(value) - rows) if is_table else None
    if isinstance(value, dict) and value:
        columns = [*value.values()]
        if all(isinstance(one, list) and one and len(one) == len(columns[0]) for one in columns):
            return _records([dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)], rows)
        return _cut((), ((str(name), _as_text(one)) for name, one in [*value.items()][:rows]), len(value) - rows)
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return _records(value, rows)
    if isinstance(value, list) and value and all(isinstance(one, list) for one in value):
        return _cut((), ([_as_text(cell) for cell in row[:_MOST_COLUMNS]] for row in value[:rows]), len(value) - rows)
    return None


def _records(dicts: Sequence[Mapping[str, Any]], rows: int) -> Table:
    """Return a table with a row for each dict; a cell is empty if a dict lacks its name."""
    names = [*dict.fromkeys(name for one in dicts[:rows] for name in one)][:_MOST_COLUMNS]
    cells = ([_as_text(one[name]) if name in one else "" for name in names] for one in dicts[:rows])
    return _cut([str(name) for name in names], cells, len(dicts) - rows)


def _cut(head: Sequence[str], rows: Iterable[Sequence[str]], num_more: int) -> Table:
    return Table(head, [*rows, *([[f"… and {num_more:,} more"]] if num_more > 0 else [])])


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
