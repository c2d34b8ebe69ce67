# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a mixture-of-experts layer take: the experts of this rank, and each token's choice among all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from phalanx.config.experts import ClampedSwiGlu, Scoring
from phalanx.kernels.gemm.int4_packing import Int4Weight
from phalanx.kernels.moe.nvfp4_packing import Nvfp4Weight

ExpertActivation = Literal["silu", "gelu", "clamped", "squared", ""]
"""Of an expert's gate, or, "squared", of its up; "": none."""
GATED_ACTIVATIONS: tuple[ExpertActivation, ...] = ("silu", "gelu", "clamped")


@dataclass(frozen=True)
class ExpertTensors:
    """The feed-forward blocks of E experts, which are experts first .. first + E of the layer.

    gate_up [E * 2 * I, H]: each expert's gate rows, then its up rows; of experts that are not gated up's alone, [E * I, H]. down
    [E * H, I]. In bf16, fp16 or fp32; or in e4m3 with fp32 scales: one per row ([rows]), or one per row and block of 128 columns
    ([rows, blocks]). input_scale, inner_scale: static scales of the two GEMMs' inputs, fp32 scalars; None for one per token, or per
    token and block. begin: the column of its block that is the first of `down`, whose columns may be a slice. fp8_gemm: inputs are
    e4m3, too; else the weights are widened in registers. Or in int8 with a scale per row, and then inputs are in int8, too.

    Or in MXFP4 (OCP Microscaling formats 1.0): uint8 with two e2m1 values each, [rows, columns / 2], arranged by `packing.packed`
    and `packing.tiled`; and a scale 2^(n - 127) for 32 columns, n in uint8 [rows, columns / 32], 128 at most, padded with zeros to
    a multiple of 4, and tiled. Or in 4-bit integers or NVFP4: `packed` has gate and up, and down, each with a dim of experts
    before the others of its tensors; gate_up and down are its words.
    batch_invariant: a token's bits do not depend on the other tokens of a step.
    gate_up_bias [E * 2 * I], down_bias [E * H]: added to what the GEMMs give; None for none. swiglu: the activation where it is not
    silu(gate) * up; gelu: where it is gelu(gate) * up, by tanh. gated: else it is relu(up)^2.
    """

    count: int
    first: int
    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    input_scale: Tensor | None = None
    inner_scale: Tensor | None = None
    begin: int = 0
    fp8_gemm: bool = False
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    swiglu: ClampedSwiGlu | None = None
    gated: bool = True
    gelu: bool = False
    packed: tuple[Int4Weight, Int4Weight] | tuple[Nvfp4Weight, Nvfp4Weight] | None = None
    batch_invariant: bool = False

    @property
    def activation(self) -> ExpertActivation:
        """Of what the first GEMM gives."""
        if not self.gated:
            return "squared"
        return "clamped" if self.swiglu is not None else "gelu" if self.gelu else "silu"

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[1] * (2 if self.mxfp4 else 1) if self.packed is None else self.packed[0].inputs

    @property
    def inner(self) -> int:
        return self.down.shape[1] * (2 if self.mxfp4 else 1) if self.packed is None else self.packed[1].inputs

    @property
    def mxfp4(self) -> bool:
        """Whether weights are in MXFP4."""
        return self.gate_up.dtype == torch.uint8

    @property
    def int8(self) -> bool:
        """Whether weights and inputs are in int8."""
        return self.gate_up.dtype == torch.int8

    @property
    def in_4_bits(self) -> bool:
        """Whether weights have 4 bits, and are widened in registers."""
        return self.mxfp4 or self.packed is not None

    @property
    def by_block(self) -> bool:
        """Whether scales are per block of columns."""
        return self.gate_up_scale is not None and self.gate_up_scale.dim() == 2 and not self.mxfp4


class RouterLogits(NamedTuple):
    """Logits [T, E] as the router's GEMM leaves them: the sum over S of parts [S, T, E] fp32, in their order, plus bias [E], if
    there is one, rounded to `dtype`."""

    parts: Tensor
    bias: Tensor | None
    dtype: torch.dtype


class Routing(NamedTuple):
    """The experts of T tokens. weights [T, k] fp32; ids [T, k] int32, numbers of experts of the layer, none twice in a row; -1 for
    none."""

    weights: Tensor
    ids: Tensor

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


class TrafficPattern(NamedTuple):
    """Routing that is drawn instead of computed, for benchmarks with random weights, whose routers would be anything but balanced.

    log_weights [E] fp32: logarithms of the experts' shares of the traffic.
    """

    log_weights: Tensor

    @classmethod
    def power_law(cls, experts: int, exponent: float, layer: int, device: torch.device) -> TrafficPattern:
        """Shares that fall with the power `exponent` of an expert's rank (0: uniform). Each layer has its own order of experts."""
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(layer))
        return cls((-exponent * torch.log(1.0 + order.double())).float().to(device))


class ExpertChoice(NamedTuple):
    """How logits choose `top_k` of a layer's `experts` for each token: by their softmax, or as `scoring` says, where bias [experts]
    fp32 is added to scores. renormalize: the chosen weights are divided by their sum. pattern: experts are drawn instead."""

    top_k: int
    experts: int
    renormalize: bool
    scoring: Scoring | None = None
    bias: Tensor | None = None
    pattern: TrafficPattern | None = None
