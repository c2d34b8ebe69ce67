# SPDX-License-Identifier: Apache-2.0
"""What `make test` leaves out exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.sweeps import SWEEPS

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("pattern", SWEEPS)
def test_a_pattern_names_tests(pattern: str) -> None:
    file, _, test = pattern.partition("::")
    texts = [path.read_text(encoding="utf-8") for path in TESTS.glob(file.replace("/*", "/**/*.py"))]
    assert texts, f"no file is {file}"
    words = re.findall(r"[a-z_]{6,}", test)
    assert all(any(word in text for text in texts) for word in words), f"no test of {file} has {words} in its name"
