"""The ledger: what happened to an output, one line of JSON per event, in `.datamat/ledger.jsonl`.

    {"time": "2026-11-21T07:30:00.123Z", "run": "5f0c9a1e", "event": "sample_skipped", "key": "0001", ...}

It tells the story; the truth lies in receipts and the manifest. Only the process that runs the job writes it, each line
in one `write` to the end of the file, so that another process may read it meanwhile. A kill can tear the last line: a
reader passes over it, and the next run begins on a line of its own.

EVENT               WHAT ITS LINE ALSO TELLS
run_started         versions, options, host, pid
part_committed      shard, part, rows, records, bytes, busy_s
sample_skipped      shard, position, key, error, message, attempts; so do sample_quarantined and sample_retried
sample_mended       a sample that was in quarantine and is good now: shard, key
sample_failed       the sample that ended the run: key, message
sample_timeout      shard, part, key, message with the stack; so does worker_died
deadline_reached    rows and records that are done; so does disk_reached
interrupted         error, message; so does run_failed
run_finished        is_complete, rows, failed, records, bytes, elapsed_s
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from datamat.errors import CorruptDataError, OutputError, SampleError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["LEDGER_FILE", "FailedRow", "Ledger", "LedgerEntry", "read_ledger", "recorded"]

LEDGER_FILE = "ledger.jsonl"
_LONGEST_TEXT = 4000  # of a message, in characters: a stack fits, a tensor that somebody printed does not


@dataclasses.dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that gave no record, or did so only when it was tried again.

    Attributes:
        position: in the order of the plan.
        key: of the row.
        error: class of the error.
        message: what went wrong.
        action: "skip", "quarantine" or "retry": what was done about it.
        attempts: how often it was tried.
    """

    position: int
    key: str
    error: str
    message: str
    action: str
    attempts: int = 1

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"

    @property
    def event(self) -> str:
        """What the ledger calls it."""
        return {"skip": "sample_skipped", "quarantine": "sample_quarantined", "retry": "sample_retried"}[self.action]

    def told(self) -> dict[str, Any]:
        """Return what the ledger tells of it."""
        return {name: getattr(self, name) for name in ("position", "key", "error", "message", "attempts")}


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One line of the ledger.

    Attributes:
        time: when it was written, in UTC, by the clock of the machine that ran.
        run: id of the run, eight hex digits.
        event: what happened.
        values: what else the line tells, by name.
    """

    time: datetime.datetime
    run: str
    event: str
    values: Mapping[str, Any]


class Ledger:
    """Appends to a ledger.

    Args:
        path: the file, made if missing.

    Raises:
        OutputError: it cannot be written, or is a link.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.run = os.urandom(4).hex()
        self._path = path
        # O_NOFOLLOW: a link planted there would have us append to a file elsewhere.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._refused(error) from error
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise OutputError(f"{path} is not a regular file; datamat keeps its ledger there: remove it")
        size = found.st_size
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, event: str, **values: Any) -> None:
        """Append one line.

        Args:
            event: what happened.
            values: what else there is to tell: JSON values; long text is cut.
        """
        self.write_all(event, [values])

    def write_all(self, event: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append a line for each entry, all of the same event, in one write.

        Raises:
            OutputError: the disk does not take them.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = {"time": now, "run": self.run, "event": event}
        data = "".join(f"{json.dumps({**head, **_cut(entry)})}\n" for entry in entries).encode("ascii")
        self._append(b"\n" + data if self._is_torn else data)

    def sync(self) -> None:
        """Flush what was written to the disk."""
        with contextlib.suppress(OSError):  # a disk that fails is told by what failed for it
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
            f"{self._path} cannot be written: {error.strerror or error}; make room or give a folder that can be written"
        )


@contextlib.contextmanager
def recorded(path: pathlib.Path, **started: Any) -> Iterator[Ledger]:
    """Tell a ledger that a run starts, and how it ends if an error ends it.

    Args:
        path: the ledger.
        started: what to tell of the start.

    Yields:
        The ledger.
    """
    ledger = Ledger(path)
    try:
        ledger.write("run_started", **started)
        yield ledger
    except BaseException as error:
        event = "run_failed" if isinstance(error, Exception) else "interrupted"
        with contextlib.suppress(OutputError):  # the disk may be what failed
            if isinstance(error, SampleError):
                ledger.write("sample_failed", key=error.key, message=error.reason)
            ledger.write(event, error=type(error).__name__, message=str(error))
        raise
    finally:
        ledger.close()


def read_ledger(path: str | os.PathLike[str]) -> Iterator[LedgerEntry]:
    """Yield the lines of a ledger, oldest first; it may be written meanwhile.

    A line that a kill or a full disk tore is passed over: the last one, or one that the start of the next run or the
    failure of its own follows.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
        CorruptDataError: a line is not one that datamat wrote; names it.

    Example:
        >>> [entry.event for entry in read_ledger("out/camvid/.datamat/ledger.jsonl")]   # doctest: +SKIP
        ['run_started', 'part_committed', 'run_finished']
    """
    with open(path, "rb") as file:
        bad: CorruptDataError | None = None
        for number, line in enumerate(file, start=1):
            try:
                entry = _parsed(line)
            except (ValueError, KeyError, TypeError) as error:
                if bad is not None:
                    raise bad from error
                bad = CorruptDataError(f"{os.fspath(path)}, line {number}: {error}; want a line that datamat wrote")
                continue
            if bad is not None and entry.event not in {"run_started", "run_failed"}:
                raise bad
            bad = None
            yield entry


def _parsed(line: bytes) -> LedgerEntry:
    if not line.endswith(b"\n"):
        raise ValueError("it is cut off")
    found = json.loads(line)
    time = datetime.datetime.fromisoformat(found.pop("time"))
    run, event = found.pop("run"), found.pop("event")
    if not (isinstance(run, str) and isinstance(event, str) and time.tzinfo):
        raise ValueError("time, run or event is not what it should be")
    return LedgerEntry(time, run, event, found)


def _cut(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _cut_text(value) if isinstance(value, str) else value for name, value in values.items()}


def _cut_text(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ... ({len(text):,} characters)"
