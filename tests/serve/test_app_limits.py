# SPDX-License-Identifier: Apache-2.0
"""The server raises its soft limit of open files, as far as it may."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

CODE = """
import resource
from phalanx.serve.app import raise_open_files
raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("before", "after"), [((256, 4096), (4096, 4096)), ((3000, 3000), (3000, 3000)), ((1024, 19000), (19000, 19000))]
)
def test_open_files(before, after):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < before[1]:
        pytest.skip(f"not run: the hard limit here is {hard}")
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)  # noqa: E731
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, preexec_fn=limits)
    assert tuple(map(int, done.stdout.split())) == after
