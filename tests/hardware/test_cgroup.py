# SPDX-License-Identifier: Apache-2.0
"""Control groups as files: both versions, chains of ancestors, namespaces, and what stands in no table."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.hardware.cgroup import HARMLESS, HONOURED, chains, read_limits

GIB = 1 << 30
V2 = "30 23 0:28 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"  # noqa: E501


def host(root: Path, own: str, files: dict[str, str], mounts: str = V2, top: str = "/") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    if mounts:
        (root / "proc/self/mountinfo").write_text(mounts.format(top=top))
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


SLURM = {
    "job_7/memory.max": str(4 * GIB), "job_7/memory.current": str(3 * GIB), "job_7/memory.stat": f"anon 1\ninactive_file {GIB}",
    "job_7/step_0/memory.max": "max", "job_7/step_0/task_0/memory.max": "max", "job_7/cpu.max": "250000 100000",
    "job_7/step_0/task_0/cpu.max": "max 100000", "job_7/pids.max": "max", "job_7/step_0/task_0/pids.max": "500",
}  # fmt: skip
V1_FILES = {
    "memory/slurm/memory.limit_in_bytes": str(2 * GIB), "memory/slurm/memory.usage_in_bytes": str(GIB),
    "memory/slurm/task/memory.limit_in_bytes": str(2**63 - 4096), "memory/slurm/task/memory.usage_in_bytes": "5",
    "cpu,cpuacct/slurm/cpu.cfs_quota_us": "300000", "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000",
    "cpu,cpuacct/slurm/task/cpu.cfs_quota_us": "-1", "cpu,cpuacct/slurm/task/cpu.cfs_period_us": "100000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "files", "mounts", "top", "memory", "free", "cores", "tasks"),
    [
        ("0::/job_7/step_0/task_0", SLURM, V2, "/", 4 * GIB, 2 * GIB, 2.5, 500),
        ("0::/job_7", {"job_7/memory.max": "max", "job_7/memory.high": str(GIB)}, V2, "/", GIB, GIB, None, None),
        ("0::/", {"memory.max": str(GIB), "cpu.max": "50000 100000"}, V2, "/", GIB, GIB, 0.5, None),
        # The container sees its own group as the root, by a namespace, or by a mount of that folder.
        ("0::/../outside", {"memory.max": str(GIB)}, V2, "/", GIB, GIB, None, None),
        ("0::/docker/a/b", {"memory.max": "max", "b/memory.max": str(GIB)}, V2, "/docker/a", GIB, GIB, None, None),
        ("5:memory:/slurm/task\n4:cpu,cpuacct:/slurm/task", V1_FILES, V1, "/", 2 * GIB, GIB, 3.0, None),
        (
            "5:memory:/docker/x",
            {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.stat": f"hierarchical_memory_limit {GIB}"},
            V1, "/docker/x", GIB, GIB, None, None,
        ),
        ("0::/pod", {"pod/memory.max": str(GIB)}, "", "/", GIB, GIB, None, None),
        ("0::/none", {"memory.max": "max"}, V2, "/", None, None, None, None),
    ],
)  # fmt: skip
def test_the_smallest_limit_of_the_chain(tmp_path, own, files, mounts, top, memory, free, cores, tasks):
    limits = read_limits(host(tmp_path, own, files, mounts, top))
    amounts = [None if limit is None else limit.amount for limit in (limits.memory, limits.cores, limits.tasks)]
    assert [*amounts, limits.free_memory] == [memory, cores, tasks, free]
    assert limits.unread == ()


def test_a_limit_names_its_group(tmp_path):
    limits = read_limits(host(tmp_path, "0::/job_7/step_0/task_0", SLURM))
    assert str(limits.memory) == "the control group job_7, above this one,"
    assert str(limits.tasks) == "the control group"


def test_what_is_set_and_stands_in_no_table_is_named(tmp_path):
    files = {
        "pod/rdma.max": "mlx5_0 hca_handle=2 hca_object=max",
        "pod/new.max": "12",
        "pod/io.max": "8:0 rbps=1",
        "pod/misc.max": "max",
    }
    unread = read_limits(host(tmp_path, "0::/pod", files)).unread
    assert [text.split("/")[-1].removesuffix(", a limit that is not looked at") for text in unread] == [
        "new.max is 12", "rdma.max is mlx5_0 hca_handle=2 hca_object=max",
    ]  # fmt: skip


def test_a_limit_that_is_no_number_is_named(tmp_path):
    limits = read_limits(host(tmp_path, "0::/pod", {"pod/memory.max": "lots", "pod/pids.max": "7"}))
    assert limits.memory is None
    assert limits.tasks.amount == 7
    assert "a limit of " in limits.unread[0]
    assert limits.unread[0].endswith("memory.max holds 'lots'")


def test_no_file_is_in_two_tables():
    from fnmatch import fnmatch

    assert not [name for name in HONOURED for pattern in HARMLESS if fnmatch(name, pattern)]


def test_this_host_is_read():
    assert chains()
    assert not read_limits().unread
