"""`merge`: combine finished directories into one without rewriting records."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from datamat.directory.files import WORK, commit, disk_errors_explained, fsync_folder, locked, refuse_links
from datamat.directory.index_files import read_index
from datamat.directory.keys import DATASET_NAME, ShardName, key_hash, packed_hashes
from datamat.directory.ledger import LEDGER_FILE, Ledger, ledger_in
from datamat.directory.manifest import (
    INDEX_FOLDER,
    MOST_MANIFEST_BYTES,
    IndexInfo,
    Manifest,
    file_names,
    index_file,
    keys_file,
)
from datamat.directory.sidecars.exporting import built_in_files, write_sidecars
from datamat.directory.verify import verify
from datamat.errors import CorruptDataError, OptionError, OutputError, join_problems
from datamat.folders import AbsentError, LocalFolder
from datamat.folders.base import ChangedError
from datamat.folders.local import regular_path
from datamat.folders.places import local_folder
from datamat.parallel import get_logger
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datamat.directory.manifest import ShardInfo
    from datamat.features import Features
    from datamat.folders import Folder

Renamed: TypeAlias = "dict[str, list[list[tuple[ShardInfo, ShardInfo]]]]"

_GROUP_ROWS = 65_536
_MARK = "merging"  # in `.datamat`, until the manifest is written
_OF_SAMPLES = frozenset(
    {"sample_skipped", "sample_quarantined", "sample_retried", "sample_dropped", "samples_removed", "shard_lacks"}
)


def merge(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    name: str | None = None,
    logger: logging.Logger | None = None,
) -> Manifest:
    """Combine finished directories that were made separately, with the same features and formats, into one.

    Shards keep their bytes: they are hard links if the disk supports them, otherwise copies. They get new names,
    because their numbers change; those of the first directory come first in each split. Index, manifest and sidecars
    are rewritten, and the ledger takes over the failed and dropped samples. The directories are only read.

    A killed merge starts over when it is called again.

    Args:
        paths: the finished directories, at least two.
        output: folder of the new directory; missing or empty.
        name: name of the new dataset; None if all have the same.
        logger: receives messages; None takes the logger "datamat".

    Returns:
        The manifest of the new directory.

    Raises:
        OptionError: the directories do not fit together (the message says why); or a key is in two of them; or one is
            a URL.
        OutputError: one of them is not finished; or the output is not empty, or cannot be written.
        CorruptDataError: a file does not match its manifest.

    Example:
        >>> merge(["out/monday", "out/tuesday"], "out/week")   # doctest: +SKIP
    """
    if isinstance(paths, (str, os.PathLike)):
        raise OptionError(f"merge: paths is {os.fspath(paths)!r}; want a list of directories")
    *folders, target = [local_folder(place, "merge", "copy the directories to a disk") for place in (*paths, output)]
    sets = [FinishedSet(folder, Manifest.read(folder)) for folder in folders]
    name = _common_name(sets, name)
    _check_fit(sets, target)
    index = {info.file: info for one in sets for info in one.manifest.index}  # as long as that which is not made yet
    check_size(joined_manifest(sets, name, renamed_in(sets, name), tuple(index.values())))
    began = time.perf_counter()
    with disk_errors_explained(target):
        _begin(target)
        with locked(target / WORK / "lock"):
            if not (target / WORK / _MARK).exists():
                raise OutputError(f"merge: another process has just finished {target}; give another folder")
            return _merged(sets, target, name, logger or get_logger("datamat"), began)


@frozen(eq=False)
class FinishedSet:
    """A directory that becomes part of another.

    Attributes:
        folder: the folder with its shards and its index.
        manifest: its manifest.
        place: the place of its ledger; None for the folder.
    """

    folder: pathlib.Path
    manifest: Manifest
    place: Folder | None = None


def _common_name(sets: Sequence[FinishedSet], name: str | None) -> str:
    if len(sets) < 2:  # a single one cannot be merged
        raise OptionError(f"merge: {len(sets)} directories are given; want at least two")
    names = sorted({one.manifest.name for one in sets})
    if name is None and len(names) > 1:
        raise OptionError(f"merge: the datasets are called {', '.join(names)}; give the name of the new one, name=...")
    chosen = names[0] if name is None else name
    if not DATASET_NAME.match(chosen):
        raise OptionError(f"merge: name is {chosen!r}; want letters, digits, and . _ - between them")
    return chosen


def _check_fit(sets: Sequence[FinishedSet], target: pathlib.Path) -> None:
    """Raise `OptionError` if directories do not fit together, or one of them would be changed."""
    first = sets[0]
    for one in sets:
        if target.resolve() in (one.folder.resolve(), *one.folder.resolve().parents):
            raise OptionError(
                f"merge: output {target} is, or contains, {one.folder}, which is to be merged; give a new folder"
            )
        if one.folder.resolve() in target.resolve().parents:
            raise OptionError(
                f"merge: output {target} is inside {one.folder}, which is to be merged; give a folder outside it"
            )
        _check_alike(first, one)
    _check_keys(sets)


def _check_alike(first: FinishedSet, other: FinishedSet) -> None:
    mine, its = first.manifest, other.manifest
    copies = {split: number for split, number in its.copies.items() if split in its.splits}
    if problems := differences(mine, its.features, list(its.by_format), copies):
        raise OptionError(
            f"merge: {first.folder} and {other.folder} do not fit together: {', and '.join(problems)}; make them alike "
            "(convert changes formats, and Materializer with a directory as its source changes fields)"
        )


def differences(manifest: Manifest, features: Features, formats: Sequence[str], copies: Mapping[str, int]) -> list[str]:
    """Return the reasons why shards do not fit a finished set; empty if they do."""
    problems = []
    if manifest.features != features:
        names = [*manifest.features, *(field for field in features if field not in manifest.features)]
        pairs = {field: (manifest.features.get(field, "none"), features.get(field, "none")) for field in names}
        wrong = [f"{field}: {here}, {there}" for field, (here, there) in pairs.items() if here != there]
        problems.append(f"features differ ({'; '.join(wrong) or 'in their order'})")
    if list(manifest.by_format) != list(formats):
        problems.append(f"formats differ ({', '.join(manifest.by_format)}; {', '.join(formats)})")
    for split in manifest.splits.keys() & copies.keys():
        if manifest.copies.get(split) != copies[split]:
            problems.append(f"copies of {split} differ ({manifest.copies.get(split)}; {copies[split]})")
    return problems


def _check_keys(sets: Sequence[FinishedSet]) -> None:
    """Raise `OptionError` if a row's key is in two directories, in any splits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = [
        read_index(one.folder, info.file, ["key"], info=info)
        for one in sets
        for info in one.manifest.index
        if info.kind == "index"
    ]
    counted = pa.concat_tables(keys).group_by("key").aggregate([([], "count_all")])
    twice = sorted(counted.filter(pc.greater(counted["count_all"], 1))["key"].to_pylist())
    if twice:
        raise OptionError(
            f"merge: {len(twice)} keys are in more than one of {', '.join(str(one.folder) for one in sets)}: "
            f"{join_problems(twice)}; a key names one sample. Leave those samples out of one set and make it again, or "
            "give its samples other keys in `index`"
        )


def check_size(manifest: Manifest) -> None:
    """Raise `OptionError` if no reader would take a manifest."""
    num_bytes = len(manifest.render())
    if num_bytes > MOST_MANIFEST_BYTES:
        raise OptionError(
            f"the manifest would have {num_bytes:,} bytes, of which readers take {MOST_MANIFEST_BYTES:,}; keep the "
            "directories apart, and join them where they are read, by `concat`"
        )


def _begin(target: pathlib.Path) -> None:
    """Make the folder of the output, which must be missing, empty, or left by a killed merge."""
    work = target / WORK
    found = sorted(os.listdir(target)) if target.is_dir() else []
    if found and not (work / _MARK).exists():
        raise OutputError(f"merge: {target} holds {join_problems(found)}; give a new or empty folder")
    work.mkdir(parents=True, exist_ok=True)
    refuse_links(work)
    (work / _MARK).touch()


def _merged(
    sets: Sequence[FinishedSet], target: pathlib.Path, name: str, logger: logging.Logger, began: float
) -> Manifest:
    ledger_path = target / WORK / LEDGER_FILE
    ledger_path.unlink(missing_ok=True)  # of a merge that was killed
    ledger = Ledger(ledger_path)
    with contextlib.closing(ledger):
        merges = [str(one.folder) for one in sets]
        ledger.write("run_started", name=name, merges=merges, host=socket.gethostname(), pid=os.getpid())
        renamed = renamed_in(sets, name)
        for each in renamed.values():
            for one, pairs in zip(sets, each, strict=True):
                for old, new in pairs:
                    _bring(one.folder, old, target, new)
        fsync_folder(target)
        (target / INDEX_FOLDER).mkdir(exist_ok=True)
        through = target / WORK
        index = tuple(info for split in renamed for info in write_joined_index(sets, split, target, through))
        fsync_folder(target / INDEX_FOLDER)
        take_samples(sets, ledger, renamed)
        manifest = joined_manifest(sets, name, renamed, index)
        write_sidecars(target, manifest, built_in_files(manifest), logger)
        manifest.write(target, through=target / WORK)
        ledger.write(
            "run_finished",
            is_complete=True,
            **manifest.counts.to_ledger(),
            elapsed_s=round(time.perf_counter() - began, 3),
        )
    (target / WORK / _MARK).unlink()
    return manifest


def renamed_in(sets: Sequence[FinishedSet], name: str, *, keeps_first: bool = False) -> Renamed:
    """Return the files of each split and directory, with their old and new names.

    Args:
        sets: the directories.
        name: name of the dataset.
        keeps_first: whether files of the first directory keep their names.
    """
    splits = dict.fromkeys(split for one in sets for split in one.manifest.splits)
    return {split: _renamed_split(sets, name, split, keeps_first=keeps_first) for split in splits}


def _renamed_split(
    sets: Sequence[FinishedSet], name: str, split: str, *, keeps_first: bool
) -> list[list[tuple[ShardInfo, ShardInfo]]]:
    """Return, for each directory, the files of a split, with their old and new names."""
    extensions = [shards[0].extension for shards in sets[0].manifest.by_format.values()]
    counts = [len(one.manifest.splits.get(split, ())) for one in sets]
    found = []
    first = 0
    for one, count in zip(sets, counts, strict=True):
        pairs = []
        for place, shards in enumerate(one.manifest.by_format.values()):
            mine = [info for info in shards if info.split == split]
            for number, info in enumerate(mine):
                if keeps_first and one is sets[0]:
                    pairs.append((info, info))
                    continue
                shard = str(ShardName(name, split, first + number, sum(counts)))
                file, index = file_names(shard, extensions)[place]
                pairs.append((info, dataclasses.replace(info, file=file, index_file=index)))
        found.append(pairs)
        first += count
    return found


def check_whole(folder: pathlib.Path, info: ShardInfo) -> None:
    """Raise if a shard or its offsets differ from the manifest; not every format would notice when a record is read.

    Raises:
        CorruptDataError: they are damaged; the message is the report of `verify`.
        ChangedError: the directory has changed since its manifest was read.
    """
    with contextlib.suppress(OSError, CorruptDataError):
        if info.is_whole(regular_path(folder, info.file)) and info.has_offsets(folder / info.index_file):
            return
    report = verify(folder)
    if report.ok:
        raise ChangedError(f"{folder} has changed since it was loaded; load it again, and repeat the call")
    raise CorruptDataError(f"{report}\nrepair the directory, and repeat the call")


def _bring(folder: pathlib.Path, old: ShardInfo, target: pathlib.Path, new: ShardInfo) -> None:
    """Check a shard, then link or copy it with its offsets."""
    check_whole(folder, old)
    for source, name in ((old.index_file, new.index_file), (old.file, new.file)):
        final, path = target / name, regular_path(folder, source)
        final.unlink(missing_ok=True)  # of a merge that was killed
        try:
            os.link(path, final)
        except OSError:  # another disk, or one without links
            with open(path, "rb") as file, commit(final, through=target / WORK) as copy:
                shutil.copyfileobj(file, copy, 1 << 20)


def write_joined_index(
    sets: Sequence[FinishedSet], split: str, target: pathlib.Path, through: pathlib.Path
) -> list[IndexInfo]:
    """Write the index of a split: the rows of all directories, with the new numbers of their shards."""
    import pyarrow as pa

    tables, first = [], 0
    for one in sets:
        if split not in one.manifest.splits:
            continue
        listed = one.manifest.index_infos.get(index_file(split))
        table = read_index(one.folder, index_file(split) if listed is None else listed.file, info=listed)
        numbers = pa.array(table["shard"].to_numpy() + first, pa.int32())
        tables.append(table.set_column(table.column_names.index("shard"), table.schema.field("shard"), numbers))
        first += len(one.manifest.splits[split])
    kinds: dict[str, Any] = {}
    for field in (field for table in tables for field in table.schema):
        other = kinds.setdefault(field.name, field)
        if not field.equals(other, check_metadata=True):
            raise OptionError(
                f"the rows of {split} have a field {field.name!r} that is {other.type} {other.metadata or ''} "
                f"in one directory, and {field.type} {field.metadata or ''} in another; make one of them again"
            )
    whole = pa.concat_tables(tables, promote_options="default")
    path, keys = target / index_file(split), target / keys_file(split)
    write_index(whole, path, through)
    with commit(keys, through=through) as file:
        hashes = np.fromiter(map(key_hash, whole["key"].to_pylist()), np.uint64, len(whole))
        file.writelines(packed_hashes(len(hashes), hashes.__getitem__))
    return [IndexInfo.of_file(path), IndexInfo.of_file(keys)]


def write_index(table: Any, path: pathlib.Path, through: pathlib.Path) -> None:
    """Write an index file; `through` is the folder for a temporary file."""
    from pyarrow import parquet

    with commit(path, through=through) as file:
        parquet.write_table(table, file, compression="zstd", row_group_size=_GROUP_ROWS)


def take_samples(sets: Sequence[FinishedSet], ledger: Ledger, renamed: Renamed) -> None:
    """Copy the ledgers' lines about single samples, with the new names of their shards."""
    for number, one in enumerate(sets):
        place = one.place or LocalFolder(one.folder)
        names = {old.name: new.name for each in renamed.values() for old, new in each[number]}
        with contextlib.suppress(AbsentError):
            for entry in [*ledger_in(place.child(WORK), LEDGER_FILE, without="part_committed")]:
                shard = names.get(str(entry.values.get("shard")))
                if entry.event in _OF_SAMPLES and shard:
                    ledger.write(entry.event, **{**entry.values, "shard": shard})


def joined_manifest(
    sets: Sequence[FinishedSet],
    name: str,
    renamed: Renamed,
    index: tuple[IndexInfo, ...],
) -> Manifest:
    """Return the manifest of all sets as one."""
    first = sets[0].manifest
    new = [info for each in renamed.values() for _, info in itertools.chain(*each)]
    formats = list(first.by_format)
    extensions = [shards[0].extension for shards in first.by_format.values()]
    ordered = sorted(new, key=lambda info: (list(renamed).index(info.split), info.name))
    by_format = {
        form: tuple(info for info in ordered if info.extension == extension)
        for form, extension in zip(formats, extensions, strict=True)
    }
    copies = {split: number for one in reversed(sets) for split, number in one.manifest.copies.items()}
    augmented = {split for one in sets for split in one.manifest.augmented}
    same = [one.manifest.ingredients.items() for one in sets]
    ingredients = dict(sorted(set(same[0]).intersection(*same[1:])))
    return dataclasses.replace(
        first,
        name=name,
        shards=by_format[formats[0]],
        copies={split: copies[split] for split in renamed},
        augmented=tuple(split for split in renamed if split in augmented),
        made_by={**first.made_by, "merged_from": ", ".join(one.manifest.name for one in sets)},
        index=index,
        ingredients=ingredients,
        removed=tuple(sorted({key for one in sets for key in one.manifest.removed})),
        also={form: by_format[form] for form in formats[1:]},
    )
