"""The ledger: the history of an output, one line of JSON per event, in `.datamat/ledger.jsonl`.

    {"time": "2026-11-21T07:30:00.123Z", "run": "5f0c9a1e", "event": "sample_skipped", "key": "0001", ...}

It is only a history: receipts and the manifest are authoritative. Only the process that runs the job writes it,
appending each line with one `write`, so that other processes may read it meanwhile. A kill can tear the last line:
readers skip it, and the next run starts a new line.

EVENT               OTHER VALUES IN ITS LINE
run_started         versions, options, host, pid
part_committed      shard, part, rows, records, bytes, busy_s
part_damaged        shard, part, message; again: the numbers of the parts to rebuild
sample_skipped      shard, position, key, error, message, attempts, row, path, traceback; so does sample_quarantined
sample_retried      shard, position, key, error, message, attempts
sample_dropped      shard, position, key, error, message: intentionally left out, by Skip or None
samples_removed     shard, keys: rows and records dropped from the finished set in place
shard_lacks         the failed samples of a shard, before it gets its name: shard, checksum, keys
sample_mended       a quarantined sample that has since succeeded: shard, key
sample_failed       the sample that ended the run: key, message
sample_timeout      shard, part, key, message with the stack; so does worker_died
deadline_reached    finished rows and records; so does disk_reached
interrupted         error, message; so does run_failed
run_finished        is_complete, rows, failed, records, bytes, elapsed_s
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from datamat.errors import READ_FLAGS, CorruptDataError, OutputError
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from datamat.folders import Folder

_KEYS_PER_LINE = 10_000  # of the ledger
_MOST_BYTES = 1 << 40  # largest ledger
_MOST_LINE_BYTES = 1 << 24  # longer than any traceback; a file without line ends must not fill the memory
LEDGER_FILE = "ledger.jsonl"
_OF_ROWS = frozenset({"sample_skipped", "sample_quarantined", "sample_retried", "sample_dropped"})
_LONGEST_TEXT = 4000  # characters of a message: a stack fits, a printed tensor does not


@frozen()
class FailedRow:
    """A row that failed or succeeded only when retried; or a record that was intentionally left out.

    Attributes:
        position: position of the row in the plan.
        key: key of the row; of the record, if the row gave others.
        error: name of the error's class.
        message: description of the failure, or the reason for leaving it out.
        action: response to the failure: "skip", "quarantine" or "retry"; "drop" if there was none.
        attempts: number of attempts.
        row: number of the row in the index, from 0; -1 unless it failed.
        path: path or URL of its input file; "" unless it failed and has one.
        traceback: traceback of the error; "" unless one was raised.
    """

    position: int
    key: str
    error: str
    message: str
    action: str
    attempts: int = 1
    row: int = -1
    path: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """Return its values for the ledger; long text is cut."""
        return _cut({name: getattr(self, name) for name in ("position", "key", "error", "message", "attempts")})


@frozen()
class LedgerEntry:
    """One line of the ledger.

    Attributes:
        time: time of writing, in UTC, by the clock of the machine.
        run: id of the run, eight hex digits.
        event: name of the event.
        values: all other values of the line, by name.
    """

    time: datetime.datetime
    run: str
    event: str
    values: Mapping[str, Any]


class Ledger:
    """Appends to a ledger.

    Args:
        path: the file, created if missing.

    Raises:
        OutputError: it cannot be written, or is a link.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.run = os.urandom(4).hex()
        self._path = path
        # O_NOFOLLOW: a planted link would make us append to another file.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        no_file = f"{path} is not a regular file; datamat keeps its ledger there: move it away, or call repair()"
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except IsADirectoryError as error:
            raise OutputError(no_file) from error
        except OSError as error:
            raise self._refused(error) from error
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise OutputError(no_file)
        size = found.st_size
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, event: str, **values: Any) -> None:
        """Append one line.

        Args:
            event: name of the event, such as "part_committed".
            values: further JSON values to record; long text is cut.

        Raises:
            OutputError: it cannot be written.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"time": now, "run": self.run, "event": event, **_cut(values)})
        data = f"{line}\n".encode("ascii")
        self._append(b"\n" + data if self._is_torn else data)

    def write_keys(self, event: str, keys: Sequence[str], **values: Any) -> None:
        """Append lines of an event, each with some of many keys."""
        for start in range(0, len(keys), _KEYS_PER_LINE):
            self.write(event, **values, keys=list(keys[start : start + _KEYS_PER_LINE]))

    def recorded_rows(self) -> set[tuple[str, str, str, str]]:
        """Return event, shard, key and message of each row recorded since the last complete run.

        Unreadable lines count as not recorded: better twice than never.
        """
        found: set[tuple[str, str, str, str]] = set()
        with contextlib.suppress(OSError, CorruptDataError):
            for entry in read_ledger(self._path, without="part_committed"):
                if entry.event == "run_finished" and entry.values.get("is_complete"):
                    found.clear()
                elif entry.event in _OF_ROWS:
                    shard, key, message = (str(entry.values.get(name)) for name in ("shard", "key", "message"))
                    found.add((entry.event, shard, key, message))
        return found

    def sync(self) -> None:
        """Flush the ledger to disk."""
        with contextlib.suppress(OSError):  # other writes to the disk report its failure
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close."""
        self.sync()
        os.close(self._descriptor)

    def _append(self, data: bytes) -> None:
        try:
            while data:
                written = os.write(self._descriptor, data)
                self._is_torn = data[written - 1 : written] != b"\n"
                data = data[written:]
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> OutputError:
        return OutputError(
            f"{self._path} cannot be written: {error.strerror or error}; make room or give a writable folder"
        )


def read_ledger(path: str | os.PathLike[str], *, without: str = "") -> Iterator[LedgerEntry]:
    """Yield the entries of a ledger, oldest first; a run may append to it in the meantime.

    Lines torn by a kill or a full disk are skipped: the last one, and those followed by the start of the next run or
    the failure of their own.

    Args:
        path: the ledger, usually `OUTPUT/.datamat/ledger.jsonl`.
        without: an event to skip without parsing its lines, which saves most of the time if there are many parts.

    Raises:
        OSError: it cannot be read; `FileNotFoundError` if it is missing.
        CorruptDataError: a line is not from datamat; names it.

    Example:
        >>> [entry.event for entry in read_ledger("out/camvid/.datamat/ledger.jsonl")]   # doctest: +SKIP
        ['run_started', 'part_committed', 'run_finished']
    """
    descriptor = os.open(path, READ_FLAGS)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptDataError(f"{os.fspath(path)} is not a regular file; want a ledger that datamat wrote")
        lines = iter(functools.partial(file.readline, _MOST_LINE_BYTES), b"")
        yield from parse_ledger(lines, os.fspath(path), without=without)


def ledger_in(folder: Folder, name: str, *, without: str = "") -> Iterator[LedgerEntry]:
    """Yield the entries of a ledger in a folder, as `read_ledger` does; raise `AbsentError` if it is missing."""
    with contextlib.closing(folder.blocks(name, _MOST_BYTES)) as blocks:
        yield from parse_ledger(_lines_in(blocks), folder.place(name), without=without)


def _lines_in(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from (line + b"\n" for line in whole)
        if len(rest) >= _MOST_LINE_BYTES:  # too long for a ledger line, which the parser reports
            yield rest[:_MOST_LINE_BYTES]
            rest = b""
    if rest:
        yield rest


def parse_ledger(lines: Iterable[bytes], place: str, *, without: str = "") -> Iterator[LedgerEntry]:
    """Yield the entries in the lines of a ledger, as `read_ledger` does; errors name `place`."""
    bad: CorruptDataError | None = None
    left_out = f'"event": "{without}"'.encode()  # inside a value, its quotes would be escaped
    for number, line in enumerate(lines, start=1):
        if without and bad is None and left_out in line and line.endswith(b"\n"):
            continue
        try:
            entry = _parsed(line)
        except (ValueError, KeyError, TypeError) as error:
            if bad is not None:
                raise bad from error
            bad = CorruptDataError(f"{place}, line {number}: {error}; want a line that datamat wrote")
            continue
        if bad is not None and entry.event not in {"run_started", "run_failed"}:
            raise bad
        bad = None
        yield entry


def _parsed(line: bytes) -> LedgerEntry:
    if not line.endswith(b"\n"):
        raise ValueError("it is longer than any line" if len(line) == _MOST_LINE_BYTES else "it is cut off")
    found = json.loads(line)
    time = datetime.datetime.fromisoformat(found.pop("time"))
    run, event = found.pop("run"), found.pop("event")
    if not (isinstance(run, str) and isinstance(event, str) and time.tzinfo):
        raise ValueError("time, run or event is not as datamat writes it")
    return LedgerEntry(time, run, event, found)


def _cut(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cut_text(value) if isinstance(value, str) else value for name, value in values.items()}


def cut_text(text: str) -> str:
    """Return a text for the ledger: both ends of a long one, since a traceback ends with the error."""
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"
