# SPDX-License-Identifier: Apache-2.0
"""Coefficients of the cost model and of what a start takes: `data/coefficients.json`, which benchmarks/planner/fit.py writes."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "data" / "coefficients.json"

_LIKE = {
    "c_few": "c_layer", "sharpness_experts": "sharpness", "c_eager_experts": "c_eager", "e_long_prompt": "e_prompt",
    "e_long_prompt_fp8": "e_prompt_fp8",
}  # fmt: skip
"""Coefficient -> the one that it was, in files that are older than it."""


INVARIANT_ONE, INVARIANT_FEW, INVARIANT_FLOPS, INVARIANT_KV = 17.0, 2.0, 0.75, 0.45
"""What `--deterministic` costs on a GPU: microseconds that a layer's chain takes longer at one token and at more, the part of the
operations that its GEMMs reach, and of the bandwidth that its attention of decodes does. Fitted to 8B on one H200 in four ways: one
row, 64 rows, a prefill of 8,192 tokens and 256 requests at once (benchmarks/results/deterministic_8b_*.json)."""


@dataclass(frozen=True)
class Coefficients:
    """e_*: parts of a peak; tflops_per_watt: FP8 operations per joule, twice those in 16 bit; c_*: microseconds. c_one: a layer's
    chain at one token, where kernels are fused; c_few: at up to FEW_ROWS; c_layer: at MANY_ROWS and more. c_norm: of a chain, a
    residual norm with its quantization, which an all-reduce has in itself. c_moe: more of a chain for a layer with experts,
    c_moe_hidden: for each 1,024 of its hidden size, c_expert: for each expert of a rank that tokens reach, ns_pair: nanoseconds
    for each pair of a token and an expert of a step, which every rank chooses and sorts. e_experts, e_experts_flops,
    sharpness_experts: of the grouped GEMMs over experts. e_far, e_far_fp8: of decode attention beyond FAR_ROW tokens of a row.
    ps_head, ps_head_fp8: picoseconds of decode attention for each query head and cached token, beside the reading. passes,
    passes_experts: over activations, between GEMMs and around experts. c_eager: of a layer whose kernels the host launches one by
    one, which a step without a graph takes at least; c_eager_experts: of one with experts, which has more of them. c_hop: of each
    stage of a pipeline whose tokens go over the host; c_return: for each row of a step where the last stage returns them to the
    first on the device, instead. c_call: of another call of a layer's attention, where rows of other sizes have one of their own
    (on a CPU). c_latent: more of a chain for a layer with latent attention; c_query: for one whose query is compressed too.
    e_latent: of absorbed attention over latents, whose heads share what is read, with LATENT_HEADS of a rank and more;
    e_latent_few: with fewer. block_experts: times as long as at e_experts does reading experts take whose weights have scales of
    blocks. e_long_prompt: of attention of prompts in the kernel for long ones (`Costs.has_long_prompts`), e_prompt: in the one for
    all others. *_fp8: with an FP8 cache. e_bytes_16: of weights in 16 bit. mxfp4, mxfp4_flops: times as long as reading weights at
    e_experts, and as computing at e_experts_flops, do GEMMs over experts in MXFP4 take, which widen their weights. ns_row,
    ns_long_row: of one row's attention, for each token of its context up to LONG_ROW and beyond. gemm_rs_hidden_part: of an
    all-reduce, what long steps hide, since GEMMs write into their owners' memory."""

    e_bytes: float
    e_bytes_16: float
    e_flops: float
    tflops_per_watt: float
    sharpness: float
    e_kv: float
    e_kv_fp8: float
    e_far: float
    e_far_fp8: float
    e_experts: float
    e_experts_flops: float
    e_prompt: float
    e_prompt_fp8: float
    e_long_prompt: float
    e_long_prompt_fp8: float
    passes: float
    passes_experts: float
    gemm_rs_hidden_part: float
    ns_row: float
    ns_long_row: float
    c_layer: float
    c_one: float
    c_moe: float
    c_step: float
    c_hop: float
    c_eager: float
    c_call: float
    c_few: float
    sharpness_experts: float
    c_eager_experts: float
    ps_head: float = 0.0
    ps_head_fp8: float = 0.0
    c_norm: float = 0.0
    c_expert: float = 0.0
    c_moe_hidden: float = 0.0
    ns_pair: float = 0.0
    c_latent: float = 0.0
    e_latent: float = 1.0
    e_latent_few: float = 1.0
    c_query: float = 0.0
    block_experts: float = 1.0
    mxfp4: float = 1.0
    mxfp4_flops: float = 1.0
    c_return: float = 0.0

    @classmethod
    def from_json(cls, values: dict[str, float]) -> Coefficients:
        """Raises KeyError where one without a default is missing."""
        values = {**{name: values[like] for name, like in _LIKE.items() if like in values}, **values}
        chosen = (each for each in fields(cls) if each.default is MISSING or each.name in values)
        return cls(**{each.name: float(values[each.name]) for each in chosen})

    @property
    def batch_invariant(self) -> Coefficients:
        """Those of steps whose sums have one order for any number of tokens. Long prompts have no kernel of their own then."""
        reads = {name: getattr(self, name) * INVARIANT_KV for name in ("e_kv", "e_kv_fp8", "e_far", "e_far_fp8")}
        return replace(
            self, c_one=self.c_one + INVARIANT_ONE, c_few=self.c_few + INVARIANT_FEW, c_layer=self.c_layer + INVARIANT_FEW,
            e_flops=self.e_flops * INVARIANT_FLOPS, tflops_per_watt=self.tflops_per_watt * INVARIANT_FLOPS,
            ps_head=self.ps_head / INVARIANT_KV, ps_head_fp8=self.ps_head_fp8 / INVARIANT_KV, e_long_prompt=self.e_prompt,
            e_long_prompt_fp8=self.e_prompt_fp8, **reads,
        )  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """The committed coefficients, their residuals and where they come from."""
    loaded: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return loaded
