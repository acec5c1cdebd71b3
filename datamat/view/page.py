"""A self-contained page about a dataset: cards of some samples, and a script that pages and filters them.

The templates escape all text, and a policy in each page keeps any unescaped script from running.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.errors import OptionError, count_of
from datamat.values import frozen
from datamat.view.collection import PER_PAGE, Collection

if TYPE_CHECKING:
    import jinja2

CARD = 320
"""Maximum width and height of a picture on a card, in pixels."""

_QUALITY = 85
_MOST_BYTES = 24 << 20  # of the cards of a self-contained page


@frozen()
class ViewPage:
    """A page about a dataset, with some of its samples; a notebook displays it.

    Attributes:
        html: the page, one self-contained file.
        num_samples: number of samples on it.
    """

    html: str
    num_samples: int

    def __repr__(self) -> str:
        return f"ViewPage({count_of(self.num_samples, 'sample')}, {len(self.html) / 1e6:.1f} MB)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file that any browser opens."""
        pathlib.Path(path).write_bytes(encoded(self.html))

    def _repr_html_(self) -> str:
        frame = 'style="width:100%;height:720px;border:0" sandbox="allow-scripts"'
        return f'<iframe {frame} srcdoc="{html.escape(self.html)}"></iframe>'


def view(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    count: int = 96,
    cache_dir: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ViewPage:
    """Return a page about a finished directory: facts, and samples to page through and filter by split and class.

    Each sample shows its pictures, texts and labels, and unfolds to show all its fields and its origin. Samples are
    spread evenly over each split. A page ends with the sample that takes it over 24 MB.

    Args:
        path: the directory that a run wrote, or its URL.
        split: split to show, or None for all.
        count: maximum number of samples to show, at least 1; each split gets at least one.
        cache_dir: folder for copies of the shards of a URL, as for `load`.
        storage_options: options for the URL; as for `load`.

    Raises:
        OutputError: the directory has no manifest, because the run is not finished.
        OptionError: there is no such split, or an option is invalid.
        CorruptDataError: the manifest is damaged. A damaged record is marked in its place on the page.

    Example:
        >>> view("out/camvid").save("camvid.html")   # doctest: +SKIP
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise OptionError(f"view: count={count!r}; want at least 1 sample")
    collection = Collection(path, split, cache_dir, storage_options)
    card = environment().get_template("parts.html").module.card  # type: ignore[attr-defined]  # a macro
    cards, num_bytes = list[str](), 0
    for position in collection.spread(count):
        cards.append(card(collection, collection.shot(position, CARD)))
        num_bytes += len(cards[-1])
        if num_bytes > _MOST_BYTES:
            break
    note = f"{len(cards):,} of {count_of(len(collection), 'sample')}, spread evenly over each split"
    if len(cards) < len(collection):
        note += "; the server shows all: datamat view --serve"
    script = environment().get_template("script.js").render(per_page=PER_PAGE)
    return ViewPage(
        render("page.html", collection.title, script=script, collection=collection, note=note, cards=cards), len(cards)
    )


def render(template: str, title: str, *, script: str = "", **values: Any) -> str:
    """Return a page that needs no other file, and may neither load one nor run any script except the given one.

    Args:
        template: name of its template.
        title: title of the page, as text.
        script: JavaScript; "" for none.
        values: variables of the template; texts are escaped.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'; " if script else ""
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {allowed}base-uri 'none'; form-action 'self'"
    )
    return environment().get_template(template).render(title=title, script=script, policy=policy, **values)


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment that loads the templates beside this module and escapes all values."""
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.PackageLoader("datamat.view"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters["as_jpeg"] = _as_jpeg
    found.filters["as_png"] = _as_png
    return found


def _as_jpeg(pixels: np.ndarray) -> str:
    data = codecs.encode_jpeg(np.ascontiguousarray(pixels), quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def _as_png(pixels: np.ndarray) -> str:
    return f"data:image/png;base64,{base64.b64encode(codecs.encode_png(pixels)).decode()}"


def encoded(text: str) -> bytes:
    """Return a page as bytes; bytes of a folder's name that are not UTF-8 are shown as escapes."""
    return text.encode(errors="backslashreplace")
