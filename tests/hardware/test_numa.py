# SPDX-License-Identifier: Apache-2.0
"""The NUMA node of a device, and that a policy reaches the kernel."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from phalanx.hardware.numa import node_of, prefer_node


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None)])
def test_the_node_of_a_device_is_what_the_kernel_says(text: str, node: int | None, tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
    assert node_of("0000:1B:00.0", tmp_path) == node


def test_a_device_that_is_not_there_has_no_node(tmp_path: Path) -> None:
    assert node_of("0000:ff:00.0", tmp_path) is None


def policy_at(address: int) -> str:
    """The kernel's line of the mapping that begins there."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if int(line.split()[0], 16) == address)


def test_memory_has_the_policy_and_a_node_that_is_not_there_is_refused() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel shows no policies")
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    array = np.frombuffer(memory, dtype=np.uint8)
    address = int(array.ctypes.data)
    if (refused := prefer_node(address + 16, array.nbytes - 16, 0)) == "Operation not permitted":
        pytest.skip("this container may not set policies")
    assert refused == ""
    line = policy_at(address + mmap.PAGESIZE)
    assert line.split()[1] == "prefer:0"
    assert prefer_node(address, array.nbytes, 62) == "Invalid argument"
    assert prefer_node(address, array.nbytes, 63).startswith("not known")
    assert prefer_node(address + 1, 100, 0) == "", "not one whole page"
