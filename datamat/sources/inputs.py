"""Finds out which fields of rows name input files, and takes the state of these files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from datamat.directory.files import read_json, render_json
from datamat.directory.row_values import FILES, files_of_text, looks_like_path
from datamat.errors import SourceError, join_problems
from datamat.folders.urls import is_url
from datamat.sources.files import FileState, SourceFiles, follows_links, may_be_input
from datamat.sources.rows import BATCH_ROWS, origin_of
from datamat.sources.store import INPUT, RowField, RowStore, mixed, names_in
from datamat.sources.url_files import UrlFiles

_PIECE_ROWS = 1 << 20
_LOOKED_AT = 16  # values that are examined to find the fields that hold files: the first that are not blank, ...
_LOOKED_AT_LATER = 1024  # ... and so many more, over all rows, of those that look like paths


class InputFinder:
    """Finds the fields that hold paths of input files, and takes the state of these files.

    Args:
        store: the rows, with no file known yet.
        file_fields: names of the fields that hold files; None if they are not declared.
        urls: the files behind URLs.
    """

    def __init__(self, store: RowStore, file_fields: Sequence[str] | None, urls: UrlFiles | None) -> None:
        self._store = store
        self._declared = file_fields
        self._urls = urls
        self._files = SourceFiles(store.source)

    def find_files(self, fields: Sequence[RowField]) -> None:
        """Write the state of the files of all rows, in one pass per field that holds files."""
        is_strict = self._fields_with_files(fields)
        if not is_strict:
            return
        store = self._store
        digests = np.memmap(store.folder / "digest.codes", np.uint64, "r+")
        shutil.copyfile(store.folder / "digest.codes", store.folder / "identity.codes")
        identities = np.memmap(store.folder / "identity.codes", np.uint64, "r+")
        for field in fields:
            if field.name not in is_strict:
                continue
            with open(store.folder / f"{field.stem}.inputs", "xb") as file:
                for start in range(0, store.num_rows, BATCH_ROWS):
                    rows = np.arange(start, min(start + BATCH_ROWS, store.num_rows))
                    if field.holds_urls:
                        found, names = self._look_at_urls(field, rows)
                    else:
                        found, names = self._look_at(field, rows, is_strict=is_strict[field.name])
                    file.write(found.data)
                    here, sizes, times = found["path"] > 0, found["size"].view(np.uint64) ^ names, found["stamp"]
                    identities[rows] = np.where(here, mixed(identities[rows], sizes), identities[rows])
                    with_files = mixed(mixed(digests[rows], sizes), times.view(np.uint64))
                    digests[rows] = np.where(here, with_files, digests[rows])
                    if follows_links():  # the names of the files have digests of where links lead
                        digests[rows] = np.where(here, mixed(digests[rows], found["path"]), digests[rows])
        digests.flush()
        identities.flush()
        fields = [dataclasses.replace(field, holds_file=field.name in is_strict) for field in fields]
        head = store.folder / "rows.json"
        head.write_bytes(render_json(read_json(head) | {"fields": [*map(dataclasses.asdict, fields)]}))

    def _fields_with_files(self, fields: Sequence[RowField]) -> dict[str, bool]:
        """Return the fields that hold files, and whether every value that is not blank must be one."""
        found = {field.name: True for field in fields if field.kind == "json" and field.holds_file}
        found |= {field.name: True for field in fields if field.holds_urls}
        texts = [field for field in fields if field.kind in {"text", "path"} and not field.holds_urls]
        if self._declared is not None:
            return found | {field.name: True for field in texts if field.name in self._declared}
        samples = {field.name: self._samples(field) for field in texts}
        for field in texts:
            first, later = samples[field.name]
            if any(self._is(os.path.isfile, path) for _, path in first):
                found[field.name] = True
            elif any(looks_like_path(path) and self._is(os.path.isfile, path) for _, path in later):
                found[field.name] = False
        beside = [field for field in texts if field.name in found]
        for field in texts:
            if field.name not in found and self._holds_folders(field, samples[field.name], beside, bool(found)):
                found[field.name] = False
        return found

    def _samples(self, field: RowField) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Return row and value of the first values of a field that are not blank, and of a sample of all of them."""
        step = max(sum(map(len, self._given(field))) // _LOOKED_AT_LATER, 1)
        before, firsts, steps = 0, [], []
        for given in self._given(field):
            firsts.append(given[: max(_LOOKED_AT - before, 0)])
            steps.append(given[-before % step :: step])
            before += len(given)
        rows = (np.concatenate(firsts), np.concatenate(steps)[:_LOOKED_AT_LATER])
        first, later = ([(row, str(v)) for row, v in self._values(field, chosen) if v is not None] for chosen in rows)
        return first, later

    def _given(self, field: RowField) -> Iterator[np.ndarray]:
        """Yield int64 (n,), in pieces: the numbers of rows whose value is not blank."""
        ends = np.asarray(np.memmap(self._store.folder / f"{field.stem}.ends", np.uint64, "r"))
        for start in range(0, len(ends), _PIECE_ROWS):
            before = ends[start - 1] if start else np.uint64(0)
            yield start + np.flatnonzero(np.diff(ends[start : start + _PIECE_ROWS], prepend=before))

    def _values(self, field: RowField, rows: np.ndarray) -> list[tuple[int, Any]]:
        return list(zip(rows.tolist(), self._store.column(field, rows), strict=True))

    def _is(self, test: Callable[[str], bool], path: str) -> bool:
        try:
            return test(os.path.join(self._store.source, path))
        except ValueError:  # a NUL in it
            return False

    def _holds_folders(
        self,
        field: RowField,
        samples: tuple[list[tuple[int, str]], list[tuple[int, str]]],
        beside: Sequence[RowField],
        has_files: bool,
    ) -> bool:
        """Return True if a field names folders whose files are the sample, rather than folders of samples, or classes.

        A bare name counts only if rows have no other files: "cat" may be a class as well as a folder.
        """
        for row, path in {**dict(samples[0]), **dict(samples[1])}.items():
            is_plain = field.kind == "text" and "/" not in path
            if (is_plain and has_files) or not self._is(os.path.isdir, path):
                continue
            if field.kind == "text" and not may_be_input(path, self._store.source):
                continue
            full = os.path.join(self._store.source, path, "")
            others = [str(self._values(other, np.array([row]))[0][1]) for other in beside]
            if any(os.path.join(self._store.source, other).startswith(full) for other in others):
                continue
            try:
                self._files.state(path)
            except (OSError, ValueError) as error:
                warnings.warn(
                    f"field {field.name!r}: {path!r} is {error}; changes in it will not be noticed. Name the field in "
                    "file_fields, or the files in IndexRow(files=...), if samples are made from it",
                    stacklevel=2,
                )
                return False
            return True
        return False

    def _look_at(self, field: RowField, rows: np.ndarray, *, is_strict: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return `INPUT` (n,), and uint64 (n,): digests of the names if a value stands for several files."""
        found, names = np.zeros(len(rows), INPUT), np.zeros(len(rows), np.uint64)
        problems = []
        for number, value in enumerate(self._texts(field, rows)):
            if not value:
                continue
            try:
                state = self._look(field, value, is_strict=is_strict)
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
            except ValueError as error:
                problem = str(error)
            else:
                name = value + self._targets(field, value)
                found[number] = (xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape")), *state[:2], b"")
                names[number] = state.names
                continue
            if is_strict:
                (row,) = self._store.read(rows[number : number + 1])
                shown = "" if field.kind == "json" else f" {value!r}"
                name = "files" if field.name == FILES else field.name
                problems.append(f"{origin_of(row, int(rows[number]))}: {name}{shown}: {problem}")
        if problems:
            raise SourceError(
                f"{join_problems(problems)}; looked below {self._store.source}: add the files or drop the rows"
            )
        return found, names

    def _look_at_urls(self, field: RowField, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `_look_at` returns, but for URLs: send requests only if content decides, and refuse no row."""
        found = np.zeros(len(rows), INPUT)
        texts = self._store.gathered(field.stem, rows).tolist()
        named = [names_in(field, text) for text in texts]
        asked: dict[str, tuple[int, int]] = {}
        if self._store.identity == "content" and self._urls is not None:
            places = self._store.input_urls(field, rows)
            whole = {name: url for urls in places for name, url in urls.items()}
            answers = self._urls.ask_all(whole.values())
            asked = {name: answers[url] for name, url in whole.items()}
        names_found = np.zeros(len(rows), np.uint64)
        for number, (text, names) in enumerate(zip(texts, named, strict=True)):
            state = None if any(map(is_url, names)) else self._local_state(field, text)
            if names and state is not None:
                name = (text + self._targets(field, text)).encode("utf-8", "surrogateescape")
                found[number] = (xxhash.xxh3_64_intdigest(name), *state[:2], b"")
                names_found[number] = state.names
            elif names:
                states = [asked.get(name) if is_url(name) else self._local_state(None, name) for name in names]
                found[number] = _input_of_urls(text, [one[:2] for one in states if one is not None])
        return found, names_found

    def _local_state(self, field: RowField | None, text: str) -> FileState | None:
        """Return the state of local files next to URLs; None if their row is to fail when it is read."""
        with contextlib.suppress(OSError, ValueError):
            return self._files.state(text) if field is None else self._look(field, text, is_strict=False)
        return None

    def _targets(self, field: RowField, value: str) -> str:
        """Return where links of a value that leave the source lead, so that a new target counts as a new file."""
        if not follows_links():
            return ""
        found = map(self._files.target, names_in(field, value))
        return "".join(f"\0{target}" for target in found if target)

    def _texts(self, field: RowField, rows: np.ndarray) -> list[str]:
        if field.kind == "json":
            return [text if '{"file' in text else "" for text in self._store.gathered(field.stem, rows).tolist()]
        return ["" if value is None else str(value) for value in self._store.column(field, rows)]

    def _look(self, field: RowField, value: str, *, is_strict: bool) -> FileState:
        if field.kind == "json":
            return self._files.state_of_several(files_of_text(value))
        if is_strict and self._declared is None:  # among files, a folder is a mistake
            self._files.check_file(value)
        return self._files.state(value, is_text=field.kind == "text" and self._declared is None)


def _input_of_urls(text: str, states: Sequence[tuple[int, int]]) -> tuple[int, int, int, bytes]:
    """Return an `INPUT` of URLs: their names decide, and what their stores say about them, if they are asked.

    Args:
        text: the URLs, as the row has them.
        states: size and stamp of each; none if no store was asked.
    """
    path = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))
    size, stamp = sum(size for size, _ in states), 0
    if states:
        stamp = xxhash.xxh3_64_intdigest(repr(states).encode()) >> 1
    said = repr((text, states)).encode("utf-8", "surrogateescape")
    return path, size, stamp, xxhash.xxh3_128_digest(said)
