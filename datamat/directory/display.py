"""HTML displays of objects in a notebook: a title, facts and tables, in the notebook's colours.

Everything is escaped. Styles define no colours, so that a display is readable in dark and light themes; untrusted
notebooks show it, too, since there is no script.
"""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.features import Features

_BOX = "color:inherit;background:transparent;font-size:inherit"
_CELL = "text-align:left;padding:1px 1em 1px 0;color:inherit;background:transparent;vertical-align:top"
_NUMBER = _CELL.replace("left", "right", 1) + ";font-variant-numeric:tabular-nums"
_MOST_ROWS = 50
_MOST_LETTERS = 200


class Table(NamedTuple):
    """A table to show.

    Attributes:
        head: titles of the columns.
        rows: cells of each row; other values than texts are shown by `str`, integers with separators; bytes are a JPEG
            file.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]


def render_html(
    title: str, facts: Iterable[tuple[str, Any]] = (), tables: Iterable[Table] = (), notes: Iterable[str] = ()
) -> str:
    """Return a display for `_repr_html_`.

    Args:
        title: short description of the object.
        facts: names with their values, one line each.
        tables: tables below them; only the first rows of a long one are shown.
        notes: lines of text below these.

    Example:
        >>> render_html("A & B")
        '<div style="color:inherit;background:transparent;font-size:inherit"><b>A &amp; B</b></div>'
    """
    parts = [f"<b>{html.escape(title)}</b>"]
    if lines := [_row([name, value], "th", "td") for name, value in facts]:
        parts.append(_table(lines))
    for table in tables:
        rows = [_row(row, "td", "td") for row in table.rows[:_MOST_ROWS]]
        if rows:
            parts.append(_table([_row(table.head, "th", "th"), *rows]))
        if len(table.rows) > _MOST_ROWS:
            parts.append(f"<div>and {len(table.rows) - _MOST_ROWS:,} more</div>")
    parts += [f'<div style="white-space:pre-wrap">{html.escape(note)}</div>' for note in notes]
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def shorten(text: str, most: int = _MOST_LETTERS) -> str:
    """Return a text, or its beginning and an ellipsis if it is long.

    Example:
        >>> shorten("abcdef", 4)
        'abc…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _table(lines: Sequence[str]) -> str:
    return f'<table style="{_BOX};border-collapse:collapse;margin:.3em 0">{"".join(lines)}</table>'


def _row(cells: Sequence[Any], first: str, others: str) -> str:
    made = [_cell(cell, others if number else first) for number, cell in enumerate(cells)]
    return f'<tr style="background:transparent">{"".join(made)}</tr>'


def _cell(value: Any, tag: str) -> str:
    if isinstance(value, bytes):
        picture = f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(value).decode()}">'
        return f'<{tag} style="{_CELL}">{picture}</{tag}>'
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = f"{value:,}" if is_number else shorten(str(value))
    return f'<{tag} style="{_NUMBER if is_number else _CELL}">{html.escape(text)}</{tag}>'


def feature_table(features: Features) -> Table:
    """Return the fields of a schema with their declarations."""
    rows = [[name, feature.type_name, feature.declared()] for name, feature in features.items()]
    return Table(["field", "feature", "declared as"], rows)


def statistics_table(statistics: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Return the statistics of each field, by split and field, one line each."""
    from datamat.features.statistics import summarized_in_words

    rows = [
        [split, field, summarized_in_words(summary)]
        for split, fields in statistics.items()
        for field, summary in fields.items()
    ]
    return Table(["split", "field", "statistics"], rows)
