# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank by kind, from shapes alone: weights to the byte, and what is beside them as no start of the present engine has
exceeded it."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.adapter import slot_bytes
from phalanx.layout.cache import default_snapshots, group_windows, request_bytes
from phalanx.layout.draft import DraftNetwork, network_bytes, network_caches
from phalanx.layout.families import model_cache
from phalanx.layout.graphs import graph_sizes, max_graph_tokens
from phalanx.layout.memory import (
    GRAPH_BYTES,
    HostCounts,
    block_bytes,
    fewest,
    host_counts,
    kv_budget,
    stage_caches,
    staging_bytes,
    state_staging_bytes,
    tokens_kept,
)
from phalanx.layout.weights import embedding_bytes, itemsize, weight_bytes
from phalanx.planner.coefficients import document

SAMPLED = ("sampled_token", "sampled_logit", "sampled_hidden", "sampled_shared")
PROMPT = ("prompt_hidden", "prompt_inner", "prompt_expert", "prompt_pair")
"""Coefficients of activations where the step that needs most is one that samples for every slot, and where it is one of prompts;
`data/coefficients.json`, "memory". Bytes for each byte of the features, but for the first: for each token."""


def activation_features(
    shape: ModelShape, layout: Layout, max_num_tokens: int, slots: int, dtype: str
) -> tuple[list[float], list[float]]:
    """What `SAMPLED` and `PROMPT` multiply: tokens of a step; bytes of fp32 logits of all slots; of hidden states; of a rank's part
    of the logits in 16 bit, which ranks share; and bytes of hidden states, of inner states, of those of experts, and of the outputs
    of (token, expert) pairs. A rank has the prompts of its dp index, and of all experts' pairs at most those of its experts."""
    size, indices, experts = itemsize(dtype), layout.dp, shape.experts
    logits = 4.0 * -(-slots // (layout.pp * indices)) * shape.vocab_size
    hidden = float(size) * -(-max_num_tokens // indices) * shape.hidden_size
    sampled = [float(max_num_tokens), logits, hidden, logits * size / 4 / layout.tp if layout.tp > 1 else 0.0]
    if experts is None:
        inner = max(map(shape.intermediate_in, range(shape.num_layers)))
        return sampled, [hidden, size * max_num_tokens * inner / layout.tp, 0.0, 0.0]
    width = (experts.intermediate * experts.per_token + experts.shared) * layout.moe_ep / layout.tp
    pairs = max_num_tokens * experts.per_token
    return sampled, [hidden, 0.0, size * max_num_tokens * width, size * pairs * shape.hidden_size]


def activation_bytes(
    shape: ModelShape, layout: Layout, max_num_tokens: int, slots: int, dtype: str, *, on_gpu: bool = True
) -> int:  # fmt: skip
    """Of the step that needs most, of `max_num_tokens` tokens: its tensors, without what libraries, collectives and the allocator
    take beside them. slots: max_batch_size. on_gpu: whether kernels have workspaces, which grow with the tokens alone."""
    memory = document()["memory"]
    sampled, prompt = activation_features(shape, layout, max_num_tokens, slots, dtype)
    if not on_gpu:
        sampled[0] = 0.0
    peaks = (
        sum(memory[name] * feature for name, feature in zip(names, features, strict=True))
        for names, features in ((SAMPLED, sampled), (PROMPT, prompt))
    )
    recurrent, size = shape.recurrent, itemsize(dtype)
    # Of one layer, beside its input, its norm and its output.
    widths = () if recurrent is None else recurrent.widths
    states = size * max_num_tokens / layout.dp * (3 * shape.hidden_size + sum(widths) / layout.tp) if widths else 0.0
    # Vectors of all layers, which last for the step: where they are made there are two more of them.
    width = 0 if shape.layer_inputs is None else shape.layer_inputs.width * shape.num_layers
    by_layer = size * max_num_tokens / layout.dp * width
    return int(max(*(peak + by_layer for peak in peaks), states, 3 * by_layer))


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


def overhead_features(shape: ModelShape, layout: Layout, max_num_tokens: int) -> list[float]:
    """What `OVERHEADS` multiply, in order: 1, other ranks, other stages, each other rank that experts may move to,
    weights with scales of blocks, no experts (1e9 each), and bytes of a full step's hidden states, and of what of
    them is beyond WIDEST_MEASURED values.

    The constant holds the CUDA context, kernels, workspaces of libraries and what the allocator loses between blocks, so that it
    grows from a step of 8,192 tokens on.
    """
    grown = max(max_num_tokens / 8192, 1.0)
    of_blocks = shape.quantization is not None and shape.quantization.block is not None
    return [
        1e9 * grown, 1e9 * float(layout.world > 1), 1e9 * float(layout.pp > 1), 1e9 * (layout.dp * layout.moe_ep - 1.0),
        1e9 * float(of_blocks), 1e9 * float(shape.experts is None),
        2.0 * -(-max_num_tokens // layout.dp) * shape.hidden_size,
        2.0 * max_num_tokens * max(0, shape.hidden_size - WIDEST_MEASURED),
    ]  # fmt: skip


def graph_tokens(shape: ModelShape, dtype: str, layout: Layout, max_num_tokens: int) -> int:
    """Tokens of the largest graph of a step with prompts."""
    return min(max_num_tokens, max_graph_tokens(shape, dtype, layout))


def pair_bytes(shape: ModelShape, dtype: str, tokens: int) -> int:
    """What GRAPH_PAIR multiplies, of a graph of `tokens` tokens: the outputs of (token, expert) pairs."""
    return 0 if shape.experts is None else itemsize(dtype) * tokens * shape.experts.per_token * shape.hidden_size


def graph_bytes(
    shape: ModelShape, dtype: str, layout: Layout, max_batch_size: int, max_num_tokens: int, *, adapted: bool = False
) -> int:
    """Set aside for CUDA graphs: so much for each, as the engine does, and what a capture of the largest one with prompts takes.
    adapted: those with adapters are captured, too."""
    rows, tokens = -(-max_batch_size // layout.pp), graph_tokens(shape, dtype, layout, max_num_tokens)
    most = max(tokens, min(max_num_tokens, FEW_GRAPH_TOKENS))
    decode, mixed = map(len, graph_sizes(rows, most, adapted=adapted))
    captured = GRAPH_BYTES * (decode * (1 if shape.indexer is None else 2) + mixed)  # with an indexer, one is for short rows
    if shape.latent is not None:  # each head's query over latents, and what it attended to
        captured += 2 * tokens * -(-shape.num_heads // layout.tp) * layout.dcp * shape.latent.kv_rank * itemsize(dtype)
    return captured + int(document()["memory"][GRAPH_PAIR] * pair_bytes(shape, dtype, tokens))


def overhead_bytes(shape: ModelShape, layout: Layout, max_num_tokens: int) -> int:
    """What one rank takes beside weights, KV cache, activations and graphs: CUDA context, kernels, buffers of collectives. With
    these, it is never less than a start of the present engine took."""
    memory = document()["memory"]
    features = overhead_features(shape, layout, max_num_tokens)
    return int(sum(memory[name] * feature for name, feature in zip(OVERHEADS, features, strict=True)))


def requests_held(kv_tokens: int, groups: int, seq_len: int) -> int:
    """Requests of seq_len tokens that a replica's KV tokens hold at once: each stays whole in one of the data-parallel groups (ep),
    which share the tokens evenly."""
    return groups * (kv_tokens // groups // seq_len)


@dataclass(frozen=True)
class Sizes:
    """What of the options decides the memory of a rank. kv: the dtype of keys and values; slots: max_batch_size; fraction: of the
    memory left, the KV cache's part; graphs: whether CUDA graphs are captured. draft: the network that proposes drafts, on the last
    stage. snapshots: state_snapshots; None: as the engine chooses them. adapters: slots for adapters, and the rank that each has
    room for; they count as weights. seq_len: of the requests whose tokens are counted; None: as long as the model takes. host_tier:
    whether blocks go to host memory, through staging buffers."""

    dtype: str
    kv: str
    slots: int
    max_num_tokens: int
    block_size: int = 16
    fraction: float = 0.9
    graphs: bool = True
    draft: DraftNetwork | None = None
    snapshots: int | None = None
    adapters: tuple[int, int] = (0, 1)
    seq_len: int | None = None
    host_tier: bool = False


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank whose KV cache is the smallest, on a GPU with a number of bytes, by kind.

    state: of as many requests as have slots, and of prefixes. beside: activations, CUDA context and buffers of collectives. block:
    one KV block.
    budget: for KV blocks, below 0 where something is missing. kv_tokens: of the whole copy of the model, in requests of seq_len;
    kv: bytes of its blocks on this rank; blocks: of the whole copy. windows: of the groups of layers that take blocks.
    """

    weights: int
    state: int
    beside: int
    graphs: int
    block: int
    budget: int
    kv_tokens: int
    kv: int
    blocks: int
    windows: tuple[int | None, ...]

    @property
    def least(self) -> int:
        """What a start needs: everything, and a single KV block."""
        return self.weights + self.state + self.beside + self.graphs + self.block


def on_host(shape: ModelShape, layout: Layout, gpus_per_node: int, memory: int, sizes: Sizes) -> HostCounts:
    """What so many bytes of each host keep of a data-parallel index. Raises CapacityError where they hold nothing."""
    caches, draft = stage_caches(shape, sizes.kv, sizes.dtype, layout), sizes.draft
    if draft is not None:
        caches = (*caches[:-1], (*caches[-1], *network_caches(draft, sizes.kv, layout.tp)))
    ranks = [
        (block_bytes(each, sizes.block_size), request_bytes(each)) for each in caches for _ in range(layout.tp * layout.dp)
    ]  # fmt: skip
    copies = min(layout.replicas, max(gpus_per_node // len(ranks), 1))  # on one host
    hosts = []
    for first in range(0, len(ranks), gpus_per_node):
        block, state = (copies * sum(sizes) for sizes in zip(*ranks[first : first + gpus_per_node], strict=True))
        # The host is taken to have the memory.
        hosts.append(host_counts(memory, block, 2 * memory, state=state, block_size=sizes.block_size, host="a host"))
    return fewest(hosts)


def host_tokens(shape: ModelShape, layout: Layout, gpus_per_node: int, memory: int, sizes: Sizes) -> tuple[int, int]:
    """Tokens of prefixes that so many bytes of each host keep, in all replicas, and the states of so many prefixes. Raises as
    `on_host`."""
    (blocks, states), draft = on_host(shape, layout, gpus_per_node, memory, sizes), sizes.draft
    groups = len(group_windows([*model_cache(shape), *([] if draft is None else network_caches(draft, sizes.kv))]))
    indices = layout.dp * layout.replicas
    return blocks * sizes.block_size * indices // groups, states * indices


def rank_memory(shape: ModelShape, layout: Layout, total: int, sizes: Sizes) -> RankMemory:
    """How `total` bytes of each GPU are used. The planner promises with this function, and the doctor computes its remedies."""
    weights, draft = weight_bytes(shape, sizes.dtype, layout), sizes.draft
    if draft is not None:
        network = network_bytes(draft, sizes.dtype, layout.tp)
        if draft.reads_target and layout.pp > 1 and not shape.tie_word_embeddings:
            network += embedding_bytes(shape, sizes.dtype, layout)
        weights = (*weights[:-1], weights[-1] + network)
    slots_of_adapters, adapter_rank = sizes.adapters
    if slots_of_adapters:
        each = slot_bytes(shape, sizes.dtype, layout, adapter_rank)
        weights = tuple(weight + slots_of_adapters * one for weight, one in zip(weights, each, strict=True))
    activations = activation_bytes(shape, layout, sizes.max_num_tokens, sizes.slots, sizes.dtype)
    beside = activations + overhead_bytes(shape, layout, sizes.max_num_tokens)
    captured, adapted = 0, slots_of_adapters > 0
    if sizes.graphs:
        captured = graph_bytes(shape, sizes.dtype, layout, sizes.slots, sizes.max_num_tokens, adapted=adapted)
    caches, slots = stage_caches(shape, sizes.kv, sizes.dtype, layout), -(-sizes.slots // layout.dp)
    if draft is not None:
        caches = (*caches[:-1], (*caches[-1], *network_caches(draft, sizes.kv, layout.tp)))
    snapshots = default_snapshots(sizes.slots) if sizes.snapshots is None else sizes.snapshots
    kept = slots - (-snapshots // layout.dp)
    states, one = ([kept * request_bytes(each) for each in caches], [block_bytes(each, sizes.block_size) for each in caches])
    if sizes.host_tier:
        beside += staging_bytes(max(one)) + state_staging_bytes(max(map(request_bytes, caches)))
    budgets = [
        kv_budget(sizes.fraction, total - weight - state, beside, captured) for weight, state in zip(weights, states, strict=True)
    ]
    windows = group_windows([*model_cache(shape), *([] if draft is None else network_caches(draft, sizes.kv))])
    usable = slots * len(windows) * -(-shape.max_positions // sizes.block_size)
    fitting = [budget / block if block else usable if budget >= 0 else -1 for budget, block in zip(budgets, one, strict=True)]
    tightest = min(range(layout.pp), key=fitting.__getitem__)
    blocks = max(int(fitting[tightest]), 0)
    return RankMemory(
        weights[tightest], states[tightest], beside, captured, one[tightest], budgets[tightest],
        tokens_kept(windows, blocks, sizes.block_size, sizes.seq_len or shape.max_positions) * layout.dp, blocks * one[tightest],
        blocks * layout.dp, windows,
    )  # fmt: skip
