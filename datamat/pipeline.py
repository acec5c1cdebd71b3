"""From one input row to its encoded records: read, augment, encode. What a worker spends its time on.

    row ── writer.read ──> sample ──┬── as it is ────────────────────────────> encode ──> KEY
                                    └── decode once ── augment, per copy ────> encode ──> KEY#0 KEY#1 ...

Nothing here knows of files, processes or plans: the same row gives the same records wherever it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import SampleError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datamat.features import Column
    from datamat.index import IndexRow
    from datamat.transforms import Augmenter
    from datamat.writer import DatasetWriter, Sample

__all__ = ["Pipeline"]

_MOST_ATTEMPTS = 8  # to draw a copy unlike the earlier ones; a transform that changes nothing is left at that


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The way of a sample from its row to its records.

    Args:
        writer: the plug-in.
        augmenter: draws the copies.
        seed: of the run.
    """

    writer: DatasetWriter
    augmenter: Augmenter
    seed: int

    def records(self, row: IndexRow, *, copies: int, augmented: bool) -> Iterator[tuple[str, dict[str, Column]]]:
        """Yield (key, columns) of each record of one row.

        Args:
            row: with paths that can be opened.
            copies: how many are drawn.
            augmented: whether the writer's `augment` and the transform apply.

        Raises:
            SampleError: whatever goes wrong, with the key of the row and the first of its files.
        """
        try:
            sample = self._read(row)
            if augmented:
                yield from self._drawn(row, sample, copies)
            else:
                yield from self._kept(row, sample, copies)
        except SampleError:
            raise
        except Exception as error:
            raise SampleError(row.key, _told(row, error)) from error

    def block(self, keys: list[str], fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the columns of many untransformed rows at once, or None where the writer wants to be asked for each.

        Raises:
            SampleError: the block is not as declared; the key is that of its first row.
        """
        try:
            found = self.writer.read_block(keys, fields)
            return None if found is None else self.writer.features.encode_block({**found, "key": keys})
        except Exception as error:
            raise SampleError(keys[0], f"in a block of {len(keys)} rows: {type(error).__name__}: {error}") from error

    def check_determined(self, row: IndexRow) -> None:
        """Raise `OptionError` where the transform draws from something else than the seed of the record."""
        try:
            sample = self.writer.features.prepare(self._read(row))
        except Exception:  # noqa: BLE001 -- the row itself reports it, with its key
            return
        self.augmenter.check_determined(sample, key=row.key, seed=self.seed)

    def _read(self, row: IndexRow) -> Sample:
        sample = self.writer.read(row)
        if not isinstance(sample, Mapping):
            raise SchemaError(f"read returned a {type(sample).__name__}; want a dict of values by feature name")
        for name, value in sample.items():
            if value is None:  # what cv2.imread and cv2.imdecode return for a file that they cannot decode
                raise SchemaError(f"read returned None for the field {name!r}; want a value: did its file not decode?")
        return {**sample, "key": row.key}

    def _kept(self, row: IndexRow, sample: Sample, copies: int) -> Iterator[tuple[str, dict[str, Column]]]:
        columns = self.writer.features.encode(sample)
        for copy in range(copies):
            key = row.key if copies == 1 else f"{row.key}#{copy}"
            yield key, {**columns, "key": key.encode()}

    def _drawn(self, row: IndexRow, sample: Sample, copies: int) -> Iterator[tuple[str, dict[str, Column]]]:
        decoded = self.writer.features.prepare(sample)  # once, for all copies
        earlier: list[list[dict[str, Column]]] = []
        for copy in range(copies):
            # Transforms with probabilities leave some copies untouched: two of those would be the same record twice.
            for attempt in range(_MOST_ATTEMPTS):
                encoded = self._draw(decoded, row.key, copy, attempt)
                if not any(_are_equal(encoded, other) for other in earlier):
                    break
            earlier.append(encoded)
            for number, columns in enumerate(encoded):
                key = f"{row.key}#{copy}" if len(encoded) == 1 else f"{row.key}#{copy}-{number}"
                yield key, {**columns, "key": key.encode()}

    def _draw(self, decoded: Sample, key: str, copy: int, attempt: int) -> list[dict[str, Column]]:
        drawn = self.augmenter.draw(decoded, key=key, copy=copy, seed=self.seed, attempt=attempt)
        return [self.writer.features.encode({**result, "key": key}) for result in drawn]


def _are_equal(some: list[dict[str, Column]], others: list[dict[str, Column]]) -> bool:
    if len(some) != len(others):
        return False
    pairs = ((mine[name], other[name]) for mine, other in zip(some, others, strict=True) for name in mine)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def _told(row: IndexRow, error: BaseException) -> str:
    files = [value for value in row.fields.values() if isinstance(value, str) and "/" in value]
    where = f" ({files[0]})" if files else ""
    return f"{type(error).__name__}: {error}{where}"
