"""The tests of a `Folder`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import pathlib
import pickle
import random
import re
import tempfile
import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from datamat.errors import CorruptDataError, DatamatError, OptionError
from datamat.folders import AbsentError, ChangedError, ExistsError, Folder, ReplaceIf, Stat, create_once
from datamat.testing.assertions import compare, raises

_FOLDER_FILES = {
    "manifest.json": b"{}",
    "empty": b"",
    "_index/train.index": bytes(range(256)) * 2000,
    "_index/deep/er": b"deep",
    "indexed": b"not in _index",
}


class FolderConformance:
    """What every `Folder` does: it returns the requested bytes and keeps the written ones, or says why not.

    Attributes:
        secrets: strings that no message may show, such as keys among the folder's options.
        is_writable: whether the folder can be written to.
        large_bytes: size of a large file; if the folder uploads in parts, more than one part.
    """

    secrets: ClassVar[Sequence[str]] = ()
    is_writable: ClassVar[bool] = True
    large_bytes: ClassVar[int] = 3 << 20

    def make_folder(self, files: Mapping[str, bytes], tmp_path: pathlib.Path) -> Folder:
        """Return a folder that holds exactly these files, by name."""
        raise NotImplementedError(f"{type(self).__name__}: define make_folder(self, files, tmp_path)")

    def test_files_are_read(self, tmp_path: pathlib.Path) -> None:
        """Whole, in blocks, and by their sizes."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        for name, content in _FOLDER_FILES.items():
            compare(folder.read(name, 1 << 20), content, f"{name}: content")
            compare(folder.read_if_there(name, len(content)), content, f"{name}: content of a file of the largest size")
            compare(b"".join(folder.blocks(name, len(content))), content, f"{name}: its blocks, joined")
            compare(getattr(folder.stat(name), "num_bytes", None), len(content), f"{name}: size")

    def test_file_that_is_too_long_is_refused(self, tmp_path: pathlib.Path) -> None:
        """`read` raises and names it; its blocks exceed the limit, so that a caller who counts bytes notices."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        with raises(CorruptDataError, "manifest.json", "a file of 2 bytes that may have 1"):
            folder.read("manifest.json", 1)
        found = sum(map(len, folder.blocks("_index/train.index", 100)))
        assert found > 100, f"blocks of a file that is too long: found {found} bytes, expected more than 100"

    def test_range_is_exactly_what_was_asked_for(self, tmp_path: pathlib.Path) -> None:
        """At any position; a range beyond the end of the file raises, and is not cut."""
        folder, name = self.make_folder(_FOLDER_FILES, tmp_path), "_index/train.index"
        content = _FOLDER_FILES[name]
        size = len(content)
        for start, stop in [(0, 1), (10, 300_000), (size - 3, size), (0, size), (5, 5)]:
            compare(folder.read_range(name, start, stop).content, content[start:stop], f"bytes {start} to {stop}")
        for start, stop in [(size - 3, size + 1), (size, size + 1), (size + 10, size + 20)]:
            with raises(DatamatError, re.escape(name), f"bytes {start} to {stop} of {size}"):
                folder.read_range(name, start, stop)

    def test_range_says_its_version(self, tmp_path: pathlib.Path) -> None:
        """The file's version, and another once the file was replaced; or none, if the store does not report one."""
        folder = self.make_folder({"file": b"one"}, tmp_path)
        first = folder.read_range("file", 0, 2).version
        if first:
            compare(first, getattr(folder.stat("file"), "version", None), "version of a range")
        if self.is_writable:
            written = folder.write("file", b"two")
            again = folder.read_range("file", 1, 3).version
            compare(again, written if first else "", "version of a range of a file that was replaced")

    def test_file_that_is_not_there_is_said_to_be_absent(self, tmp_path: pathlib.Path) -> None:
        """Absence differs from all other errors, and the message names the file."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        for name in ("nothing", "nothing/at/all", "_index/nothing"):
            for use in (
                lambda name: folder.read(name, 10),
                lambda name: list(folder.blocks(name, 10)),
                lambda name: folder.read_range(name, 0, 1),
            ):
                with raises(AbsentError, re.escape(name), f"{name}, which is not there"):
                    use(name)
            assert folder.read_if_there(name, 10) is None, f"{name}: found a file, expected None"
        for name in ("nothing", "nothing/at/all", "_index"):
            assert folder.stat(name) is None, f"{name}: found the size of a file, expected None"

    def test_names_are_listed(self, tmp_path: pathlib.Path) -> None:
        """Sorted, of one folder or of all below it; or not at all."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        if folder.list() is None:
            assert folder.list(deep=True) is None, "found names of all files, and none of those at the top"
            return
        compare(_names(folder), ["empty", "indexed", "manifest.json"], "names")
        compare(_names(folder, deep=True), sorted(_FOLDER_FILES), "names of all files")
        compare(_names(folder, "_index"), ["train.index"], "names in _index")
        compare(_names(folder, "_index", deep=True), ["deep/er", "train.index"], "names below _index")
        compare(_names(folder, "nothing"), [], "names in a folder that is not there")
        compare(_names(folder.child("_index"), "deep"), ["er"], "names in a folder of a folder")
        for name, found in (folder.list(deep=True) or {}).items():
            told = folder.stat(name)
            assert found in (told, told and told._replace(version="")), f"{name}: listed as {found}, expected {told}"

    def test_folder_in_a_folder_holds_its_files(self, tmp_path: pathlib.Path) -> None:
        """By their names relative to it."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        compare(folder.child("_index").read("deep/er", 10), b"deep", "_index, deep/er")
        place = folder.child("_index").place("deep/er")
        compare(place, folder.place("_index/deep/er"), "place of a file in a folder of the folder")

    def test_names_do_not_leave_the_folder(self, tmp_path: pathlib.Path) -> None:
        """They may come from an untrusted manifest."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path).child("_index")
        for name in (
            "../manifest.json",
            "deep/../../manifest.json",
            "/etc/hostname",
            "",
            ".",
            "deep//er",
            "deep/",
            "a\0",
        ):
            for use in (
                lambda name: folder.read(name, 10),
                lambda name: folder.read_range(name, 0, 1),
                lambda name: folder.write(name, b""),
                lambda name: folder.write_file(name, __file__),
                folder.delete,
                folder.stat,
                folder.child,
            ):
                with raises(OptionError, "", f"the name {name!r}"):
                    use(name)

    def test_odd_names_are_names(self, tmp_path: pathlib.Path) -> None:
        """Spaces, punctuation and letters of any language are read and written unchanged."""
        files = {name: name.encode() for name in ("a b", "ü/é", "100%", "a%20b", "a+b&c", "'", "q#x", "x" * 200)}
        folder = self.make_folder(files, tmp_path)
        for name, content in files.items():
            compare(folder.read(name, 1000), content, f"content of {name!r}")
        if folder.list() is not None:
            compare(_names(folder, deep=True), sorted(files), "names")
        if self.is_writable:
            folder = folder.child("written")
            for name, content in files.items():
                folder.write(name, content)
            compare({name: folder.read(name, 1000) for name in _names(folder, deep=True)}, files, "what was written")

    def test_local_path_leads_to_the_file(self, tmp_path: pathlib.Path) -> None:
        """If there is one."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        path = folder.local_path("_index/train.index")
        assert (path is None) == (folder.local_path() is None), "found a path of the file or of the folder, not of both"
        if path is not None:
            compare(path.read_bytes(), _FOLDER_FILES["_index/train.index"], "content of the file at local_path")

    def test_copy_reads_and_shows_no_secret(self, tmp_path: pathlib.Path) -> None:
        """A folder can be sent to other processes; neither its name nor an error contains credentials."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        compare(pickle.loads(pickle.dumps(folder)).read("manifest.json", 10), b"{}", "content, read by a pickled copy")
        said = f"{folder} {folder!r} {folder.place('manifest.json')}"
        try:
            folder.read("nothing", 10)
        except AbsentError as error:
            said += f"{error} {error.__cause__!r} {error.__context__!r}"
        try:
            folder.write("manifest.json", b"", ReplaceIf("nonsense"))
        except DatamatError as error:
            said += f"{error} {error.__cause__!r} {error.__context__!r}"
        shown = [secret for secret in self.secrets if secret in said]
        assert not shown, f"found {shown} in a message, expected no secrets"

    def test_forked_process_reads(self, tmp_path: pathlib.Path) -> None:
        """So do its threads, and afterwards its parent."""
        folder = self.make_folder(_FOLDER_FILES, tmp_path)
        folder.read("manifest.json", 10)
        _in_forks(_read_in_threads, folder)
        _read_in_threads(folder)

    # ------------------------------------------------------------ writing

    def _writable_folder(self, files: Mapping[str, bytes], tmp_path: pathlib.Path) -> Folder:
        """Return the result of `make_folder`; skip the test if such folders cannot be written to."""
        if not self.is_writable:
            raise unittest.SkipTest("the folder cannot be written")
        return self.make_folder(files, tmp_path)

    def test_written_file_is_there(self, tmp_path: pathlib.Path) -> None:
        """With the size and version that the write returned; each new content has another version."""
        folder = self.make_folder({} if self.is_writable else {"a": b""}, tmp_path)
        if not self.is_writable:
            for refused in (lambda: folder.write("a", b""), lambda: folder.delete("a"), lambda: folder.copy("a", "b")):
                with raises(OptionError, "can be read, not written", "a write"):
                    refused()
            return
        versions = set()
        for content in (b"one", b"two", b"", b"one more", bytes(range(256)) * 4000):
            version = folder.write("new/deep/file", content)
            versions.add(version)
            compare(folder.stat("new/deep/file"), Stat(len(content), version), "size and version of a written file")
            compare(folder.read("new/deep/file", 1 << 20), content, "content of a written file")
        compare(len(versions), 5, "distinct versions of a file that was written five times")
        compare(_names(folder, deep=True), ["new/deep/file"], "names after writing")

    def test_file_is_whole_whenever_it_is_read(self, tmp_path: pathlib.Path) -> None:
        """While it is replaced over and over, readers find either the old content or the new."""
        contents = [bytes([number]) * (100_000 * (number + 1)) for number in range(2)]
        folder = self._writable_folder({"file": contents[0]}, tmp_path)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            writing = pool.submit(lambda: [folder.write("file", contents[number % 2]) for number in range(20)])
            is_done = False
            while not is_done:
                is_done = writing.done()
                found = folder.read("file", 1 << 20)
                assert found in contents, f"found {len(found)} bytes of a file while it is replaced, expected all"
            writing.result()

    def test_file_is_created_once(self, tmp_path: pathlib.Path) -> None:
        """Later attempts are rejected in any thread or process; after a lost response, the content tells who won."""
        folder = self._writable_folder({}, tmp_path)
        folder.write("file", b"one", "create")
        with raises(ExistsError, "file", "a second creation"):
            folder.write("file", b"two", "create")
        for content, expected in [(b"one", True), (b"two", False), (b"o", False), (b"one more", False)]:
            compare(create_once(folder, "file", content), expected, f"creation of {content!r} over b'one'")
        compare(folder.read("file", 10), b"one", "content of a file that was created once")
        if "create" not in folder.keeps:
            return
        _in_forks(_create, folder, () if folder.is_private else range(4))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(_create, [folder] * 4, range(4, 8)))
        won = [name for name in _names(folder) if name.startswith("won")]
        compare(won, [f"won by {folder.read('race', 10).decode()}"], "who created a file that eight wanted to create")

    def test_version_is_replaced_once(self, tmp_path: pathlib.Path) -> None:
        """Naming any version but the latest is rejected; of several writers that name the latest, one succeeds."""
        folder = self._writable_folder({}, tmp_path)
        first = folder.write("file", b"one")
        last = folder.write("file", b"two", ReplaceIf(first))
        for name, version in [("file", first), ("file", "nonsense"), ("file", ""), ("nothing", last)]:
            with raises(ChangedError, name, f"a replacement of the version {version!r}"):
                folder.write(name, b"three", ReplaceIf(version))
        compare((folder.read("file", 10), folder.stat("nothing")), (b"two", None), "content after refused replacements")

        def replace(number: int) -> str:
            with contextlib.suppress(ChangedError):
                return folder.write("file", str(number).encode(), ReplaceIf(last))
            return ""

        if "replace_if" in folder.keeps:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                won = [number for number, version in enumerate(pool.map(replace, range(8))) if version]
            compare(won, [int(folder.read("file", 10))], "who replaced a version that eight wanted to replace")

    def test_file_of_the_disk_is_written(self, tmp_path: pathlib.Path) -> None:
        """Of any size, under the same conditions as every write."""
        folder = self._writable_folder({}, tmp_path)
        for name, size in (("small", 10), ("empty", 0), ("large", self.large_bytes)):
            content = random.Random(size).randbytes(size)
            (tmp_path / name).write_bytes(content)
            version = folder.write_file(f"to/{name}", tmp_path / name, "create")
            compare(folder.stat(f"to/{name}"), Stat(size, version), f"{name}: size and version")
            compare(folder.read(f"to/{name}", size), content, f"{name}: content")
            with raises(ExistsError, name, f"a second creation of the {name} file"):
                folder.write_file(f"to/{name}", tmp_path / name, "create")
            with raises(ChangedError, name, f"a replacement of another version of the {name} file"):
                folder.write_file(f"to/{name}", tmp_path / name, ReplaceIf("nonsense"))
            folder.write_file(f"to/{name}", tmp_path / name, ReplaceIf(version))
        folder.write_file("to/small", tmp_path / "large")
        compare(folder.read("to/small", self.large_bytes), content, "content of a replaced file")

    def test_file_is_copied(self, tmp_path: pathlib.Path) -> None:
        """A file of the target name is replaced; the copy stays when the original goes."""
        folder = self._writable_folder(_FOLDER_FILES, tmp_path)
        content = _FOLDER_FILES["_index/train.index"]
        for target in ("new/copy", "empty", "new/copy"):
            folder.copy("_index/train.index", target)
            compare(folder.read(target, 1 << 20), content, f"{target}: content of a copy")
        with raises(AbsentError, "nothing", "a copy of nothing"):
            folder.copy("nothing", "empty")
        folder.write("_index/train.index", b"another")
        folder.delete("_index/train.index")
        compare(folder.read("empty", 1 << 20), content, "content of a copy of a file that is gone")
        compare(_names(folder, "new"), ["copy"], "names beside a copy")

    def test_file_is_deleted(self, tmp_path: pathlib.Path) -> None:
        """And no other; deleting a missing file does nothing."""
        folder = self._writable_folder(_FOLDER_FILES, tmp_path)
        for name in ("_index/deep/er", "_index/deep/er", "nothing", "nothing/at/all"):
            folder.delete(name)
        compare(_names(folder, deep=True), sorted({*_FOLDER_FILES} - {"_index/deep/er"}), "names after one was deleted")
        compare(folder.stat("_index/deep/er"), None, "stat of a deleted file")
        folder.write("_index/deep/er", b"again", "create")
        compare(folder.read("_index/deep/er", 10), b"again", "content of a file that was created again")

    def test_forked_process_writes(self, tmp_path: pathlib.Path) -> None:
        """Its parent reads what it wrote, and so does a process forked later."""
        folder = self._writable_folder({}, tmp_path)
        if folder.is_private:
            return
        folder.write("file", b"of the parent")
        _in_forks(_write_and_copy, folder)
        for name in ("of a child", "of the disk", "copy"):
            compare(folder.read(name, 100), b"of a child", f"{name}: content")
        compare(folder.stat("file"), None, "stat of a file that a child deleted")


def _names(folder: Folder, below: str = "", *, deep: bool = False) -> list[str]:
    return [*(folder.list(below, deep=deep) or ())]


def _in_forks(function: Callable[..., object], folder: Folder, numbers: Iterable[int | None] = (None,)) -> None:
    """Call a function in a forked process for each number; do nothing if the platform cannot fork."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=function, args=(folder,) if number is None else (folder, number)) for number in numbers
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0, f"found exit code {child.exitcode} of a forked process, expected 0"


def _read_in_threads(folder: Folder) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: folder.read("_index/train.index", 1 << 20), range(16)))
    compare(found, {_FOLDER_FILES["_index/train.index"]}, "content, read by several threads")


def _create(folder: Folder, number: int) -> None:
    """Create a file, and record it if this process was the first."""
    if create_once(folder, "race", str(number).encode()):
        folder.write(f"won by {number}", b"")


def _write_and_copy(folder: Folder) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"of a child")
        file.flush()
        folder.write_file("of the disk", file.name, "create")
    folder.write("of a child", b"of a child", "create")
    folder.copy("of the disk", "copy")
    folder.delete("file")
