# SPDX-License-Identifier: Apache-2.0
"""The seam: the configuration names an executor by a dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config.model import ModelShape
from phalanx.engine.executor import FAKE_EXECUTOR, RANK_EXECUTOR, Executor, load_executor
from phalanx.engine.fake import FakeExecutor
from phalanx.errors import OptionError
from phalanx.executor.rank_executor import RankExecutor
from tests.support.engine_drive import options

SHAPE = ModelShape(
    architecture="LlamaForCausalLM", vocab_size=50, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=1,
    max_positions=64, windows=(None,),
)  # fmt: skip


def test_a_dotted_path_names_the_executor() -> None:
    executors: list[Executor] = [load_executor(path, options(Path("x")), SHAPE, {}) for path in (RANK_EXECUTOR, FAKE_EXECUTOR)]
    assert [type(executor) for executor in executors] == [RankExecutor, FakeExecutor]
    for executor in executors:
        executor.shutdown()


def test_settings_reach_the_executor() -> None:
    executor = load_executor(FAKE_EXECUTOR, options(Path("x")), SHAPE, {"num_blocks": 7})
    assert executor.start()[1] == 7
    executor.shutdown()


def test_a_path_that_names_nothing_is_an_option_error() -> None:
    with pytest.raises(OptionError, match=r"executor='phalanx\.engine\.fake:Nothing' cannot be loaded"):
        load_executor("phalanx.engine.fake:Nothing", options(Path("x")), SHAPE, {})
