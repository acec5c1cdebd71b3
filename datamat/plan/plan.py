"""The plan: which row goes into which shard, and how the work is divided; a pure function of rows and options.

    rows ── split ── order drawn from (seed, key) ── shards (files) ── parts (runs of rows: the unit of work)

The place of a sample depends on its own key: the split on one hash of the key, the shard on another. So adding samples
never moves old ones between splits, nor between shards if their number stays the same. Nothing here depends on the
number of workers.
"""

from __future__ import annotations

import bisect
import dataclasses
import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from datamat.directory.keys import DATASET_NAME, RecordKey, ShardName, mix64, ordered_by, pieces
from datamat.errors import OptionError, count_of
from datamat.options import option
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from datamat.options import ShardOptions
    from datamat.plan.generations import Generations
    from datamat.sources.store import RowStore

OUTPUT_VERSION = 1
"""Incremented when the order of rows or the division into parts changes: then all shards are rebuilt."""


# Work is divided by estimated cost, in bytes of input: large parts for little overhead (about a millisecond each), and
# small ones at the end of each shard, run last, so that workers finish together. There are enough parts to keep many
# cores busy even if rows name no files, so that their cost is unknown. This depends only on the plan, never on the
# number of workers.
_PARTS_PER_PLAN = 40
_LARGEST_PART = 32 << 20
_TAIL_SHARE, _TAIL_DIVISOR = 0.2, 4
_ROW_COST = 256  # minimum cost of a row, in bytes of input: a tiny row takes as long as this much of an image
_MOST_PART_ROWS = 65_536
_COLUMNS_PER_ROW = 32  # each part takes a fraction of a millisecond per column: parts of wide tables have more rows
# Readers read groups of records as one piece, so parts end where groups do. Parts of less than this share of a group
# are not aligned: a few slow rows should keep many cores busy, and little is read twice.
_GROUP_SHARE = 4

_WILDCARD = re.compile(r"[*?[]")

_EVEN_BELOW = 4
"""Rows per shard below which rows are divided evenly: hashing would leave some shards empty. At r rows on average, one
of n shards is empty with a probability below n * exp(-r); then they are also divided evenly."""


@frozen()
class PartSpec:
    """Consecutive rows of a shard: a unit of work of `PartWorker.write_parts`.

    Attributes:
        shard: name of the shard.
        number: position among the `num_parts` parts of the shard.
        start: position of the first row in the plan; `stop` is one past the last.
        cost: estimated cost, in bytes of input.
        copies: records per row.
        augmented: whether the transform applies, and keys end in `#COPY`.
        fingerprint: fingerprint of the shard.
        removed: keys of its rows, and of single records, that are left out: they were dropped from the finished set.
    """

    shard: str
    number: int
    start: int
    stop: int
    cost: int
    copies: int
    augmented: bool
    fingerprint: str
    num_parts: int
    removed: tuple[str, ...] = ()


@frozen()
class ShardSpec:
    """One output file to write.

    Attributes:
        name: file name without extension: NAME-SPLIT-XXXXX-of-YYYYY.
        split: the split that it belongs to.
        number: position among the shards of the split.
        fingerprint: digest of everything that decides its bytes.
        parts: the units of work, in the order of the records.
    """

    name: str
    split: str
    number: int
    fingerprint: str
    parts: tuple[PartSpec, ...]

    def __post_init__(self) -> None:
        # Workers complete a shard once they see `num_parts` parts.
        if any(part.num_parts != len(self.parts) for part in self.parts):
            raise ValueError(f"{self.name} has {count_of(len(self.parts), 'part')}; they say {self.parts[0].num_parts}")

    @property
    def start(self) -> int:
        """Position of the first row in the plan."""
        return self.parts[0].start

    @property
    def stop(self) -> int:
        """One past the last row."""
        return self.parts[-1].stop

    @property
    def num_rows(self) -> int:
        """Number of input rows."""
        return self.stop - self.start

    @property
    def copies(self) -> int:
        """Records per row."""
        return self.parts[0].copies

    @property
    def augmented(self) -> bool:
        """Whether the transform applies."""
        return self.parts[0].augmented

    @property
    def cost(self) -> int:
        """Estimated cost, in bytes of input."""
        return sum(part.cost for part in self.parts)

    def matches(self, pattern: str) -> bool:
        """Return True if a shell pattern matches this shard: `train-0000?`, `test-*`, or its whole name."""
        short = ShardName.parse(self.name).short
        return any(fnmatch.fnmatchcase(name, pattern) for name in (short, self.name))


@frozen(slots=False)
class Plan:
    """The plan of a run: which rows go to which shard. It prints as a table, also in a notebook.

    Attributes:
        name: name of the dataset.
        shards: every output file, sorted by split and number.
        ranks: number of training processes that will share the shards; None if not given.
        left_aside: number, suffixes and first names of files that the index does not use; "" if it uses all.
        groups: number and kind of the groups that drew the splits; "" if keys did or the index named them.
        generations: for a set with appended rows, the number of shards, by split, of each generation.
        removed: keys of rows and records that are left out, even those that no row has now.
    """

    name: str
    shards: tuple[ShardSpec, ...]
    ranks: int | None = None
    left_aside: str = ""
    groups: str = ""
    generations: tuple[Mapping[str, int], ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of input rows."""
        return sum(shard.num_rows for shard in self.shards)

    @property
    def num_records(self) -> int:
        """Number of records, if every draw of the transform gives one sample."""
        return sum(shard.num_rows * shard.copies for shard in self.shards)

    @functools.cached_property
    def splits(self) -> dict[str, tuple[ShardSpec, ...]]:
        """The shards of each split, in order."""
        found: dict[str, list[ShardSpec]] = {}
        for shard in self.shards:
            found.setdefault(shard.split, []).append(shard)
        return {split: tuple(shards) for split, shards in found.items()}

    def rank_records(self, split: str, num_records: Mapping[str, int] | None = None) -> list[int]:
        """Return the number of records of a split for each rank: rank r takes the shards r, r + ranks, r + 2 ranks, ...

        `webdataset.split_by_node`, `tf.data.Dataset.shard` and Hugging Face's `split_dataset_by_node` distribute shards
        in this way.

        Args:
            split: name of the split.
            num_records: number of records by shard name, if known; None takes those of the plan.

        Example:
            >>> plan.rank_records("train")   # doctest: +SKIP
            [371, 371, 371, 371]
        """
        shards, ranks = self.splits[split], self.ranks or 1
        planned = {shard.name: shard.num_rows * shard.copies for shard in shards}
        found = [(num_records or planned)[shard.name] for shard in shards]
        return [sum(found[rank::ranks]) for rank in range(ranks)]

    def uneven(self, num_records: Mapping[str, int] | None = None) -> dict[str, str]:
        """Return the splits whose records ranks share unevenly, with the consequences; see `rank_records`."""
        messages = {}
        for split, shards in self.splits.items():
            found = self.rank_records(split, num_records)
            if min(found) == max(found):
                continue
            num_rows = sum(shard.num_rows for shard in shards)
            why = "rows failed or were left out, or gave more or fewer samples than copies"
            if num_records is None:
                rows = count_of(num_rows, "row")
                why = f"{rows} cannot be divided by {self.ranks}, and all copies of a row are in one shard"
            messages[split] = (
                f"split {split!r} gives its {self.ranks} ranks {min(found):,} to {count_of(max(found), 'record')}: "
                f"{why}; have "
                f"every rank end its epoch after {min(found):,}"
            )
        return messages

    def shard_at(self, place: int) -> ShardSpec:
        """Return the shard that holds the row at a position in the plan."""
        return self.shards[bisect.bisect_right(self.shards, place, key=lambda shard: shard.start) - 1]

    def select(self, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> tuple[ShardSpec, ...]:
        """Return the shards that match wildcard patterns.

        Args:
            include: shell patterns such as `train-0000?` or `test-*`; None takes all.
            exclude: shell patterns of shards to leave out.

        Raises:
            OptionError: a pattern matches no shard.
        """
        chosen = self._named(include, "include") if include is not None else {shard.name for shard in self.shards}
        if exclude is not None:
            chosen -= self._named(exclude, "exclude")
        if not chosen:
            raise OptionError(f"include={include!r} and exclude={exclude!r} leave no shard to make")
        return tuple(shard for shard in self.shards if shard.name in chosen)

    def _named(self, patterns: str | Sequence[str], name: str) -> set[str]:
        found: set[str] = set()
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            # Without wildcards it names one shard, which is looked up: a job array names thousands of them.
            exact = None if _WILDCARD.search(pattern) else self._by_name.get(pattern)
            shards = self.shards if exact is None else (exact,)
            names = {shard.name for shard in shards if shard.matches(pattern)}
            if not names:
                known = ", ".join(ShardName.parse(shard.name).short for shard in self.shards[:6])
                raise OptionError(f"{option(name, pattern)} names no shard of the plan; its shards are {known}, ...")
            found |= names
        return found

    @functools.cached_property
    def _by_name(self) -> dict[str, ShardSpec]:
        """Each shard by its full name and by its name within the dataset."""
        short = {ShardName.parse(shard.name).short: shard for shard in self.shards}
        return {**short, **{shard.name: shard for shard in self.shards}}

    def _table(self) -> list[list[str]]:
        rows = [["split", "shards", "rows", "copies", "records", "parts", "input"]]
        rows[0] += ["records per rank"] if self.ranks else []
        for split, shards in self.splits.items():
            num_rows = sum(shard.num_rows for shard in shards)
            num_parts = sum(len(shard.parts) for shard in shards)
            megabytes = sum(shard.cost for shard in shards) / max(shards[0].copies, 1) / 1e6
            copies = shards[0].copies
            numbers = [len(shards), num_rows, copies, num_rows * copies, num_parts]
            rows.append([split, *(f"{number:,}" for number in numbers), f"{megabytes:,.1f} MB"])
            if self.ranks:
                found = sorted(set(self.rank_records(split)))
                rows[-1].append(" or ".join(f"{number:,}" for number in found))
        return rows

    @property
    def _remarks(self) -> list[str]:
        """Remarks below the table: which splits are transformed, and what is not in the plan."""
        drawn = [split for split, shards in self.splits.items() if shards[0].augmented]
        others = [split for split in self.splits if split not in drawn]
        draws = f"drawn: {', '.join(drawn)}" + (f"; as they are: {', '.join(others)}" if others else "")
        return [remark for remark in (draws if drawn else "", self.groups, self.left_aside) if remark]

    @property
    def _title(self) -> str:
        return f"Plan of {self.name!r}: {count_of(len(self.shards), 'shard')}, {count_of(self.num_records, 'record')}"

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join([self._title, *lines, *self._remarks])

    def _repr_html_(self) -> str:
        from datamat.directory.display import Table, render_html

        head, *rows = self._table()
        return render_html(self._title, tables=[Table(head, rows)], notes=self._remarks)


class SplitTerms(NamedTuple):
    """The terms for all rows of a split.

    Attributes:
        copies: records per row.
        augmented: whether the transform applies.
        fingerprint: digest of everything except rows that decides the bytes of a shard.
    """

    copies: int
    augmented: bool
    fingerprint: str


def make_plan(  # noqa: PLR0913 -- everything that decides a plan, by name
    store: RowStore,
    *,
    name: str,
    options: ShardOptions,
    splits: Mapping[str, SplitTerms],
    seed: int,
    costs: np.ndarray,
    group_records: int = 1,
    num_columns: int = 1,
    rows_at_once: int = 1,
    generations: Generations | None = None,
    keeps_names: bool = False,
) -> Plan:
    """Order the rows, divide them into shards and parts, and write the order to the store.

    Args:
        store: rows of the index, as written; receives their order.
        name: name of the dataset, with which the names of the shards begin.
        options: number or size of the shards, and whether rows are shuffled.
        splits: terms for the rows of each split.
        seed: base seed; with the key it decides the place of each row.
        costs: int64 (num_rows,), the cost of each row in bytes.
        group_records: number of records that a format stores together: parts end where such a group does, unless they
            are much smaller.
        num_columns: number of columns of a record.
        rows_at_once: number of rows that are awaited together, and so must be in one part.
        generations: the generations of a set with appended rows, each of which has its own shards.
        keeps_names: whether shards of such a set keep their names, where renaming one means copying it.

    Raises:
        OptionError: the name cannot be part of a file name, or there are fewer rows than shards.
    """
    if not DATASET_NAME.match(name):
        raise OptionError(f"dataset name {name!r}: want letters, digits, _ and -, as it begins the names of the shards")
    codes = store.split_codes
    turns = None if generations is None else generations.turns(store)
    if turns is not None:
        codes = np.where(turns < 0, len(store.splits), codes)  # not the code of a split
    totals = _totals(costs, codes, len(store.splits))
    total = sum(cost * splits[split].copies for cost, split in zip(totals, store.splits, strict=True))
    target = min(max(total // _PARTS_PER_PLAN, 1), _LARGEST_PART)
    order, shards, first = [], [], 0
    made: dict[str, dict[int, int]] = {}  # number of shards of each generation, by split
    for code in np.flatnonzero(totals).tolist():
        split = store.splits[code]
        copies, augmented, fingerprint = splits[split]
        places = _Places(store.hashes, seed) if options.shuffle else None
        rows = _rows_of(codes, code)
        if places is not None:
            rows = places.ordered(rows)
        if generations is None or turns is None:
            bounds = _bounds(rows, places, totals[code], copies, options, split)
        else:
            rows = rows[np.argsort(turns[rows], kind="stable")]
            bounds, made[split] = _bounds_by_turn(rows, turns, generations, places, costs, copies, options, split)
        order.append(rows)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            shard_name = str(ShardName(name, split, number, len(bounds) - 1))
            if keeps_names and generations is not None:
                shard_name = generations.name_of(name, split, number, len(bounds) - 1)
            here = rows[start:stop]
            shard_fingerprint = _fingerprint(fingerprint, store.identities[here])  # one text shared by all parts
            work = np.cumsum((costs[here] + _ROW_COST) * copies)
            least = max(rows_at_once, num_columns // _COLUMNS_PER_ROW)
            cuts = _cut(work, target, group_records // math.gcd(group_records, copies), least)
            parts = tuple(
                PartSpec(
                    shard=shard_name,
                    number=part,
                    start=first + start + a,
                    stop=first + start + b,
                    cost=int(work[b - 1] - (work[a - 1] if a else 0)),
                    copies=copies,
                    augmented=augmented,
                    fingerprint=shard_fingerprint,
                    num_parts=len(cuts),
                )
                for part, (a, b) in enumerate(cuts)
            )
            shards.append(ShardSpec(shard_name, split, number, shard_fingerprint, parts))
        first += len(rows)
    store.set_order(np.concatenate(order) if len(order) > 1 else order[0])
    return Plan(name, tuple(shards), options.ranks, generations=_by_generation(made))


def plan_without(plan: Plan, removed: Sequence[str], store: RowStore) -> Plan:
    """Return the plan in which some rows and records are left out where they lie, so that no other row moves.

    Args:
        plan: the plan.
        removed: their keys.
        store: the rows, in the order of the plan.
    """
    if not removed:
        return plan
    of_parts: dict[tuple[str, int], list[str]] = {}
    rows = store.find_all([*map(RecordKey.row_of, removed)]).tolist()
    for key, row in zip(removed, rows, strict=True):
        if row >= 0:
            place = store.place_in_order(row)
            shard = plan.shard_at(place)
            part = bisect.bisect_right(shard.parts, place, key=lambda part: part.start) - 1
            of_parts.setdefault((shard.name, part), []).append(key)
    shards = []
    for shard in plan.shards:
        keys = [of_parts.get((shard.name, part.number), []) for part in shard.parts]
        if any(keys):
            digest = fingerprint_without(shard.fingerprint, itertools.chain(*keys))
            parts = tuple(
                dataclasses.replace(part, fingerprint=digest, removed=tuple(gone))
                for part, gone in zip(shard.parts, keys, strict=True)
            )
            shard = dataclasses.replace(shard, fingerprint=digest, parts=parts)  # noqa: PLW2901 -- the same shard
        shards.append(shard)
    return dataclasses.replace(plan, shards=tuple(shards), removed=tuple(removed))


def fingerprint_without(fingerprint: str, removed: Iterable[str], restored: Iterable[str] = ()) -> str:
    """Return the fingerprint of a shard that lacks some keys, in whichever order they were removed."""
    gone, back = (
        sum(xxhash.xxh3_128_intdigest(f"without {key}".encode()) for key in keys) for keys in (removed, restored)
    )
    return f"{(int(fingerprint, 16) + gone - back) % (1 << 128):032x}"


def _fingerprint(terms: str, identities: np.ndarray) -> str:
    digest = xxhash.xxh3_128(terms.encode())
    digest.update(np.ascontiguousarray(identities).data)
    return digest.hexdigest()


def _bounds_by_turn(
    rows: np.ndarray,
    turns: np.ndarray,
    generations: Generations,
    places: _Places | None,
    costs: np.ndarray,
    copies: int,
    options: ShardOptions,
    split: str,
) -> tuple[list[int], dict[int, int]]:
    """Return the bounds of shards, as `_bounds` does, for rows by generation, and the number of shards of each."""
    bounds, counts = [0], {}
    for turn, count in zip(*np.unique(turns[rows], return_counts=True), strict=True):
        here = rows[bounds[-1] : bounds[-1] + count]
        cost = int(costs[here].sum()) + _ROW_COST * len(here)
        found = _bounds(here, places, cost, copies, generations.options(options, split, turn, len(here)), split)
        bounds += [bounds[-1] + bound for bound in found[1:]]
        counts[int(turn)] = len(found) - 1
    return bounds, counts


def _by_generation(made: Mapping[str, Mapping[int, int]]) -> tuple[dict[str, int], ...]:
    last = max((turn for counts in made.values() for turn in counts), default=0)
    if not last:
        return ()
    return tuple({split: counts[turn] for split, counts in made.items() if turn in counts} for turn in range(last + 1))


# The following functions process rows in pieces. A hundred million rows then need only a few bytes each: their numbers,
# in the order of the plan. Everything else is mapped from the files of the store.


def _totals(costs: np.ndarray, codes: np.ndarray, num_splits: int) -> list[int]:
    """Return the total cost of the rows of each split, one record each; 0 for empty splits."""
    totals = [0] * num_splits
    for piece in pieces(len(codes)):
        here = codes[piece]
        for code, count in enumerate(np.bincount(here, minlength=num_splits)[:num_splits].tolist()):
            if count:
                totals[code] += int(costs[piece][here == code].sum()) + _ROW_COST * count
    return totals


def _rows_of(codes: np.ndarray, code: int) -> np.ndarray:
    """Return uint32 (n,): the numbers of the rows of a split."""
    found = [
        np.flatnonzero(codes[piece] == code).astype(np.uint32) + np.uint32(piece.start) for piece in pieces(len(codes))
    ]
    return np.concatenate(found)


class _Places:
    """The place of each row in the order of its split: uint64, uniform, drawn from (seed, key).

    Args:
        hashes: uint64 (n,), hash of the key of each row.
        seed: base seed.
    """

    def __init__(self, hashes: np.ndarray, seed: int) -> None:
        self._hashes = hashes
        self._salt = np.uint64(xxhash.xxh3_64_intdigest(f"order {seed}".encode()))

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return uint64 (n,): the places of rows by number."""
        return mix64(self._hashes[rows] ^ self._salt)

    def ordered(self, rows: np.ndarray) -> np.ndarray:
        """Return uint32 (n,): rows by number, in the order of their places."""
        return ordered_by(self.of, rows)

    def before(self, rows: np.ndarray, limits: np.ndarray) -> list[int]:
        """Return the number of ordered rows before each of some places."""
        low, high = np.zeros(len(limits), np.int64), np.full(len(limits), len(rows), np.int64)
        while (is_open := low < high).any():
            middle = (low + high) // 2
            is_before = is_open.copy()
            is_before[is_open] = self.of(rows[middle[is_open]]) < limits[is_open]
            low = np.where(is_before, middle + 1, low)
            high = np.where(is_open & ~is_before, middle, high)
        found: list[int] = low.tolist()
        return found


def _bounds(
    rows: np.ndarray,
    places: _Places | None,
    cost: int,
    copies: int,
    options: ShardOptions,
    split: str,
) -> list[int]:
    """Return the starts of the shards of a split, and its end: increasing positions among its rows."""
    count = len(rows)
    if options.records_per_shard is not None:
        step = max(options.records_per_shard // copies, 1)
        return [*range(0, count, step), count]
    wanted = options.num_shards or 1 << max(-(-cost * copies // options.shard_bytes) - 1, 0).bit_length()
    if options.ranks is not None:
        return _rank_bounds(count, wanted, options.ranks, split)
    number = min(wanted, count)
    even = [count * shard // number for shard in range(number + 1)]
    if places is None or count < _EVEN_BELOW * number:
        return even
    # By equal shares of the hash range: the shard of a row does not depend on other rows.
    limits = np.array([(shard << 64) // number for shard in range(1, number)], np.uint64)
    bounds = [0, *places.before(rows, limits), count]
    return bounds if len(set(bounds)) == len(bounds) else even


def _rank_bounds(count: int, wanted: int, ranks: int, split: str) -> list[int]:
    """Return bounds that give each rank the same number of shards, and of rows, except for a remainder of one.

    Each `ranks` consecutive shards form a layer, of which each rank takes one; all shards of a layer have the same
    size. The remainder goes to the first shards of the first layer, which is the smallest.
    """
    if count < ranks:
        raise OptionError(
            f"split {split!r} has {count_of(count, 'row')}, too few for {ranks} shards, one for each rank; lower "
            "ranks, or leave the split out of the source and write it to its own output"
        )
    each, left = divmod(count, ranks)
    layers = min(-(-wanted // ranks), each)
    sizes = [each * (layer + 1) // layers - each * layer // layers for layer in range(layers) for _ in range(ranks)]
    sizes[:left] = [size + 1 for size in sizes[:left]]
    return [0, *itertools.accumulate(sizes)]


def _cut(work: np.ndarray, target: int, step: int, least: int = 1) -> list[tuple[int, int]]:
    """Divide the rows of a shard into parts of about `target` cost, with smaller ones at the end.

    Args:
        work: cumulative cost of the rows.
        target: desired cost of a part.
        step: number of rows that fill groups of records: large enough parts have a multiple of it.
        least: minimum number of rows of a part, except the last, which may have half as many.
    """
    tail_from = int(work[-1]) * (1 - _TAIL_SHARE)
    cuts, here = [], 0
    while here < len(work):
        done = int(work[here - 1]) if here else 0
        size = target if done < tail_from else target // _TAIL_DIVISOR
        end = max(int(np.searchsorted(work, done + size, side="right")), here + least)
        if len(work) - end < least // 2:
            end = len(work)
        end = min(end, here + _MOST_PART_ROWS)
        if _GROUP_SHARE * (end - here) >= step:
            end = here + max((end - here) // step, 1) * step
        end = min(end, len(work))
        cuts.append((here, end))
        here = end
    return cuts
