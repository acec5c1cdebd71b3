"""What is done about damaged records: raise, or leave them out, counted and told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from datamat.errors import CorruptDataError, OptionError
from datamat.options import ErrorPolicy
from datamat.parallel.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Damages"]

_logger = get_logger("datamat.readers")


@final
class Damages:
    """The damaged records of a data set that were left out so far. Thread-safe; a pickled copy starts with those.

    Args:
        policy: "raise", "skip", or an `ErrorPolicy` of either with a limit.
        num_records: of the data set.

    Raises:
        OptionError: the policy is none of these.
    """

    def __init__(self, policy: str | ErrorPolicy, num_records: int) -> None:
        self._policy = policy if isinstance(policy, ErrorPolicy) else ErrorPolicy(_checked(policy))
        if self._policy.action == "quarantine" or self._policy.retries:
            raise OptionError(
                f"errors={policy!r}: readers raise or skip; want 'raise', 'skip' or ErrorPolicy('skip', max_errors=...)"
            )
        limit = self._policy.limit(num_records)
        # Without a limit any number, unless all fail: as when writing.
        self._most = limit if limit is not None else num_records - 1
        self._positions: dict[int, None] = {}  # adding to a dict takes no lock, which a fork could leave taken

    @property
    def are_skipped(self) -> bool:
        """Whether damaged records are left out."""
        return self._policy.action == "skip"

    @property
    def positions(self) -> tuple[int, ...]:
        """The records that were left out, each once, however often it was met."""
        return tuple(self._positions)

    def leave_out(self, position: int, error: CorruptDataError) -> None:
        """Count a damaged record and tell of it once; raise where the policy says so.

        Raises:
            CorruptDataError: that one, or that there are too many.
        """
        if not self.are_skipped:
            raise error
        if position not in self._positions:
            self._positions[position] = None
            _logger.warning("skipped, %d so far: %s", len(self._positions), error)
        self._check(error)

    def add(self, positions: Iterable[int]) -> None:
        """Count records that were left out, and told of, in another process; raise as `leave_out` does."""
        self._positions.update(dict.fromkeys(positions))
        self._check(None)

    def _check(self, last: CorruptDataError | None) -> None:
        if len(self._positions) > self._most:
            raise CorruptDataError(
                f"{len(self._positions)} damaged records were skipped, {self._most} at most are allowed"
                + (f"; the last one: {last}" if last else "; the log names them")
            ) from last


def _checked(policy: Any) -> Any:
    if policy not in ("raise", "skip"):
        raise OptionError(f"errors is {policy!r}; want 'raise', 'skip' or ErrorPolicy('skip', max_errors=...)")
    return policy
