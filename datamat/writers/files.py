"""A folder of files, read as WebDataset reads a tar: those with one name before the first dot are a sample."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from datamat.errors import CorruptDataError, SourceError
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile
from datamat.writers.records import RecordForm, RecordsSource
from datamat.writers.tar import content_of_member, declared_members, feature_of_ending, missing_member, why_unknown
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    from datamat.features import Feature


@final
class FilesForm(RecordForm):
    """A folder of files, read as WebDataset reads a tar: those with one name before the first dot are a sample.

    Args:
        files: absolute path of each file, by its path below the folder.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        samples: dict[str, dict[str, str]] = {}
        for name, path in files.items():
            folder, slash, base = name.rpartition("/")
            stem, dot, ending = base.partition(".")
            if not dot:
                raise SourceError(
                    f"{path} has no extension, which would name its field and say what it holds; rename it, as in "
                    f"{base}.txt, or give a pattern of files as the source, as in '*.jpg'"
                )
            members = samples.setdefault(folder + slash + stem, {})
            if ending.lower() in members:
                raise SourceError(f"{path} and {members[ending.lower()]} are the same field of one sample; rename one")
            members[ending.lower()] = path
        self._samples = list(samples.items())
        self._raw: frozenset[str] = frozenset()
        self._may_miss: frozenset[str] = frozenset()
        self._names = list(dict.fromkeys(name for members in samples.values() for name in members))
        self.features = {name: found for name in self._names if (found := feature_of_ending(name))}
        self.refused = {name: reason for name in self._names if (reason := self._why_not(name))}

    def field_names(self) -> list[str]:
        return self._names

    def counts(self) -> list[int]:
        return [len(self._samples)]

    def keys(self, file: int) -> Sequence[str] | None:
        del file
        return [key for key, _ in self._samples]

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._raw, self._may_miss = declared_members(features)

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        del file
        key, members = self._samples[number]
        found: dict[str, Any] = {}
        for name in names:
            if name not in members:
                if name not in self._may_miss:
                    raise CorruptDataError(missing_member("the folder", key, name))
                found[name] = None
                continue
            with open(members[name], "rb") as opened:
                data = opened.read()
            try:
                found[name] = data if name in self._raw else content_of_member(name, data)
            except CorruptDataError as error:
                raise CorruptDataError(f"{members[name]}: {error}") from error
        return found

    def _why_not(self, name: str) -> str:
        without = [key for key, members in self._samples if name not in members]
        if without:
            return (
                f"{len(without)} samples have no file that ends in .{name}, the first {without[0]!r}; add it, "
                f"declare it with features={{{name!r}: Nullable(...)}}, leave the field out with drop=[{name!r}], or "
                f"give a pattern of files as the source, as in '*.{name}'"
            )
        return why_unknown(name)


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the samples of a folder of files."""
    del spool
    source = RecordsSource(
        [SourceFile("", os.path.commonpath([one.path for one in files]))],
        FilesForm({one.name: one.path for one in files}),
    )
    source.files = {one.name: one.path for one in files}
    return source
