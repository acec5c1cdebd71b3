"""A folder as another package may have it: files in a dict."""

from datamat import OutputError
from datamat.folders import AbsentError, Folder, checked


class DictFolder(Folder):
    """A place of another package: files in a dict."""

    def __init__(self, files, below=""):
        self.files = files
        self.below = below

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
        return found

    def size(self, name):
        return len(self.content(name))

    def names(self, below="", *, deep=False):
        top = f"{self.below}{below}/" if below else self.below
        found = sorted(name.removeprefix(top) for name in self.files if name.startswith(top))
        return [name for name in found if deep or "/" not in name]

    def child(self, name):
        return type(self)(self.files, f"{self.below}{checked(name)}/")
