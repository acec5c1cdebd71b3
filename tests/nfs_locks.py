"""Locks as NFS gives them: flock(2) is a lock of bytes there, and an exclusive one is for whoever may write."""

import errno
import fcntl
import os


def refuse_as_nfs_does(monkeypatch):
    """Refuse exclusive locks of files that are open for reading alone."""
    really = fcntl.flock

    def flock(file, how):
        descriptor = file if isinstance(file, int) else file.fileno()
        may_write = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if how & fcntl.LOCK_EX and not may_write:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        really(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
