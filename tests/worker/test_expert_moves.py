# SPDX-License-Identifier: Apache-2.0
"""Experts move between in-process ranks: logits stay those of transformers, in every form that weights have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.quantization import INT4_ON_LOAD, ON_LOAD
from phalanx.engine.messages import ExpertMove
from phalanx.errors import EngineError
from phalanx.layout.expert_placement import balanced_placement, steps_between
from phalanx.worker.expert_load import ExpertLoad
from phalanx.worker.expert_moves import ExpertMover
from tests.support import mxfp4_checkpoints, quantized_checkpoints
from tests.support.checkpoints import write_checkpoint
from tests.support.models_formation import CPU, Formation

HOT = [90, 80, 5, 4, 3, 2, 1, 0]
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("mixtral", {"num_local_experts": 8}, {}),
    "copies": ("mixtral", {"num_local_experts": 8}, {"redundant_experts": 4}),
    "copies, stacked": ("mixtral", {"num_local_experts": 8, "stacked": True}, {"redundant_experts": 2}),
    "static": ("qwen3_moe", {"num_experts_per_tok": 2}, {"fp8_gemm": False}),
    "quantized on load": ("qwen3_moe", {"num_experts_per_tok": 2}, {"quantization": ON_LOAD}),
    "biases": ("gpt_oss", {"num_local_experts": 8}, {}),
    "scales": ("gemma4_moe", {}, {"redundant_experts": 2}),
    "mxfp4": ("gpt_oss", {"num_local_experts": 8}, {"redundant_experts": 2}),
    "int4": ("qwen3_moe", {"num_experts_per_tok": 2}, {"quantization": INT4_ON_LOAD}),
}


def movers(formation: Formation, moe_ep: int) -> list[ExpertMover]:
    """Of each rank, whose counters they take over."""
    (models,) = formation.models
    return formation.world.run(
        lambda group: ExpertMover(layers := models[group.rank].moe_layers, group, moe_ep, ExpertLoad(list(layers.values()), 8, CPU))
    )


@pytest.mark.parametrize(("tp", "moe_ep"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("form", list(FORMS))
def test_logits_stay_the_same(form: str, tp: int, moe_ep: int, tmp_path: Path) -> None:
    family, overrides, options = FORMS[form]
    folder = write_checkpoint(tmp_path / "plain", family, num_hidden_layers=2, **overrides)
    if form == "mxfp4":
        folder, _ = mxfp4_checkpoints.rewrite(folder, tmp_path)
    if form == "static":
        folder, _ = quantized_checkpoints.rewrite(folder, tmp_path, "compressed static")
    formation = Formation(folder, tp=tp, moe_ep=moe_ep, **options)
    if form == "static":  # of inputs: they cover the experts that may come
        blocks = [model.layers[0].mlp for model in formation.models[0]]
        assert len({float(block.experts.down_proj.input_scale) for block in blocks}) == 1
    for scale in (block.router.expert_scale for rank in formation.models[0] for block in rank.moe_layers.values()):
        if scale is not None:
            scale.weight.data.copy_(torch.linspace(0.5, 4, 8))  # of each expert its own
    ids = torch.arange(3, 40)
    number = 0

    def logits() -> Tensor:
        nonlocal number
        number += 1
        return formation.step([(number, ids)], padding=number % 2)[0]

    expected = logits()
    (models,) = formation.models
    each = movers(formation, moe_ep)
    formation.world.run(lambda group: each[group.rank].warm_up())
    changed = 0
    for layer, block in models[0].moe_layers.items():
        goal = balanced_placement(HOT, block.placement, moe_ep)
        for placement in steps_between(block.placement, goal):
            move = ExpertMove(layer, list(placement))
            times = formation.world.run(lambda group, move=move: each[group.rank].apply(move))
            assert all(time is not None and time.seconds >= 0 for time in times)
            changed += 1
        torch.testing.assert_close(logits(), expected, rtol=0, atol=2e-5)
        assert block.placement == goal
    assert changed >= 2
    assert formation.world.run(lambda group: each[group.rank].apply(ExpertMove(7, [0] * 8))) == [None] * tp


def test_a_placement_without_an_expert_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "mixtral", num_local_experts=8, num_hidden_layers=1)
    formation = Formation(folder, tp=2, moe_ep=2)
    each = movers(formation, 2)
    with pytest.raises(EngineError, match="some expert would have none"):
        each[0].apply(ExpertMove(0, [0, 1, 2, 3, 4, 5, 6, 6]))
