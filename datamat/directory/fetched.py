"""Files of a folder as local files, for code that opens them by path."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from typing import TYPE_CHECKING, final

from datamat.directory.files import temporary_folder
from datamat.directory.manifest import MANIFEST_FILE, Manifest, content_of_manifest
from datamat.errors import OutputError
from datamat.folders import AbsentError, DeniedError
from datamat.folders.local import regular_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from datamat.directory.manifest import ListedFile
    from datamat.folders import Folder


@final
class FilesHere:
    """The files of a folder: the files themselves if they are on this machine, else copies of fetched ones.

    The copies are in a temporary folder, which is removed with this object. Thread-safe.

    Attributes:
        path: the local folder with the files: the folder itself, or a temporary one in `TMPDIR`.
        are_copies: whether it is a temporary one.
    """

    def __init__(self, root: Folder) -> None:
        self.root = root
        found = root.local_path()
        self.are_copies = found is None
        self.path = pathlib.Path(temporary_folder(self)) if found is None else found

    def manifest(self, *, strict: bool = True) -> Manifest:
        """Return the manifest after fetching its file; raise as `Manifest.read` does."""
        content = content_of_manifest(self.root)
        if self.are_copies:
            (self.path / MANIFEST_FILE).write_bytes(content)
        return Manifest.parse(content, self.root.place(MANIFEST_FILE), strict=strict).placed(self.root)

    def fetch_if_there(self, name: str, max_bytes: int) -> bool:
        """Fetch a file; return True if there is one.

        Args:
            name: path of the file below the folder.
            max_bytes: size beyond which a copy is cut: that of a larger file is only slightly longer.

        Raises:
            OutputError: it cannot be read, or the disk is full.
        """
        place = self.path / name
        if not self.are_copies:
            return os.path.lexists(place)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "wb") as file, contextlib.closing(self.root.blocks(name, max_bytes)) as blocks:
                file.writelines(blocks)
        except OutputError as error:
            place.unlink(missing_ok=True)
            if isinstance(error, AbsentError):
                return False
            raise
        except OSError as error:
            place.unlink(missing_ok=True)
            raise OutputError(
                f"{self.root.place(name)} does not fit into {self.path.parent} ({error.strerror}), where it is "
                "examined; set TMPDIR to a folder on a larger disk"
            ) from error
        return True

    def listed(self, info: ListedFile) -> pathlib.Path:
        """Return the path of a file that the manifest lists.

        Raises:
            OutputError: it is missing, or cannot be read.
            CorruptDataError: it is not a regular file in the folder.
        """
        if not self.fetch_if_there(info.file, info.num_bytes):
            raise OutputError(f"{self.root.place(info.file)} is missing; run the job again to rebuild it")
        return regular_path(self.path, info.file)

    def fetch_all(self, sizes: Mapping[str, int], at_once: int = 16) -> dict[str, str]:
        """Fetch several files concurrently; return the reasons for those that could not be fetched, by name.

        Args:
            sizes: `max_bytes` of each, by name.
            at_once: number of files to fetch at the same time.

        Raises:
            OutputError: as for `fetch_if_there`, except for files that may not be read.
        """
        from concurrent.futures import ThreadPoolExecutor

        def fetch(name: str) -> int:
            try:
                return 0 if self.fetch_if_there(name, sizes[name]) else errno.ENOENT
            except DeniedError:
                return errno.EACCES

        if not self.are_copies:
            return {}
        with ThreadPoolExecutor(at_once) as pool:
            found = zip(sizes, pool.map(fetch, sizes), strict=True)
            return {name: os.strerror(why) for name, why in found if why}

    def drop(self, names: Iterable[str]) -> None:
        """Remove copies of files."""
        if self.are_copies:
            for name in names:
                (self.path / name).unlink(missing_ok=True)

    def named(self, text: str) -> str:
        """Return a text with the path of the temporary folder replaced by the folder's own."""
        return text.replace(str(self.path), str(self.root))
