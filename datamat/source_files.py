"""The input files of a source, as the index looks at them: size, time of change, and whether they are its own."""

from __future__ import annotations

import os
import stat

__all__ = ["SourceFiles"]


class SourceFiles:
    """Looks at input files by path, and at nothing else: no device or pipe, and nowhere that only a link leads to.

    Who unpacks an archive that somebody else made has links of that person's choice in the source. Absolute paths come
    from the writer's own code, and may lead anywhere.

    Args:
        source: folder that relative paths start from.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._root = os.path.join(os.path.realpath(source), "")
        self._is_inside: dict[str, bool] = {}

    def look_at(self, path: str) -> os.stat_result:
        """Return the status of a file.

        Raises:
            OSError: there is none.
            ValueError: it is no regular file inside the source.
        """
        full = os.path.join(self._source, path)
        found = os.lstat(full)
        if stat.S_ISLNK(found.st_mode):
            self._check_target(path, full)
            found = os.stat(full)
        elif not os.path.isabs(path):
            folder = os.path.dirname(full)
            if folder not in self._is_inside:  # one look for each folder, not for each file
                self._is_inside[folder] = self._holds(folder)
            if not self._is_inside[folder]:
                self._check_target(path, full)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        if ".." in path.split("/"):
            raise ValueError("leads out of its folder by '..'")
        return found

    def _check_target(self, path: str, full: str) -> None:
        if not os.path.isabs(path) and not self._holds(full):
            raise ValueError(
                f"a link leads out of the source, to {os.path.realpath(full)!r}; copy what it leads to, or give "
                "absolute paths in the index"
            )

    def _holds(self, full: str) -> bool:
        return os.path.join(os.path.realpath(full), "").startswith(self._root)
