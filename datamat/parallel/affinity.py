"""Which processors workers get, and how many threads a library may start in each.

All of it is read from sysfs, procfs and the scheduler below a `root` that tests replace. Nothing here changes the
calling process, except `bind` and the two `limit_…` functions, which a worker calls on itself.

Formats: `/sys/devices/system/cpu/cpuN/topology/*` and CPU lists ("0-3,8") are described in the kernel's
Documentation/admin-guide/cputopology.rst; quotas in cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst
(`cpu.cfs_quota_us`, `cpu.cfs_period_us`).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from datamat.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "bind",
    "core_mask",
    "cpu_quota",
    "limit_loaded_libraries",
    "limit_thread_environment",
    "parse_cpu_list",
    "physical_cores",
    "worker_masks",
]

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
_BLAS_SETTERS = ("openblas_set_num_threads", "scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_",
                 "MKL_Set_Num_Threads", "bli_thread_set_num_threads", "omp_set_num_threads")  # fmt: skip


def physical_cores(*, allowed: Iterable[int] | None = None, root: str = "/") -> tuple[int, ...]:
    """Return one logical CPU for each physical core that this process may use, fastest cores first.

    Hyper-threads of one core share its arithmetic units, so one worker per core is what decoding and augmentation
    gain from. The number is capped by the CPU quota of the process' cgroup and its ancestors, rounded up.

    Args:
        allowed: CPU numbers to choose from; None takes the scheduler's mask of this process.
        root: directory that holds `sys` and `proc`.

    Returns:
        CPU numbers, at least one. Where the scheduler's mask cannot be read (macOS, Windows) the numbers only count
        cores: do not bind to them.

    Example:
        >>> len(physical_cores()) >= 1
        True
    """
    cores = core_mask(allowed=allowed, root=root)
    quota = cpu_quota(root=root)
    return cores if quota is None else cores[: max(1, math.ceil(quota - 1e-9))]


def core_mask(*, allowed: Iterable[int] | None = None, root: str = "/") -> tuple[int, ...]:
    """Return one logical CPU per allowed physical core, fastest first, whatever the quota.

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
    """Return how many CPUs' time the cgroups of this process allow, or None where they set no limit.

    The smallest of the quotas of the own group and all its ancestors counts.
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
        num_workers: number of masks.

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
    """Tell libraries that are imported later how many threads to start; what the user has set stays."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, str(num_threads))


def limit_loaded_libraries(num_threads: int) -> None:
    """Limit the thread pools of libraries that are loaded already (a forked worker inherits them)."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(num_threads)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(num_threads)
    if "numpy" not in sys.modules:
        return
    for path in _loaded_libraries():
        with suppress(OSError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            for name in _BLAS_SETTERS:
                if (setter := getattr(library, name, None)) is not None:
                    setter(ctypes.c_int(num_threads))


def _loaded_libraries() -> set[str]:
    """Return the mapped shared objects that may hold a BLAS or OpenMP thread pool."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    except OSError:
        return set()
    words = ("openblas", "libmkl_rt", "libblis", "libgomp", "libiomp", "libomp")
    return {path for path in paths if any(word in os.path.basename(path) for word in words)}


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
    """Yield the directories of this process' CPU groups and of all their ancestors."""
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
