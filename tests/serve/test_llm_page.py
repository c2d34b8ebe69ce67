# SPDX-License-Identifier: Apache-2.0
"""docs/offline.md says what is: its code runs, on the demo model with two ranks."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

from phalanx.config import SamplingParams
from tests.architecture.sources import ROOT

PAGE = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")


def test_the_code_on_the_page_runs(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == " A rank is one process on one device. All ranks together are the world. stop"
    assert lines[6] in ("True", "False")
    streamed = lines[7:]
    assert len(streamed) > 1, "it grows, by as much as there is when it is asked for"
    assert streamed[-1] == " A KV block holds the keys and values of 16 tokens, in every layer. kv_"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(streamed))


def test_every_field_of_sampling_params_is_on_the_page():
    unsaid = {"skip_special_tokens", "detokenize"}
    assert {name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in PAGE and f"`{name}=" not in PAGE} == unsaid
