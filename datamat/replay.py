"""Make single records anew, in the caller's own process and with the very draws of a run: to look into, to compare."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import DatamatError, OptionError
from datamat.manifest import MANIFEST_FILE
from datamat.seeding import global_state_kept
from datamat.shard_check import Problem
from datamat.verification import examine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datamat.features import Column
    from datamat.survey import Survey
    from datamat.verification import VerifyReport
    from datamat.writer import Sample

__all__ = ["Recomputation", "replay", "verify_sample"]


def replay(survey: Survey, key: str, copy: int) -> Sample:
    """Return the sample that a run stores for a row and copy, decoded, by doing that one row here and now.

    A debugger that is set to stop in `read`, `augment` or the transform stops there. Earlier copies are drawn, too: a
    copy that comes out as one of them is drawn anew. The global random state is as before when it returns.

    Args:
        survey: source and options.
        key: of the row, or of a record: KEY#COPY, or KEY#COPY-NUMBER where a copy gives several.
        copy: where the key does not name one.

    Raises:
        OptionError: there is no such row, or no such copy of it.
        SampleError: the row fails, as it does in a run.
    """
    row_key, _, suffix = key.partition("#")
    row, shard = survey.find(row_key)
    wanted = key if suffix else f"{row_key}#{copy}"
    survey.pipeline.writer.setup_worker()
    found = []
    with global_state_kept():
        for name, columns in survey.pipeline.records(row, copies=shard.copies, augmented=shard.augmented):
            is_only = shard.copies == 1 and name == row_key and wanted == f"{row_key}#0"
            if is_only or name == wanted or name.startswith(f"{wanted}-"):
                return survey.pipeline.writer.features.decode(columns)
            found.append(name)
    raise OptionError(f"row {row_key!r} gives no record {wanted!r}; it gives {', '.join(found)}")


def verify_sample(survey: Survey, share: float, *, deep: bool) -> VerifyReport:
    """Do what `verify` does, and make the records of a share of the rows anew, to compare them byte for byte.

    Args:
        survey: source and options.
        share: of the rows, above 0 and up to 1.
        deep: decode every record, too.

    Raises:
        OutputError: the run is not finished.
        OptionError: the share makes no sense.
    """
    recomputation = Recomputation(survey, share)
    report = examine(survey.output, deep=deep, recomputed=recomputation.difference)
    missing = [] if MANIFEST_FILE in report.files else recomputation.missing()
    told = [Problem(MANIFEST_FILE, f"row {key!r} of the source is in no record; run() brings it in") for key in missing]
    return dataclasses.replace(report, found=(*report.found, *told))


class Recomputation:
    """Compares records of some rows with those that their source gives now; one at a time, in order.

    Args:
        survey: source and options.
        share: of the rows that are made anew, 0 to 1; one at least.

    Raises:
        OptionError: the share is not between 0 and 1.
    """

    def __init__(self, survey: Survey, share: float) -> None:
        if not 0 < share <= 1:
            raise OptionError(f"verify: sample={share!r}; want a share of the rows, above 0 and up to 1")
        number = max(round(share * len(survey.store)), 1)
        # Other rows each time, so that a check that is often repeated comes to all of them.
        chosen = np.random.default_rng().choice(len(survey.store), number, replace=False)
        self._survey = survey
        self._left = set(survey.store.keys(np.sort(chosen)))
        self._chosen = frozenset(self._left)
        self._current = ""
        self._records: dict[str, Mapping[str, Column]] = {}
        survey.pipeline.writer.setup_worker()

    def difference(self, key: str, record: Mapping[str, Any]) -> str:
        """Return how a stored record differs from what its row gives now: "" if it does not, or is not looked at."""
        row_key = key.partition("#")[0]
        if row_key not in self._chosen:
            return ""
        self._left.discard(row_key)
        if row_key != self._current:
            try:
                self._records = self._recomputed(row_key)
            except DatamatError as error:
                self._records = {}
                return f"cannot be made anew: {error}"
            self._current = row_key
        if key not in self._records:
            return f"is not among the records that its row gives now: {', '.join(self._records)}"
        columns = self._records[key]
        differing = [name for name in columns if not _is_same(record.get(name), columns[name])]
        return f"differs from what its source gives now, in {', '.join(differing)}" if differing else ""

    def missing(self) -> list[str]:
        """Return the chosen rows of the source of which no record was seen, and that do give some now."""
        missing = []
        for key in sorted(self._left):
            with contextlib.suppress(DatamatError):  # it fails, as it did in the run
                missing += [key] if self._recomputed(key) else []
        return missing

    def _recomputed(self, row_key: str) -> dict[str, Mapping[str, Column]]:
        row, shard = self._survey.find(row_key)
        with global_state_kept():
            return dict(self._survey.pipeline.records(row, copies=shard.copies, augmented=shard.augmented))


def _is_same(stored: Any, made: Any) -> bool:
    """Compare a column as it is read with one as it is written: byte for byte, numbers too."""
    if isinstance(made, np.ndarray):
        return isinstance(stored, np.ndarray) and stored.dtype == made.dtype and stored.tobytes() == made.tobytes()
    return isinstance(stored, (list, bytes)) and _listed(stored) == _listed(made)


def _listed(value: Any) -> list[bytes]:
    return [value] if isinstance(value, bytes) else list(value)
