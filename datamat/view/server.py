"""A server of pages about a dataset, with all its samples and without scripts.

It listens only on the loopback address, answers only requests with its random path and its own host name, and opens no
file named in a request: requests choose numbers and classes.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import http.server
import os
import secrets
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from datamat.errors import OptionError
from datamat.parallel.logs import get_logger
from datamat.view.collection import OPACITIES, PER_PAGE, Collection
from datamat.view.page import CARD, encoded, render

if TYPE_CHECKING:
    from datamat.view.collection import Shot

_FULL, _LARGEST = 900, 4096  # maximum width and height of a picture on the page of a sample, and of an enlarged one
_LOOPBACK = "127.0.0.1"
_MOST_PORTS = 65_536
_logger = get_logger("datamat.readers")


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
        port: port to listen on; 0 for any free port.
        cache_dir: folder for copies of the shards of a URL, as for `load`.
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
        raise OptionError(f"viewing: port={port!r}; want a number from 0 (any free port) to {_MOST_PORTS - 1}")
    server = ViewServer(Collection(path, split, cache_dir, storage_options), port)
    try:
        yield server
    finally:
        server.close()


class ViewServer:
    """Serves pages about a dataset on the loopback address; `viewing` starts and ends it.

    Args:
        collection: the samples.
        port: port to listen on; 0 for any free port.
    """

    def __init__(self, collection: Collection, port: int = 0) -> None:
        self._token = secrets.token_urlsafe(16)
        answer = functools.partial(_Answer, collection, self._token)
        self._server = _Server((_LOOPBACK, port), answer)
        self._thread = threading.Thread(target=self._server.serve_forever, name="datamat view", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ViewServer({self.url!r})"

    @property
    def url(self) -> str:
        """Address of the first page, with the random path."""
        return f"http://{_LOOPBACK}:{self._server.server_address[1]}/{self._token}/"

    def wait(self) -> None:
        """Wait until the server has ended; a signal ends the wait."""
        self._thread.join()

    def close(self) -> None:
        """End the server and release its port; calling it again does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    """Answers each request in a thread, and logs errors instead of printing them."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error of a request as a warning, unless the browser has moved on."""
        del request, client_address
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            _logger.warning("view: a request failed", exc_info=True)


class _Answer(http.server.BaseHTTPRequestHandler):
    """Answers a request."""

    server_version = "datamat"
    sys_version = ""
    timeout = 30

    def __init__(self, collection: Collection, token: str, *arguments: Any) -> None:
        self._collection, self._token = collection, token
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page at the path if the request is allowed."""
        path, _, query = self.path.partition("?")
        asked = {name: values[-1] for name, values in urllib.parse.parse_qs(query).items()}
        _, token, page, *others = [*path.split("/"), "", ""][:4]
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in {_LOOPBACK, "localhost"}:  # a foreign page whose name resolves to this machine
            self._refuse(403, "Wrong host name.")
        elif not hmac.compare_digest(token.encode(), self._token.encode()) or any(others):
            self._refuse(404, "There is no such page.")
        elif page == "":
            self._send(200, self._overview(asked))
        elif page == "sample" and (shot := self._asked_for(asked)) is not None:
            self._send(200, self._sample(shot, asked))
        elif page == "sample":
            self._refuse(404, "There is no such sample.", link=".")
        else:
            self._refuse(404, "There is no such page.")

    def _asked_for(self, asked: Mapping[str, str]) -> Shot | None:
        """Return the sample that a request names by number or key; None if there is none."""
        position = _number(asked.get("at"))
        if position is not None and position >= len(self._collection):
            return None
        item = asked.get("key", "") if position is None else position
        with contextlib.suppress(KeyError):
            return self._collection.shot(item, _LARGEST if "large" in asked else _FULL, in_full=True)
        return None

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 -- named by the base class
        """Log a request at level DEBUG, without the random path."""
        _logger.debug("view: %s", (format % arguments).replace(self._token, "..."))

    def _overview(self, asked: Mapping[str, str]) -> str:
        collection = self._collection
        split, wanted = asked.get("split", ""), _number(asked.get("class"))
        split = split if split in collection.splits else ""
        wanted = wanted if wanted is not None and wanted < len(collection.classes) else None
        text, mask = asked.get("key", "").strip(), _opacity(asked)
        low, high = collection.bounds(split)
        start = max(_number(asked.get("from")) or 0, low)
        found, after = collection.search(start, split, wanted, text)
        query = {"split": split, "class": "" if wanted is None else wanted, "key": text, "mask": mask}
        steps = {"first": low} if start > low else {}
        if wanted is None and not text and start > low:
            steps["◀ back"] = max(start - PER_PAGE, low)
        if after is not None:
            steps["on ▶"] = after
        links = {name: f"?{urllib.parse.urlencode({**query, 'from': place})}" for name, place in steps.items()}
        end = high if after is None else after
        note = f"{len(found):,} shown of samples {min(start + 1, end):,} to {end:,}"
        shots = [(collection.shot(place, CARD), f"sample?at={place}&mask={mask}") for place in found]
        if start == low and (exact := self._with_key(text, split, wanted)):  # before partial matches
            link = f"sample?{urllib.parse.urlencode({'key': text, 'mask': mask})}"
            shots = [(exact, link), *(pair for pair in shots if pair[0].key != text)]
        chosen = {"split": split, "class": str(query["class"]), "key": text, "mask": mask}
        return render(
            "overview.html", collection.title, collection=collection, note=note, shots=shots, links=links, chosen=chosen
        )

    def _with_key(self, key: str, split: str, wanted: int | None) -> Shot | None:
        """Return the sample with a key if it is in a split and has a class."""
        with contextlib.suppress(KeyError):
            shot = self._collection.shot(key, CARD)
            if shot.split == (split or shot.split) and (wanted is None or wanted in shot.classes):
                return shot
        return None

    def _sample(self, shot: Shot, asked: Mapping[str, str]) -> str:
        collection, position = self._collection, shot.position
        steps = {}
        if position is not None and position:
            steps["◀ back"] = position - 1
        if position is not None and position + 1 < len(collection):
            steps["on ▶"] = position + 1
        return render(
            "sample.html",
            collection.title,
            collection=collection,
            shot=shot,
            steps=steps,
            mask=_opacity(asked),
            is_large="large" in asked,
        )

    def _refuse(self, status: int, said: str, *, link: str = "") -> None:
        title = {403: "Forbidden", 404: "Not found"}[status]
        self._send(status, render("refused.html", title, said=said, link=link))

    def _send(self, status: int, text: str) -> None:
        data = encoded(text)
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


def _opacity(asked: Mapping[str, str]) -> str:
    return asked["mask"] if asked.get("mask") in OPACITIES else "50"
