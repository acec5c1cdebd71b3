"""CPU affinity and core counts of workers, and the native threads that libraries start."""

from __future__ import annotations

import bisect
import ctypes
import math
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from datamat.parallel.errors import OptionError

# ---------------------------------------------------------------- native threads
#
# Native threads, started by libraries rather than Python: which library owns them, and whether they survive a fork.
#
# A fork copies only the calling thread. A runtime whose threads are gone waits for them for ever, unless it is prepared
# for that. Such runtimes cannot be listed, so the origin of each thread is looked up: the kernel says where the stack
# of a waiting thread is (`/proc/self/task/ID/syscall`), and the outermost address of code on it lies in the library
# that started the thread. Libraries known to survive a fork are listed; all others count as unsafe.


_UNKNOWN = "an unknown library"
# They end their threads before a fork, or start new ones after it (pthread_atfork): OpenBLAS, numexpr, Arrow, the
# OpenMP of LLVM and Intel, torch's pool for convolutions. OpenCV does not; see `at_rest`.
_SURVIVES_FORK = re.compile(r"openblas|/numexpr/|/libarrow\.so|/libi?omp5?[.-]|/libtorch_cpu\.so|/cv2/|/libopencv_")
_GNU_OPENMP = re.compile(r"/libgomp[.-]")
_START_OF_ANY_THREAD = re.compile(r"/(libc|libpthread|libstdc\+\+|libc\+\+|libgcc_s|ld|ld-[\w-]+)[.-][^/]*$")
# After its last call OpenBLAS spins for some 30 ms, and GNU OpenMP for less, before it waits and can be asked.
_PATIENCE_S = 0.5
_NAP_S = 0.002
_DEEPEST = 1 << 16
_WORD = struct.calcsize("P")
_OMP_PAUSE_SOFT = 1


class Mapping(NamedTuple):
    """A part of the address space.

    Attributes:
        start: first address of the mapping.
        end: address just past the mapping.
        path: the file that is mapped; empty for anonymous memory.
        is_code: whether the mapping is executable.
    """

    start: int
    end: int
    path: str
    is_code: bool


def mappings() -> list[Mapping]:
    """Return the memory mappings of this process, in order; empty where the system does not list them."""
    found = []
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, permissions, *rest = line.split(maxsplit=5)
            start, _, end = addresses.partition("-")
            path = rest[3].rstrip("\n") if len(rest) > 3 else ""
            is_code = "x" in permissions and path.startswith("/")
            found.append(Mapping(int(start, 16), int(end, 16), path, is_code))
    return found


# ---------------------------------------------------------------- owners of threads


def library_against_fork(*, is_patient: bool = True, known: set[int] | None = None) -> str | None:
    """Return the name of a library whose threads a fork of this process would lose; None if there is none.

    A thread that computes without a pause counts as one of an unknown library, and so do all of them where the kernel
    does not say where their stacks are (gVisor).

    Args:
        is_patient: wait for threads that are computing right now; otherwise they are skipped.
        known: thread ids to skip, from `native_threads`; None skips Python's own threads, which `threading` counts.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while threads := native_threads() - (_python_threads() if known is None else known):
        owners = _owners(threads, is_python_one=known is not None)
        if not is_patient:
            owners.discard(None)
        if None not in owners or time.monotonic() > deadline:
            unsafe = sorted(os.path.basename(owner or _UNKNOWN) for owner in owners if not _survives(owner))
            return unsafe[0] if unsafe else None
        time.sleep(_NAP_S)
    return None


def _python_threads() -> set[int | None]:
    return {os.getpid(), threading.get_native_id(), *(thread.native_id for thread in threading.enumerate())}


def native_threads() -> set[int]:
    """Return the kernel's ids of the threads of this process; empty where it does not list them."""
    with suppress(OSError):
        return set(map(int, os.listdir("/proc/self/task")))
    return set()


def _survives(owner: str | None) -> bool:
    if owner is None:
        return False
    if _GNU_OPENMP.search(owner):
        return _pause_of(owner) is not None
    return _SURVIVES_FORK.search(owner) is not None


def _owners(threads: set[int], *, is_python_one: bool) -> set[str | None]:
    """Return the files whose code started these threads; None for a thread whose file cannot be determined now.

    Args:
        threads: ids of the threads.
        is_python_one: whether the interpreter counts.
    """
    everything = mappings()
    code = [mapping for mapping in everything if mapping.is_code]
    interpreter = find(code, ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0)
    owners: set[str | None] = set()
    for thread in threads:
        stack = b""
        with suppress(OSError):
            stack = _stack(thread, everything)
        owner = _outermost(stack, code)
        has_ended = not stack and not os.path.exists(f"/proc/self/task/{thread}")
        is_of_python = owner is not None and interpreter is not None and owner == interpreter.path
        if not has_ended and (is_python_one or not is_of_python):
            owners.add(owner)
    return owners


def _stack(thread: int, everything: list[Mapping]) -> bytes:
    """Return the used part of a thread's stack; empty if the thread is running."""
    with open(f"/proc/self/task/{thread}/syscall", encoding="ascii") as file:
        fields = file.read().split()
    if len(fields) < 3:  # "running"
        return b""
    pointer = int(fields[-2], 16)
    mapping = find(everything, pointer)
    if mapping is None:
        return b""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), min(mapping.end - pointer, _DEEPEST), pointer)


def _outermost(stack: bytes, code: list[Mapping]) -> str | None:
    """Return the file of a thread's outermost function, ignoring the C library's code that starts every thread."""
    usable = len(stack) // _WORD * _WORD
    for address in struct.unpack(f"{usable // _WORD}P", stack[:usable])[::-1]:
        mapping = find(code, address)
        if mapping is not None and not _START_OF_ANY_THREAD.search(mapping.path):
            return mapping.path
    return None


def find(ordered: list[Mapping], address: int) -> Mapping | None:
    """Return the mapping that contains an address."""
    place = bisect.bisect_right(ordered, address, key=lambda mapping: mapping.start) - 1
    return ordered[place] if place >= 0 and address < ordered[place].end else None


# ---------------------------------------------------------------- rest


@contextmanager
def at_rest() -> Iterator[None]:
    """Shut down the thread pools of OpenCV and GNU OpenMP for the block, which forks the process.

    They restart when next used. A forked process would inherit the records of these pools, but not their
    threads: `cv2.setNumThreads` (pthreads backend, OpenCV 4 and 5), and every parallel region of torch, scikit-learn,
    LightGBM or XGBoost, would wait for them for ever.
    """
    libraries = _loaded_libraries()
    note_thread_pools(libraries)
    for path in libraries:
        if _GNU_OPENMP.search(path) and (pause := _pause_of(path)) is not None:
            pause(_OMP_PAUSE_SOFT)
    cv2 = sys.modules.get("cv2")
    if cv2 is None:
        yield
        return
    num_threads = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(num_threads)


def _pause_of(path: str) -> Callable[[int], int] | None:
    """Return the function of a GNU OpenMP library that ends its idle threads (GCC 9 and later)."""
    with suppress(OSError, AttributeError):
        pause: Callable[[int], int] = ctypes.CDLL(path, mode=os.RTLD_NOLOAD).omp_pause_resource_all
        return pause
    return None


# ---------------------------------------------------------------- affinity
#
# Which CPUs workers get, and how many threads a library may start in each worker.
#
# All of it is read from sysfs, procfs and the scheduler below a `root` that tests replace. Nothing here changes the
# calling process, except `bind` and the two `limit_…` functions, which a worker calls on itself.
#
# Formats: `/sys/devices/system/cpu/cpuN/topology/*` and CPU lists ("0-3,8") are described in the kernel's
# Documentation/admin-guide/cputopology.rst; quotas in cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst
# (`cpu.cfs_quota_us`, `cpu.cfs_period_us`).


_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
_CODE_OF_A_FILE = re.compile(rb"^\S+ ..x\S* \S+ \S+ \S+ +(/.*)$", re.MULTILINE)  # proc_pid_maps(5)
_HAS_THREAD_POOL = re.compile("openblas|libmkl_rt|libblis|libgomp|libiomp|libomp")
_BLAS_SETTERS = ("openblas_set_num_threads", "scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_",
                 "MKL_Set_Num_Threads", "bli_thread_set_num_threads", "omp_set_num_threads")  # fmt: skip


def num_cpus() -> int:
    """Return the number of logical CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores(*, allowed: Iterable[int] | None = None, root: str = "/") -> tuple[int, ...]:
    """Return one logical CPU for each physical core that this process may use, fastest cores first.

    Hyper-threads of one core share its arithmetic units, so decoding and augmentation gain only from one worker per
    core. The number is capped by the CPU quotas of the process's cgroup and its ancestors, rounded up.

    Args:
        allowed: CPU numbers to choose from; None takes the scheduler's mask of this process.
        root: directory that holds `sys` and `proc`.

    Returns:
        CPU numbers, at least one. If the scheduler's mask cannot be read (macOS, Windows), the numbers only count
        cores: do not bind to them.

    Example:
        >>> len(physical_cores()) >= 1
        True
    """
    cores = core_mask(allowed=allowed, root=root)
    quota = cpu_quota(root=root)
    return cores if quota is None else cores[: max(1, math.ceil(quota - 1e-9))]


def core_mask(*, allowed: Iterable[int] | None = None, root: str = "/") -> tuple[int, ...]:
    """Return one logical CPU per allowed physical core, fastest first, ignoring CPU quotas.

    This is the mask that workers get. It is not cut to the quota, because a quota limits time and not places: with
    it, all containers of a host would crowd on the same first cores.
    """
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):
            return tuple(range(_count_cores_elsewhere()))
        allowed = os.sched_getaffinity(0)
    cpus = sorted(set(allowed))
    leaders: dict[frozenset[int], int] = {}
    for cpu in cpus:
        leaders.setdefault(_siblings(cpu, root), cpu)
    return tuple(sorted(leaders.values(), key=lambda cpu: (-_capacity(cpu, root), cpu)))


def cpu_quota(*, root: str = "/") -> float | None:
    """Return the CPU quota of this process's cgroups, in CPUs; None if there is no limit.

    It is the smallest quota of the process's own group and all its ancestors.
    """
    quotas = [quota for directory in _cgroup_directories(root) if (quota := _quota_of(directory)) is not None]
    return min(quotas, default=None)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPU numbers of the kernel's list format.

    Example:
        >>> sorted(parse_cpu_list("0-2,8"))
        [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def worker_masks(affinity: str | None, num_workers: int) -> list[frozenset[int] | None]:
    """Return the CPU mask of each worker.

    Args:
        affinity: "physical" gives every worker all physical cores, "pinned" gives each one core (round robin where
            there are more workers than cores), None leaves the scheduler's mask alone.
        num_workers: number of workers, and so of masks.

    Raises:
        OptionError: `affinity` is none of these.
    """
    if affinity not in {"physical", "pinned", None}:
        raise OptionError(f"affinity is {affinity!r}; pass 'physical', 'pinned' or None")
    if affinity is None or not hasattr(os, "sched_setaffinity"):
        return [None] * num_workers
    cores = core_mask()
    if affinity == "physical":
        return [frozenset(cores)] * num_workers
    return [frozenset({cores[i % len(cores)]}) for i in range(num_workers)]


def bind(mask: frozenset[int] | None) -> None:
    """Restrict the calling process to `mask`, never to more than it has now.

    The allowed set may have shrunk since the mask was computed; with nothing left of it the process stays as it is.
    """
    if mask is None:
        return
    within = mask & os.sched_getaffinity(0)
    if within:
        os.sched_setaffinity(0, within)


def limit_thread_environment(num_threads: int) -> None:
    """Limit the threads of libraries that are imported later; variables that the user has set stay."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(num_threads))


# Functions that set the number of threads, and OpenBLAS's that ends them; a fork inherits its parent's.
_thread_setters: list[tuple[Callable[[ctypes.c_int], object], Callable[[], object] | None]] | None = None


def limit_loaded_libraries(num_threads: int) -> None:
    """Limit the thread pools of libraries that are loaded already (a forked worker inherits them)."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(num_threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(num_threads)
    if "numpy" not in sys.modules:
        return
    if _thread_setters is None:
        note_thread_pools(_loaded_libraries())
    for setter, pause in _thread_setters or ():
        setter(ctypes.c_int(num_threads))
        if pause is not None:  # OpenBLAS has started them all, and they spin for 40 ms; it restarts them when needed
            pause()


def note_thread_pools(libraries: Iterable[str] | None = None) -> None:
    """Find the thread pools of loaded libraries before a fork: doing it in each worker would take 2 to 5 ms.

    Args:
        libraries: paths of the libraries if known; None looks for them.
    """
    global _thread_setters  # noqa: PLW0603 -- what the forks inherit
    _thread_setters = []
    for path in _loaded_libraries() if libraries is None else libraries:
        with suppress(OSError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            setters = (getattr(library, name, None) for name in _BLAS_SETTERS)
            pause = getattr(library, "blas_thread_shutdown_", None)
            _thread_setters += [(setter, pause) for setter in setters if setter is not None]


def _loaded_libraries() -> set[str]:
    """Return the mapped shared objects that may hold a BLAS or OpenMP thread pool."""
    content = b""
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        content = maps.read()
    paths = map(os.fsdecode, set(_CODE_OF_A_FILE.findall(content)))
    return {path for path in paths if _HAS_THREAD_POOL.search(os.path.basename(path))}


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _siblings(cpu: int, root: str) -> frozenset[int]:
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second is its name before Linux 5.3
        text = _read(os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}/topology/{name}"))
        if text:
            return parse_cpu_list(text)
    return frozenset({cpu})


def _capacity(cpu: int, root: str) -> int:
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        text = _read(os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}/{name}"))
        if text and text.isdigit():
            return int(text)
    return 0


def _count_cores_elsewhere() -> int:
    import psutil  # needed only where the scheduler's mask cannot be read

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _cgroup_directories(root: str) -> Iterator[str]:
    """Yield the directories of this process's CPU cgroups and of all their ancestors."""
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [os.path.join(root, "sys/fs/cgroup")]
        elif "cpu" in controllers.split(","):
            bases = [os.path.join(root, "sys/fs/cgroup", name) for name in (controllers, "cpu", "cpu,cpuacct")]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield os.path.join(base, *parts[:depth])


def _quota_of(directory: str) -> float | None:
    if text := _read(os.path.join(directory, "cpu.max")):
        quota, _, period = text.partition(" ")
    else:
        quota = _read(os.path.join(directory, "cpu.cfs_quota_us")) or ""
        period = _read(os.path.join(directory, "cpu.cfs_period_us")) or ""
    if not quota.isdigit() or not int(quota):  # "max", -1 or unreadable: no limit
        return None
    return int(quota) / (int(period) if period.isdigit() and int(period) else 100_000)
