# SPDX-License-Identifier: Apache-2.0
"""Schemathesis over `/openapi.json`: data that fits the schema and data that does not, in all phases. No 5xx, every answer as the
schema says, every misfit refused; and the engine is alive after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.serve_processes import MODEL, fake_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

EXAMPLES = int(os.environ.get("PHALANX_FUZZ_EXAMPLES", "3"))
"""Per operation and phase, made at random; `make fuzz` makes more. The coverage phase goes through every boundary of the schema
besides."""
SEED, SECONDS = os.environ.get("PHALANX_FUZZ_SEED", "7"), 240 + 10 * EXAMPLES

CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 403, 404, 405, 413, 429]
"""
"""A misfit may be so large that its size is what is refused."""
NOT_CHECKED = "positive_data_acceptance"
"""What fits the schema may still ask for what a model cannot do: a prompt longer than its context, a token that it has not."""


@pytest.mark.timeout(SECONDS + 60)
def test_schemathesis(tmp_path, tiny_model):
    (tmp_path / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
    # A short context: what asks for tokens until the end gets them soon. It holds every prompt of the coverage phase: as many
    # requests are served as with 256 tokens.
    with fake_server(tmp_path, tiny_model, engine={"max_batch_size": 64, "max_seq_len": 64}) as served:
        served.wait_ready()
        with served.openai() as client:  # it starts the compiler of structured output, which may take longer than a request should
            client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body={"guided_regex": "a"})
        with served.http() as http:
            operations = sum(map(len, http.get("/openapi.json").json()["paths"].values()))
        command = [
            str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(tmp_path / "schemathesis.toml"), "run",
            f"{served.url}/openapi.json", "--phases", "examples,coverage,fuzzing,stateful", "--mode", "all", "--checks", "all",
            "--exclude-checks", NOT_CHECKED, "--max-examples", str(EXAMPLES), "--seed", SEED, "--continue-on-failure",
            "--request-timeout", "60", "--no-color",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert operations >= 28
        assert f"Tested: {operations}" in done.stdout
        for stem in ("num_requests_running", "num_requests_waiting", "num_requests_queued", "kv_cache_usage_perc"):
            until(lambda stem=stem: served.metric(stem) == 0)
        with served.openai() as client:
            answer = client.completions.create(model=MODEL, prompt="alive?", max_tokens=3, extra_body={"ignore_eos": True})
            assert answer.usage.completion_tokens == 3
        assert "Traceback" not in served.log
        assert {process.pid for process in served.tree} <= {process.pid for process in psutil.process_iter()}
