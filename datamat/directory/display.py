"""What objects show in a notebook: a title, facts and tables as HTML, in the colours of the notebook; and whole pages.

Everything is escaped. No style of a display names a colour of its own, so that it reads as well dark as light; a
notebook that does not trust the file shows it too, since there is no script. A page is light or dark as the browser is.
"""

from __future__ import annotations

import base64
import hashlib
import html
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.features import Features


__all__ = ["Table", "feature_table", "render_document", "render_html", "shorten", "statistics_table"]

_BOX = "color:inherit;background:transparent;font-size:inherit"
_CELL = "text-align:left;padding:1px 1em 1px 0;color:inherit;background:transparent;vertical-align:top"
_NUMBER = _CELL.replace("left", "right", 1) + ";font-variant-numeric:tabular-nums"
_MOST_ROWS = 50
_MOST_LETTERS = 200
_PAGE_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --faint: #767676; --line: #d8d8d8; --box: #f5f5f5 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #161616; --ink: #e8e8e8; --faint: #9a9a9a; --line: #3a3a3a; --box: #222 }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, "Noto Sans KR", sans-serif;
  max-width: 1100px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em; overflow-wrap: anywhere } h2 { font-size: 1.1em; margin: 1.8em 0 .5em }
table { border-collapse: collapse } td, th { text-align: left; padding: 2px 1.5em 2px 0; vertical-align: top;
  overflow-wrap: anywhere }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.faint { color: var(--faint) } i.key { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em }
"""


class Table(NamedTuple):
    """A table to show.

    Attributes:
        head: titles of the columns.
        rows: cells of each row; what is no text is shown as `str` has it, an integer with separators.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]


def render_html(
    title: str, facts: Iterable[tuple[str, Any]] = (), tables: Iterable[Table] = (), notes: Iterable[str] = ()
) -> str:
    """Return a display for `_repr_html_`.

    Args:
        title: what the object is, in a few words.
        facts: names with their values, one line each.
        tables: tables below them; of a long one the first rows.
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


def render_document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a page that needs no other file, and has no leave to load one or to run any script but the one given.

    Args:
        title: name of the page, as text.
        body: HTML, whose texts are escaped.
        style: CSS beside that of all pages.
        script: JavaScript; "" for none.

    Example:
        >>> "<title>A &amp; B</title>" in render_document("A & B", "<p>C</p>")
        True
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {allowed}base-uri 'none'; form-action 'self'"
    )
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_PAGE_STYLE}{style}</style>"
    )
    end = f"<script>{script}</script>" if script else ""
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n{end}</body></html>\n'


def shorten(text: str, most: int = _MOST_LETTERS) -> str:
    """Return a text, or its beginning and an ellipsis where it is long.

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
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = f"{value:,}" if is_number else shorten(str(value))
    return f'<{tag} style="{_NUMBER if is_number else _CELL}">{html.escape(text)}</{tag}>'


def feature_table(features: Features) -> Table:
    """Return the fields of a schema with what was declared for each."""
    rows = [[name, feature.type_name, feature.declared()] for name, feature in features.items()]
    return Table(["field", "feature", "declared as"], rows)


def statistics_table(statistics: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Return what is known of the values of each field, by split and field, one line each."""
    from datamat.features.statistics import summarized_in_words

    rows = [
        [split, field, summarized_in_words(summary)]
        for split, fields in statistics.items()
        for field, summary in fields.items()
    ]
    return Table(["split", "field", "statistics"], rows)
