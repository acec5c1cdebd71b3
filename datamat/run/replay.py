"""Rebuild single records in the caller's process, with the same draws as a run, for debugging and comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.keys import RecordKey
from datamat.directory.manifest import MANIFEST_FILE
from datamat.directory.verify import Problem, examine
from datamat.errors import DatamatError, OptionError, SchemaError, Skip
from datamat.readers.preview import draw_drawn
from datamat.transforms.seeding import global_state_kept

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datamat.directory.verify import VerifyReport
    from datamat.features import Features
    from datamat.features.base import Column
    from datamat.plan.job import PlannedJob
    from datamat.readers.preview import Picture
    from datamat.writers.base import Sample


def replay(planned: PlannedJob, key: str, copy: int) -> Sample:
    """Process a row here and now, and return the sample that a run would store for it, decoded.

    Breakpoints in `read`, `augment` and the transform work. Earlier copies are drawn, too, because a copy that equals
    one of them is drawn again. The global random state is restored at the end.

    Args:
        planned: job with its rows and its plan.
        key: key of the row, or of a record: KEY#COPY, or KEY#COPY-NUMBER if a copy gives several.
        copy: number of the copy, if the key does not name one.

    Raises:
        OptionError: there is no such row, or no such copy of it.
        SampleError: the row fails, as it would in a run.
    """
    planned.pipeline.setup_worker()
    meant = [one for one in RecordKey.meant_by(key) if planned.store.find(one.row_key) is not None]
    for wanted in meant or [RecordKey.parse(key)]:
        row, shard = planned.find(wanted.row_key)
        name = str(wanted) if wanted.copy is not None else RecordKey.format(wanted.row_key, copy)
        found = []
        with global_state_kept():
            for stored, columns in planned.pipeline.records(row, copies=shard.copies, augmented=shard.augmented):
                if stored == name or stored.startswith(f"{name}-") or f"{stored}#0" == name:
                    return planned.pipeline.features.decode(columns)
                found.append(stored)
    raise OptionError(f"row {row.key!r} gives no record {name!r}; it gives {', '.join(found)}")


def preview_copies(planned: PlannedJob, count: int, copies: int, opacity: float) -> Picture:
    """Return a picture of a few rows: each as read, followed by the first copies that a run would store.

    Everything happens in this process, as in `replay`, and nothing is written.

    Args:
        planned: job with its rows and its plan.
        count: number of rows, at least 1, spread evenly over the splits that the transform changes, or over all if it
            changes none.
        copies: maximum number of copies to show, at least 1.
        opacity: opacity of the masks, from 0 to 1.

    Raises:
        OptionError: an argument is out of range.
        SampleError: a row fails, as it would in a run.
    """
    if count < 1 or copies < 1:
        raise OptionError(f"preview: count={count}, copies={copies}; want at least 1 of each")
    pipeline, shards = planned.pipeline, [shard for shard in planned.chosen if shard.augmented] or planned.chosen
    places = np.concatenate([np.zeros(0, np.int64), *(np.arange(shard.start, shard.stop) for shard in shards)])
    chosen = places[np.linspace(0, len(places) - 1, min(count, len(places))).round().astype(int)]
    pipeline.setup_worker()
    drawn = []
    with global_state_kept():
        for row in planned.store.read(np.asarray(planned.store.order[chosen])):
            _, shard = planned.find(row.key)
            samples = [sample for sample in pipeline.samples(row) if not isinstance(sample, Skip)]
            if samples:
                made = pipeline.records(row, copies=min(copies, shard.copies), augmented=shard.augmented)
                stored = [(key, pipeline.features.decode(columns)) for key, columns in itertools.islice(made, copies)]
                drawn.append([(f"{row.key} as read ({row.split})", _as_read(pipeline.features, samples[0])), *stored])
    return draw_drawn(drawn, pipeline.features, opacity)


def _as_read(features: Features, sample: Sample) -> Mapping[str, Any]:
    """Return a sample as it would be stored, or as the transform gets it if it can only be stored transformed."""
    try:
        return features.decode(features.encode(sample))
    except SchemaError:
        return features.prepare(sample)


def verify_sample(planned: PlannedJob, share: float, *, deep: bool) -> VerifyReport:
    """Verify an output, and rebuild the records of a share of its rows, to compare them byte for byte.

    Args:
        planned: job with its rows and its plan.
        share: share of the rows, above 0 and up to 1.
        deep: whether to also decode every record.

    Raises:
        OutputError: the run is not finished.
        OptionError: the share is not between 0 and 1.
    """
    recomputation = Recomputation(planned, share)
    report = examine(planned.job.folder, deep=deep, recomputed=recomputation.difference)
    missing = [] if MANIFEST_FILE in report.files else recomputation.missing()
    problems = [
        Problem(MANIFEST_FILE, f"row {key!r} of the source is in no record; the next run adds it") for key in missing
    ]
    return dataclasses.replace(report, found=(*report.found, *problems))


class Recomputation:
    """Compares records of some rows with those that the source gives now, one at a time, in order.

    Args:
        planned: job with its rows and its plan.
        share: share of the rows whose records are rebuilt, above 0 and up to 1; at least one row.

    Raises:
        OptionError: the share is not between 0 and 1.
    """

    def __init__(self, planned: PlannedJob, share: float) -> None:
        if not 0 < share <= 1:
            raise OptionError(f"verify: sample={share!r}; want a share of the rows, above 0 and up to 1")
        number = max(round(share * len(planned.store)), 1)
        # Different rows each time, so that repeated checks eventually cover all of them.
        chosen = np.random.default_rng().choice(len(planned.store), number, replace=False)
        self._planned, self._removed = planned, frozenset(planned.plan.removed)
        self._left = set(planned.store.keys(np.sort(chosen)))
        self._chosen = frozenset(self._left)
        self._current = ""
        self._records: dict[str, Mapping[str, Column]] = {}
        planned.pipeline.setup_worker()

    def difference(self, key: str, record: Mapping[str, Any]) -> str:
        """Return how a stored record differs from the one that its row gives now; "" if it is equal or not checked."""
        row_key = RecordKey.row_of(key)
        if row_key not in self._chosen:
            return ""
        self._left.discard(row_key)
        if row_key != self._current:
            try:
                self._records = self._recomputed(row_key)
            except DatamatError as error:
                self._records = {}
                return f"cannot be made again: {error}"
            self._current = row_key
        if key not in self._records:
            return f"is not among the records that its row gives now: {', '.join(self._records)}"
        columns = self._records[key]
        differing = [name for name in columns if not _is_same(record.get(name), columns[name])]
        return f"differs from what its source gives now, in {', '.join(differing)}" if differing else ""

    def missing(self) -> list[str]:
        """Return the chosen rows of the source that have no record but would give some now."""
        missing = []
        for key in sorted(self._left):
            with contextlib.suppress(DatamatError):  # it fails, as in the run
                missing += [key] if self._recomputed(key) else []
        return missing

    def _recomputed(self, row_key: str) -> dict[str, Mapping[str, Column]]:
        row, shard = self._planned.find(row_key)
        if row.key in self._removed:
            return {}
        with global_state_kept():
            made = self._planned.pipeline.records(row, copies=shard.copies, augmented=shard.augmented)
            return {key: columns for key, columns in made if key not in self._removed}


def _is_same(stored: Any, made: Any) -> bool:
    """Return True if a column as read equals one as written, byte for byte, including numbers."""
    if isinstance(made, np.ndarray):
        return isinstance(stored, np.ndarray) and stored.dtype == made.dtype and stored.tobytes() == made.tobytes()
    return isinstance(stored, (list, bytes)) and _listed(stored) == _listed(made)


def _listed(value: Any) -> list[bytes]:
    return [value] if isinstance(value, bytes) else list(value)
