"""The quarantine: evidence of each failed sample, in `.datamat/quarantine/SPLIT/KEY/`.

    image-0001TP_006690.png    a copy of each readable input file, as FIELD-NAME
    traceback.txt              the traceback of the error
    sample.json                key, split, fields, error and the path of each file

A sample appears there complete or not at all, and replaces an earlier one with the same key.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.codecs import read_file
from datamat.directory.row_values import nested_paths
from datamat.errors import InputError, OutputError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

    from datamat.directory.ledger import FailedRow
    from datamat.sources.rows import IndexRow

QUARANTINE_FOLDER = "quarantine"
_LARGEST_FILE = 64 << 20
_LONGEST_NAME = 100  # bytes of a key or name in a file name, whose limit is 255
_PLAIN = re.compile(r"[\w=+@,~ -][\w.=+@,~ -]*\Z")


def quarantine(work: pathlib.Path, row: IndexRow, failed: FailedRow, traceback: str) -> None:
    """Keep the evidence of a failed sample.

    Args:
        work: `.datamat` folder of the output.
        row: row of the sample, with paths that can be opened.
        failed: the row's ledger entry: error, message, number of attempts.
        traceback: traceback of the error, as text.

    Raises:
        OutputError: the sample cannot be written.
    """
    folder = work / QUARANTINE_FOLDER / safe_name(row.split or "none")
    final = folder / safe_name(row.key)
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    try:
        _refuse_links(work / QUARANTINE_FOLDER, folder)
        folder.mkdir(parents=True, exist_ok=True)
        _make_empty(temporary)
        files = {name: _keep(temporary, name, path) for name, path in _paths(row)}
        _write(temporary / "traceback.txt", traceback.encode(errors="backslashreplace"))
        sample = {
            **failed.to_json(),
            "split": row.split,
            "origin": row.origin,
            "fields": _readable(row.fields),
            "files": files,
        }
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
    """Return the names of the folders that hold samples of a split; see `safe_name`."""
    folder = work / QUARANTINE_FOLDER / safe_name(split)
    _refuse_links(work / QUARANTINE_FOLDER, folder)
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def release(work: pathlib.Path, split: str, key: str) -> None:
    """Remove the evidence of a sample that has since succeeded."""
    shutil.rmtree(work / QUARANTINE_FOLDER / safe_name(split) / safe_name(key), ignore_errors=True)


def safe_name(text: str) -> str:
    """Return a file name that shows the text and is unique to it."""
    if _PLAIN.match(text) and len(text.encode()) <= _LONGEST_NAME:
        return text
    cut = text.encode(errors="replace")[:_LONGEST_NAME].decode(errors="ignore")
    plain = re.sub(r"[^\w=+@,~-]", "_", cut)
    return f"{plain}-{xxhash.xxh3_64_hexdigest(text.encode(errors='surrogatepass'))}"


def _make_empty(folder: pathlib.Path) -> None:
    try:
        folder.mkdir()
    except FileExistsError:  # left by a killed process with the same id; rmtree refuses a link
        shutil.rmtree(folder)
        folder.mkdir()


def _paths(row: IndexRow) -> list[tuple[str, str]]:
    """Return the paths in fields, including nested ones, and in `files`, that are absolute or exist."""
    found = []
    for name, value in {**row.fields, "files": list(row.files)}.items():
        paths = list(nested_paths(value))
        is_one = isinstance(value, (str, os.PathLike))
        found += [(name if is_one else f"{name}.{number}", path) for number, path in enumerate(paths)]
    return [(name, path) for name, path in found if os.path.isabs(path) or os.path.isfile(path)]


def _readable(fields: Mapping[str, Any]) -> Any:
    """Return fields as JSON values: paths as text, tuples as lists."""
    return json.loads(json.dumps(dict(fields), default=str, skipkeys=True))


def _keep(folder: pathlib.Path, field: str, path: str) -> dict[str, Any]:
    """Copy an input file; return its path, and the name of the copy or why there is none."""
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
