"""What is kept of a sample that failed, for whoever wants to know why: `.datamat/quarantine/SPLIT/KEY/`.

    image-0001TP_006690.png    the very bytes of each input file that can be read, as FIELD-NAME
    traceback.txt              where it failed
    sample.json                key, split, fields, error, and where the files lay

A sample appears there whole or not at all, and replaces what was kept of an earlier failure of the same key.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.codecs import read_file
from datamat.errors import InputError, OutputError

if TYPE_CHECKING:
    import pathlib

    from datamat.index import IndexRow
    from datamat.ledger import FailedRow

__all__ = ["QUARANTINE_FOLDER", "kept_names", "quarantine", "release", "safe_name"]

QUARANTINE_FOLDER = "quarantine"
_LARGEST_FILE = 64 << 20
_LONGEST_NAME = 100  # bytes of a key or name that are kept in a file name, which may have 255
_PLAIN = re.compile(r"[\w=+@,~ -][\w.=+@,~ -]*\Z")


def quarantine(work: pathlib.Path, row: IndexRow, failed: FailedRow, traceback: str) -> None:
    """Keep a sample that failed.

    Args:
        work: the `.datamat` folder.
        row: of the sample, with paths that can be opened.
        failed: what went wrong.
        traceback: where, as text.

    Raises:
        OutputError: it cannot be written.
    """
    folder = work / QUARANTINE_FOLDER / safe_name(row.split or "none")
    final = folder / safe_name(row.key)
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    try:
        _refuse_links(work / QUARANTINE_FOLDER, folder)
        folder.mkdir(parents=True, exist_ok=True)
        _make_anew(temporary)
        files = {name: _keep(temporary, name, path) for name, path in _paths(row)}
        _write(temporary / "traceback.txt", traceback.encode(errors="backslashreplace"))
        sample = {**failed.told(), "split": row.split, "origin": row.origin, "fields": dict(row.fields), "files": files}
        _write(temporary / "sample.json", json.dumps(sample, indent=1).encode() + b"\n")
        try:
            os.rename(temporary, final)
        except OSError:  # of an earlier failure
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"{final}: sample {row.key!r} cannot be kept: {error.strerror or error}; make room, or skip bad samples "
            "with ErrorPolicy('skip')"
        ) from error


def kept_names(work: pathlib.Path, split: str) -> set[str]:
    """Return the names under which samples of a split are kept."""
    folder = work / QUARANTINE_FOLDER / safe_name(split)
    _refuse_links(work / QUARANTINE_FOLDER, folder)
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def release(work: pathlib.Path, split: str, key: str) -> None:
    """Remove what is kept of a sample that is good now."""
    shutil.rmtree(work / QUARANTINE_FOLDER / safe_name(split) / safe_name(key), ignore_errors=True)


def safe_name(text: str) -> str:
    """Return a name for a file that tells the text, and differs for every text."""
    if _PLAIN.match(text) and len(text.encode()) <= _LONGEST_NAME:
        return text
    cut = text.encode(errors="replace")[:_LONGEST_NAME].decode(errors="ignore")
    plain = re.sub(r"[^\w=+@,~-]", "_", cut)
    return f"{plain}-{xxhash.xxh3_64_hexdigest(text.encode(errors='surrogatepass'))}"


def _make_anew(folder: pathlib.Path) -> None:
    try:
        folder.mkdir()
    except FileExistsError:  # left by a killed process that had our number; something else, be it a link, is refused
        shutil.rmtree(folder)
        folder.mkdir()


def _paths(row: IndexRow) -> list[tuple[str, str]]:
    """Return the fields that are paths of files: what the row store has made absolute, or what exists."""
    texts = [(name, value) for name, value in row.fields.items() if isinstance(value, str) and value]
    return [(name, value) for name, value in texts if os.path.isabs(value) or os.path.isfile(value)]


def _keep(folder: pathlib.Path, field: str, path: str) -> dict[str, Any]:
    """Copy an input file; return where it was and what became of it."""
    base = os.path.basename(path)
    name = safe_name(f"{field}-{base}")
    try:
        data = read_file(path, max_bytes=_LARGEST_FILE)
    except InputError as error:
        return {"path": path, "kept": None, "reason": str(error)}
    _write(folder / name, data)
    return {"path": path, "kept": name, "num_bytes": len(data)}


def _write(path: pathlib.Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)


def _refuse_links(*folders: pathlib.Path) -> None:
    for folder in folders:
        if folder.is_symlink():
            raise OutputError(f"{folder} is a link; datamat writes only below its output: remove it")
