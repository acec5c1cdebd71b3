"""The job of a run: the same job and source give the same bytes on any machine."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from datamat.directory.files import WORK
from datamat.directory.manifest import MANIFEST_FILE, MOST_MANIFEST_BYTES, Manifest
from datamat.errors import CorruptDataError, OptionError, OutputError, SourceError, count_of, join_problems
from datamat.folders.base import AT_ONCE
from datamat.folders.local import LocalFolder, expand_home
from datamat.formats import ShardFormat, get_format
from datamat.options import Remedies, RunOptions
from datamat.plan.digests import JobDigests
from datamat.plan.generations import Generations
from datamat.plan.inputs import InputFiles, Neighbourhood, placeholders_refused
from datamat.plan.memos import KnownMemos, write_places
from datamat.plan.pipeline import Pipeline, RecordSource
from datamat.plan.plan import SplitTerms, make_plan, plan_without
from datamat.sources.fetching import urls_in_errors
from datamat.sources.files import FileState, digest_files, file_state, links_followed, listing_noted, output_excluded
from datamat.sources.groups import Groups, groups_in_words
from datamat.sources.rows import relative_to_source
from datamat.sources.writing import write_rows
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from datamat.directory.manifest import IndexInfo, ShardFiles
    from datamat.directory.sidecars import Sidecar
    from datamat.features import Features
    from datamat.folders import Folder
    from datamat.options import ShardOptions, WorkerOptions
    from datamat.plan.plan import Plan, ShardSpec
    from datamat.sources.mirror import SourceMirror
    from datamat.sources.rows import IndexRow
    from datamat.sources.store import RowStore
    from datamat.sources.url_files import UrlFiles

# Bytes in the manifest per shard and per part, in each format: at least about 500 and 40.
_SHARD_BYTES, _PART_BYTES = 500, 40


def checked_version(version: str | int | None) -> str | None:
    """Return the user's version, which replaces the digests of code, as text; raise `OptionError`."""
    if version is None or (isinstance(version, (str, int)) and not isinstance(version, bool)):
        return None if version is None else str(version)
    raise OptionError(f"version is {version!r}; want a str or an int, such as '2' or '2024-05-01', or None")


def resolve_formats(given: Any, features: Features) -> tuple[ShardFormat, ...]:
    """Return the formats given by a user, each bound to these features.

    Args:
        given: a name, a `ShardFormat`, or a list or tuple of them; the first is the one for readers.
        features: schema of the records.

    Raises:
        OptionError: there is none, or one is neither a name nor a format, or two write files with the same names.
        MissingDependencyError: a format needs a package that is not installed.
    """
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    if not listed:
        raise OptionError("format is an empty list; name one format at least, as in format='tfrecord'")
    found: dict[str, ShardFormat] = {}
    for one in listed:
        made = get_format(one) if isinstance(one, str) else one
        if not isinstance(made, ShardFormat):
            raise OptionError(f"format holds {one!r}; want a name such as 'tfrecord', a ShardFormat, or a list of them")
        other = found.setdefault(made.extension, made)
        if other is not made:
            raise OptionError(
                f"format names {other.name!r} and {made.name!r}, which both write files ending in .{made.extension}; "
                "leave one out, or write it to another output"
            )
    return tuple(made.with_features(features) for made in found.values())


@frozen(slots=False, eq=False, kw_only=True)
class Job:
    """The arguments of `Materializer`, checked and resolved.

    It travels without sidecars, the output and most of `how`, which belong to the caller's process.

    Attributes:
        records: record source: the pipeline of a writer, or a finished dataset to convert.
        source: the raw data: a path, or the object that the writer indexes.
        folder: the output: the folder of the finished shards, on a disk or in a store.
        output: absolute path of the folder in which the work is done: the output itself if it is on this machine, else
            a scratch folder.
        formats: the shard formats; the first is the one for readers.
        splits: share of each split if the index names none.
        groups: field or function of rows; those of equal value land in the same split. None draws by key.
        shards: layout of samples in files.
        copies: records per input row of the transformed splits, or by split.
        seed: base seed; with the sample key it decides every random draw.
        version: the user's version, which replaces the digests of code, or None.
        sidecars: the user's functions that return files to write beside the shards.
        how: how to run, which shards to make now, and how to treat existing output.
        remedies: suggested calls, for messages.
        follow_links: whether to follow links that lead out of the source.
        mirror: fetcher of the files of a source behind a URL, with `source` as its local path.
        urls: fetcher of the files behind URLs in rows.
        row_s: seconds that the first row took, if it was read to infer features; it may affect how work is divided, but
            never the result.
        appends_to: the finished set to which new rows are appended; else None.
        part_of: the output, as its user knows it, of which the job makes a part in a folder of its own; else None.
        dispatched: returns the method that is sent to workers, given the part worker of a run; None for the part
            worker's own method.

    Raises:
        OptionError: an argument is invalid.
    """

    records: RecordSource
    source: Any
    folder: Folder
    output: pathlib.Path
    formats: tuple[ShardFormat, ...]
    splits: Mapping[str, float] | None
    shards: ShardOptions
    copies: int | Mapping[str, int]
    seed: int
    version: str | None
    sidecars: tuple[Sidecar, ...]
    how: RunOptions
    groups: str | Callable[[IndexRow], Any] | None = None
    remedies: Remedies = dataclasses.field(default_factory=Remedies)
    follow_links: bool = False
    mirror: SourceMirror | None = None
    urls: UrlFiles | None = None
    row_s: float | None = None
    appends_to: Generations | None = None
    part_of: pathlib.Path | str | None = None
    dispatched: Callable[[Any], Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        if wrong := [sidecar for sidecar in self.sidecars if not callable(sidecar)]:
            raise OptionError(f"sidecars holds {wrong[0]!r}; want functions of a manifest that return files by name")
        _check_executor(self.how.executor, self.how.workers)
        _check_shares(self.splits)
        _check_groups(self.groups, self.splits)
        for number in self.copies.values() if isinstance(self.copies, Mapping) else [self.copies]:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise OptionError(f"copies is {self.copies!r}; want a number of at least 1, or such numbers by split")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise OptionError(f"seed is {self.seed!r}; want an int, not negative")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to the caller's process."""
        how = RunOptions(workers=self.how.workers, errors=self.how.errors, logger=self.how.logger)
        left = {"sidecars": (), "groups": None, "dispatched": None, "appends_to": None}
        folder = LocalFolder(self.output)  # workers write to no other; that of a store may hold secrets
        return {**self.__dict__, "how": how, "folder": folder, **left}

    def for_workers(self) -> Job:
        """Return the job for workers: they have the rows, so a table or dataset in memory is left out."""
        made = copy.copy(self)
        object.__setattr__(made, "dispatched", None)
        if not _is_path(self.source):
            object.__setattr__(made, "source", None)
        return made

    @property
    def place(self) -> pathlib.Path | str:
        """The output as the user knows it: its folder or URL."""
        return self.part_of or self.folder.address

    @property
    def work(self) -> pathlib.Path:
        """The `.datamat` folder of the folder in which the work is done."""
        return self.output / WORK

    @contextlib.contextmanager
    def planned(self) -> Iterator[PlannedJob]:
        """Yield the plan of a run that would begin now; its rows exist only within the block.

        Raises:
            SourceError: the source cannot be indexed.
            OptionError: the options do not fit the rows.
            FingerprintError: the writer or the transform cannot be fingerprinted.
        """
        with tempfile.TemporaryDirectory(prefix="datamat-") as folder:
            yield self.planned_in(pathlib.Path(folder))

    def planned_in(self, folder: pathlib.Path, published: pathlib.Path | None = None) -> PlannedJob:
        """Return the plan of a run that would begin now; raises like `planned`.

        Args:
            folder: empty folder for the rows.
            published: folder of the finished set; None for the output.
        """
        store = self.write_rows(folder)
        digests = self.digests()
        write_places(folder, digests.places)
        return PlannedJob(self, store, self.plan(store, digests, published), digests, InputFiles(store, self.work))

    def write_rows(self, folder: pathlib.Path) -> RowStore:
        """Index the source, check its rows, and write them to a folder; raise `SourceError`."""
        if self.mirror is not None:
            self.mirror.renew(self._named_files().values())
        if self.urls is not None:
            self.urls.activate()
        outside = output_excluded(self._likely_outputs())
        here = placeholders_refused()
        with links_followed(self.follow_links), urls_in_errors(), outside, here, listing_noted() as listing:
            rows = self.records.index(self.source)
            contents = getattr(self.records.writer, "contents_of", None)
            groups = None
            if self.groups is not None:
                groups = Groups(self.groups, self._base, None if contents is None else contents(self.groups))
            if _is_path(self.source) and not os.path.isabs(self.source):
                rows = relative_to_source(rows, self.source, self.records.file_fields)
            store = write_rows(
                rows,
                folder,
                source=self._base,
                splits=self.splits,
                groups=None if groups is None else groups.hashes,
                file_fields=self.records.file_fields,
                identity=self.shards.identity,
                url_fields=self.records.url_fields,
                urls=self.urls,
            )
        store.left_aside = str(listing)
        store.groups = "" if groups is None else str(groups)
        return store

    def _likely_outputs(self) -> list[str]:
        """Return the absolute paths of output files that a listing of the source may contain."""
        folder = self.folder.local_path() or (self.mirror and self.mirror.path_of(str(self.folder)))
        if folder is None:
            return []
        names = [MANIFEST_FILE, "README.md", f"{self.name}-train-00000-of-00001.idx"]
        names += [f"{self.name}-train-00000-of-00001.{made.extension}" for made in self.formats]
        return [os.path.join(folder, name) for name in names]

    def digests(self) -> JobDigests:
        """Return the digests of everything except rows that decides the bytes of shards.

        Raises:
            FingerprintError: writer or transform cannot be fingerprinted.
            SourceError: one of the writer's `files` is missing or unreadable.
        """
        found = JobDigests.of(self.records, self.formats, self.seed, self.version, self._files())
        memos = KnownMemos(self.work, found.code).counting(found.given) if found.given else {}
        return dataclasses.replace(found, memos=memos)

    def plan(self, store: RowStore, digests: JobDigests, published: pathlib.Path | None = None) -> Plan:
        """Return the plan; raise `OptionError` if the options do not fit the rows."""
        published = published or self.output
        copies, before = self.copies_by_split(store), self._published(published)
        pipeline, drawn = self.records.pipeline, self._drawn_splits(store)
        draws = pipeline is not None and not pipeline.augmenter.is_empty
        augmented = {split: draws and split in drawn for split in store.splits}
        of_splits = {
            split: digests.of_split(augmented=augmented[split], copies=copies[split]) for split in store.splits
        }
        plan = make_plan(
            store,
            name=self.name,
            options=self.shards,
            splits={split: SplitTerms(copies[split], augmented[split], digest) for split, digest in of_splits.items()},
            seed=self.seed,
            costs=self.records.costs(store),
            group_records=math.lcm(*(made.group_records for made in self.formats)),
            num_columns=len(self.records.features.columns),
            rows_at_once=max(AT_ONCE if store.holds_urls else 1, self.records.rows_at_once),
            generations=self.appends_to or self._generations(published, before),
            keeps_names=not self.folder.renames and self.appends_to is None,
        )
        plan = self.records.arrange(plan, store, of_splits)
        plan = plan_without(plan, () if before is None else before.removed, store)
        _refuse_endless_manifest(plan, len(self.formats))
        return dataclasses.replace(plan, left_aside=store.left_aside, groups=store.groups)

    def _published(self, folder: pathlib.Path) -> Manifest | None:
        """Return the manifest of the finished set, unless the source alone decides."""
        if self.how.existing == "replace":
            return None
        with contextlib.suppress(OutputError, CorruptDataError):  # there is none; or whoever repairs it says so
            return Manifest.read(folder)
        return None

    def _generations(self, folder: pathlib.Path, before: Manifest | None) -> Generations | None:
        """Return the generations of the output, if rows were appended to it and stay in their shards."""
        with contextlib.suppress(OutputError, CorruptDataError):
            if before is not None and before.generations:
                return Generations.of(folder, before)
        return None

    def manifest(
        self, plan: Plan, digests: JobDigests, finished: Sequence[ShardFiles], index: tuple[IndexInfo, ...]
    ) -> Manifest:
        """Return the manifest of finished shards and the index; raise `SourceError`."""
        changed = [name for name, digest in self._files().items() if digests.files.get(name) != digest]
        if changed:
            raise SourceError(
                f"{changed[0]!r}, one of the files that every sample depends on, changed while the run was under way; "
                "run again to remake the shards"
            )
        by_format = zip(self.formats, zip(*finished, strict=True), strict=True)
        (first, shards), *others = [(made.name, infos) for made, infos in by_format]
        manifest = Manifest(
            name=plan.name,
            format=first,
            features=self.records.features,
            shards=shards,
            seed=self.seed,
            copies={split: shards[0].copies for split, shards in plan.splits.items()},
            augmented=tuple(split for split, shards in plan.splits.items() if shards[0].augmented),
            made_by={
                "writer": self.writer_name,
                "transform": None if self._transform is None else type(self._transform).__qualname__,
            },
            index=index,
            ingredients=digests.to_json(),
            also=dict(others),
            generations=() if self.appends_to else plan.generations,
            removed=plan.removed,
        )
        return self.records.describe(manifest)

    def neighbourhood(self) -> Neighbourhood:
        """Return the places of files that `read`, `augment` or the transform may open without declaring them."""
        # datamat's own writers declare what they open: an import reads its source, whose content counts as a whole.
        writer = self.records.writer
        is_own = type(writer).__module__.startswith("datamat.")
        without = [os.fspath(self.output), *([os.fspath(self.source)] if is_own and _is_path(self.source) else [])]
        without += self._named_files().values()
        spool = getattr(writer, "spool", None) if is_own else None
        without += [os.path.abspath(expand_home(spool))] if spool else []
        code = [writer, self._transform, *filter(callable, vars(writer).values())]
        return Neighbourhood.of(None if is_own else self.source, code, without=without)

    @property
    def _base(self) -> str:
        """The folder that relative paths start from."""
        if not _is_path(self.source):
            return ""
        source = os.path.abspath(self.source)
        return os.path.dirname(source) if os.path.isfile(source) else source

    def _named_files(self) -> dict[str, str]:
        """Return the absolute path of each of the writer's `files`, by the writer's path or name."""
        files = self.records.files
        if isinstance(files, (str, os.PathLike)):
            raise OptionError(f"{self.writer_name}.files is {files!r}; want a list of paths")
        named = files if isinstance(files, Mapping) else {os.fspath(path): os.fspath(path) for path in files}
        return {str(name): os.path.join(self._base, path) for name, path in named.items()}

    def _files(self) -> dict[str, str]:
        """Return the digest of the content of each of the writer's `files`, by its name."""
        files = self._named_files()
        # Hashing releases the GIL, and a few threads keep a disk busy.
        with ThreadPoolExecutor(_HASHING_THREADS) as threads:
            digests = threads.map(self._digest_of_file, files, files.values()) if files else ()
            return dict(zip(files, digests, strict=True))

    def _digest_of_file(self, name: str, path: str) -> str:
        try:
            state = file_state([path])
            known = _hashed.get(path)
            if known is None or known[0] != state or self.shards.identity == "content":
                known = state, (digest_files([path], state, is_single=True, largest=1 << 62) or b"").hex()
                _hashed[path] = known
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SourceError(f"{self.writer_name}.files names {name!r}: {path}: {reason}; correct the path") from error
        return known[1]

    @property
    def name(self) -> str:
        """The name of the dataset."""
        return self.records.name

    @property
    def writer_name(self) -> str:
        """The class of the writer, as "module:Class"."""
        return f"{type(self.records.writer).__module__}:{type(self.records.writer).__qualname__}"

    @property
    def _transform(self) -> Any:
        pipeline = self.records.pipeline
        return None if pipeline is None else pipeline.augmenter.transform

    def _drawn_splits(self, store: RowStore) -> Collection[str]:
        """Return the transformed splits: those named in `copies`, or, if it is a number, the training split."""
        if not isinstance(self.copies, int):
            return self.copies
        splits = [split for code, split in enumerate(store.splits) if (store.split_codes == code).any()]
        return [_TRAIN] if _TRAIN in splits else splits

    def copies_by_split(self, store: RowStore) -> dict[str, int]:
        """Return the number of records per row of each split."""
        drawn = self._drawn_splits(store)
        if isinstance(self.copies, int):
            return {split: self.copies if split in drawn else 1 for split in store.splits}
        unknown = sorted(set(self.copies) - set(store.splits))
        if unknown:
            raise OptionError(f"copies names the split {unknown[0]!r}; the index has {', '.join(store.splits)}")
        return {split: self.copies.get(split, 1) for split in store.splits}


_TRAIN = "train"
_HASHING_THREADS = 4
_hashed: dict[str, tuple[FileState, str]] = {}  # by path, so that a plan and its run hash a file once


def _is_path(source: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(source, (str, os.PathLike))


def _check_executor(executor: Any, workers: WorkerOptions) -> None:
    if executor is None:
        return
    from datamat.parallel.engines import check_engine

    check_engine(executor)
    for name in ("sample_timeout_s", "max_rss"):
        if getattr(workers, name) is not None:
            raise OptionError(
                f"WorkerOptions: only datamat's own workers, which can be replaced, enforce {name}; leave out "
                f"executor, or {name}"
            )


def _check_shares(splits: Mapping[str, float] | None) -> None:
    if splits is None:
        return
    if not isinstance(splits, Mapping) or not all(isinstance(share, int | float) for share in splits.values()):
        raise OptionError(f"splits is {splits}; want shares by split, as in {{'train': 0.9, 'val': 0.1}}")
    total = sum(splits.values())
    if not splits or any(share <= 0 for share in splits.values()) or not np.isclose(total, 1):
        raise OptionError(f"splits is {dict(splits)}; want positive shares that add up to 1 (they add up to {total:g})")


def _check_groups(groups: Any, splits: Mapping[str, float] | None) -> None:
    if groups is None:
        return
    if not isinstance(groups, str) and not callable(groups):
        raise OptionError(f"groups is {groups!r}; want the name of a field, or a function of an IndexRow")
    if splits is None:
        raise OptionError(
            f"groups={groups_in_words(groups)} is given without splits=, and rows are grouped where splits are drawn; "
            "add their shares, as in splits={'train': 0.8, 'val': 0.2}"
        )


# ---------------------------------------------------------------- the planned job


@frozen(slots=False, eq=False)
class PlannedJob:
    """A job with the present rows of its source and its plan.

    Attributes:
        job: the job.
        store: the rows, in the order of the plan.
        plan: shard and place of each row.
        digests: everything except rows that decides the bytes of shards.
        inputs: comparison of the input files with their former state.
    """

    job: Job
    store: RowStore
    plan: Plan
    digests: JobDigests
    inputs: InputFiles

    @functools.cached_property
    def chosen(self) -> tuple[ShardSpec, ...]:
        """The shards that `include` and `exclude` choose."""
        return tuple(self.plan.select(self.job.how.include, self.job.how.exclude))

    @functools.cached_property
    def manifest_digests(self) -> dict[str, str]:
        """The digests, as stored in the manifest."""
        return self.digests.to_json()

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """Makes the records of rows in this process, with a copy of the writer, which `setup_worker` may change."""
        made = self.job.records.pipeline
        assert made is not None  # a conversion is not replayed
        return Pipeline.of(copy.copy(made.writer), made.augmenter.transform, made.seed, made.augmenter.untouched)

    def find(self, row_key: str) -> tuple[IndexRow, ShardSpec]:
        """Return the row of a key, with its paths joined to the source, and its shard.

        Raises:
            OptionError: the source has no such row.
        """
        number = self.store.find(row_key)
        if number is None:
            some = join_problems(self.store.keys(np.arange(min(len(self.store), 20))))
            raise OptionError(f"the source has no row {row_key!r}; it has {some}")
        (row,) = self.store.read(np.array([number]))
        return row, self.plan.shard_at(self.store.place_in_order(number))


def _refuse_endless_manifest(plan: Plan, num_formats: int) -> None:
    """Raise `OptionError` for a plan whose manifest would be too large for readers, before the work begins."""
    num_parts = sum(len(shard.parts) for shard in plan.shards)
    num_bytes = num_formats * (_SHARD_BYTES * len(plan.shards) + _PART_BYTES * num_parts)
    if num_bytes > MOST_MANIFEST_BYTES:
        raise OptionError(
            f"the plan has {count_of(num_parts, 'part')} in {count_of(len(plan.shards), 'shard')}, and its manifest "
            f"{num_bytes:,} bytes or "
            f"more, of which readers take {MOST_MANIFEST_BYTES:,}; divide the rows among several datasets, each with "
            "an output of its own, or make fewer shards"
        )
