"""Limits of control groups of both versions, seen from the host and from inside a container."""

from pathlib import Path

import pytest

from lightning_cnnpar.launchers.cgroup import Limits, read_limits
from lightning_cnnpar.launchers.topology import read_topology
from tests.unit.launchers.machines import Machine

V2 = {"proc/mounts": "none /sys/fs/cgroup cgroup2 rw 0 0", "proc/self/cgroup": "0::/job/task"}
V1 = {
    "proc/mounts": "a /cg/cpu cgroup rw,cpu,cpuacct 0 0\nb /cg/cpuset cgroup rw,cpuset 0 0",
    "proc/self/cgroup": "4:cpuset:/job\n3:cpu,cpuacct:/job\n0::/",
}


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, Limits()),
        (V2, Limits()),
        ({**V2, "sys/fs/cgroup/job/task/cpu.max": "max 100000"}, Limits()),
        ({**V2, "sys/fs/cgroup/job/task/cpu.max": "250000 100000"}, Limits(quota=2.5)),
        # The group above limits too.
        (
            {**V2, "sys/fs/cgroup/job/task/cpu.max": "800000 100000", "sys/fs/cgroup/job/cpu.max": "400000 100000"},
            Limits(quota=4.0),
        ),
        # Inside a container the mount's root is the group.
        ({**V2, "sys/fs/cgroup/cpu.max": "50000 100000"}, Limits(quota=0.5)),
        ({**V2, "sys/fs/cgroup/job/task/cpuset.cpus.effective": "0-1\0"}, Limits(cpus=frozenset({0, 1}))),
        ({**V2, "sys/fs/cgroup/job/cpuset.cpus.effective": "2"}, Limits(cpus=frozenset({2}))),
        ({**V1, "cg/cpu/job/cpu.cfs_quota_us": "-1", "cg/cpu/job/cpu.cfs_period_us": "100000"}, Limits()),
        ({**V1, "cg/cpu/job/cpu.cfs_quota_us": "300000", "cg/cpu/job/cpu.cfs_period_us": "100000"}, Limits(quota=3.0)),
        ({**V1, "cg/cpuset/job/cpuset.cpus": "4-5"}, Limits(cpus=frozenset({4, 5}))),
        (
            {**V1, "cg/cpuset/job/cpuset.cpus": "4-5", "cg/cpuset/job/cpuset.effective_cpus": "5"},
            Limits(cpus=frozenset({5})),
        ),
        # Mounted without the prefix; named by /proc/self/cpuset alone.
        (
            {
                "proc/mounts": "x /dev/cpuset cgroup rw,cpuset,noprefix 0 0",
                "proc/self/cpuset": "/p",
                "dev/cpuset/p/cpus": "0",
            },
            Limits(cpus=frozenset({0})),
        ),
    ],
)
def test_limits(files: dict[str, str], limits: Limits, tmp_path: Path) -> None:
    assert read_limits(Machine(nodes={0: "0-3"}, files=files).write(tmp_path)) == limits


def test_the_machine_allows_what_groups_leave(tmp_path: Path) -> None:
    machine = Machine(
        nodes={0: "0-3"},
        files={**V2, "sys/fs/cgroup/cpuset.cpus.effective": "2-9", "sys/fs/cgroup/cpu.max": "100000 100000"},
    )
    topology = read_topology(machine.write(tmp_path))
    assert topology.allowed == {2, 3}
    assert topology.online == {0, 1, 2, 3}
    assert topology.quota == 1.0
