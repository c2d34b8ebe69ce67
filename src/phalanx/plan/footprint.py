# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank by kind, from shapes alone: weights to the byte, and what is beside them as no start of the present engine has
exceeded it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from phalanx.config.dtypes import DTYPES
from phalanx.config.quantization import ON_LOAD
from phalanx.plan import graphs
from phalanx.plan.coefficients import document
from phalanx.plan.families import Tensor, layer_tensors, outer_tensors
from phalanx.plan.families.declare import MXFP4_BLOCK
from phalanx.plan.graphs import graph_sizes
from phalanx.plan.layout import stages
from phalanx.plan.memory import GRAPH_BYTES, INT8_KV, KvFormat, kv_budget
from phalanx.plan.shape import Shape


@dataclass(frozen=True)
class Split:
    """How one copy of a model stands on its ranks. ep: groups over which experts and requests are split, world = pp x ep x tp;
    moe_ep: experts split inside the tensor-parallel group. redundant: copies beside a layer's experts, on all ranks together."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    moe_ep: int = 1
    redundant: int = 0

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.ep


def itemsize(dtype: str) -> int:
    """Bytes of a value that is not in FP8 or less: with "fp8" that is one in 16 bit."""
    return DTYPES["bf16" if dtype == "fp8" else dtype].itemsize


def kv_format(kv_cache_dtype: str, dtype: str) -> KvFormat:
    """How keys and values are cached. kv_cache_dtype: "fp8", "int8", or "model" for the model's dtype."""
    if kv_cache_dtype == "int8":
        return INT8_KV
    return KvFormat(1 if kv_cache_dtype == "fp8" else itemsize(dtype))


def tensor_bytes(shape: Shape, tensor: Tensor, dtype: str, split: Split) -> int:
    """Bytes of a declared tensor on one rank, its scales among them.

    dtype: "fp32", "fp16", "bf16", or "fp8" for GEMMs in FP8; GEMMs that the checkpoint stores in FP8 or MXFP4 stay so with each.
    In MXFP4 a row has 4 bits a value and 8 a scale, of which 32 values share one; a rank pads its scales to a multiple of 4.
    An expert's weights are split `tp` ways under ep; under moe_ep a rank holds 1/moe_ep of the experts, each split tp/moe_ep ways.
    """
    local, count = local_shape(tensor, split), local_experts(tensor, split)
    elements = math.prod(local)
    if shape.experts is not None and shape.experts.mxfp4 and tensor.part == "experts" and tensor.gemm:
        return count * local[0] * (local[1] // 2 + -(-local[1] // (4 * MXFP4_BLOCK)) * 4)
    size, quantization = itemsize(dtype), shape.quantization or (ON_LOAD if dtype == "fp8" else None)
    if tensor.kept == "fp32":
        return count * elements * 4
    if quantization is None or not in_fp8(shape, tensor, dtype):
        return count * elements * size
    by_row = 1 if quantization.block is None else -(-local[1] // quantization.block[1])
    return count * (elements + 4 * local[0] * by_row)


def in_fp8(shape: Shape, tensor: Tensor, dtype: str) -> bool:
    """Whether the weights of a GEMM are in FP8."""
    quantization = shape.quantization or (ON_LOAD if dtype == "fp8" else None)
    plain = not tensor.gemm or tensor.part in ("router", "head") or tensor.kept != "quantized"
    return not plain and quantization is not None and quantization.covers(tensor.name.removesuffix(".weight"))


def local_shape(tensor: Tensor, split: Split) -> tuple[int, ...]:
    return tensor.local(split.tp // split.moe_ep if tensor.part == "experts" else split.tp)


def local_experts(tensor: Tensor, split: Split) -> int:
    """How many experts' tensors a rank holds, copies among them, the most where they differ; 1 for a tensor that is none of an
    expert."""
    return -(-(tensor.experts + split.redundant) // (split.ep * split.moe_ep)) if tensor.experts else 1


@cache
def kinds(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(a layer, how many are like it): layers whose tensors have equal shapes and dtypes."""
    quantization = shape.quantization
    if quantization is not None and (quantization.targets or quantization.ignore):
        by_size: dict[object, list[int]] = {}
        for layer in range(shape.num_layers):
            sizes = tuple(tensor_bytes(shape, tensor, "bf16", Split()) for tensor in layer_tensors(shape, layer))
            by_size.setdefault((sizes, shape.windows[layer]), []).append(layer)
        return tuple((layers[0], len(layers)) for layers in by_size.values())
    groups: dict[object, list[int]] = {}
    for layer in range(shape.num_layers):
        groups.setdefault((shape.experts_in(layer) is not None, shape.windows[layer]), []).append(layer)
    return tuple((layers[0], len(layers)) for layers in groups.values())


@cache
def layer_weight_bytes(shape: Shape, layer: int, dtype: str, split: Split) -> int:
    """Bytes of one layer's weights on one rank."""
    return sum(tensor_bytes(shape, tensor, dtype, split) for tensor in layer_tensors(shape, layer))


@cache
def active_layer_bytes(shape: Shape, layer: int, dtype: str, split: Split) -> float:
    """Of one layer's bytes on one rank, those that one token of each group is multiplied with; in 16 bit where they are in
    MXFP4."""
    total, experts = 0.0, shape.experts
    for tensor in layer_tensors(shape, layer):
        reached = 1.0
        if tensor.experts and experts is not None:
            reached = experts.per_token / experts.count * split.ep * (graphs.MXFP4_BYTES if experts.mxfp4 else 1)
        total += tensor_bytes(shape, tensor, dtype, split) * reached
    return total


@cache
def stage_layers(shape: Shape, dtype: str, pp: int) -> tuple[range, ...]:
    """The layers of each pipeline stage, balanced as the engine balances them."""
    one = Split()
    kind_of = _kind_of(shape)
    sizes = [layer_weight_bytes(shape, kind_of[layer], dtype, one) for layer in range(shape.num_layers)]
    vocabulary = shape.vocab_size * shape.hidden_size * itemsize(dtype)
    return tuple(stages(sizes, pp, first_bytes=vocabulary, last_bytes=vocabulary + shape.hidden_size * itemsize(dtype)))


def _kind_of(shape: Shape) -> dict[int, int]:
    """Each layer -> the first layer that is like it."""
    quantization = shape.quantization
    if quantization is not None and (quantization.targets or quantization.ignore):
        return {layer: layer for layer in range(shape.num_layers)}
    first: dict[object, int] = {}
    return {
        layer: first.setdefault((shape.experts_in(layer) is not None, shape.windows[layer]), layer)
        for layer in range(shape.num_layers)
    }


@cache
def weight_bytes(shape: Shape, dtype: str, split: Split) -> tuple[int, ...]:
    """Bytes of weights of one rank of each stage, as `RankFacts.bytes["weights"]` counts them."""
    kind_of, size = _kind_of(shape), itemsize(dtype)
    outer = {tensor.part: tensor for tensor in outer_tensors(shape)}
    vocabulary = math.prod(outer["embedding"].local(split.tp)) * size
    rotary = 4 * (shape.latent.rope if shape.latent else shape.head_dim) // 2
    stage_bytes = []
    ranges = stage_layers(shape, dtype, split.pp)
    for layers in ranges:
        total = sum(layer_weight_bytes(shape, kind_of[layer], dtype, split) for layer in layers) + rotary
        first, last = layers.start == 0, layers.stop == shape.num_layers
        total += vocabulary if first else 0
        total += (0 if first and shape.tie_word_embeddings else vocabulary) + shape.hidden_size * size if last else 0
        stage_bytes.append(total)
    return tuple(stage_bytes)


def kv_token_bytes(shape: Shape, kv: KvFormat, dtype: str, split: Split) -> tuple[int, ...]:
    """Bytes of one token's KV cache on one rank of each stage."""
    per_layer = shape.kv_spec(split.tp, kv).bytes_per_token
    return tuple(len(layers) * per_layer for layers in stage_layers(shape, dtype, split.pp))


SAMPLED = ("sampled_token", "sampled_logit", "sampled_hidden", "sampled_shared")
PROMPT = ("prompt_hidden", "prompt_inner", "prompt_expert", "prompt_pair")
"""Coefficients of activations where the step that needs most is one that samples for every slot, and where it is one of prompts;
`data/coefficients.json`, "memory". Bytes for each byte of the features, but for the first: for each token."""


def activation_features(shape: Shape, split: Split, max_num_tokens: int, slots: int, dtype: str) -> tuple[list[float], list[float]]:
    """What `SAMPLED` and `PROMPT` multiply: tokens of a step; bytes of fp32 logits of all slots; of hidden states; of a rank's part
    of the logits in 16 bit, which ranks share; and bytes of hidden states, of inner states, of those of experts, and of the outputs
    of (token, expert) pairs. A rank has the prompts of its dp index, and of all experts' pairs at most those of its experts."""
    size, indices, experts = itemsize(dtype), split.ep, shape.experts
    logits = 4.0 * -(-slots // (split.pp * indices)) * shape.vocab_size
    hidden = float(size) * -(-max_num_tokens // indices) * shape.hidden_size
    sampled = [float(max_num_tokens), logits, hidden, logits * size / 4 / split.tp if split.tp > 1 else 0.0]
    if experts is None:
        return sampled, [hidden, size * max_num_tokens * shape.intermediate_size / split.tp, 0.0, 0.0]
    width = (experts.intermediate * experts.per_token + experts.shared) * split.moe_ep / split.tp
    pairs = max_num_tokens * experts.per_token
    return sampled, [hidden, 0.0, size * max_num_tokens * width, size * pairs * shape.hidden_size]


def activation_bytes(
    shape: Shape, split: Split, max_num_tokens: int, slots: int, dtype: str, *, on_gpu: bool = True
) -> int:  # fmt: skip
    """Of the step that needs most, of `max_num_tokens` tokens: its tensors, without what libraries, collectives and the allocator
    take beside them. slots: max_batch_size. on_gpu: whether kernels have workspaces, which grow with the tokens alone."""
    memory = document()["memory"]
    sampled, prompt = activation_features(shape, split, max_num_tokens, slots, dtype)
    if not on_gpu:
        sampled[0] = 0.0
    peaks = (
        sum(memory[name] * feature for name, feature in zip(names, features, strict=True))
        for names, features in ((SAMPLED, sampled), (PROMPT, prompt))
    )
    return int(max(peaks))


FEW_GRAPH_TOKENS = 2048
"""Graphs of steps with prompts are captured up to so many tokens, or up to `max_graph_tokens` where those are more."""

OVERHEADS = (
    "constant", "ranks", "stages", "split_experts", "block_scales", "dense", "per_hidden_byte", "per_wide_byte",
)  # fmt: skip
"""Coefficients of what is neither weights nor KV cache, activations nor graphs: in GB, but the last two, which are bytes for each
byte; `data/coefficients.json`, "memory"."""
GRAPH_PAIR = "graph_pair"
"""The coefficient of graphs, bytes for each byte of `pair_bytes`; there, too."""
WIDEST_MEASURED = 8192
"""By the present engine. Hidden states of more values took more of the allocator for each byte: Llama-3.1-405B's."""


def overhead_features(shape: Shape, split: Split, max_num_tokens: int) -> list[float]:
    """What `OVERHEADS` multiply, in order: 1, other ranks, other stages, each other rank that experts may move to,
    weights with scales of blocks, no experts (1e9 each), and bytes of a full step's hidden states, and of what of
    them is beyond WIDEST_MEASURED values.

    The constant holds the CUDA context, kernels, workspaces of libraries and what the allocator loses between blocks, so that it
    grows from a step of 8,192 tokens on.
    """
    grown = max(max_num_tokens / 8192, 1.0)
    of_blocks = shape.quantization is not None and shape.quantization.block is not None
    return [
        1e9 * grown, 1e9 * float(split.world > 1), 1e9 * float(split.pp > 1), 1e9 * (split.ep * split.moe_ep - 1.0),
        1e9 * float(of_blocks), 1e9 * float(shape.experts is None),
        2.0 * -(-max_num_tokens // split.ep) * shape.hidden_size,
        2.0 * max_num_tokens * max(0, shape.hidden_size - WIDEST_MEASURED),
    ]  # fmt: skip


def max_graph_tokens(shape: Shape, dtype: str, split: Split) -> int:
    """Up to how many tokens a step with prompts is replayed from a graph."""
    per_layer = active_layer_bytes(shape, 0, dtype, split)
    has_experts, latent = shape.experts_in(0) is not None, shape.latent is not None
    return graphs.max_graph_tokens(per_layer, has_experts=has_experts, latent=latent, dp=split.ep)


def graph_tokens(shape: Shape, dtype: str, split: Split, max_num_tokens: int) -> int:
    """Tokens of the largest graph of a step with prompts."""
    return min(max_num_tokens, max_graph_tokens(shape, dtype, split))


def pair_bytes(shape: Shape, dtype: str, tokens: int) -> int:
    """What GRAPH_PAIR multiplies, of a graph of `tokens` tokens: the outputs of (token, expert) pairs."""
    return 0 if shape.experts is None else itemsize(dtype) * tokens * shape.experts.per_token * shape.hidden_size


def graph_bytes(shape: Shape, dtype: str, split: Split, max_batch_size: int, max_num_tokens: int) -> int:
    """Set aside for CUDA graphs: so much for each, as the engine does, and what a capture of the largest one with prompts takes."""
    rows, tokens = -(-max_batch_size // split.pp), graph_tokens(shape, dtype, split, max_num_tokens)
    captured = GRAPH_BYTES * sum(map(len, graph_sizes(rows, max(tokens, min(max_num_tokens, FEW_GRAPH_TOKENS)))))
    if shape.latent is not None:  # each head's query over latents, and what it attended to
        captured += 2 * tokens * -(-shape.num_heads // split.tp) * shape.latent.kv_rank * itemsize(dtype)
    return captured + int(document()["memory"][GRAPH_PAIR] * pair_bytes(shape, dtype, tokens))


def overhead_bytes(shape: Shape, split: Split, max_num_tokens: int) -> int:
    """What one rank takes beside weights, KV cache, activations and graphs: CUDA context, kernels, buffers of collectives. With
    these, it is never less than a start of the present engine took."""
    memory = document()["memory"]
    features = overhead_features(shape, split, max_num_tokens)
    return int(sum(memory[name] * feature for name, feature in zip(OVERHEADS, features, strict=True)))


def requests_held(kv_tokens: int, groups: int, seq_len: int) -> int:
    """Requests of seq_len tokens that a replica's KV tokens hold at once: each stays whole in one of the data-parallel groups (ep),
    which share the tokens evenly."""
    return groups * (kv_tokens // groups // seq_len)


@dataclass(frozen=True)
class Sizes:
    """What of the options decides the memory of a rank. kv: how keys and values are cached; slots: max_batch_size;
    fraction: of the memory left, the KV cache's part; graphs: whether CUDA graphs are captured."""

    dtype: str
    kv: KvFormat
    slots: int
    max_num_tokens: int
    block_size: int = 16
    fraction: float = 0.9
    graphs: bool = True


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank whose KV cache is the smallest, on a GPU with a number of bytes, by kind.

    beside: activations, CUDA context and buffers of collectives. block: one KV block. budget: for the KV cache, below 0 where
    something is missing. kv_tokens: of the whole copy of the model; kv: bytes of its blocks on this rank.
    """

    weights: int
    beside: int
    graphs: int
    block: int
    budget: int
    kv_tokens: int
    kv: int

    @property
    def least(self) -> int:
        """What a start needs: everything, and a single KV block."""
        return self.weights + self.beside + self.graphs + self.block


def rank_memory(shape: Shape, split: Split, total: int, sizes: Sizes) -> RankMemory:
    """How `total` bytes of each GPU are used. The planner promises with this function, and the doctor computes its remedies."""
    weights = weight_bytes(shape, sizes.dtype, split)
    activations = activation_bytes(shape, split, sizes.max_num_tokens, sizes.slots, sizes.dtype)
    beside = activations + overhead_bytes(shape, split, sizes.max_num_tokens)
    captured = graph_bytes(shape, sizes.dtype, split, sizes.slots, sizes.max_num_tokens) if sizes.graphs else 0
    per_token = kv_token_bytes(shape, sizes.kv, sizes.dtype, split)
    budgets = [kv_budget(sizes.fraction, total - each, beside, captured) for each in weights]
    blocks = min(max(budget, 0) // (sizes.block_size * size) for budget, size in zip(budgets, per_token, strict=True))
    tightest = min(range(split.pp), key=lambda stage: budgets[stage] / per_token[stage])
    block = sizes.block_size * per_token[tightest]
    return RankMemory(
        weights[tightest], beside, captured, block, budgets[tightest], blocks * sizes.block_size * split.ep, blocks * block
    )  # fmt: skip
