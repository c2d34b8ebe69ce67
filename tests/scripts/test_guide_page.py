# SPDX-License-Identifier: Apache-2.0
"""docs/guide.md is what its commands print, and every example of the guide is on it."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture.sources import ROOT


def test_the_page_is_what_the_commands_print():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "guide_page.py", "--check"], check=False)
    assert done.returncode == 0, "run: python scripts/guide_page.py"


def test_every_example_and_table_is_there():
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    for phrase in (
        "A100-80 --gpus_per_node 1 --dtype fp16",
        "--tp_size 4 --pp_size 2",
        "--nodes 2",
        "--tp_size 4 --ep_size 2",
        "--tp_size 8 --pp_size 2 --num_workers 2",
        "errs by",
        "--tp_size 4 --max_batch_size 256",
        "`phalanx monitor URL`",
        "| 8B FP16 on one A100 | 30 GB |",
    ):
        assert phrase in text
    assert text.count("phalanx serve meta-llama/Meta-Llama-3-70B --tp_size 4") == 3  # two plans, and the guide's own command
    assert "no layout fits" in text
