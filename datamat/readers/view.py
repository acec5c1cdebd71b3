"""Shows a finished directory in a browser: one page that needs nothing else, or a server on this machine.

    Collection ──search──> places ──┬─> ViewPage: cards of some samples, a script that pages and filters
      samples, their classes,       └─> ViewServer: the same cards, page by page, of all samples; no script
      provenance

All text is escaped, and a policy in each page keeps whatever were not from running. The server listens on the loopback
address alone, answers only those who know its random path and came by its own name, and opens no file that a request
names: a request chooses numbers and classes.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hmac
import html
import http.server
import os
import pathlib
import secrets
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.directory.display import render_document
from datamat.directory.fetched import FilesHere
from datamat.directory.provenance import ProvenanceFinder
from datamat.errors import DatamatError, OptionError, count_of
from datamat.features.statistics import summarized_in_words
from datamat.folders import open_folder
from datamat.parallel.logs import get_logger
from datamat.readers.dataset import load
from datamat.readers.preview import in_words, look_at
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.directory.manifest import Manifest
    from datamat.features import Feature
    from datamat.readers.dataset import ShardedDataset
    from datamat.readers.preview import Panel, Scene


__all__ = ["ViewPage", "ViewServer", "view", "viewing"]

_CARD, _FULL = 320, 900  # largest width and height of a picture on a card, and on the page of a sample
_QUALITY = 85
_OPACITY = 0.45
_PER_PAGE = 24
_MOST_BYTES = 24 << 20  # of the cards of a page that is one file
_MOST_LETTERS, _MOST_IN_FULL = 600, 50_000  # of a text on a card, and on the page of a sample
_MOST_SEARCHED, _LONGEST_S = 5_000, 3.0  # samples that a request looks through for a class
_LOOPBACK = "127.0.0.1"
_MOST_PORTS = 65_536
_logger = get_logger("datamat.readers")


@frozen()
class ViewPage:
    """A page about a dataset, with some of its samples; a notebook displays it.

    Attributes:
        html: the page: one self-contained file.
        num_samples: number of samples that it shows.
    """

    html: str
    num_samples: int

    def __repr__(self) -> str:
        return f"ViewPage({count_of(self.num_samples, 'sample')}, {len(self.html) / 1e6:.1f} MB)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, which any browser opens."""
        pathlib.Path(path).write_bytes(_encoded(self.html))

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
    """Return a page about a finished directory: samples that can be paged and filtered by split and class, and facts.

    Each sample shows its pictures, texts and labels, and unfolds to show all its fields and where it came from. Samples
    are spread evenly over each split. A page ends with the sample that takes it over 24 MB.

    Args:
        path: the directory that a run wrote, or its URL.
        split: split to show, or None for all.
        count: how many samples to show at most, at least 1; each split has at least one.
        cache_dir: where the copies of the shards of a URL go; as for `load`.
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
    collection = _Collection(path, split, cache_dir, storage_options)
    cards, num_bytes = list[str](), 0
    for position in collection.spread(count):
        cards.append(_card(collection, collection.shot(position, _CARD), link=""))
        num_bytes += len(cards[-1])
        if num_bytes > _MOST_BYTES:
            break
    note = f"{len(cards):,} of {count_of(len(collection), 'sample')}, spread evenly over each split"
    if len(cards) < len(collection):
        note += "; the server shows all: datamat view --serve"
    search = '<input id="words" type="search" placeholder="key or text" aria-label="key or text">'
    body = [
        _header(collection, note),
        f'<div class="controls">{_controls(collection, "", None)}{search}</div>',
        f'<main class="grid">{"".join(cards)}</main>',
        '<nav><button id="back">◀</button><span id="where" class="faint"></span><button id="on">▶</button></nav>',
        _facts(collection),
    ]
    script = _SCRIPT.replace("PER_PAGE", str(_PER_PAGE))
    return ViewPage(render_document(collection.title, "\n".join(body), style=_STYLE, script=script), len(cards))


@contextlib.contextmanager
def viewing(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    port: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[ViewServer]:
    """Serve pages about a finished directory, with all its samples, on this machine, until the block ends.

    It listens only on the loopback address. Other users of this machine would also need the random path in `url`. From
    another machine, forward the port: `ssh -L PORT:127.0.0.1:PORT HOST`.

    Args:
        path: the directory that a run wrote, or its URL.
        split: split to show, or None for all.
        port: port to listen on; 0 for any that is free.
        cache_dir: where the copies of the shards of a URL go; as for `load`.
        storage_options: options for the URL; as for `load`.

    Yields:
        The server, with its `url`.

    Raises:
        OutputError, OptionError, CorruptDataError: as for `view`; OptionError also for an invalid port.
        OSError: the port is taken.

    Example:
        >>> with viewing("out/camvid") as server:   # doctest: +SKIP
        ...     print(server.url)
        ...     server.wait()
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < _MOST_PORTS:
        raise OptionError(f"viewing: port={port!r}; want a number from 0 (any that is free) to {_MOST_PORTS - 1}")
    server = ViewServer(_Collection(path, split, cache_dir, storage_options), port)
    try:
        yield server
    finally:
        server.close()


# ---------------------------------------------------------------- what is shown


@frozen()
class _Shot:
    """What is shown of one sample.

    Attributes:
        position: its number among all samples that are shown; None where it was asked for by its key.
        split: name of its split.
        key: its key; "" where it cannot be read.
        scene: its pictures and words; None where it cannot be read.
        fields: name, declaration and text of each field.
        classes: numbers of its classes, as `_Collection.classes` has them.
        problem: why it cannot be shown; "" otherwise.
    """

    position: int | None
    split: str
    key: str = ""
    scene: Scene | None = None
    fields: tuple[tuple[str, str, str], ...] = ()
    classes: frozenset[int] = frozenset()
    problem: str = ""


class _Collection:
    """The samples of the splits that are shown, numbered from 0, one split after the other."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        split: str | None,
        cache_dir: str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self.folder = open_folder(path, storage_options)
        opened = functools.partial(load, path, cache_dir=cache_dir, storage_options=storage_options)
        whole = opened(split)
        self.manifest: Manifest = whole.manifest
        self.features = whole.features
        self.splits: dict[str, ShardedDataset] = {
            name: opened(name) for name in ([split] if split is not None else self.manifest.splits)
        }
        sizes = [len(dataset) for dataset in self.splits.values()]
        self.starts: dict[str, int] = dict(zip(self.splits, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._size = sum(sizes)
        self.named = {name: feature for name, feature in self.features.items() if feature.class_names()}
        pairs = [(name, said) for name, feature in self.named.items() for said in feature.class_names() or ()]
        self.classes: dict[tuple[str, str], int] = {pair: number for number, pair in enumerate(pairs)}
        self._labels = {name: data.columns(*self.named) for name, data in self.splits.items()} if self.named else {}
        self._provenance = ProvenanceFinder(FilesHere(self.folder), self.manifest)

    def __len__(self) -> int:
        return self._size

    @property
    def title(self) -> str:
        """What all pages are about."""
        return f"{self.manifest.name}: {count_of(self._size, 'sample')}"

    def _split_at(self, position: int) -> str:
        return [name for name, start in self.starts.items() if start <= position and len(self.splits[name])][-1]

    def _split_of(self, key: object) -> str:
        for name, dataset in self.splits.items():
            if key in dataset:
                return name
        raise KeyError(key)

    def bounds(self, split: str) -> tuple[int, int]:
        """Return the positions of a split; of all where it is ""."""
        if not split:
            return 0, self._size
        return self.starts[split], self.starts[split] + len(self.splits[split])

    def spread(self, count: int) -> list[int]:
        """Return positions spread evenly over each split, which has its share of them."""
        found = []
        for split, dataset in self.splits.items():
            share = min(max(round(count * len(dataset) / max(self._size, 1)), 1), len(dataset))
            found += [self.starts[split] + place * len(dataset) // share for place in range(share)]
        return found

    def find(self, text: str) -> int | None:
        """Return the number of the first sample whose key holds a text, in either case; None where there is none."""
        wanted = text.casefold()
        for split, dataset in self.splits.items() if wanted else ():
            for number, key in enumerate(dataset.keys()):
                if wanted in key.casefold():
                    return self.starts[split] + number
        return None

    def shot(self, item: int | str, size: int, *, in_full: bool = False) -> _Shot:
        """Return what is shown of a sample; one that is damaged says so.

        Args:
            item: its number, or its key.
            size: largest width and height of its pictures, in pixels.
            in_full: whether texts are whole.

        Raises:
            KeyError: no sample has this key.
        """
        position, number = (None, item) if isinstance(item, str) else (item, item - self.starts[self._split_at(item)])
        split = self._split_of(item) if isinstance(item, str) else self._split_at(item)
        most = _MOST_IN_FULL if in_full else _MOST_LETTERS
        try:
            sample = self.splits[split][number]
            scene = look_at(sample, self.features, width=size, height=size, opacity=_OPACITY, in_full=in_full)
        except (DatamatError, OSError, ValueError) as error:  # damage, or what decodes it is missing
            return _Shot(position, split, problem=f"{type(error).__name__}: {error}")
        values = self.features.nesting.split(sample)
        fields = [
            (name, feature.declared(), _cut(in_words(feature, values.get(name), in_full=True), most))
            for name, feature in self.features.items()
        ]
        scene = dataclasses.replace(scene, words=tuple((name, _cut(text, most)) for name, text in scene.words))
        return _Shot(position, split, scene.key, scene, tuple(fields), self.classes_of(values))

    def classes_of(self, values: Mapping[str, Any]) -> frozenset[int]:
        """Return the numbers of the classes that a sample has: of its labels, and of its pixels."""
        found = set[int]()
        for name, feature in self.named.items():
            found.update(
                self.classes[name, said]
                for said in _classes_in(feature, values.get(name))
                if (name, said) in self.classes
            )
        return frozenset(found)

    def search(self, start: int, split: str, wanted: int | None) -> tuple[list[int], int | None]:
        """Return the next samples of a split with a class, and where to go on; None at the end.

        Args:
            start: first position to look at.
            split: name of the split; "" for all.
            wanted: number of the class; None for any.
        """
        low, high = self.bounds(split)
        position, found, ends_at = max(start, low), list[int](), time.monotonic() + _LONGEST_S
        last = min(high, position + _MOST_SEARCHED)
        while position < last and len(found) < _PER_PAGE and (wanted is None or time.monotonic() < ends_at):
            if wanted is None or self._has(position, wanted):
                found.append(position)
            position += 1
        return found, position if position < high else None

    def _has(self, position: int, wanted: int) -> bool:
        split = self._split_at(position)
        try:
            sample = self._labels[split][position - self.starts[split]]
        except (DatamatError, OSError, ValueError):  # it has no class that could be told
            return False
        return wanted in self.classes_of(self.features.nesting.split(sample))

    def provenance(self, key: str) -> list[tuple[str, Any]]:
        """Return facts about where a record came from, or why that is not known."""
        try:
            found = self._provenance.find(key)
        except (DatamatError, OSError) as error:
            return [("provenance", str(error))]
        facts: list[tuple[str, Any]] = [
            ("row", found.row_key),
            ("copy", "none: stored as it is" if found.copy is None else found.copy),
            ("shard", found.shard),
            ("position", "none" if found.position is None else found.position),
            ("seed", found.seed),
        ]
        return [*facts, *found.sources.items(), *found.fields.items()]


def _classes_in(feature: Feature, value: Any) -> list[str]:
    """Return the names of the classes in a value of labels or of pixels, each once."""
    names = feature.class_names() or ()
    if value is None:
        return []
    ids = np.unique(np.asarray(value))
    if ids.dtype.kind not in "iu":
        return []
    return [names[number] for number in ids.tolist() if 0 <= number < len(names)]


def _encoded(text: str) -> bytes:
    """Return a page as bytes; of the name of a folder that is no UTF-8, an escape is shown."""
    return text.encode(errors="backslashreplace")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} letters)"


# ---------------------------------------------------------------- HTML


_STYLE = """
body { max-width: 1500px } header p { margin: .2em 0 }
form, .controls { display: flex; flex-wrap: wrap; gap: .8em; align-items: center; margin: 1em 0;
  position: sticky; top: 0;  background: var(--paper); padding: .5em 0; z-index: 1 }
select, input, button { font: inherit; color: inherit; background: var(--box); border: 1px solid var(--line);
  border-radius: 6px; padding: .25em .6em }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); gap: 16px; align-items: start }
article { background: var(--box); border: 1px solid var(--line); border-radius: 10px; overflow: hidden }
article[hidden] { display: none }
article img, .sample img { display: block; max-width: 100%; height: auto } article img { width: 100% }
article img + img { margin-top: 3px }
.text { padding: .55em .8em .7em; overflow-wrap: anywhere } .text h3 { margin: 0; font-size: 1em }
.text h3 a { color: inherit } .text p { margin: .25em 0 }
.text .long { display: -webkit-box; -webkit-box-orient: vertical;
  -webkit-line-clamp: 4; overflow: hidden }
.chips { display: flex; flex-wrap: wrap; gap: .3em .4em; margin: .35em 0; font-size: .87em }
.chips span { display: inline-flex; align-items: center; gap: .35em; border: 1px solid var(--line); border-radius: 99px;
  padding: 0 .6em }
.chips i { width: .75em; height: .75em; border-radius: 3px; display: inline-block }
details { font-size: .9em; margin-top: .4em } summary { cursor: pointer; color: var(--faint) }
details td, details th { padding-right: .8em } .problem { border-left: 4px solid #d55e00; padding-left: .6em }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: inherit }
nav { display: flex; gap: 1em; align-items: center; margin: 1.2em 0 } nav a, .sample a { color: inherit }
.sample { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 24px }
.sample img + img { margin-top: 6px }
@media (max-width: 800px) { .sample { display: block } }
.wide { overflow-x: auto } .wide td:first-child pre { white-space: pre }
article:has(details[open]) { grid-column: 1 / -1 } article:has(details[open]) img { max-width: 480px }
"""
_SCRIPT = """
const all = [...document.querySelectorAll("article")], one = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.hash.slice(1));
let page = (parseInt(asked.get("page")) || 1) - 1;
for (const id of ["split", "class", "words"]) if (asked.has(id)) one(id).value = asked.get(id);
function show() {
  const split = one("split").value, kind = one("class").value, words = one("words").value.trim().toLowerCase();
  const found = all.filter((card) => (!split || card.dataset.split === split)
    && (!kind || card.dataset.classes.split(" ").includes(kind))
    && (!words || card.textContent.toLowerCase().includes(words)));
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  page = Math.min(Math.max(page, 0), pages - 1);
  all.forEach((card) => { card.hidden = true; });
  found.slice(page * PER_PAGE, (page + 1) * PER_PAGE).forEach((card) => { card.hidden = false; });
  one("where").textContent = `${found.length} samples, page ${page + 1} of ${pages}`;
  one("back").disabled = page === 0;
  one("on").disabled = page === pages - 1;
}
for (const id of ["split", "class", "words"]) one(id).addEventListener("input", () => { page = 0; show(); });
one("back").addEventListener("click", () => { page -= 1; show(); scrollTo(0, 0); });
one("on").addEventListener("click", () => { page += 1; show(); scrollTo(0, 0); });
show();
"""


def _header(collection: _Collection, note: str) -> str:
    name, path = html.escape(collection.title), html.escape(str(collection.folder))
    return f'<header><h1>{name}</h1><p class="faint">{path}</p><p>{html.escape(note)}</p></header>'


def _controls(collection: _Collection, split: str, wanted: int | None) -> str:
    """Return two lists to choose from, with what is chosen: splits and classes."""
    splits = [("", "all splits"), *((name, f"{name} ({len(data):,})") for name, data in collection.splits.items())]
    several = len(collection.named) > 1
    classes = [("", "all classes" if collection.classes else "no classes")] + [
        (str(number), f"{field}: {name}" if several else name) for (field, name), number in collection.classes.items()
    ]
    return _select("split", splits, split) + _select("class", classes, "" if wanted is None else str(wanted))


def _select(name: str, options: Iterable[tuple[str, str]], chosen: str) -> str:
    lines = [
        f'<option value="{html.escape(value)}"{" selected" if value == chosen else ""}>{html.escape(text)}</option>'
        for value, text in options
    ]
    return f'<select id="{name}" name="{name}" aria-label="{name}">{"".join(lines)}</select>'


def _card(collection: _Collection, shot: _Shot, link: str) -> str:
    """Return a sample as a card; `link` leads to its own page, or is "", and then the card unfolds."""
    marks = " ".join(map(str, sorted(shot.classes)))
    opening = f'<article data-split="{html.escape(shot.split)}" data-classes="{marks}">'
    if shot.scene is None:
        words = f'<p class="problem">{html.escape(shot.problem)}</p>'
        return f'{opening}<div class="text">{words}<p class="faint">{html.escape(shot.split)}</p></div></article>'
    key = html.escape(shot.key)
    title = f'<a href="{html.escape(link)}">{key}</a>' if link else key
    lines = [
        f'<p class="long"><span class="faint">{html.escape(name)}</span> {html.escape(text)}</p>'
        for name, text in shot.scene.words
    ]
    unfolded = "" if link else f"<details><summary>all fields</summary>{_whole(collection, shot)}</details>"
    inner = f'<h3>{title}</h3><p class="faint">{html.escape(shot.split)}</p>{_chips(shot.scene)}{"".join(lines)}'
    return f'{opening}{_images(shot.scene)}<div class="text">{inner}{unfolded}</div></article>'


def _images(scene: Scene) -> str:
    return "".join(_image(panel) for panel in scene.panels)


def _image(panel: Panel) -> str:
    data = base64.b64encode(codecs.encode_jpeg(np.ascontiguousarray(panel.pixels), quality=_QUALITY)).decode()
    height, width = panel.pixels.shape[:2]
    named = html.escape(", ".join(panel.fields))
    return f'<img alt="{named}" title="{named}" width="{width}" height="{height}" src="data:image/jpeg;base64,{data}">'


def _chips(scene: Scene) -> str:
    """Return the legends of all pictures of a sample, each class once."""
    swatches = {
        (swatch.name, swatch.colour): None
        for panel in scene.panels
        for part in panel.legend.values()
        for swatch in part
    }
    chips = [f'<span><i style="background:rgb{colour}"></i>{html.escape(name)}</span>' for name, colour in swatches]
    return f'<div class="chips">{"".join(chips)}</div>' if chips else ""


def _whole(collection: _Collection, shot: _Shot) -> str:
    """Return tables of all fields of a sample, and of where it came from."""
    fields = _table([(name, text, declared) for name, declared, text in shot.fields], ("field", "value", "declared as"))
    facts = [(name, _cut(str(value), _MOST_LETTERS)) for name, value in collection.provenance(shot.key)]
    return f"{fields}<p><b>Where it came from</b></p>{_table(facts)}"


def _facts(collection: _Collection) -> str:
    """Return tables about the whole dataset."""
    manifest = collection.manifest
    rows = [
        (name, f"{len(data):,}", f"{len(shards):,}", f"{sum(info.num_bytes for info in shards) / 1e6:,.1f}")
        for name, data in collection.splits.items()
        for shards in [manifest.splits[name]]
    ]
    splits = _table(rows, ("split", "samples", "shards", "MB"), numbers=(1, 2, 3))
    declared = [(name, feature.type_name, feature.declared()) for name, feature in collection.features.items()]
    fields = _table(declared, ("field", "feature", "declared as"))
    known = [
        (split, field, summarized_in_words(found))
        for split, of_split in manifest.statistics.items()
        if split in collection.splits
        for field, found in of_split.items()
    ]
    values = f"<h2>Statistics</h2>{_table(known, ('split', 'field', 'values'))}" if known else ""
    return f"<h2>Splits</h2>{splits}<h2>Fields</h2>{fields}{values}"


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), numbers: Sequence[int] = ()) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"] if head else []
    for row in rows:
        cells = [
            f"<td{' class=n' if place in numbers else ''}><pre>{html.escape(cell)}</pre></td>"
            for place, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


# ---------------------------------------------------------------- the server


class ViewServer:
    """Serves pages about a dataset on the loopback address; `viewing` starts and ends it.

    Args:
        collection: the samples.
        port: port to listen on; 0 for any that is free.
    """

    def __init__(self, collection: _Collection, port: int = 0) -> None:
        self._token = secrets.token_urlsafe(16)
        answer = functools.partial(_Answer, collection, self._token)
        self._server = _Server((_LOOPBACK, port), answer)
        self._thread = threading.Thread(target=self._server.serve_forever, name="datamat view", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ViewServer({self.url!r})"

    @property
    def url(self) -> str:
        """Address of the first page, with the random path that it answers to."""
        return f"http://{_LOOPBACK}:{self._server.server_address[1]}/{self._token}/"

    def wait(self) -> None:
        """Return when the server has ended; a signal ends the wait."""
        self._thread.join()

    def close(self) -> None:
        """End the server, and give its port back; calling it again does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    """Answers each request in a thread, and logs what goes wrong in place of printing it."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error of a request: a warning, or nothing where the browser has gone on."""
        del request, client_address
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            _logger.warning("view: a request failed", exc_info=True)


class _Answer(http.server.BaseHTTPRequestHandler):
    """Answers a request."""

    server_version = "datamat"
    sys_version = ""
    timeout = 30

    def __init__(self, collection: _Collection, token: str, *arguments: Any) -> None:
        self._collection, self._token = collection, token
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page that the path names, if the request may have it."""
        path, _, query = self.path.partition("?")
        asked = {name: values[-1] for name, values in urllib.parse.parse_qs(query).items()}
        _, token, page, *others = [*path.split("/"), "", ""][:4]
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in {_LOOPBACK, "localhost"}:  # a page elsewhere whose name leads to this machine
            self._send(403, "Forbidden", "<p>Not by this name.</p>")
        elif not hmac.compare_digest(token.encode(), self._token.encode()) or any(others):
            self._send(404, "Not found", "<p>There is no such page.</p>")
        elif page == "":
            self._send(200, self._collection.title, self._overview(asked))
        elif page == "sample" and (shot := self._asked_for(asked)) is not None:
            self._send(200, self._collection.title, self._sample(shot))
        elif page == "sample":
            said = html.escape(asked.get("key", "")) or "nothing"
            self._send(404, "Not found", f'<p>No key holds {said}.</p><p><a href=".">all samples</a></p>')
        else:
            self._send(404, "Not found", "<p>There is no such page.</p>")

    def _asked_for(self, asked: Mapping[str, str]) -> _Shot | None:
        """Return the sample that a request names by number, key or part of one; None where there is none."""
        position = _number(asked.get("at"))
        if position is not None and position < len(self._collection):
            return self._collection.shot(position, _FULL, in_full=True)
        with contextlib.suppress(KeyError):
            return self._collection.shot(asked["key"], _FULL, in_full=True)
        found = self._collection.find(asked.get("key", ""))
        return None if found is None else self._collection.shot(found, _FULL, in_full=True)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 -- named by the base class
        """Log a request at the level DEBUG, without the random path."""
        _logger.debug("view: %s", (format % arguments).replace(self._token, "..."))

    def _overview(self, asked: Mapping[str, str]) -> str:
        collection = self._collection
        split, wanted = asked.get("split", ""), _number(asked.get("class"))
        split = split if split in collection.splits else ""
        wanted = wanted if wanted is not None and wanted < len(collection.classes) else None
        low, high = collection.bounds(split)
        start = max(_number(asked.get("from")) or 0, low)
        found, after = collection.search(start, split, wanted)
        cards = [_card(collection, collection.shot(place, _CARD), link=f"sample?at={place}") for place in found]
        query = {"split": split, "class": "" if wanted is None else wanted}
        steps = {"first": low} if start > low else {}
        if wanted is None and start > low:
            steps["◀ back"] = max(start - _PER_PAGE, low)
        if after is not None:
            steps["on ▶"] = after
        links = [
            f'<a href="?{html.escape(urllib.parse.urlencode({**query, "from": place}))}">{name}</a>'
            for name, place in steps.items()
        ]
        end = high if after is None else after
        note = f"{len(found):,} shown of samples {min(start + 1, end):,} to {end:,}"
        search = '<form action="sample"><input name="key" type="search" placeholder="key"><button>Find</button></form>'
        body = [
            _header(collection, note),
            f"<form>{_controls(collection, split, wanted)}<button>Show</button></form>{search}",
            f'<main class="grid">{"".join(cards) or "<p>Nothing here.</p>"}</main>',
            f"<nav>{''.join(links)}</nav>",
            _facts(collection),
        ]
        return "\n".join(body)

    def _sample(self, shot: _Shot) -> str:
        collection, position = self._collection, shot.position
        links = ['<a href=".">all samples</a>']
        if position is not None:
            links += [f'<a href="sample?at={position - 1}">◀ back</a>'] if position else []
            links += [f'<a href="sample?at={position + 1}">on ▶</a>'] if position + 1 < len(collection) else []
        if shot.scene is None:
            inner = f'<p class="problem">{html.escape(shot.problem)}</p>'
        else:
            whole = _whole(collection, shot)
            inner = f'<div class="sample"><div>{_images(shot.scene)}{_chips(shot.scene)}</div><div>{whole}</div></div>'
        title = f"<h1>{html.escape(shot.key or 'A sample that cannot be shown')}</h1>"
        return f'{title}<p class="faint">{html.escape(shot.split)}</p><nav>{"".join(links)}</nav>{inner}'

    def _send(self, status: int, title: str, body: str) -> None:
        data = _encoded(render_document(title, body, style=_STYLE))
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(data)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else None
