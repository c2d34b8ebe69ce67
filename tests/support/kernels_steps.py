# SPDX-License-Identifier: Apache-2.0
"""A rank's runner on a CPU whose steps choose kernels as on Hopper: `built` inside `kernels_variants.recorded`. Weights are of no
value, and peers of a group hold the same as rank 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.comm.choose import Rules
from phalanx.comm.group import Group, Solo, Splits
from phalanx.comm.strategies import symmetric_strategies
from phalanx.comm.symmetric import ReduceScatterBuffer
from phalanx.comm.tuned_group import TunedGroup
from phalanx.config.experts import ClampedSwiGlu, Experts, Scoring
from phalanx.config.latent import Indexer, Latent
from phalanx.config.model import ModelShape
from phalanx.config.quantization import MXFP4, ON_LOAD, Quantization
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.models import registry
from phalanx.models.cache import empty_caches
from phalanx.models.layers.attention.sdpa import SdpaBackend
from phalanx.models.layers.attention.sparse_latent import SparseLatentBackend
from phalanx.models.layers.attention.triton import TritonBackend
from phalanx.models.layers.attention.triton_latent import TritonLatentBackend
from phalanx.models.slices import LayerContext
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import Entry
from phalanx.worker.cuda_graphs import GraphCapturer
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.sampler import Sampler
from tests.support.comm_compiled import workspace
from tests.support.kernels_variants import NUM_SMS, SM

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SLOTS, BLOCK, LONGEST, TOKENS = 37, 16, 2048, 4095
"""Odd, so that what lies behind a row of facts lies on no 16 bytes."""


BLOCKS = Quantization("fp8", "block", "token", block=(128, 128), scale_name="weight_scale_inv")
GPT_OSS = {
    "architecture": "GptOssForCausalLM", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "windows": (128, None),
    "qkv_bias": True, "output_bias": True, "sinks": True,
    "experts": Experts(8, 4, 2880, biases=True, swiglu=ClampedSwiGlu(1.702, 7.0)),
    "quantization": MXFP4,
}  # fmt: skip
EXPERTS = {"architecture": "MixtralForCausalLM", "experts": Experts(8, 2, 1024)}
DEEPSEEK = {
    "architecture": "DeepseekV3ForCausalLM", "num_kv_heads": 16, "head_dim": 192,
    "latent": Latent(1536, 512, 128, 64, 128, softmax_scale=0.1), "experts": Experts(
        16, 4, 2048, shared=1024, dense_layers=(0,), scoring_bias=True, scoring=Scoring("sigmoid", 4, 2, 2.5),
    ),
}  # fmt: skip
SPARSE = DEEPSEEK | {
    "architecture": "DeepseekV32ForCausalLM", "num_heads": 64, "num_kv_heads": 64, "latent": Latent(
        1536, 512, 128, 64, 128, softmax_scale=0.1,
        indexer=Indexer(heads=64, head_dim=128, topk=1500, interleaved=False, computes=(True, True)),
    ),
}  # fmt: skip


class Alike(Solo):
    """Rank 0 of ranks that all hold the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x] * self.size, dim)

    def all_to_all(self, x: torch.Tensor, splits: Splits | None = None) -> torch.Tensor:
        return x if splits is None else x.new_empty(sum(splits.received), *x.shape[1:])

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[: len(x) // self.size]


class Written:
    """A one-sided exchange whose tokens are there already."""

    def __init__(self, size: int) -> None:
        self.size, self.max_rows = size, TOKENS

    def dispatch(
        self, x: torch.Tensor | Quantized, routing: Routing, rows: int, experts: int
    ) -> tuple[torch.Tensor | Quantized, Routing]:  # fmt: skip
        every = self.size * rows
        received = Routing(*(part.new_zeros(every, part.shape[1]) for part in routing))
        if isinstance(x, Quantized):
            return Quantized(*(part.new_empty(every, part.shape[1]) if part.dim() else part for part in x)), received
        return x.new_empty(every, x.shape[1]), received

    def combine(self, sums: torch.Tensor, sent: Routing, received: Routing, experts: int) -> torch.Tensor:
        return sums[: len(sent.ids)]


def group_of(size: int) -> Group:
    """A rank's group on NVLink, over a workspace that nobody maps; GEMM_RS runs from half the longest step's tokens on."""
    if size == 1:
        return Solo()

    def peer_tensor(rank: int, rows: int, columns: int, dtype: torch.dtype, before: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype)

    longest = TOKENS * 4096 * 2
    buffer = ReduceScatterBuffer(
        0, size, longest + size * 8192, longest, torch.zeros(4, dtype=torch.int32), (0,) * size, peer_tensor
    )
    space, machine = workspace(size, SM, TOKENS * 4096 * 2), Fingerprint(SM, "nvlink", size)
    table = table_for(machine)

    def lookup(dtype: str, fusion: Fusion, tokens: int, hidden: int, caller: Caller) -> Entry:
        long = caller is Caller.GEMM and fusion.shards and tokens * hidden >= (TOKENS // 2) * 4096
        return Entry(Strategy.GEMM_RS, True, "table", "long") if long else table.lookup(dtype, fusion, tokens, hidden, caller)

    rules = Rules(machine, {Strategy.NCCL: "there is none"}, lookup, deterministic=True)
    return TunedGroup(Alike(size), rules, symmetric_strategies(space, buffer), "")


@dataclass(frozen=True)
class Case:
    """graphs: steps are captured. ranks: of the group. slots: requests at once. stages: of the pipeline, and this is its last.
    fp8: linear layers, where the checkpoint does not say, and the cache. fp8_gemm: as `fp8` where it is None. int8: the cache.
    context: more of what the layers are built for. dp: of indices that exchange tokens; one_sided: by writes."""

    shape: dict[str, Any] = field(default_factory=dict)
    fp8: bool = False
    graphs: bool = True
    ranks: int = 1
    slots: int = SLOTS
    stages: int = 1
    fp8_gemm: bool | None = None
    int8: bool = False
    context: dict[str, Any] = field(default_factory=dict)
    dp: int = 1
    one_sided: bool = False


class Last(Solo):
    """The last stage of a pipeline: what it receives is there already."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = size - 1, size

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x


def made_runner(case: Case, capturer: GraphCapturer) -> ModelRunner:
    """Of weights that nobody has set: nothing reads them, and their pages are never there."""
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "vocab_size": 8192, "hidden_size": 4096, "intermediate_size": 1024, "num_layers": 2,
        "num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "max_positions": LONGEST, "windows": (None, None),
    }  # fmt: skip
    shape = ModelShape(**(sizes | case.shape))
    layers = range(0 if case.stages == 1 else 1, shape.num_layers)
    context = LayerContext(
        group_of(case.ranks), BF16, CPU, quantization=ON_LOAD if case.fp8 else None,
        kv_cache_dtype="fp8" if case.fp8 else "int8" if case.int8 else "model",
        fp8_gemm=case.fp8 if case.fp8_gemm is None else case.fp8_gemm, dp=Solo() if case.dp == 1 else Alike(case.dp),
        one_sided=Written(case.dp) if case.one_sided else None, **case.context,
    )  # fmt: skip
    model = registry.build(shape, layers, context)
    attention: Any = TritonBackend(SdpaBackend(), CPU, "all")
    if shape.latent is not None:
        attention = TritonLatentBackend(CPU, own_prefill=True, most_tokens=TOKENS)
    attention.workspace.num_sms = NUM_SMS
    if shape.indexer is not None:
        attention = SparseLatentBackend(attention, shape.indexer.topk)
    caches = empty_caches(model.declared_caches(), 1, BLOCK, CPU)
    sampler, pipeline = Sampler(case.slots, shape.vocab_size, CPU), Solo() if case.stages == 1 else Last(case.stages)
    return ModelRunner(
        model, caches, attention, sampler, pipeline, max_batch_size=case.slots, max_seq_len=LONGEST, block_size=BLOCK, dtype=BF16,
        device=CPU, capturer=capturer if case.graphs else None, max_num_tokens=TOKENS,
    )  # fmt: skip
