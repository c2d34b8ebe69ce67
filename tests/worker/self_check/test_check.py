# SPDX-License-Identifier: Apache-2.0
"""Starts of real ranks with a self check: right ones pass, and what is wrong on purpose is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.errors import SelfCheckFailed
from phalanx.executor.rank_executor import RankExecutor
from phalanx.worker.self_check.check import BOUNDS, CHOICES_BOUND
from tests.support import int4_checkpoints, quantized_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import all_gone, options, pids
from tests.support.faulty_rank import FaultyLauncher

pytestmark = pytest.mark.usefixtures("forked_python")

LAUNCHER = "tests.support.faulty_rank:FaultyLauncher"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by what they hold."""
    root = tmp_path_factory.mktemp("self_check")
    plain = write_checkpoint(root / "llama", "llama", **SIZES)
    return {
        "llama": plain,
        "experts": write_checkpoint(root / "mixtral", "mixtral"),
        "windows": write_checkpoint(root / "gpt_oss", "gpt_oss", num_hidden_layers=3),
        "int4": int4_checkpoints.rewrite(plain, root / "int4", int4_checkpoints.FORMS["gptq"])[0],
        "fp8": quantized_checkpoints.rewrite(plain, root / "fp8", "compressed static")[0],
        # Of larger weights the logits are so far apart that one quantum of an activation changes the answer.
        "small fp8": quantized_checkpoints.rewrite(
            write_checkpoint(root / "small", "llama", std=0.1, **SIZES), root / "small fp8", "compressed static"
        )[0],
    }


def start(folder: Path, **overrides: Any) -> list[str]:
    """What each rank of a start reports; the ranks are gone afterwards."""
    sizes = {"max_batch_size": 40, "max_num_tokens": 128, "max_seq_len": 128, "kv_cache_bytes": 2_000_000}
    executor = RankExecutor(options(folder, self_check=True, **{**sizes, **overrides}))
    try:
        return [facts.self_check for facts in executor.start()[0]]
    finally:
        rank_pids = pids(executor)
        executor.shutdown()
        assert all_gone(rank_pids)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "phalanx" / "self_check"


RIGHT = [
    ("llama", "fp32", 1, 1, BOUNDS[torch.float32]), ("int4", "bf16", 1, 2, BOUNDS[torch.bfloat16]),
    ("experts", "fp32", 2, 1, CHOICES_BOUND), ("windows", "fp32", 1, 2, CHOICES_BOUND),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "tp", "pp", "bound"), RIGHT)
def test_a_right_start_reports_the_line_from_the_last_stage(
    name: str, dtype: str, tp: int, pp: int, bound: float, folders: dict[str, Path], home: Path
) -> None:
    lines = start(folders[name], dtype=dtype, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    (line,) = [line for line in lines if line]
    assert lines.index(line) == (pp - 1) * tp
    assert f"at most {bound:.2g}" in line
    (file,) = home.iterdir()
    (entry,) = json.loads(file.read_text())["versions"]
    assert 0 <= entry["worst_kl"] < bound / 2
    assert entry["top1"] > 0.9
    assert entry["positions"] > 300


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ["llama", "experts", "int4", "small fp8"])
def test_a_right_start_on_a_gpu(name: str, folders: dict[str, Path], home: Path) -> None:
    """With graphs, and kernels of every kind."""
    (line,) = start(folders[name], device="cuda", dtype="bf16", cuda_graphs=True, kv_block_size=16)
    assert "top-1 " in line
    assert len(list(home.iterdir())) == 1


WRONG = [
    ("llama", "oneshot", None, "bf16", "moved by all-reduce strategy ONESHOT;"),
    ("llama", "attention", None, "bf16", "moved by attention back end;"),
    ("int4", "int4", None, "fp32", "moved by linear kernels (rank 1: model.layers.0"),
    ("fp8", "scale", "fp8", "bf16", "moved by linear kernels (rank 1: model.layers.0"),
]


@pytest.mark.parametrize(("name", "kind", "everywhere", "dtype", "named"), WRONG, ids=[case[1] for case in WRONG])
def test_what_is_wrong_on_one_rank_fails_the_start_and_is_named(
    name: str, kind: str, everywhere: str | None, dtype: str, named: str, folders: dict[str, Path], home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fault = {"rank": 1, "kind": kind, **({} if everywhere is None else {"everywhere": everywhere})}
    monkeypatch.setattr(FaultyLauncher, "fault", fault)
    with pytest.raises(SelfCheckFailed) as error:
        start(folders[name], dtype=dtype, tensor_parallel_size=2, launcher=LAUNCHER)
    assert named in str(error.value)
    assert "self_check=False" in error.value.next
    assert not home.exists()
