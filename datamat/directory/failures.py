"""`failures`: the samples that are missing from a dataset, and why, from the ledger of the run that made each shard.

The ledger is a history: it also lists samples that have since been made, and shards that are gone. But before a shard
gets its name, a line with its checksum lists its missing keys. So the lines of present shards are found, regardless of
earlier or later runs, and of runs on other machines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from datamat.directory.files import WORK
from datamat.directory.ledger import LEDGER_FILE, ledger_in, read_ledger
from datamat.directory.manifest import Manifest
from datamat.errors import CorruptDataError, OutputError, count_of
from datamat.folders import AbsentError, open_folder
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib

    from datamat.directory.ledger import LedgerEntry
    from datamat.directory.manifest import ShardInfo

_ACTIONS = {"sample_skipped": "skip", "sample_quarantined": "quarantine"}


@frozen()
class Failure:
    """A sample that a run left out because it failed.

    Attributes:
        key: key of its row.
        reason: the error, in one line.
        exception: name of the exception's class.
        traceback: traceback of the exception, only its ends if it is very long; "" if a worker died instead.
        split: split of the sample.
        shard: name of the file that lacks it; with several formats, that of the first.
        row: number of its row in the index, from 0: its place among the inputs of `materialize`.
        path: path or URL of its input file (the one named in the reason if there are several); "" if it has none.
        action: the response: "skip" or "quarantine".
        attempts: number of attempts.
    """

    key: str
    reason: str
    exception: str
    traceback: str
    split: str
    shard: str
    row: int
    path: str
    action: str
    attempts: int

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"

    @classmethod
    def of(cls, values: Mapping[str, Any], action: str, *, split: str, shard: str) -> Failure:
        """Return the failure described by a ledger line, a receipt or an event."""
        return cls(
            key=values["key"],
            reason=values["message"],
            exception=values["error"],
            traceback=values["traceback"],
            split=split,
            shard=shard,
            row=values["row"],
            path=values["path"],
            action=action,
            attempts=values["attempts"],
        )


def failures(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> tuple[Failure, ...]:
    """Return the samples missing from a finished dataset because a run skipped or quarantined them.

    `RunReport.failures` has those of one run, `Status.failures` those of an unfinished output.

    Args:
        path: the directory, or any URL of it that fsspec can read.
        storage_options: options for the URL, as for `load`.

    Returns:
        One failure for each failed row counted in the manifest, in the order of its shards.

    Raises:
        OutputError: there is no manifest, the ledger is missing or incomplete, or the URL cannot be read.
        CorruptDataError: manifest or ledger are damaged.

    Example:
        >>> for failure in failures("out/camvid"):   # doctest: +SKIP
        ...     print(failure.shard, failure.key, failure.reason)
        camvid-train-00002-of-00008.tfrecord 0001TP_006690 InputError: train/0001TP_006690.png is empty
    """
    folder = open_folder(path, storage_options)
    manifest = Manifest.read(folder)
    lacking = [info for info in manifest.shards if info.num_failed]
    name = f"{WORK}/{LEDGER_FILE}"
    ledger = folder.place(name)
    try:
        found = failures_in(ledger_in(folder, name, without="part_committed"), lacking) if lacking else ()
    except AbsentError as error:
        raise OutputError(f"{ledger} is missing, which names them; copy it along. {_again(lacking)}") from error
    except OSError as error:
        raise OutputError(f"{ledger} cannot be read: {error.strerror or error}") from error
    if len(found) < sum(info.num_failed for info in lacking):
        raise OutputError(f"{ledger} names {len(found)} of them. {_again(lacking)}")
    return found


def _again(lacking: Iterable[ShardInfo]) -> str:
    num_failed = sum(info.num_failed for info in lacking)
    return (
        f"The manifest says that {count_of(num_failed, 'row')} failed; a run that tries failed rows again "
        "(retry_failed=True) names those that still fail"
    )


def failures_in(entries: Iterable[LedgerEntry], lacking: Iterable[ShardInfo]) -> tuple[Failure, ...]:
    """Return the failures of rows that shards lack, as far as the lines of ledgers list them.

    Args:
        entries: the lines, oldest first; several ledgers one after another.
        lacking: the shards with failed rows, in the order of the result.
    """
    found: dict[tuple[str, str], dict[str, Failure]] = {}
    infos = {(info.name, info.checksum): info for info in lacking}
    last: dict[tuple[str, str], LedgerEntry] = {}
    for entry in entries:
        values = entry.values
        if entry.event in _ACTIONS:
            last[values["shard"], values["key"]] = entry
        elif entry.event == "shard_lacks" and (info := infos.get((values["shard"], values["checksum"]))):
            named = found.setdefault((info.name, info.checksum), {})
            for line in (last[info.name, key] for key in values["keys"] if (info.name, key) in last):
                named[line.values["key"]] = Failure.of(
                    line.values, _ACTIONS[line.event], split=info.split, shard=info.file
                )
    return tuple(failure for shard in infos for failure in found.get(shard, {}).values())


def failed_keys(work: pathlib.Path, lacking: Iterable[ShardInfo]) -> list[str]:
    """Return the keys of the failed rows that shards lack, as far as the ledger in a `.datamat` folder lists them."""
    with contextlib.suppress(OSError, CorruptDataError):
        entries = read_ledger(work / LEDGER_FILE, without="part_committed")
        return [failure.key for failure in failures_in(entries, lacking)]
    return []
