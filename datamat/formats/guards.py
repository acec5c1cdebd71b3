"""Refusals that formats share, so that all say the same in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat.errors import CorruptDataError, OptionError

if TYPE_CHECKING:
    from datamat.features import Features

__all__ = ["bound", "located", "refuse_finished"]


def bound(features: Features | None, name: str) -> Features:
    """Return the features of a format that stores them; raise `OptionError` where it has none yet."""
    if features is None:
        raise OptionError(
            f"the format {name!r} stores features, not columns; use get_format({name!r}).with_features(features)"
        )
    return features


def refuse_finished(finished: bool) -> None:
    """Raise `OptionError` if `finish` was called on a writer."""
    if finished:
        raise OptionError("finish was called on this writer, which ends it; make another one for more records")


def located(error: Exception, path: str, number: int, offset: int) -> CorruptDataError:
    """Return the error that says which record is damaged, and what to do about it."""
    return CorruptDataError(
        f"{path or 'shard'}: record {number} at byte {offset} is damaged: {error}; "
        f"remove the file and run the job again, which makes it anew"
    )
