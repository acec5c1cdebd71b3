"""Finished directories in another format, or cut into other shards, without computing a sample again.

    finished directory ──> rows of its index ──> plan ──> workers: stored columns, read by number ──> shards
                                                                                       manifest, index, offsets

`convert` is a run like any other, of which only two things differ: what workers do with a row (`stored`), and, unless
other shards are asked for, where shards end. So it uses all cores, goes on where it was stopped, and gives the same
bytes for any number of workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.errors import CorruptDataError, OptionError
from datamat.manifest import Manifest
from datamat.materializer import Materializer
from datamat.options import ShardOptions
from datamat.plan import PartSpec, Plan, ShardSpec
from datamat.recipe import Recipe
from datamat.rows import RowStore
from datamat.storage import digest_file
from datamat.stored import SHARD, StoredPipeline, StoredWriter
from datamat.verification import verify

if TYPE_CHECKING:
    import logging
    import os
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from datamat.formats import ShardFormat
    from datamat.ingredients import Ingredients
    from datamat.options import WorkerOptions
    from datamat.pipeline import Pipeline
    from datamat.report import RunReport

__all__ = ["convert"]

_PART_BYTES = 32 << 20
_PARTS_PER_PLAN = 40
_MOST_PART_ROWS = 65_536


def convert(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: str | ShardFormat | Sequence[str | ShardFormat] | None = None,  # noqa: A002 -- as for `Materializer`
    shards: int | ShardOptions | None = None,
    workers: WorkerOptions | None = None,
    executor: Executor | None = None,
    logger: logging.Logger | None = None,
    progress: bool = True,
) -> RunReport:
    """Rewrite a finished directory in another format, or in another number of shards.

    Records are taken over as they are stored: pictures keep their bytes, keys their copies (`KEY#COPY`), and splits
    their order. The new directory has all that a run leaves: shards, offsets, index, manifest, ledger. Its index keeps
    the fields of each row, and says where its records came from (`from_shard`, `from_record`, `from_records`), but no
    sizes and times of input files. Rows that had failed are not in it.

    Stopped at any moment, the same call goes on; with nothing to do it ends at once.

    Args:
        path: the finished directory; it is only read.
        output: folder of the new one.
        format: as for `Materializer`; None keeps the formats. Of a directory with several, the first is read.
        shards: how records are laid out: the number of shards in each split, or `ShardOptions`, of which `shuffle` is
            passed over because the order stays. None keeps the shards: each has the records that it had.
        workers: the processes that do the work.
        executor: any `concurrent.futures.Executor`, instead of datamat's own.
        logger: for messages.
        progress: show a bar and a summary on standard error.

    Returns:
        What was done.

    Raises:
        OptionError: neither `format` nor `shards` is given, or the output is the directory itself.
        OutputError: `path` is not finished, or the output cannot be written.
        CorruptDataError: a file of the directory is damaged; names it and the record.

    Example:
        >>> convert("out/camvid", "out/camvid-parquet", format="parquet", shards=16)   # doctest: +SKIP
    """
    folder = pathlib.Path(path).absolute()
    if format is None and shards is None:
        raise OptionError(f"convert: nothing to change in {folder}; give format= or shards=")
    if folder.resolve() in (target := pathlib.Path(output).resolve(), *target.parents):
        raise OptionError(f"convert: output {output} lies in the directory that is converted; give another folder")
    before = Manifest.read(folder)
    _check_whole(folder, before)
    job = Materializer(
        StoredWriter(before),
        folder,
        output,
        format=list(before.by_format) if format is None else format,
        shards=_shard_options(shards),
        copies={split: number for split, number in before.copies.items() if _has_records(before, split)},
        seed=before.seed,
        workers=workers,
        executor=executor,
        logger=logger,
    )
    job.recipe = _ConversionRecipe.of(job.recipe, before, keeps_shards=shards is None)
    return job.run(progress=progress)


def _has_records(manifest: Manifest, split: str) -> bool:
    return any(info.num_records for info in manifest.splits.get(split, ()))


def _shard_options(shards: int | ShardOptions | None) -> ShardOptions:
    options = shards if isinstance(shards, ShardOptions) else ShardOptions(num_shards=shards)
    return dataclasses.replace(options, shuffle=False)


def _check_whole(folder: pathlib.Path, manifest: Manifest) -> None:
    """Raise where a shard is not as the manifest says: not every format would show it where a record is read."""
    for info in manifest.shards:
        try:
            is_same = digest_file(folder / info.file) == info.checksum
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise CorruptDataError(f"{verify(folder)}\nnothing was converted: repair the directory, and convert again")


@dataclasses.dataclass(frozen=True, eq=False)
class _ConversionRecipe(Recipe):
    """The recipe of a conversion: stored records in place of samples.

    Args:
        before: manifest of the directory that is converted.
        keeps_shards: whether each shard keeps its records.
    """

    before: Manifest = dataclasses.field(kw_only=True)
    keeps_shards: bool = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, recipe: Recipe, before: Manifest, *, keeps_shards: bool) -> _ConversionRecipe:
        """Return a recipe with the arguments of another one."""
        arguments = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe) if field.init}
        return cls(**arguments, before=before, keeps_shards=keeps_shards)

    def pipeline(self) -> Pipeline:
        """Return what takes records over."""
        return StoredPipeline(self.writer, self.augmenter, self.seed, folder=self.source, manifest=self.before)

    def write_rows(self, folder: pathlib.Path) -> RowStore:
        """Write the rows, and return them with the sizes of their records."""
        return _StoredRows(super().write_rows(folder).folder, self.before)

    def plan(self, store: RowStore, ingredients: Ingredients) -> Plan:
        """Return which row goes to which shard."""
        plan = super().plan(store, ingredients)
        return _as_before(plan, store, ingredients, self.before) if self.keeps_shards else plan

    def manifest(self, *args: Any) -> Manifest:
        """Return the manifest, with what the directory said of the making of its records."""
        made = super().manifest(*args)
        return dataclasses.replace(
            made,
            augmented=tuple(split for split in made.splits if split in self.before.augmented),
            made_by={**self.before.made_by, "converted_from": self.before.format},
        )


class _StoredRows(RowStore):
    """Rows that cost what their records take in the shards that they come from, on average."""

    def __init__(self, folder: pathlib.Path, before: Manifest) -> None:
        super().__init__(folder)
        self._before = before

    def input_bytes(self) -> np.ndarray:
        """Return int64 (num_rows,): bytes of the records of each row."""
        costs = np.zeros(self.num_rows, np.int64)
        shard_of = _shards_of(self)
        for code, split in enumerate(self.splits):
            infos = self._before.splits.get(split, ())
            rows = self.split_codes == code
            sizes = [info.num_bytes // max(info.num_rows - info.num_failed, 1) for info in infos]
            costs[rows] = np.array(sizes, np.int64)[shard_of[rows]]
        return costs


def _shards_of(store: RowStore) -> np.ndarray:
    """Return int64 (num_rows,): the number of the shard that the records of each row come from."""
    name, numbers = next(store.columns(np.arange(store.num_rows)))
    assert name == SHARD
    return np.asarray(numbers)


def _as_before(plan: Plan, store: RowStore, ingredients: Ingredients, before: Manifest) -> Plan:
    """Return the plan with the cuts between shards that the directory has; shards without records are left out."""
    shard_of = _shards_of(store)[store.order]
    least_parts = -(-_PARTS_PER_PLAN // len(before.shards))
    shards: list[ShardSpec] = []
    for split, planned in plan.splits.items():
        like = planned[0].parts[0]
        base = ingredients.of_split(augmented=like.augmented, copies=like.copies)
        start, stop = planned[0].start, planned[-1].stop
        sources, firsts = np.unique(shard_of[start:stop], return_index=True)
        bounds = [*(firsts + start).tolist(), stop]
        for number, source in enumerate(sources.tolist()):
            digests = store.digests[store.order[bounds[number] : bounds[number + 1]]]
            model = dataclasses.replace(
                like,
                shard=f"{plan.name}-{split}-{number:05d}-of-{len(sources):05d}",
                start=bounds[number],
                stop=bounds[number + 1],
                cost=before.splits[split][source].num_bytes,
                fingerprint=xxhash.xxh3_128_hexdigest(base.encode() + np.ascontiguousarray(digests).tobytes()),
            )
            parts = _parts(model, least_parts)
            shards.append(ShardSpec(model.shard, split, number, model.fingerprint, parts))
    return Plan(plan.name, tuple(shards))


def _parts(whole: PartSpec, least: int) -> tuple[PartSpec, ...]:
    """Return a shard, given as one part, in even parts: by its bytes alone, so that any number of workers has these."""
    count = whole.stop - whole.start
    wanted = max(least, -(-whole.cost // _PART_BYTES), -(-count // _MOST_PART_ROWS))
    number = min(wanted, count)
    bounds = [whole.start + count * part // number for part in range(number + 1)]
    return tuple(
        dataclasses.replace(whole, number=part, start=start, stop=stop, cost=whole.cost * (stop - start) // count)
        for part, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
