"""The names that a run uses in its output: only free ones, or ones that datamat has used there before.

    plan, formats ──> the names that the run will give ──┐
    listing of the output ───────────────────────────────┼──> names that somebody else has: refused, before any work
    manifest, entries, `.datamat/names.json` ────────────┘

Names are compared by series, shared by all shards of a split: `cats-train-of-00008.tfrecord` stands for eight names.
The record `.datamat/names.json` lists the series that runs have begun here. It is written before any work, so that a
file which a killed run leaves under a final name, without manifest or entry, is never mistaken for a foreign one.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.files import WORK, render_json
from datamat.directory.keys import ShardName
from datamat.directory.manifest import (
    INDEX_FOLDER,
    MANIFEST_FILE,
    MOST_MANIFEST_BYTES,
    file_names,
    index_file,
    is_manifest,
    keys_file,
    manifest_bytes,
    salvaged_shards,
)
from datamat.errors import OutputError, count_of, join_problems
from datamat.folders import LocalFolder

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from datamat.directory.manifest import Manifest, ShardFiles
    from datamat.folders import Folder
    from datamat.plan.job import Job, PlannedJob
    from datamat.plan.plan import Plan

_RECORD = f"{WORK}/names.json"
_NUMBER = re.compile(r"-\d{5}(?=-of-\d{5}\.)")


def series_of(name: str) -> str:
    """Return the series of a shard's name, which stands for all shards of its split; other names stay unchanged.

    Example:
        >>> series_of("cats-train-00000-of-00008.tfrecord"), series_of("_index/train.keys")
        ('cats-train-of-00008.tfrecord', '_index/train.keys')
    """
    return _NUMBER.sub("", name, count=1)


def _planned_series(plan: Plan, extensions: Sequence[str]) -> set[str]:
    found = {MANIFEST_FILE}
    for split, shards in plan.splits.items():
        found |= {index_file(split), keys_file(split)}
        # appended shards have another count
        firsts = {ShardName.parse(shard.name).count: shard.name for shard in shards}
        found |= {
            series_of(name) for first in firsts.values() for pair in file_names(first, extensions) for name in pair
        }
    return found


def _known_series(manifest: Manifest | None, shards: Iterable[ShardFiles]) -> set[str]:
    found = {series_of(name) for files in shards for info in files for name in (info.file, info.index_file)}
    if manifest is not None:
        found |= {MANIFEST_FILE, *(info.file for info in manifest.index)}
    return found


def claim_names(planned: PlannedJob, manifest: Manifest | None, known: Mapping[str, ShardFiles]) -> None:
    """Refuse an output with foreign files under names that a run will use; otherwise record the names as datamat's.

    Args:
        planned: the job and its plan.
        manifest: manifest of the output, or of its state before an unfinished run; None if there is none.
        known: finished shards by name.

    Raises:
        OutputError: there are such files; or rows name input files in the output.
    """
    job = planned.job
    wanted = _planned_series(planned.plan, [made.extension for made in job.formats])
    ours = _known_series(manifest, known.values())
    _refuse_inputs_in(job.output, planned)
    if wanted <= ours or job.output.parent.name == WORK:  # there, all names are datamat's
        return
    record = _read_record(job.folder)
    ours |= record
    if not wanted <= ours:
        listing = _names_in(job.folder)
        if manifest is None and MANIFEST_FILE in listing:
            ours |= _series_of_damaged(job.output)
        theirs = wanted - ours
        if foreign := sorted(name for name in listing if series_of(name) in theirs):
            raise OutputError(
                f"{job.place} holds {join_problems(foreign)}, which no run of datamat has made there, and this run "
                "would overwrite; move such files away, or give another output or name"
            )
    if not wanted <= record:
        job.folder.write(_RECORD, render_json(sorted(record | wanted)))


def _series_of_damaged(output: pathlib.Path) -> set[str]:
    """Return the series that a damaged manifest still lists; none if it was never one of datamat's."""
    try:
        content = manifest_bytes(output)
    except (OSError, ValueError):
        return set()
    if not is_manifest(content):
        return set()
    return _known_series(None, [(info,) for info in salvaged_shards(LocalFolder(output))]) | {MANIFEST_FILE}


def _names_in(folder: Folder) -> list[str]:
    """Return the names in a folder and in its `_index`; on a disk, including folders."""
    if (here := folder.local_path()) is None:
        return [name for name in folder.list(deep=True) or () if name[:1] != "."]
    index = here / INDEX_FOLDER
    return os.listdir(here) + [f"{INDEX_FOLDER}/{name}" for name in (os.listdir(index) if index.is_dir() else ())]


def _read_record(folder: Folder) -> set[str]:
    try:
        return set(map(str, json.loads(folder.read_if_there(_RECORD, MOST_MANIFEST_BYTES) or b"[]")))
    except ValueError:
        return set()


# ---------------------------------------------------------------- source and output


def refuse_own_source(job: Job) -> None:
    """Refuse an output that is or contains the source of its job, whose files finished shards would replace.

    Raises:
        OutputError: names both.
    """
    for source in _source_places(job):
        if "://" in f"{source} {job.place}":
            is_inside = f"{source.rstrip('/')}/".startswith(f"{job.place}/")
        else:
            is_inside = _is_below(source, os.path.realpath(job.output))
        if is_inside:
            raise OutputError(
                f"output {job.place} is, or holds, the source {source}, and a run could overwrite it; choose an output "
                "outside the source"
            )


def _is_below(path: str, folder: str) -> bool:
    """Return True if a path leads to or into a folder, given without links."""
    return os.path.join(os.path.realpath(path), "").startswith(os.path.join(folder, ""))


def _source_places(job: Job) -> Iterator[str]:
    """Yield the paths and URLs of a source, as far as it names them."""
    if job.mirror is not None:
        yield str(job.mirror.root)
        return
    loaded: Any = sys.modules.get("datamat.readers.dataset")  # if it is not loaded, no object is from there
    waiting = [job.source]
    while waiting:
        source = waiting.pop()
        if loaded is not None and isinstance(source, loaded.ShardedDataset):
            waiting += {os.path.dirname(file) for file in source.files}
        elif isinstance(source, dict):
            waiting += source.values()
        elif isinstance(source, (list, tuple)) and all(isinstance(part, (str, os.PathLike)) for part in source):
            waiting += source
        elif isinstance(source, (str, os.PathLike)):
            yield os.fspath(source)


def _refuse_inputs_in(output: pathlib.Path, planned: PlannedJob) -> None:
    """Refuse rows whose input files are in the output."""
    real, store = os.path.realpath(output), planned.store
    with os.scandir(output) as entries:  # links may lead to a folder there by any name
        folders = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    is_searched = bool(folders - {WORK, INDEX_FOLDER})
    rows = np.arange(len(store)) if is_searched else store.rows_naming(output.name, os.path.basename(real))
    is_inside = functools.cache(lambda folder: _is_below(folder, real))
    inside = [
        any(is_inside(os.path.dirname(path)) for paths in fields for path in paths)
        for fields in (store.input_paths(rows) if store.file_fields else ())
    ]
    keys = store.keys(rows[np.flatnonzero(inside)])
    if keys:
        raise OutputError(
            f"{output} holds input files of {count_of(len(keys), 'row')} ({join_problems(keys)}), so that the output "
            "would be "
            "its own source; choose an output outside the source"
        )
