"""What a fault at one operation of a small job may do, and what must hold after it and after the run that follows."""

import dataclasses
import errno
import os
import pathlib

import small_pairs
from fault_injection import CHANGES, Fault, check_visible, left_behind

READS = (*CHANGES, "read")
FAULTS = {
    "kill": Fault("kill"),
    "kill group": Fault("kill group"),
    "tear": Fault("tear", kinds=("write",)),
    "io error": Fault("fail", error=errno.EIO, kinds=READS),
    "disk full": Fault(
        "fail", error=errno.ENOSPC, persists=True, kinds=("open", "write", "mkdir", "truncate", "fsync")
    ),
    "disk full once": Fault("fail", error=errno.ENOSPC, kinds=("open", "write", "mkdir", "truncate", "fsync")),
    "short": Fault("short", kinds=("write", "read")),
    "interrupted": Fault("fail", error=errno.EINTR, kinds=("open", "write", "read", "fsync")),
}
HARMLESS = {"short", "interrupted"}


def operations(job_server, job, fault):
    """Return how many operations of the fault's kinds an undisturbed run of the job has."""
    ended = job_server.run(job, Fault(kinds=fault.kinds))
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    return ended.num_operations


def hurt(job_server, job, fault, at, whole):
    """Run the job under the fault on an empty output; check what must hold whatever the fault does."""
    output = os.path.realpath(job.output)

    ended = job_server.run(job, dataclasses.replace(fault, at=at))

    assert ended.code is not None, f"hung: {ended.said}"
    assert ended.num_orphans == 0
    check_visible(pathlib.Path(output), whole)
    if ended.code == 0:
        assert small_pairs.digests(output) == whole, "silent: it ended well with something else than the output"
    elif fault.action == "fail":
        assert os.strerror(fault.error) in ended.error, ended.said
    return ended


def heal(job_server, job, whole):
    """Run the job undisturbed; check that it makes the same output as a run from nothing, and leaves nothing else."""
    ended = job_server.run(job)

    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []
