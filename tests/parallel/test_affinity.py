"""Cores are counted right on machines that this one is not: the trees below are fabricated."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from datamat.errors import OptionError
from datamat.parallel import affinity, physical_cores

if TYPE_CHECKING:
    from pathlib import Path


def make_cpus(root: Path, siblings: dict[int, str], name: str = "core_cpus_list", **files: dict[int, str]) -> None:
    """Write sibling lists, and any other file by CPU, below `root`."""
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / name).write_text(text + "\n")
        for path, values in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(values[cpu] + "\n")


def make_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


ADJACENT = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(8)}
HALVES = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(("siblings", "cores"), [(ADJACENT, (0, 2, 4, 6)), (HALVES, (0, 1, 2, 3))])
def test_one_cpu_per_core_whatever_the_numbering(tmp_path, siblings, cores, name):
    """Most virtual machines number siblings 0,1; most servers 0,n/2."""
    make_cpus(tmp_path, siblings, name)

    assert physical_cores(allowed=range(8), root=str(tmp_path)) == cores


def test_only_allowed_cpus_are_chosen(tmp_path):
    """A cpuset or taskset may allow only the second sibling, or only high core numbers."""
    make_cpus(tmp_path, ADJACENT)

    assert physical_cores(allowed={1, 4, 5, 7}, root=str(tmp_path)) == (1, 4, 7)


def test_offline_siblings_do_not_count(tmp_path):
    """The kernel drops an offline CPU from its siblings' lists and removes its own topology."""
    make_cpus(tmp_path, {0: "0", 2: "2-3", 3: "2-3"})

    assert physical_cores(allowed={0, 2, 3}, root=str(tmp_path)) == (0, 2)


def test_without_topology_each_cpu_is_a_core(tmp_path):
    """Some containers hide sysfs."""
    assert physical_cores(allowed={0, 1, 5}, root=str(tmp_path)) == (0, 1, 5)


def test_fast_cores_come_first(tmp_path):
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}
    make_cpus(tmp_path, siblings, cpu_capacity={cpu: "400" if cpu > 3 else "1024" for cpu in siblings})

    assert physical_cores(allowed=range(8), root=str(tmp_path)) == (0, 2, 4, 5, 6, 7)
    assert physical_cores(allowed=range(2, 8), root=str(tmp_path))[0] == 2


V1 = "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n"
QUOTAS = [
    pytest.param("0::/job\n", {"job/cpu.max": "200000 100000"}, 2, id="v2"),
    pytest.param("0::/job\n", {"job/cpu.max": "150000 100000"}, 2, id="rounded up"),
    pytest.param("0::/job\n", {"job/cpu.max": "10000 100000"}, 1, id="less than one"),
    pytest.param("0::/job\n", {"job/cpu.max": "max 100000"}, 4, id="no limit"),
    pytest.param(
        "0::/pod/job\n", {"pod/job/cpu.max": "800000 100000", "pod/cpu.max": "100000 100000"}, 1, id="narrow ancestor"
    ),
    pytest.param(
        V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000"},
        3, id="v1",
    ),
    pytest.param(
        V1, {"cpu/docker/abc/cpu.cfs_quota_us": "300000", "cpu/docker/abc/cpu.cfs_period_us": "100000"}, 3,
        id="v1 of cpu alone",
    ),
    pytest.param(V1, {"cpu/docker/abc/cpu.cfs_quota_us": "-1"}, 4, id="v1 without a limit"),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "files", "count"), QUOTAS)
def test_quota_of_the_control_group_limits_the_cores(tmp_path, groups, files, count):
    make_cpus(tmp_path, ADJACENT)
    make_file(tmp_path / "proc/self/cgroup", groups)
    for name, text in files.items():
        make_file(tmp_path / "sys/fs/cgroup" / name, text)

    assert len(physical_cores(allowed=range(8), root=str(tmp_path))) == count


def test_mask_is_not_cut_to_the_quota(tmp_path):
    """Otherwise all containers of a host would crowd onto its first cores."""
    make_cpus(tmp_path, ADJACENT)
    make_file(tmp_path / "proc/self/cgroup", "0::/\n")
    make_file(tmp_path / "sys/fs/cgroup/cpu.max", "100000 100000")

    assert affinity.core_mask(allowed=range(8), root=str(tmp_path)) == (0, 2, 4, 6)


def test_systems_without_scheduler_masks_count_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "sched_setaffinity")

    assert len(physical_cores()) >= 1
    assert affinity.worker_masks("physical", 3) == [None, None, None]


def test_masks_of_workers():
    """A worker may use all cores, one core of its own, or is not bound at all."""
    cores = affinity.core_mask()

    assert affinity.worker_masks("physical", 2) == [frozenset(cores)] * 2
    assert affinity.worker_masks("pinned", len(cores) + 1)[-1] == frozenset({cores[0]})
    assert affinity.worker_masks(None, 2) == [None, None]
    with pytest.raises(OptionError, match="affinity is 'core'"):
        affinity.worker_masks("core", 2)


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("", set()), ("0,2-2", {0, 2})])
def test_cpu_lists_are_read_as_the_kernel_writes_them(text, cpus):
    assert affinity.parse_cpu_list(text) == cpus
