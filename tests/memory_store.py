"""A store in the memory of the test, behind every `s3://` URL: a `Folder` of which each request can be met.

`meet` hears of a request before it is answered, and may refuse it, or act first: so a run ends, or another comes in
between, at an exact point, without threads. Stores themselves, by their clients, are asked in tests/folders and
tests/interop.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from datamat.errors import OutputError
from datamat.folders import register_folder
from datamat.folders.base import (
    AbsentError,
    ChangedError,
    DeniedError,
    ExistsError,
    Folder,
    Range,
    ReplaceIf,
    Stat,
    UnsupportedError,
    checked,
)


@dataclasses.dataclass
class Stored:
    """A file, and its version."""

    content: bytes
    version: str


class Store:
    """What the store holds, and what happens to requests.

    Attributes:
        objects: files by path, "BUCKET/SETS/NAME".
        meet: gets the verb and the path of each request, before it is answered; returns None, or an error to raise.
        seen: verb and path of each request.
        has_conditions: whether it keeps conditions, or takes only writes without one.
    """

    def __init__(self):
        self.objects, self.seen, self.has_conditions = {}, [], True
        self.meet = lambda verb, path: None
        self.versions = itertools.count(1)

    def put(self, path, content):
        """Write a file, as somebody would who is not met."""
        self.objects[path] = Stored(bytes(content), f"v{next(self.versions)}")
        return self.objects[path].version


class MemoryStore(Folder):
    """A folder of the store of the test."""

    keeps = frozenset({"create", "replace_if"})
    is_private = True
    store = Store()

    def __init__(self, url, options=None):
        self._url, self.options = url.rstrip("/"), options or {}

    def __str__(self):
        return self._url

    def place(self, name):
        return f"{self}/{name}"

    def _asked(self, verb, name):
        path = self.place(checked(name) if name else "").partition("://")[2].rstrip("/")
        problem = "written" if verb in {"write", "copy", "delete"} else "read"
        self.store.seen.append((verb, path))
        if (error := self.store.meet(verb, path)) is not None:
            raise error(f"{self.place(name)} cannot be {problem}: refused; give credentials")
        if path.partition("/")[0] != "bucket":
            raise OutputError(f"{self.place(name)} cannot be {problem}: no such bucket; make the bucket")
        return path

    def _found(self, verb, name):
        if (found := self.store.objects.get(self._asked(verb, name))) is None:
            raise AbsentError(f"{self.place(name)} cannot be read: it is not there")
        return found

    def blocks(self, name, max_bytes):
        yield self._found("read", name).content[: max_bytes + 1]

    def read_range(self, name, start, stop):
        found = self._found("read", name)
        if len(content := found.content[start:stop]) < stop - start:
            raise OutputError(f"{self.place(name)} ends before byte {stop}")
        return Range(content, found.version)

    def stat(self, name):
        found = self.store.objects.get(self._asked("stat", name))
        return None if found is None else Stat(len(found.content), found.version)

    def list(self, below="", *, deep=False):
        top = f"{self._asked('list', below)}/"
        names = {path[len(top) :]: found for path, found in sorted(self.store.objects.items()) if path.startswith(top)}
        return {name: Stat(len(one.content), one.version) for name, one in names.items() if deep or "/" not in name}

    def write(self, name, content, mode="overwrite"):
        path = self._asked("write", name)
        if mode != "overwrite" and not self.store.has_conditions:
            raise UnsupportedError(f"{self.place(name)}: the store takes no conditions")
        there = self.store.objects.get(path)
        if mode == "create" and there is not None:
            raise ExistsError(f"{self.place(name)} is there already")
        if isinstance(mode, ReplaceIf) and (there is None or there.version != mode.version):
            raise ChangedError(f"{self.place(name)} has changed")
        return self.store.put(path, content)

    def write_file(self, name, path, mode="overwrite"):
        with open(path, "rb") as file:
            return self.write(name, file.read(), mode)

    def copy(self, name, target):
        content = self._found("read", name).content
        self.store.put(self._asked("copy", target), content)

    def delete(self, name):
        self.store.objects.pop(self._asked("delete", name), None)

    def child(self, name):
        return MemoryStore(self.place(checked(name)), self.options)


def denied(message):
    """Return the error of a store that refuses a request."""
    return DeniedError(message)


@pytest.fixture
def s3(monkeypatch):
    """The store behind every `s3://` URL; its bucket is `bucket`."""
    undo = register_folder("s3", MemoryStore)
    monkeypatch.setattr(MemoryStore, "store", Store())
    yield MemoryStore.store
    undo()
