# SPDX-License-Identifier: Apache-2.0
"""One folder of compiled kernels for several servers: one that is killed while it writes harms neither the others nor the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels_compiled import SIZES

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("forked_python")

Kernels = dict[int, tuple[str, str]]
"""By size: "cached" or "compiled", and the digest of the code."""


def compiling(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.kernels_compiled"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TRITON_CACHE_DIR": str(folder)})


def kernels(process: subprocess.Popen[str]) -> Kernels:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return {int(size): (how, digest) for size, how, digest in map(str.split, output.splitlines())}


def codes(process: subprocess.Popen[str]) -> dict[int, str]:
    return {size: digest for size, (_, digest) in kernels(process).items()}


def test_two_processes_compile_into_one_folder_and_one_of_them_is_killed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    killed, other = compiling(shared), compiling(shared)
    assert killed.stdout is not None
    first = killed.stdout.readline().split()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=10)
    assert killed.returncode in (-signal.SIGKILL, 0), "in the midst of the others, unless this process had to wait for seconds"
    expected = codes(compiling(tmp_path / "own"))
    assert expected.keys() == set(SIZES)
    assert len(set(expected.values())) == len(SIZES)
    assert expected[int(first[0])] == first[2]
    assert codes(other) == expected
    third = kernels(compiling(shared))
    assert {size: digest for size, (_, digest) in third.items()} == expected
    assert {how for how, _ in third.values()} == {"cached"}
