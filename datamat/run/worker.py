"""Write parts in a worker: the state that is sent with the job, and the state that all parts of a process share.

PartWorker.write_parts ──> SharedByParts: files, locks, limits ──> PartTask: the rows ──> PartWriter ──> receipts
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.directory.ledger import FailedRow
from datamat.errors import (
    FingerprintError,
    OutputError,
    SourceError,
    join_problems,
)
from datamat.fingerprint import Switches
from datamat.parallel.process_role import is_worker
from datamat.plan.digests import JobDigests
from datamat.plan.inputs import OpenedFiles
from datamat.run.growing import GrowingShard
from datamat.run.module_state import ModuleState
from datamat.run.part_task import SharedByParts
from datamat.run.receipts import Sealed
from datamat.transforms import forbid_update_check

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    from datamat.plan.changes import ReusedRows
    from datamat.plan.job import Job
    from datamat.plan.plan import PartSpec
    from datamat.run.receipts import Receipt


LEAST_CALL_S = 0.02
"""Minimum seconds of work per call, since a call costs two or three milliseconds: short parts share one call."""

MOST_CALL_S = 2 * LEAST_CALL_S
"""Seconds after which a call leaves its other parts to other workers."""


def set_up_process() -> None:
    """Prepare a worker process at its start."""
    forbid_update_check()
    # glibc returns large blocks to the system as soon as they are freed, so that the next image faults in every page
    # again: a third of the decoding time. Freeing one block of nearly 32 MB, the largest that counts, raises its
    # thresholds for good (mallopt(3), M_MMAP_THRESHOLD); the pages of this block are never touched.
    np.empty((32 << 20) - (1 << 16), np.uint8)
    # A scheduler may send it to all processes of a job before its time limit: the caller decides what to do.
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # If memory runs out, the kernel should kill a worker, whose sample can be named, rather than the run.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # a container may forbid it
        file.write("500")


_made_here: set[str] = set()  # tokens of part workers; forked processes inherit them


class PartWorker:
    """Writes the parts of a job. Its bound methods are sent to workers, where it keeps the state shared by parts.

    Args:
        job: the job, with its options checked and resolved.
        folder: folder of the rows; the parts are beside it.
        run: mark of the run, whose parts may be appended directly to the shard's file; "" for no run.

    Attributes:
        most_call_s: seconds after which a call begins no further part, set before workers start.
    """

    def __init__(self, job: Job, folder: pathlib.Path, run: str = "") -> None:
        self.most_call_s = MOST_CALL_S
        self.job = job.for_workers()
        self.folder = folder
        self._run = run
        self._near = job.neighbourhood()
        self._is_own_pool = job.how.executor is None
        self._has_travelled = False
        self._token = uuid.uuid4().hex
        self._remark = ""  # in a worker: about the state that it lacks
        self._digests: dict[str, str] | None = None  # once pickled for workers of an engine: what decides the bytes
        self._module_state: ModuleState | None = None  # after pickling: state of the user's modules in the caller
        self._switches = Switches.of()  # library switches of the caller
        self._shared: dict[int, SharedByParts] = {}  # by process: a forked process starts its own
        _made_here.add(self._token)

    def __getstate__(self) -> dict[str, Any]:
        """Include the state of the user's modules; leave out the state of this process."""
        if self._module_state is None and not self._has_travelled:
            self._switches.set()  # a thread of an executor may pickle this
            self._module_state = ModuleState.of(self.job.records, is_own_pool=self._is_own_pool)
            self._digests = None if self._is_own_pool else self._decisive()
        return {**self.__dict__, "_has_travelled": True, "_shared": {}}

    def _datamat_changing(self) -> None:
        """Return nothing to compare between calls: the job is fixed, and the state of modules once it is pickled.

        Forked workers, to which it does not travel, never need that state.
        """

    def settle(self) -> None:
        """In a worker, set libraries and the user's modules to their state in the caller.

        Raises:
            FingerprintError: something differs that cannot be set.
        """
        self._switches.set()
        if self._has_travelled and self._module_state is not None and self._token not in _made_here:
            self._module_state.settle(self.job.records)
            self._remark, self._module_state = self._module_state.remark, None
        if self._has_travelled and self._digests is not None:
            self._refuse_other_host(self._digests)
            self._digests = None

    def _decisive(self) -> dict[str, str] | None:
        """Return digests and versions of everything that decides a record's bytes; None if the user gave a version."""
        job = self.job
        if job.version is not None:
            return None
        return JobDigests.of(job.records, job.formats, job.seed).to_json()  # memos are set, not compared

    def _refuse_other_host(self, there: Mapping[str, str]) -> None:
        """In a worker of an engine, compare code, packages, environment and source with those of the caller.

        Raises:
            FingerprintError: the same row would give other bytes here.
            SourceError: the source is not here.
        """
        host = socket.gethostname()
        here = self._decisive() or {}
        wrong = [name for name in {**there, **here} if here.get(name) != there.get(name)]
        if wrong:
            found = join_problems([f"{name}: {here.get(name)}, there {there.get(name)}" for name in sorted(wrong)])
            raise FingerprintError(
                f"a worker on {host} differs from the program that called run, and would write other bytes: {found}; "
                "give it the same code, packages and environment"
            )
        source = self.job.source
        if isinstance(source, (str, os.PathLike)) and "://" not in os.fspath(source) and not os.path.lexists(source):
            raise SourceError(f"a worker on {host} does not see {source}; mount it at this path on every host")

    def write_parts(
        self, parts: Sequence[PartSpec], lost: Sequence[FailedRow] | None, reused: ReusedRows | None
    ) -> list[Receipt]:
        """Write consecutive parts of a shard: the first, and the others unless they turn out to take long.

        Args:
            parts: runs of rows of the shard.
            lost: rows to leave out as failed, because they kill their worker. None for parts whose worker has not died:
                only then are rows processed in blocks.
            reused: rows whose records are copied from a finished shard; None if there are none.

        Returns:
            The receipts of the written parts, which are also on disk beside them.

        Raises:
            SampleError: a sample failed, and the policy is "raise".
            OutputError: a part cannot be written.
        """
        self._switches.set()  # some libraries keep them per thread
        shared = self._shared.get(os.getpid())
        if shared is None:
            self._arrive()
            opened = OpenedFiles(self._near) if is_worker() else None
            if opened is not None:
                opened.start()
            self.job.records.setup_worker()
            # Atomic, without a lock that a fork could inherit in a locked state: concurrent threads get the same
            # object.
            made = SharedByParts(self.job, self.folder, self._run, opened, appends=self._is_own_pool)
            shared = self._shared.setdefault(os.getpid(), made)
        receipts = shared.write_parts(parts, lost, reused, time.monotonic() + self.most_call_s)
        if self._remark:
            receipts[0] = dataclasses.replace(receipts[0], remarks=(*receipts[0].remarks, self._remark))
        return receipts

    def _arrive(self) -> None:
        """Prepare this process; in a worker of an engine, check that the output is here before anything is written.

        Raises:
            FingerprintError: something differs that cannot be set.
            OutputError: the output is not here.
        """
        self.settle()
        work = self.folder.parent
        if not self._is_own_pool and is_worker():
            set_up_process()
        if not self._is_own_pool and not (work / "shards" / "run").exists():
            raise OutputError(
                f"a worker on {socket.gethostname()} does not see {work}; mount the output at this path on every host"
            )

    def seal_shard(self, shard: str, fingerprint: str, num_parts: int) -> Sealed:
        """Complete a shard whose parts are done: join separate ones, write the offsets, flush the files.

        Raises:
            DamagedPartError: the bytes of a part are no longer those of its receipt.
        """
        self._arrive()  # this may be the first call here
        growing = GrowingShard(self.folder.parent, shard, fingerprint, self.job.formats, num_parts, self._run)
        return growing.seal(is_alone=self._is_own_pool)
