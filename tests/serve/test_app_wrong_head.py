# SPDX-License-Identifier: Apache-2.0
"""A draft model whose ids are off by one is named in less than 200 tokens: in the log, by /metrics and by the doctor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import write_checkpoint
from tests.support.serve_processes import MODEL, rank_server, until

pytestmark = pytest.mark.usefixtures("forked_python")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama")


def served_with(target, draft, folder):
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    config["num_speculative_tokens_per_batch_size"] = [[1, 8, 2]]
    flags = ["--speculative_config", json.dumps(config), "--max_batch_size", "2"]
    return rank_server(folder, target, *flags, environment={"HOME": str(folder)})


def generate(running, tokens):
    ask = {"model": MODEL, "prompt": "What is a rank?", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with running.http() as http:
        assert http.post("/v1/completions", json=ask).json()["usage"]["completion_tokens"] == tokens


def test_a_head_that_is_off_by_one_is_named(target, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(target, draft)
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    with served_with(target, draft, tmp_path) as running:
        running.wait_ready()
        generate(running, 100)  # each after the first gives a row
        until(lambda: running.metric("spec_decode_wrong_head") == 1)
        log = running.log_file.read_text()
        doctor = subprocess.run(
            [sys.executable, "-m", "phalanx", "doctor", f"http://127.0.0.1:{running.port}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert log.count("is likely none for this model") == 1
    assert f"{draft} is likely none for this model: its first draft was accepted in 0% of 57 rows; published heads reach 45%" in log
    assert "the first draft was accepted in 0% of 9" in " ".join(doctor.stdout.split())
    assert not list(tmp_path.rglob("acceptance/*.json"))


def test_a_right_one_leaves_a_record(target, tmp_path):
    with served_with(target, target, tmp_path) as running:
        running.wait_ready()
        for _ in range(3):  # steps of three tokens
            generate(running, 240)
        until(lambda: list(tmp_path.rglob("acceptance/*.json")))
        assert running.metric("spec_decode_wrong_head") == 0
        assert "is likely none for this model" not in running.log_file.read_text()
    [record] = tmp_path.rglob("acceptance/*.json")
    assert json.loads(record.read_text())["first"] > 0.95
