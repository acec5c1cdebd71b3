"""Records read and decoded, by position; of a damaged one the error says which it is, or it is left out."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, final

from datamat.errors import CorruptDataError, InputError, OutputError, SchemaError
from datamat.features.schema import NO_MEMORY

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from datamat.features import Features
    from datamat.readers.damage import Damages
    from datamat.readers.keys import KeyIndex
    from datamat.readers.records import RecordFiles

__all__ = ["SampleReader"]


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SampleReader:
    """Samples by position. Thread-safe and picklable.

    Attributes:
        records: the encoded records.
        features: their schema.
        damages: what is done about damaged ones.
        keys: names them.
    """

    records: RecordFiles
    features: Features
    damages: Damages
    keys: KeyIndex

    def read(self, position: int, memory: Mapping[str, np.ndarray] = NO_MEMORY) -> dict[str, Any]:
        """Return a sample.

        Args:
            position: of its record.
            memory: arrays by field that values may be decoded into; where that was done, the value is the array.

        Raises:
            CorruptDataError: the record is damaged; names file, record, key and what is wrong.
        """
        try:
            return self.features.decode(self.records.read(position), memory, are_intact=self.records.are_tested)
        except CorruptDataError as error:
            raise CorruptDataError(f"{error}{self._key_note(position)}") from error
        except (InputError, SchemaError) as error:
            shard, number = self.records.place(position)
            raise CorruptDataError(
                f"{self.records.file(shard)}: record {number} is damaged: {error}; remove the file and run the job "
                f"again, which makes it anew{self._key_note(position)}"
            ) from error

    def read_or_skip(self, position: int, memory: Mapping[str, np.ndarray] = NO_MEMORY) -> dict[str, Any] | None:
        """Return a sample, or None where its record is damaged and left out; raises as `read` where that is asked."""
        try:
            return self.read(position, memory)
        except CorruptDataError as error:
            self.damages.leave_out(position, error)
            return None

    def with_own_files(self) -> SampleReader:
        """Return the same over files that are opened anew, and closed with the last thread that reads them."""
        return dataclasses.replace(self, records=copy.copy(self.records))

    def damage_in(self, file: str) -> CorruptDataError:
        """Return what is wrong with a shard, by its path, of which not all records could be read."""
        try:
            for position in self.records.positions(file):
                self.read(position)
        except CorruptDataError as error:
            return error
        return CorruptDataError(f"{file} changed while it was read; see datamat verify of its directory")

    def _key_note(self, position: int) -> str:
        try:
            key = self.keys.key_at(position)
        except (CorruptDataError, OutputError):  # the index is damaged as well, or behind a URL and out of reach
            key = None
        return "" if key is None else f" (key {key!r})"
