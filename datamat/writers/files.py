"""Reads a folder of files like a WebDataset tar: files with the same name before the first dot are a sample."""

from __future__ import annotations

import os
from collections.abc import Sequence

from datamat.errors import SourceError
from datamat.writers.base import DataSource
from datamat.writers.members import MembersForm, Place
from datamat.writers.paths import SourceFile
from datamat.writers.records import RecordsSource
from datamat.writers.unpacking import SpoolOptions, UnpackedFiles


def _samples(files: Sequence[SourceFile]) -> dict[str, dict[str, Place]]:
    samples: dict[str, dict[str, Place]] = {}
    for number, file in enumerate(files):
        folder, slash, base = file.name.rpartition("/")
        stem, dot, ending = base.partition(".")
        if not dot:
            raise SourceError(
                f"{file.path} has no extension, which would name its field and say what it holds; rename it, as in "
                f"{base}.txt, or give a pattern of files as the source, as in '*.jpg'"
            )
        members = samples.setdefault(folder + slash + stem, {})
        if ending.lower() in members:
            other = files[members[ending.lower()][0]].path
            raise SourceError(f"{file.path} and {other} are the same field of one sample; rename one")
        members[ending.lower()] = number, 0, -1
    return samples


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the samples of a folder of files."""
    paths = [one.path for one in files]
    form = MembersForm(
        [list(_samples(files).items())],
        UnpackedFiles(paths, [None] * len(paths), spool),
        ", or give a pattern of files as the source, as in '*.{0}'",
    )
    source = RecordsSource([SourceFile("", os.path.commonpath(paths))], form)
    source.files = {one.name: one.path for one in files}
    return source
