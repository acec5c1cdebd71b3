"""What was made when, in a finished set to which rows were appended: each generation of rows has shards of its own.

    manifest    number of shards, by split, of each generation ──┐
    _index      key and shard of each row ───────────────────────┴──> generation of each row of the source

A row that is there stays in its generation; all others make a new one. So shards keep their rows, and their bytes. One
that was dropped from the set is there, too: the index has it as a row without records.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from datamat.directory.index_files import IndexTable, read_index
from datamat.directory.keys import ShardName, pieces
from datamat.directory.manifest import index_file
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Mapping

    from datamat.directory.manifest import Manifest
    from datamat.options import ShardOptions
    from datamat.sources.store import RowStore


@frozen(slots=False, eq=False)
class Generations:
    """The generations of a finished set.

    Attributes:
        manifest: its manifest.
        indexes: its index, by split.
        is_append: whether the rows that it has are left alone, rather than planned.
    """

    manifest: Manifest
    indexes: Mapping[str, IndexTable]
    is_append: bool = False

    @classmethod
    def of(cls, folder: pathlib.Path, manifest: Manifest, *, is_append: bool = False) -> Generations:
        """Return those of a set, given the folder that holds the files of its index.

        Raises:
            CorruptDataError: one of these cannot be read.
        """
        listed = {split: manifest.index_infos[index_file(split)] for split in manifest.splits}
        indexes = {split: IndexTable(read_index(folder, info.file, info=info)) for split, info in listed.items()}
        return cls(manifest, indexes, is_append)

    @functools.cached_property
    def counts(self) -> tuple[Mapping[str, int], ...]:
        """The number of shards, by split, of each generation."""
        splits = self.manifest.splits
        return self.manifest.generations or ({split: len(shards) for split, shards in splits.items()},)

    def turns(self, store: RowStore) -> np.ndarray:
        """Return int64 (num_rows,): the generation of each row; -1 for one that is left alone."""
        found = np.full(len(store), len(self.counts), np.int64)
        for split, rows, places in self.known(store):
            if self.is_append:
                found[rows] = -1
            elif split in store.splits:
                stay = np.asarray(store.split_codes)[rows] == store.splits.index(split)
                ends = np.cumsum([counts.get(split, 0) for counts in self.counts])
                found[rows[stay]] = np.searchsorted(ends, self.indexes[split].shards[places[stay]], side="right")
        if self.is_append and self.manifest.removed:  # also those that no index has any more
            rows = store.find_all(self.manifest.removed)
            found[rows[rows >= 0]] = -1
        return found

    def known(self, store: RowStore) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield rows whose keys are in a split of the set, whatever their split is now, and where its index has them.

        Yields:
            The split; int64 (n,), numbers of rows of the source; and int64 (n,), of the rows of the index.
        """
        for piece in pieces(len(store)):
            rows = np.arange(piece.start, piece.stop)
            keys = store.keys(rows)
            for split, index in self.indexes.items():
                places = index.find_all(keys)
                if len(here := np.flatnonzero(places >= 0)):
                    yield split, rows[here], places[here]

    def name_of(self, dataset: str, split: str, number: int, count: int) -> str:
        """Return the name of a shard that keeps the one that it has: a new one has the number of shards that there are.

        Args:
            dataset: name of the dataset.
            split: the split.
            number: number of the shard.
            count: how many shards the split has now.
        """
        before = self.manifest.splits.get(split, ())
        return before[number].name if number < len(before) else str(ShardName(dataset, split, number, count))

    def options(self, options: ShardOptions, split: str, turn: int, num_rows: int) -> ShardOptions:
        """Return how the rows of a generation are laid out: as they were; new ones in shards about as large as others.

        Args:
            options: how the set is laid out.
            split: the split.
            turn: number of the generation.
            num_rows: how many rows of the split it has.
        """
        if options.records_per_shard is not None:
            return options
        count = self.counts[turn].get(split) if turn < len(self.counts) else None
        if count is None and options.num_shards is not None:
            before = self.manifest.splits.get(split, ())
            rows = sum(shard.num_rows for shard in before)
            count = -(-len(before) * num_rows // rows) if rows else options.num_shards
        if count is None:
            return options
        ranks = options.ranks or 1
        return dataclasses.replace(options, num_shards=-(-count // ranks) * ranks)
