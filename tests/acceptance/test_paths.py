# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/compare_paths.py can fail: what it says of paths that are spoilt, and of one that is merely rounded otherwise.

The paths of these tests are the parts of the model on CPU, quantized as a GPU does it; one real pair of engines runs over gloo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from phalanx.config.locate import locate
from phalanx.config.quantization import ON_LOAD
from phalanx.models.decoder import Decoder
from tests.gpu import forced_prompts, path_comparison
from tests.gpu.logprob_distance import Limits, Observation, Truth, judge
from tests.gpu.path_comparison import Observed, Texts
from tests.gpu.reference_logprobs import Change, log_probabilities, scaled

pytestmark = pytest.mark.usefixtures("forked_python")

JOB = {"checkpoint": "demo", "model": "demo", "dtype": "fp8+fp8", "tp": 2, "pp": 1, "device": "cuda"}
PLAIN: dict[str, Any] = {"steps": {}, "ran": {"decode graph/steps": 0, "prompt graph/steps": 0, "eager/steps": 9}}
FP8 = {"quantization": ON_LOAD, "fp8_gemm": True, "kv_cache_dtype": "fp8"}


@dataclass
class Setting:
    texts: Texts
    truth: Truth
    at: torch.Tensor
    request: torch.Tensor
    plain: Observation

    def path(self, change: Change) -> Observation:
        """A path in which the model is changed."""
        logprobs = log_probabilities(locate("demo"), self.texts.rows, tp=2, dtype=torch.bfloat16, change=change, **FP8)
        return Observation.of(torch.cat(logprobs), self.at, self.request)

    def faults(self, change: Change) -> list[str]:
        result: list[str] = judge(self.truth, self.plain, self.path(change), Limits())["faults"]
        return result


@pytest.fixture(scope="module")
def setting() -> Setting:
    texts = Texts.of("demo", short=0, long=4, cuts=0, answers=16)
    truth = path_comparison.truth_of(JOB, locate("demo"), texts.rows)
    request = torch.cat([torch.full((len(row),), number) for number, row in enumerate(texts.rows)])
    at = torch.arange(len(request))
    return Setting(texts, truth, at, request, Observation.of(truth.rounded, at, request))


def dithered(model: Decoder) -> None:
    """Half of the values that the model starts from are a step of bf16 off: as good a path as any, and other bits everywhere."""
    noise = torch.rand(model.embed_tokens.weight.shape, generator=torch.Generator().manual_seed(5)) - 0.5
    model.embed_tokens.weight.mul_(1 + noise * 2**-7)


def without_a_residual(model: Decoder) -> None:
    out = model.layers[2].self_attn.o_proj
    forward = out.forward
    out.forward = lambda x, residual, norm: forward(x, torch.zeros_like(residual), norm)


def with_other_tokens_scales(model: Decoder) -> None:
    """One GEMM takes each token's scale from the token before."""
    quantizer = model.layers[3].mlp.down_proj.method.input_quantizer
    with_scale = quantizer.with_scale
    quantizer.with_scale = lambda values, scale: with_scale(values, scale.roll(1, 0))


def test_a_path_that_rounds_otherwise_holds(setting: Setting) -> None:
    path = setting.path(dithered)
    assert judge(setting.truth, setting.plain, path, Limits())["faults"] == []
    assert (path.logprobs != setting.plain.logprobs).double().mean() > 0.9


@pytest.mark.parametrize("gemm", ["qkv", "down"])
def test_a_scale_that_is_off_is_found_and_named(setting: Setting, gemm: str) -> None:
    by = {"down": 1.04}.get(gemm, 1.02)
    faults = setting.faults(scaled(gemm, by))
    assert any(f"the fast path's {gemm} seems scaled by 1.0" in fault for fault in faults), faults


@pytest.mark.parametrize("change", [without_a_residual, with_other_tokens_scales])
def test_a_broken_path_is_found(setting: Setting, change: Change) -> None:
    faults = setting.faults(change)
    assert any("times as far from the truth as the plain" in fault for fault in faults), faults


def test_another_most_likely_token_where_the_truth_is_sure_is_wrong(setting: Setting) -> None:
    ids, logprobs = setting.plain.ids.clone(), setting.plain.logprobs
    best = setting.truth.logprobs.topk(2, -1).values
    surest = int((best[:, 0] - best[:, 1]).argmax())
    ids[surest, :2] = ids[surest, :2].flip(0)
    faults = judge(setting.truth, setting.plain, Observation(setting.at, setting.request, ids, logprobs), Limits())["faults"]
    assert [fault for fault in faults if "has 1 other most likely tokens where the margin is above" in fault]


def test_the_demo_model_is_sure_of_what_it_was_taught(setting: Setting) -> None:
    margins = path_comparison.answer_margins(setting.texts, setting.truth)
    assert margins["positions"] > 400
    assert margins["0"] > 4


def test_what_did_not_run_is_a_fault(setting: Setting) -> None:
    def observed(others: int, **ran: Any) -> Observed:
        return Observed({"decode": []}, others, 30, **ran)

    result = path_comparison.verdict(JOB, setting.texts, setting.truth, observed(0, **PLAIN), observed(2, steps={"6 at once": 900}))
    assert len(result["faults"]) == 6
    assert "fast path gave 2 of 30 taught answers another token" in result["faults"][0]
    assert "2048 tokens" in result["faults"][1]
    assert "ONESHOT/" in result["faults"][2]
    assert "RS_NORM_AG/" in result["faults"][3]
    assert "no step of the fast path ran as a decode graph" in result["faults"][4]
    assert "no step of the fast path ran as a prompt graph" in result["faults"][5]
    fast = {
        "steps": {"all at once": 4000}, "allreduce": {"ONESHOT/NONE": 3, "RS_NORM_AG/RESIDUAL_RMS_NORM": 1},
        "ran": {"decode graph/steps": 7, "prompt graph/steps": 1, "eager/steps": 2},
    }  # fmt: skip
    result = path_comparison.verdict(JOB, setting.texts, setting.truth, observed(0, **PLAIN), observed(0, **fast))
    assert result["faults"] == []
    for ran in ({}, {"eager/steps": 9, "decode graph/steps": 1}, {"eager/steps": 0}):
        result = path_comparison.verdict(
            JOB, setting.texts, setting.truth, observed(0, **{**PLAIN, "ran": ran}), observed(0, **fast)
        )
        assert [fault for fault in result["faults"] if "plain path's steps are to be eager" in fault] == result["faults"] != []


def test_positions_seen_by_one_path_alone_are_not_compared_and_a_fault(setting: Setting) -> None:
    one, other = [(0, 3, "a"), (0, 3, "b"), (1, 2, "c")], [(2, 0, "x"), (0, 3, "y"), (0, 3, "z")]
    assert path_comparison._common(one, other) == ([(0, 3, "a"), (0, 3, "b")], [(0, 3, "y"), (0, 3, "z")])
    plain = Observed({"prompts": [(0, 3, []), (0, 4, [])]}, 0, 30, **PLAIN)
    result = path_comparison.verdict(
        {**JOB, "device": "cpu"}, setting.texts, setting.truth, plain, Observed({"prompts": []}, 0, 30, **PLAIN)
    )
    assert result["faults"] == ["prompts: 2 positions were reported by one of the paths only"]


@pytest.mark.parametrize(("strange", "everywhere"), [(float("nan"), False), (float("inf"), True), (-float("inf"), False)])
def test_what_is_no_number_is_a_fault(setting: Setting, strange: float, everywhere: bool) -> None:
    logprobs = setting.plain.logprobs.clone()
    logprobs[:: 1 if everywhere else len(logprobs)] = strange
    observation = Observation(setting.at, setting.request, setting.plain.ids, logprobs)
    faults = judge(setting.truth, setting.plain, observation, Limits())["faults"]
    assert [fault for fault in faults if "of the fast path are not finite" in fault], faults


def test_two_real_engines_hold() -> None:
    amount = {"short": 12, "long": 2, "cuts": 3, "answers": 4}
    result = path_comparison.compare({**JOB, "dtype": "bf16", "device": "cpu", **amount})
    assert result["faults"] == []
    assert result["answers"] == 16
    assert result["parts"]["decode"]["fast"]["positions"] >= 14 * forced_prompts.TAIL
    assert result["parts"]["prompts"]["fast"]["wrong"] == 0
    assert any(name.startswith("ONESHOT/") for name in result["allreduce"]["fast"])
    assert all(name.startswith("GLOO/") for name in result["allreduce"]["plain"])
    for ran in result["ran"].values():
        assert [name for name, count in ran.items() if count] == ["eager/steps", "eager/tokens"]
