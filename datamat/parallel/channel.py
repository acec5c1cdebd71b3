"""What passes between a worker and its parent: messages, large buffers and claims to tasks."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pickle import PickleBuffer

# ---------------------------------------------------------------- descriptors that forks close
#
# Descriptors that belong to this process alone: every fork of it closes them, whatever other threads are doing.
#
# Otherwise forked siblings, and whatever the caller forks, would hold copies of the parent's ends, and a worker would
# not see that its parent is gone.


class _Closable(Protocol):
    def close(self) -> object: ...


_ends: weakref.WeakSet[_Closable] = weakref.WeakSet()
# Held from the making of ends until they are registered, and while they are closed: an object forgets its number before
# the descriptor is closed, and a fork in between would keep it open. Every fork waits for it.
no_forks = threading.RLock()


class Descriptor:
    """An open file descriptor that is closed once."""

    __slots__ = ("__weakref__", "_number")

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return the number; -1 once it is closed."""
        return self._number

    def share(self) -> Descriptor:
        """Return a duplicate of the descriptor, for a worker."""
        return Descriptor(os.dup(self._number))

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a process that is being started, which inherits it."""
        from multiprocess.reduction import DupFd  # which Windows lacks

        return _inherited, (DupFd(self._number),)

    def close(self) -> None:
        """Close the descriptor; safe to repeat.

        The number is cleared first: a second call that interrupts this one must not close it, since it may be another
        file by then.
        """
        with no_forks:
            number, self._number = self._number, -1
            if number >= 0:
                os.close(number)


def _inherited(handle: Any) -> Descriptor:
    return Descriptor(handle.detach())


def close_in_forks(*ends: _Closable) -> None:
    """Register objects whose `close()` is called in every fork of this process; see `no_forks`."""
    for end in ends:
        _ends.add(end)


def _close_ends() -> None:
    no_forks.release()
    ends = list(_ends)
    _ends.clear()
    with ExitStack() as stack:  # all are closed even if some raise; Python reports the last error
        for end in ends:
            stack.callback(end.close)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_forks.acquire, after_in_parent=no_forks.release, after_in_child=_close_ends)


# ---------------------------------------------------------------- descriptors of another process
#
# A pipe or anonymous memory travels as its place, which the receiver opens: by its path in /proc, or, where that is not
# readable, by asking a thread of its owner that sends descriptors over a socket.


_PR_GET_DUMPABLE = 3
_servers: dict[int, Any] = {}  # by process: a fork has the listener of its parent, but not the thread


def place_of(descriptor: int) -> str:
    """Return a place at which other processes of this user can reopen a descriptor of this one."""
    if _shows_descriptors():
        return f"/proc/{os.getpid()}/fd/{descriptor}"
    from multiprocess.connection import Listener

    listener = _servers.get(os.getpid())
    if listener is None:
        listener = Listener(family="AF_UNIX", authkey=_authkey())
        listener = _servers.setdefault(os.getpid(), listener)
        threading.Thread(target=_serve_descriptors, args=(listener,), name="datamat-descriptors", daemon=True).start()
    return f"{listener.address}:{descriptor}"


def _shows_descriptors() -> bool:
    """Return True if other processes may open descriptors of this one by their path.

    They may not once it has given up the rights of root (a server with a `--user`), or has said that nobody may look at
    it: then it is not "dumpable", prctl(2).
    """
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE) == 1)


def _authkey() -> bytes:
    from multiprocess import process

    return bytes(process.current_process().authkey)


def _serve_descriptors(listener: Any) -> None:
    from multiprocess import AuthenticationError, reduction

    while True:
        with suppress(OSError, EOFError, AuthenticationError), listener.accept() as connection:
            reduction.send_handle(connection, connection.recv(), None)


def reopen(place: str, flags: int) -> int:
    """Return a descriptor of this process for the one at a place.

    Args:
        place: what `place_of` has returned in its process.
        flags: flags of `open`, if it is opened by path.

    Raises:
        OSError: it is gone.
    """
    if place.startswith("/proc/"):
        return os.open(place, flags | os.O_CLOEXEC)
    from multiprocess.connection import Client, reduction

    address, _, descriptor = place.rpartition(":")
    with Client(address, family="AF_UNIX", authkey=_authkey()) as connection:
        connection.send(int(descriptor))
        return int(reduction.recv_handle(connection))


# ---------------------------------------------------------------- a pickled callable
#
# A pickled callable on the wire: its stream and its large buffers, written once for all workers.
#
# Arrays that `self` holds do not pass through the sockets. Their bytes are copied once, when they are pickled, into
# anonymous memory (memfd_create(2)), which each worker maps privately: pages are shared until a worker writes to them.
# The copy is also the snapshot that shows later whether the arrays have changed. Its path is a `place_of`.
#
#     packed = number of buffers (uint32), length of the path (uint32), lengths of stream and buffers (uint64 each),
#              path, stream, and, where the path is empty, the buffers, each at a multiple of 64 bytes after the first


_COUNTS = struct.Struct("<II")
_ALIGNED_BYTES = 64  # a cache line: vector instructions want arrays to begin at one
_LARGE_BYTES = 1 << 20  # below this, mapping costs more than copying


class PackedFunction:
    """A snapshot of a callable, as workers receive it.

    Args:
        stream: pickle of the callable, without its large buffers.
        buffers: large buffers that the pickle refers to.

    Attributes:
        packed: the message that carries the callable.
    """

    def __init__(self, stream: bytes, buffers: Sequence[PickleBuffer]) -> None:
        views = [buffer.raw() for buffer in buffers]
        self._memory: _BufferFile | None = None
        if sum(view.nbytes for view in views) >= _LARGE_BYTES and hasattr(os, "memfd_create"):
            self._memory = _BufferFile(views)
        path = b"" if self._memory is None else self._memory.path.encode()
        lengths = struct.pack(f"<{len(views) + 1}Q", len(stream), *(view.nbytes for view in views))
        inline = [] if path else [part for view in views for part in (view, _padding(view.nbytes))]
        self.packed = b"".join((_COUNTS.pack(len(views), len(path)), lengths, path, stream, *inline))


class _BufferFile:
    """Anonymous memory that lives as long as this object, or a mapping of it."""

    def __init__(self, views: list[memoryview]) -> None:
        self._descriptor = os.memfd_create("datamat", os.MFD_CLOEXEC)
        self._owner = os.getpid()
        self.path = place_of(self._descriptor)
        for view in views:
            rest = view
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.write(self._descriptor, _padding(view.nbytes))

    def __del__(self) -> None:
        if os.getpid() == self._owner:  # in a fork the number may be another file by now
            os.close(self._descriptor)


def unpack(packed: memoryview) -> tuple[bytes, list[memoryview]]:
    """Return the stream and buffers of a packed function; the buffers are writable and private to this process."""
    num_buffers, path_length = _COUNTS.unpack_from(packed)
    lengths = struct.unpack_from(f"<{num_buffers + 1}Q", packed, _COUNTS.size)
    start = _COUNTS.size + 8 * (num_buffers + 1)
    path = bytes(packed[start : start + path_length]).decode()
    start += path_length
    stream = bytes(packed[start : start + lengths[0]])
    if path:
        with closing(Descriptor(reopen(path, os.O_RDONLY))) as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    else:
        content = memoryview(bytearray(packed[start + lengths[0] :]))
    buffers = []
    start = 0
    for length in lengths[1:]:
        buffers.append(content[start : start + length])
        start += length + len(_padding(length))
    return stream, buffers


def _padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % _ALIGNED_BYTES)


# ---------------------------------------------------------------- claims to tasks
#
# Decides who may begin a task that waits at a worker behind another: one byte in a pipe for each such task.
#
# Short tasks are sent ahead, so that a worker never waits for its parent. If the task before them turns out to be long,
# or waits for one of them, they must go to another worker; but a worker in the middle of a task reads no messages. So a
# worker reads a byte from this pipe before it begins such a task, and the parent takes tasks back by reading the bytes
# itself: the kernel gives each byte to only one of the two. Where the pipe is empty, the worker skips the task and
# reports that.


class Claims:
    """Both ends of the pipe in the parent, the reading end in the worker."""

    __slots__ = ("_read", "_write")

    def __init__(self, read: Descriptor, write: Descriptor | None = None) -> None:
        self._read = read
        self._write = write

    @classmethod
    def create(cls) -> Self:
        """Return a new, empty pipe."""
        read, write = map(Descriptor, os.pipe())
        os.set_blocking(read.fileno(), False)
        close_in_forks(read, write)
        return cls(read, write)

    def share(self) -> Claims:
        """Return a duplicate of the reading end, for the worker."""
        return Claims(self._read.share())

    def grant(self, num_tasks: int) -> None:
        """In the parent, before the tasks are sent: let the worker begin this many more of them."""
        assert self._write is not None
        os.write(self._write.fileno(), bytes(num_tasks))

    def take_back(self, num_tasks: int) -> int:
        """In the parent: return how many tasks at the worker, counted from the last, it can no longer begin.

        Args:
            num_tasks: how many there may be.
        """
        with suppress(BlockingIOError):
            return len(os.read(self._read.fileno(), num_tasks))
        return 0

    def claim(self) -> bool:
        """In the worker: return True if the next task may begin."""
        with suppress(BlockingIOError):
            return bool(os.read(self._read.fileno(), 1))
        return False

    def close(self) -> None:
        """Close the descriptors; safe to repeat."""
        self._read.close()
        if self._write is not None:
            self._write.close()


# ---------------------------------------------------------------- frames
#
# Framed messages over one socket pair per worker.
#
# A frame is nine bytes of header (payload length as little-endian uint64, then the kind as uint8) and the payload. The
# parent's end (`ParentChannel`) never blocks: what the kernel does not take at once waits in a list of buffers, so a
# worker that is busy, stopped or dead can never stall the dispatcher, whatever the size of a message. The worker's end
# (`WorkerChannel`) blocks, and one lock keeps the frames of its threads apart.
#
# Workers share nothing here: a process killed in the middle of a frame spoils only its own socket.


HEADER = struct.Struct("<QB")
_READ_BYTES = 1 << 16  # into one buffer for all reads: allocating a large one for each costs 24 us
_READS_PER_WAKE = 64  # a worker that floods its socket with log records must not starve the others
_BUFFERS_PER_CALL = 512  # below IOV_MAX (1024)
_JOINED_BYTES = 1 << 12  # copying less than a page is cheaper than one more buffer
# One result of ordinary size never makes a worker wait for the parent; and a full buffer, which the kernel may double,
# is read in one wake.
_SOCKET_BYTES = 1 << 20

Frame = tuple[int, bytes]
Buffer = bytes | bytearray | memoryview


class _FrameBuffer:
    """Receives bytes from a socket and splits them into frames."""

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
        """Return True if data waits for the socket to become writable."""
        return bool(self._out)

    def send(self, kind: int, *parts: Buffer) -> None:
        """Queue one frame made of `parts` and write as much as the socket takes now.

        A dead worker is not an error here: the dispatcher notices its death, once, where it waits.
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
        with no_forks:
            self._socket.close()


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
            EOFError: the parent has closed its end or died.
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
            for part in (header, *parts):
                self._socket.sendall(part)


def enlarge_buffers(sock: socket.socket) -> None:
    """Ask for a larger send buffer; the kernel may give less."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
