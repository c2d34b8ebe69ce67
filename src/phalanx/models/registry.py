# SPDX-License-Identifier: Apache-2.0
"""From an architecture's name to its model.

A new family: a file beside this one, a line here, and a line in `config.model.FAMILIES`.
"""

from __future__ import annotations

import torch

from phalanx.comm.group import Group, Solo
from phalanx.comm.one_sided import OneSided
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.kernels.capabilities import has_fp8_gemm
from phalanx.log import get_logger
from phalanx.models.deepseek import DeepSeek
from phalanx.models.gpt_oss import GptOss
from phalanx.models.layers.fp8 import describe_gemm
from phalanx.models.llama import Llama
from phalanx.models.mistral import Mistral
from phalanx.models.mixtral import Mixtral
from phalanx.models.qwen2 import Qwen2
from phalanx.models.qwen3 import Qwen3
from phalanx.models.qwen3_moe import Qwen3Moe
from phalanx.models.slices import LayerContext
from phalanx.tables.exchange import ExchangeTable

logger = get_logger(__name__)

Model = Llama
"""The type of every family: `forward(batch, caches, hidden)`, `kv_specs()`, and the `shape` that it was built from."""

MODELS: dict[str, type[Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "MixtralForCausalLM": Mixtral,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "GptOssForCausalLM": GptOss,
    "DeepseekV2ForCausalLM": DeepSeek,
    "DeepseekV3ForCausalLM": DeepSeek,
}


def build(
    shape: ModelShape, *, group: Group, layers: range, dtype: torch.dtype, device: torch.device, fp8: bool = False,
    fp8_cache: bool = False, int8_cache: bool = False, fp8_gemm: bool | None = None, moe_ep: int = 1,
    traffic: float | None = None, dp: Group | None = None, expert_exchange: str = "ALL_GATHER", one_sided: OneSided | None = None,
    exchange_table: ExchangeTable | None = None, redundant_experts: int = 0,
) -> Model:  # fmt: skip
    """The part of a model that holds `layers` on rank `group.rank`, with uninitialized weights (`weights.load` fills them).

    dtype: of the arithmetic, and of all weights that are not in FP8. fp8: linear layers in FP8 although the checkpoint is not; a
    checkpoint in FP8 (shape.quantization) always is. fp8_cache, int8_cache: keys and values in FP8, or in int8. fp8_gemm: whether
    activations are quantized and multiplied in FP8; None: where the device can. It is the first stage if `layers` starts at 0, the
    last if it ends at shape.num_layers. moe_ep, traffic, dp, expert_exchange, one_sided, exchange_table, redundant_experts: see
    `LayerContext`. Raises LayoutError when group.size does not divide the heads or the intermediate size.
    """
    if not (0 <= layers.start < layers.stop <= shape.num_layers and layers.step == 1):
        raise ValueError(f"{layers} is not a run of the model's {shape.num_layers} layers")
    quantization = shape.quantization or (ON_LOAD if fp8 else None)
    uses_fp8_gemm = has_fp8_gemm(device) if fp8_gemm is None else fp8_gemm
    line = None if quantization is None else describe_gemm(quantization, uses_fp8_gemm, device, dtype)
    if line is not None:
        logger.info(line)
    context = LayerContext(
        group=group, dtype=dtype, device=device, quantization=quantization, fp8_gemm=uses_fp8_gemm, fp8_cache=fp8_cache,
        int8_cache=int8_cache, moe_ep=moe_ep, traffic=traffic, dp=dp or Solo(), expert_exchange=expert_exchange,
        one_sided=one_sided, exchange_table=exchange_table, redundant_experts=redundant_experts,
    )  # fmt: skip
    return MODELS[shape.architecture](shape, layers=layers, context=context).eval()
