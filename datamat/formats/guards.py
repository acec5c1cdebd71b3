"""Refusals and judgements that formats share, so that all say the same in the same words."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from datamat.errors import CorruptDataError, OptionError, OutputError

if TYPE_CHECKING:
    from datamat.features import Features

__all__ = ["RESOURCES", "bound", "located", "refuse_finished", "want_of_resources"]

RESOURCES = (errno.ENFILE, errno.EMFILE, errno.ENOMEM)
"""Codes of errors that say nothing of the file: descriptors or memory ran out. The longer text stands first."""


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


def want_of_resources(path: object, error: Exception) -> OutputError | None:
    """Return what to raise where descriptors or memory ran out: no damage, and nothing may be left out for it."""
    if not isinstance(error, OSError) or error.errno not in RESOURCES:
        return None
    return OutputError(f"{path}: {os.strerror(error.errno)}; close what is open, or raise the limit (ulimit -n)")
