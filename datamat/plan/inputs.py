"""Input files: digests of the content that was read, and files that were opened without being declared."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.directory.files import SPOOL, commit
from datamat.directory.keys import mix64
from datamat.errors import SourceError
from datamat.sources.fetching import fetchers, remedy
from datamat.sources.files import FileState, digest_files
from datamat.sources.store import INPUT
from datamat.sources.url_files import UrlFiles, is_path_of_url
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from datamat.codecs.files import Notes
    from datamat.directory.manifest import ShardFiles
    from datamat.plan.plan import ShardSpec
    from datamat.sources.store import RowStore

# ---------------------------------------------------------------- undeclared files
#
# Files that a worker opens but no row declares: edits of these go unnoticed, and the old shards stay.
#
#     worker, in its first part: setup_worker, read, augment, transform ── audit events "open" ──> paths
#                                those near the source and the code that no row declares ──> receipt
#     run:                       the first receipt that lists any ──> one warning
#
# An audit hook stays for the life of a process, so only workers get one, and it is idle after their first part; except
# for a source behind a URL, of which missing files must never be read, in any part or during indexing.
# It sees files that Python opens, connects to (SQLite), loads (ctypes) and starts (programs, with their file
# arguments), and files that C libraries hold open at the end of the part (HDF5), not those that they open and close
# (`cv2.imread`).


_CODE = (".py", ".pyc", ".pyi", ".pth", ".so", ".pyd", ".dylib", ".dll", ".egg-link")
_PACKAGES = ("site-packages", "dist-packages", "__pycache__")
_SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var/cache", "/var/lib")
_MOST_PATHS = 10_000
_WRITES = os.O_WRONLY | os.O_CREAT  # files opened for both are read as well, as in np.memmap(path)


@final
@frozen()
class Neighbourhood:
    """The places of files that may decide the content of records.

    Attributes:
        roots: folders whose files count, with links resolved.
        without: folders and files below a root that do not count.
    """

    roots: tuple[str, ...]
    without: tuple[str, ...]

    @classmethod
    def of(cls, source: Any, code: Iterable[Any], *, without: Iterable[str]) -> Neighbourhood:
        """Return the source, the folders of some code, and the working folder.

        Args:
            source: source of the run; anything but a path has no folder.
            code: functions and instances of classes possibly written by the user.
            without: further folders that do not count, such as the output.
        """
        found = [os.fspath(source)] if isinstance(source, (str, os.PathLike)) else []
        found += [folder for one in code if (folder := _folder_of_code(one))]
        found.append(os.getcwd())
        installed = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, sys.exec_prefix, *_SYSTEM}
        hidden = {os.path.realpath(path) for path in (*installed, *without)}
        # "/" would include everything; folders of installed packages are not the user's.
        roots = dict.fromkeys(os.path.realpath(path) for path in found if "://" not in path)
        return cls(tuple(root for root in roots if root != os.sep), tuple(sorted(hidden - set(roots))))

    def holds(self, path: str, *, is_run: bool = False) -> bool:
        """Return True if a file counts: below a root and not in a hidden folder; code only if it is run."""
        root = next((root for root in self.roots if _is_below(path, root)), None)
        is_imported = path.endswith(_CODE) and not is_run
        if root is None or is_imported or any(_is_below(path, other) for other in self.without):
            return False
        inner = pathlib.PurePath(path[len(root) :]).parts
        return not any(part.startswith((".", SPOOL)) or part in _PACKAGES for part in inner)


@final
class OpenedFiles:
    """Records the files that this process opens for reading, between `start` and `stop`."""

    def __init__(self, near: Neighbourhood) -> None:
        self._near = near
        self._paths: dict[str, bool] = {}
        self._held: set[str] = set()

    def start(self) -> None:
        """Record the files opened from now on, instead of any other object that does so."""
        global _listener, _is_hooked  # noqa: PLW0603 -- a hook belongs to the process, permanently
        if not _is_hooked:
            sys.addaudithook(_hear)
            _is_hooked = True
        self._held = set(_held_open())
        _listener = self._paths

    def stop(self) -> None:
        """Stop recording."""
        global _listener  # noqa: PLW0603 -- as above
        if _listener is self._paths:
            _listener = None
            self._paths |= dict.fromkeys([path for path in _held_open() if path not in self._held], False)

    def undeclared(self, declared: Iterable[Iterable[Iterable[str]]]) -> tuple[str, ...]:
        """Return the undeclared files that count, in the order of opening."""
        named = {path for row in declared for field in row for path in field}
        # Resolving links takes longer than reading a small file: most files are opened by their declared names.
        others = {os.path.realpath(path): is_run for path, is_run in self._paths.items() if path not in named}
        near = [path for path, is_run in others.items() if self._near.holds(path, is_run=is_run)]
        known = {os.path.realpath(path) for path in named} if near else set()
        return tuple(path for path in near if not _is_among(path, known) and os.path.isfile(path))


@contextlib.contextmanager
def placeholders_refused(declared: Callable[[], Iterable[Iterable[Iterable[str]]]] = tuple) -> Iterator[None]:
    """Refuse results of the block if it opened unfetched files of a mirror: root can read them, as zeros.

    Raises:
        SourceError: a file was opened that is not here; says how to declare it.
    """
    mirrors = [folder for folder, files in fetchers().items() if not isinstance(files, UrlFiles)]
    if not mirrors:
        yield
        return
    before, opened = declared(), OpenedFiles(Neighbourhood(tuple(map(os.path.realpath, mirrors)), ()))
    opened.start()
    try:
        yield
    finally:
        opened.stop()
    if said := next(filter(None, map(remedy, opened.undeclared(before))), ""):
        raise SourceError(f"a file was opened that is not here: {said}")


_listener: dict[str, bool] | None = None
"""The opened paths, each with a flag for programs that are run and libraries loaded by ctypes."""
_is_hooked = False


def _hear(event: str, args: tuple[Any, ...]) -> None:
    # Called for every audit event of the process: after the first part, each costs only the first comparison.
    if _listener is None or event not in _EVENTS or len(_listener) >= _MOST_PATHS:
        return
    try:
        paths, is_run = _EVENTS[event](*args), event not in {"open", "sqlite3.connect"}
        for path in paths:
            if isinstance(path, (str, bytes)):
                _listener.setdefault(os.path.abspath(os.fsdecode(path)), is_run)
    except Exception:  # noqa: BLE001 -- the working folder is gone, or another kind of call: it would be raised by `open`
        return


def _started(command: Any, folder: Any = None) -> Iterator[str]:
    """Yield the files in a command, including the program."""
    words = [command] if isinstance(command, (str, bytes)) else command
    for word in (part for each in words for part in os.fsdecode(each).split()):
        path = os.path.join(os.fsdecode(folder or ""), word)
        if os.path.isfile(path):
            yield path


_EVENTS: dict[str, Callable[..., Iterable[Any]]] = {
    "open": lambda path, mode, flags: () if flags & _WRITES else (path,),
    "sqlite3.connect": lambda name: [os.fsdecode(name).removeprefix("file:").partition("?")[0]],
    "ctypes.dlopen": lambda name: [name],
    "os.system": _started,
    "subprocess.Popen": lambda program, args, folder, env: _started(args, folder),
}
"""Audit events that read files, each with the function that finds the paths in its arguments."""


def _held_open() -> Iterator[str]:
    """Yield the files that this process holds open for reading, as far as the system lists them."""
    with contextlib.suppress(OSError):
        numbers = os.listdir("/proc/self/fd")
        import fcntl

        for number in numbers:
            with contextlib.suppress(OSError, ValueError):
                path = os.readlink(f"/proc/self/fd/{number}")
                if path.startswith(os.sep) and not fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_WRONLY:
                    yield path


def _is_among(path: str, known: set[str]) -> bool:
    return path in known or any(str(folder) in known for folder in pathlib.PurePath(path).parents)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _folder_of_code(one: Any) -> str:
    """Return the folder of the module of a function, or of the class of an instance."""
    name = getattr(one, "__module__", None)
    name = name if isinstance(name, str) else type(one).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    folder = os.path.dirname(os.path.realpath(file)) if isinstance(file, str) else ""
    is_installed = set(pathlib.PurePath(folder).parts) & set(_PACKAGES)
    return "" if is_installed or name.partition(".")[0] == "datamat" else folder


# ---------------------------------------------------------------- declared files
#
# Digests of the content of input files when they were read, so that times alone decide nothing.
#
#   worker   each file of a part: its size and time, and the digest of what was read ─────────> NNNNN.inputs, receipt
#   driver   finished part or shard ── its times are the present ones ────────────────────────> its files are the same
#                                  └── else the present digests, known or computed, decide ───┘
#
# If size and time have not changed, digests come from earlier runs: `.datamat/inputs` holds those of the finished
# dataset, `*.inputs` those of parts and shards. This only saves reading files again. Digests in receipts, shard entries
# and the manifest decide. Times are stored only in `.datamat`.


_FILE = "inputs"
_MOST_REMEMBERED = 10_000
_BATCH_ROWS = 65_536
_THREADS = 8
_UNKNOWN = np.zeros((), "V16")
_CHANGED = -1  # time stamp of a file that changed while it was read


class PartInputs:
    """The input files of the rows of a part, as read by a worker.

    Args:
        store: rows of the run, with the paths.
        positions: row numbers of the rows of the part, in order.
        remembered: digests of files that this process has read, by path, size and time stamp; a file shared by many
            rows is hashed once.
    """

    def __init__(
        self, store: RowStore, positions: np.ndarray, remembered: dict[tuple[tuple[str, ...], int, int], bytes]
    ) -> None:
        self._largest = store.largest_hashed
        self._known: list[list[tuple[int, int, int, bytes]]] = store.inputs(positions).tolist()
        self._paths = store.input_paths(positions)
        # For URLs, the state that counts is known before they are fetched.
        self._are_urls = [[is_path_of_url(files) for files in row] for row in self._paths]
        self._found = [
            [one if of_url else (*one[:3], b"") for one, of_url in zip(row, of_urls, strict=True)]
            for row, of_urls in zip(self._known, self._are_urls, strict=True)
        ]
        self._is_single = [field.kind != "json" for field in store.file_fields]
        self._remembered = remembered
        self.is_as_indexed = True

    def settle(self, number: int, notes: Notes) -> bool:
        """Return True if the files of a row did not change while it was read; otherwise it must be read again."""
        is_settled = True
        for place, paths in enumerate(self._paths[number]):
            if not paths or self._are_urls[number][place] or not self._is_single[place]:
                continue
            path, size, stamp, _ = self._found[number][place]
            now = notes.get(paths[0]) or _now(paths[0])
            if now is None:  # a folder
                continue
            if now[:2] != (size, stamp):
                self.is_as_indexed = False
                is_settled = is_settled and bool(now[2])
            self._found[number][place] = (path, *now)
        return is_settled

    def keep(self, number: int) -> None:
        """Keep the recorded state of a row whose records are reused."""
        self._found[number] = [(*one[:3], one[3] if any(one[3]) else b"") for one in self._known[number]]

    def finish(self) -> np.ndarray:
        """Return `INPUT` (n, fields): the content of all files."""
        for number, paths in enumerate(self._paths):
            for place, files in enumerate(paths):
                if files and not self._found[number][place][3]:
                    hashed = self._hashed(self._found[number][place], files, is_single=self._is_single[place])
                    self._found[number][place] = hashed
        return np.array([one for row in self._found for one in row], INPUT).reshape(len(self._paths), -1)

    def _hashed(
        self, found: tuple[int, int, int, bytes], paths: Sequence[str], *, is_single: bool
    ) -> tuple[int, int, int, bytes]:
        path, size, stamp, _ = found
        name = (tuple(paths), size, stamp)
        if name not in self._remembered:
            digest = digest_files(paths, FileState(size, stamp), is_single=is_single, largest=self._largest)
            if digest is None:
                self.is_as_indexed = False
                return path, size, _CHANGED, b""
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            self._remembered[name] = digest
        return path, size, stamp, self._remembered[name]


class InputFiles:
    """The known state of a plan's input files, which decides whether finished work is up to date.

    Args:
        store: the rows, in the order of the plan.
        work: the `.datamat` folder of the directory.

    Attributes:
        has_files: whether rows have input files at all.
    """

    def __init__(self, store: RowStore, work: pathlib.Path) -> None:
        self._store = store
        self._work = work
        self.has_files = bool(store.file_fields)
        self._hashed: list[np.ndarray] = []
        self._has_recalled = False
        self._same: dict[tuple[int, int, str, str], bool] = {}

    def stand(self, shard: ShardSpec, files: ShardFiles) -> bool:
        """Return True if a finished shard has the planned fingerprint and the same input files."""
        if any(info.fingerprint != shard.fingerprint for info in files):
            return False
        return all(self.are_same(shard.start, shard.stop, info.inputs) for info in files)

    def are_same(self, start: int, stop: int, content: str, times: str = "") -> bool:
        """Return True if the files of rows have the content from which records were made.

        Args:
            start: position of the first row in the plan.
            stop: one past the position of the last row.
            content: digest of the content at that time.
            times: digest of the rows with sizes and times at that time; "" if unknown.
        """
        if not self.has_files:
            return True
        asked = (start, stop, content, times)
        if asked not in self._same:
            is_untouched = bool(times) and bool(content) and times == self._store.times(start, stop)
            self._same[asked] = is_untouched or content == content_digest(self.records(start, stop))
        return self._same[asked]

    def records(self, start: int, stop: int) -> np.ndarray:
        """Return `INPUT` (n, fields): the present files of rows; files with unknown digests are read."""
        if not self._has_recalled and self._store.identity != "content":
            self._recall()
        rows = self._store.order[start:stop]
        found = self._store.inputs(rows)
        missing = _are_unknown(found)
        if missing.any():
            self._hash(found, missing, rows)
            self._store.set_digests(rows, found["digest"])
        return found

    def _recall(self) -> None:
        """Look up the digests of all rows' files from earlier runs, all at once, since each shard needs its own."""
        self._has_recalled = True
        memory = _Memory(self._remembered())
        for start in range(0, len(self._store) if len(memory) else 0, _BATCH_ROWS):
            rows = np.arange(start, min(start + _BATCH_ROWS, len(self._store)))
            found = self._store.inputs(rows)
            missing = _are_unknown(found)
            if missing.any():
                found["digest"][missing] = memory.digests_of(found[missing])
                self._store.set_digests(rows, found["digest"])

    def remember(self, found: Iterable[np.ndarray]) -> None:
        """Save sizes, times and digests of the input files of a finished dataset, discarding others.

        Args:
            found: `INPUT` arrays of any shape: sizes, times and digests.
        """
        if self.has_files and self._store.identity != "content":
            inputs = np.concatenate([some.ravel() for some in found])
            inputs = inputs[(inputs["path"] > 0) & (inputs["stamp"] != _CHANGED)]
            self._write(inputs[np.unique(_names(inputs), return_index=True)[1]])  # many rows may share a file
        self._hashed.clear()

    def save(self) -> None:
        """Save the digests of files that were read because their times have changed, beside the others."""
        if not self._hashed:
            return
        new = np.concatenate(self._hashed)
        old = read_inputs(self._work / _FILE)
        self._write(np.concatenate([old[~np.isin(old["path"], new["path"])], new]))
        self._hashed.clear()

    def _write(self, inputs: np.ndarray) -> None:
        # Through `shards`, which is removed at the end of a run, with any leftovers of a killed process.
        through = self._work / "shards"
        through.mkdir(exist_ok=True)
        with commit(self._work / _FILE, through=through) as file:
            file.write(inputs.tobytes())

    def _hash(self, found: np.ndarray, missing: np.ndarray, rows: np.ndarray) -> None:
        """Read each file without a digest once, and fill in the digests."""
        fields = self._store.file_fields
        places = np.argwhere(missing)
        if not len(places):
            return
        paths = self._store.input_paths(rows[places[:, 0]])
        named = [tuple(paths[number][place]) for number, (_, place) in enumerate(places.tolist())]
        first: dict[tuple[str, ...], int] = {}
        for number, name in enumerate(named):
            first.setdefault(name, number)

        def digest(number: int) -> bytes:
            row, place = places[number].tolist()
            _, size, stamp, _ = found[row, place].tolist()
            is_single = fields[place].kind != "json"
            return digest_files(
                named[number], FileState(size, stamp), is_single=is_single, largest=self._store.largest_hashed
            ) or bytes(16)

        with ThreadPoolExecutor(_THREADS) as pool:
            try:
                digests = dict(zip(first, pool.map(digest, first.values()), strict=True))
            except BaseException:  # above all an interrupt: do not wait for calls that have not begun
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for name, (row, place) in zip(named, places.tolist(), strict=True):
            found["digest"][row, place] = np.frombuffer(digests[name], "V16")[0]
        if self._store.identity != "content":
            self._hashed.append(found[missing])

    def _remembered(self) -> Iterable[np.ndarray]:
        """Yield the digests of earlier runs, oldest first."""
        for pattern in ("shards/*.inputs", "parts/*/*.inputs"):
            for path in sorted(self._work.glob(pattern)):
                yield read_inputs(path)
        yield read_inputs(self._work / _FILE)


class _Memory:
    """Digests by path, size and time stamp."""

    def __init__(self, found: Iterable[np.ndarray]) -> None:
        known = np.concatenate([np.zeros(0, INPUT), *found])
        known = known[(known["digest"] != _UNKNOWN) & (known["stamp"] != _CHANGED)]
        names = _names(known)
        order = np.argsort(names, kind="stable")
        self._names = names[order]
        self._digests = known["digest"][order]

    def __len__(self) -> int:
        return len(self._names)

    def digests_of(self, inputs: np.ndarray) -> np.ndarray:
        """Return V16 (n,): the digests of input files, 0 if unknown. Requires that any are known."""
        wanted = _names(inputs)
        places = np.maximum(np.searchsorted(self._names, wanted, side="right") - 1, 0)  # the last, which is the newest
        found: np.ndarray = self._digests[places]
        found[self._names[places] != wanted] = _UNKNOWN
        return found


def _names(inputs: np.ndarray) -> np.ndarray:
    """Return uint64 (n,): hash of path, size and time stamp."""
    names: np.ndarray = inputs["path"].copy()
    for what in ("size", "stamp"):
        with np.errstate(over="ignore"):
            names = mix64(names * np.uint64(0x9E3779B97F4A7C15) + inputs[what].astype(np.uint64))
    return names


def read_inputs(path: pathlib.Path) -> np.ndarray:
    """Return the `INPUT`s in a file; empty if it is missing or incomplete."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        if len(data) % INPUT.itemsize == 0:
            return np.frombuffer(data, INPUT)
    return np.zeros(0, INPUT)


def _are_unknown(inputs: np.ndarray) -> np.ndarray:
    """Return bool of the same shape: whether the content of a file is unknown."""
    unknown: np.ndarray = (inputs["path"] > 0) & (inputs["digest"] == _UNKNOWN)
    return unknown


def content_digest(inputs: np.ndarray) -> str:
    """Return the digest of the content of files, in order; "" if that of one is unknown."""
    if _are_unknown(inputs).any():
        return ""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(inputs["digest"]).tobytes())


def _now(path: str) -> tuple[int, int, bytes] | None:
    """Return the size and time of a file, without a digest; None for a folder."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, _CHANGED, b""
    return None if stat.S_ISDIR(found.st_mode) else (found.st_size, found.st_mtime_ns, b"")
