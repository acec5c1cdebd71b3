"""A folder as another package may have it: files in a dict."""

import itertools

from datamat import OutputError
from datamat.folders import AbsentError, ChangedError, ExistsError, Folder, Range, ReplaceIf, Stat, checked


class DictFolder(Folder):
    """A place of another package: files in a dict, each with its version in another one."""

    is_private = True

    numbers = itertools.count()

    def __init__(self, files, below="", versions=None):
        self.files = files
        self.below = below
        self.versions = {} if versions is None else versions

    def __str__(self):
        return f"dict://{self.below}".rstrip("/")

    def place(self, name):
        return f"dict://{self.below}{name}"

    def content(self, name):
        if self.below + checked(name) not in self.files:
            raise AbsentError(f"{self.place(name)} is not there")
        return self.files[self.below + name]

    def blocks(self, name, max_bytes):
        content = self.content(name)
        yield content[: max_bytes + 1]

    def read_range(self, name, start, stop):
        found = self.content(name)[start:stop]
        if len(found) < stop - start:
            raise OutputError(f"{self.place(name)} is shorter")
        return Range(found, self.stat(name).version)

    def stat(self, name):
        there = self.below + checked(name)
        return Stat(len(self.files[there]), self.versions.get(there, "0")) if there in self.files else None

    def list(self, below="", *, deep=False):
        top = f"{self.below}{below}/" if below else self.below
        found = sorted(name.removeprefix(top) for name in self.files if name.startswith(top))
        return {
            name: Stat(len(self.files[top + name]), self.versions.get(top + name, "0"))
            for name in found
            if deep or "/" not in name
        }

    def write(self, name, content, mode="overwrite"):
        there = self.stat(name)
        if mode == "create" and there is not None:
            raise ExistsError(f"{self.place(name)} is there")
        if isinstance(mode, ReplaceIf) and (there is None or there.version != mode.version):
            raise ChangedError(f"{self.place(name)} has changed")
        self.files[self.below + name] = bytes(content)
        self.versions[self.below + name] = f"{next(self.numbers)}"
        return self.versions[self.below + name]

    def delete(self, name):
        self.files.pop(self.below + checked(name), None)

    def child(self, name):
        return type(self)(self.files, f"{self.below}{checked(name)}/", self.versions)
