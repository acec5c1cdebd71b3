"""Framed messages over one socket pair per worker.

A frame is nine bytes of header (payload length as little-endian uint64, then the kind as uint8) and the payload. The
parent's end (`ParentChannel`) never blocks: what the kernel does not take at once waits in a list of buffers, so a
worker that is busy, stopped or dead can never stall the dispatcher, whatever the size of a message. The worker's end
(`WorkerChannel`) blocks, and one lock keeps the frames of its threads apart.

There is nothing here that two workers share: a process killed in the middle of a frame spoils its own socket only.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HEADER", "ParentChannel", "WorkerChannel", "close_in_forks"]

HEADER = struct.Struct("<QB")
_READ_BYTES = 1 << 16  # into one buffer for all reads: to allocate a large one for each costs 24 us
_READS_PER_WAKE = 64  # a worker that floods its socket with log records must not starve the others
_BUFFERS_PER_CALL = 512  # below IOV_MAX (1024)
_JOINED_BYTES = 1 << 12  # copying less than a page is cheaper than one more buffer
# One result of ordinary size never makes a worker wait for the parent; and a full buffer, which the kernel may double,
# is read in one wake.
_SOCKET_BYTES = 1 << 20

Frame = tuple[int, bytes]
Buffer = bytes | bytearray | memoryview


class _ParentEnd(Protocol):
    def abandon(self) -> None: ...


_parent_ends: weakref.WeakSet[_ParentEnd] = weakref.WeakSet()


def close_in_forks(end: _ParentEnd) -> None:
    """Have `end.abandon()` called in every fork of this process.

    Forked siblings, and whatever the caller forks, would otherwise hold copies of the parent's ends, and a worker
    would not see that its parent is gone.
    """
    _parent_ends.add(end)


def _abandon_parent_ends() -> None:
    for end in list(_parent_ends):
        end.abandon()
    _parent_ends.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_parent_ends)


class _FrameBuffer:
    """Receives from a socket and cuts what comes into frames."""

    __slots__ = ("_buffer", "_rest")

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._rest = bytearray()  # of a frame that has not arrived as a whole

    def receive(self, sock: socket.socket) -> tuple[list[Frame], int]:
        """Return the frames that one read completes, and how many bytes it brought: 0 at the end of the stream."""
        size = sock.recv_into(self._buffer)
        received = self._buffer[:size]
        if not self._rest:
            frames, used = _cut(received)
            self._rest += received[used:]
            return frames, size
        self._rest += received
        with memoryview(self._rest) as view:
            frames, used = _cut(view)
        del self._rest[:used]
        return frames, size


def _cut(view: memoryview) -> tuple[list[Frame], int]:
    """Return the frames that are complete, and how many bytes they take."""
    frames: list[Frame] = []
    start, size, header_size = 0, len(view), HEADER.size
    while size - start >= header_size:
        length, kind = HEADER.unpack_from(view, start)
        begin = start + header_size
        end = begin + length
        if end > size:
            break
        frames.append((kind, bytes(view[begin:end])))
        start = end
    return frames, start


class ParentChannel:
    """The parent's end: sends and receives without ever blocking."""

    __slots__ = ("__weakref__", "_frames", "_out", "_socket")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        enlarge_buffers(sock)
        self._socket = sock
        self._out: deque[memoryview] = deque()
        self._frames = _FrameBuffer()
        close_in_forks(self)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    @property
    def is_backed_up(self) -> bool:
        """Does something wait for the socket to become writable?"""
        return bool(self._out)

    def send(self, kind: int, *parts: Buffer) -> None:
        """Queue one frame made of `parts` and hand the kernel what it takes now.

        A worker that is gone is not an error here: its death is noticed, once, where the dispatcher waits.
        """
        self.post(kind, *parts)
        self.flush()

    def post(self, kind: int, *parts: Buffer) -> None:
        """Queue one frame; `flush` sends it."""
        length = sum(len(part) for part in parts)
        header = HEADER.pack(length, kind)
        if length < _JOINED_BYTES:
            self._out.append(memoryview(b"".join((header, *parts))))
            return
        self._out.append(memoryview(header))
        self._out.extend(memoryview(part) for part in parts if len(part))

    def flush(self) -> None:
        """Send as much of the queued frames as the socket takes."""
        out = self._out
        while out:
            try:
                sent = self._socket.sendmsg([out[i] for i in range(min(len(out), _BUFFERS_PER_CALL))])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                out.clear()
                return
            while sent:
                first = out[0]
                if sent < len(first):
                    out[0] = first[sent:]
                    break
                sent -= len(first)
                out.popleft()

    def receive(self) -> tuple[list[Frame], bool]:
        """Return the complete frames that have arrived, and whether the stream has ended."""
        frames: list[Frame] = []
        for _ in range(_READS_PER_WAKE):
            try:
                more, size = self._frames.receive(self._socket)
            except (BlockingIOError, InterruptedError):
                return frames, False
            except OSError:
                return frames, True
            if not size:
                return frames, True
            frames += more
            if size < _READ_BYTES:
                return frames, False
        return frames, False

    def close(self) -> None:
        """Close the socket; safe to repeat."""
        self._out.clear()
        self._socket.close()

    abandon = close


class WorkerChannel:
    """The worker's end: `receive` waits for a frame, `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        enlarge_buffers(sock)
        self._socket = sock
        self._waiting: deque[Frame] = deque()
        self._frames = _FrameBuffer()
        self._lock = threading.RLock()  # re-entrant: a signal handler or finalizer may log in the middle of a send
        self._pid = os.getpid()

    def receive(self) -> Frame:
        """Return the next frame.

        Raises:
            EOFError: the parent has closed its end, or is gone.
        """
        while not self._waiting:
            try:
                frames, size = self._frames.receive(self._socket)
            except OSError as exc:
                raise EOFError from exc
            if not size:
                raise EOFError
            self._waiting.extend(frames)
        return self._waiting.popleft()

    def send(self, kind: int, *parts: Buffer) -> None:
        """Send one frame.

        A process that the task itself forked has a copy of this object: it stays silent, because its bytes would
        land in the middle of its parent's.
        """
        if os.getpid() != self._pid:
            return
        length = sum(len(part) for part in parts)
        header = HEADER.pack(length, kind)
        with self._lock:
            if length < _READ_BYTES:
                self._socket.sendall(b"".join((header, *parts)))
                return
            self._send_all((header, *parts))

    def _send_all(self, parts: Iterable[Buffer]) -> None:
        for part in parts:
            self._socket.sendall(part)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def enlarge_buffers(sock: socket.socket) -> None:
    """Ask for a larger send buffer; the kernel may give less."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
