# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks a rank has memory for: measured on GPU by running the largest steps, a number of bytes on CPU."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch

from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import MAX_LOGPROBS, SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepRow
from phalanx.errors import CapacityError
from phalanx.kernels import warmup_token_counts
from phalanx.kernels.sampling.sampling import MANY_ROWS
from phalanx.layout.cache import Cache, request_bytes
from phalanx.layout.graphs import max_decode_rows
from phalanx.layout.memory import GRAPH_BYTES, block_bytes, blocks_in, kv_budget
from phalanx.models.layers.attention.sparse_rows import KERNEL_ROWS
from phalanx.worker.model_runner import ModelRunner

DEFAULT_CPU_BYTES = 1 << 30


def usable_blocks(options: EngineOptions, max_seq_len: int, groups: int) -> int:
    """What as many full requests as run at once can use, with the prefixes that they leave behind."""
    return options.index_batch_size * groups * -(-max_seq_len // options.block_size)


def cpu_blocks(options: EngineOptions, caches: Sequence[Cache], max_seq_len: int, groups: int = 1) -> int:
    """Blocks in `kv_cache_bytes`, or in 1 GiB, but no more than `usable_blocks`. groups: of the whole model's layers. Raises
    CapacityError when no block fits."""
    if options.kv_cache_bytes is not None:
        budget, what = options.kv_cache_bytes, f"kv_cache_bytes={options.kv_cache_bytes:,}"
    else:
        budget, what = DEFAULT_CPU_BYTES, "the default of 1 GiB"
    usable, states = usable_blocks(options, max_seq_len, groups), options.index_states
    return min(blocks_in(budget, caches, options.block_size, states=states, usable=usable, what=what), usable)


def require_state_fits(options: EngineOptions, caches: Sequence[Cache], device: torch.device) -> None:
    """Raise CapacityError where the GPU has no room for the states of as many requests as have slots, and of prefixes.

    They are allocated before anything is measured."""
    states, each = options.index_states, request_bytes(caches)
    if device.type == "cuda" and each and states * each > (free := free_bytes(device)):
        most = free // each * options.expert_parallel_size
        raise CapacityError(
            f"the states of {options.index_batch_size} requests and {options.index_snapshots} prefixes do not fit the GPU memory",
            held=f"{free:,} bytes are free after weights; each takes {each:,} bytes",
            next=f"use a max_batch_size and state_snapshots of {most} together, or a larger tensor_parallel_size",
        )  # fmt: skip


def gpu_blocks(
    options: EngineOptions, caches: Sequence[Cache], max_seq_len: int, activations: int, graphs: int, device: torch.device,
    groups: int = 1,
) -> int:  # fmt: skip
    """Blocks in the configured fraction of the memory that is free after loading weights and allocating states, less
    the bytes that the peak of activations and the graphs will take."""
    fits = partial(blocks_in, caches=caches, block_size=options.block_size, usable=usable_blocks(options, max_seq_len, groups))
    if options.kv_cache_bytes is not None:
        return fits(options.kv_cache_bytes, states=options.index_states, what=f"kv_cache_bytes={options.kv_cache_bytes:,}")
    free, total = free_bytes(device), torch.cuda.mem_get_info(device)[1]
    budget = kv_budget(options.kv_cache_free_gpu_memory_fraction, free, activations, graphs)
    what = (
        f"{options.kv_cache_free_gpu_memory_fraction:g} of the GPU memory left ({free:,} of {total:,} bytes free after weights, "
        f"{activations:,} of these for activations, {graphs:,} for graphs)"
    )
    if budget < block_bytes(caches, options.block_size):
        raise CapacityError(
            "not a single KV block fits the GPU memory", held=f"{what} gives the KV cache {max(budget, 0):,} bytes",
            why=f"one block of {options.block_size} tokens takes {block_bytes(caches, options.block_size):,} bytes",
            next="use a larger tensor_parallel_size, or lower max_num_tokens or max_batch_size",
        )  # fmt: skip
    return fits(budget, states=0, what=what)


LARGEST_STEPS = 2
"""So many of the `profiling_steps` come first, as they need the most memory."""


def profiling_steps(
    *, max_num_tokens: int, max_seq_len: int, max_batch_size: int, block_size: int, max_drafts: int = 0,
    more_counts: Callable[[Collection[int]], Sequence[int]] = lambda _: (), groups: int = 1, topk: int | None = None,
) -> list[StepBatch]:  # fmt: skip
    """The steps that need the most memory: all tokens in as few prompts as possible; and every slot sampling, with the rest of the
    tokens in one prompt. Each row wants everything that takes memory, of the sampler and of the logprobs of its prompt. Smaller
    steps of every kind follow: kernels are compiled at their first launch, and no request should wait for that.

    groups: of layers, each of which takes blocks. topk: of sparse attention, see `Indexer`. more_counts: given the token counts of
    all these, further ones whose steps launch other kernels: of prompts.
    All their blocks are block 0, and their results mean nothing. The last step leaves every slot free.
    """
    prompts = _prompts(max_num_tokens, max_seq_len, max_batch_size, block_size)
    rows = min(max_batch_size, max_num_tokens)
    mixed = [_row(slot, 1, block_size) for slot in range(rows - 1)]
    mixed.append(_row(rows - 1, min(max_num_tokens - rows + 1, max_seq_len), block_size))
    largest = [_step(step_rows, PEAK_MEMORY_PARAMS) for step_rows in (prompts, mixed)]
    assert len(largest) == LARGEST_STEPS
    smaller = kernel_warmup_steps(
        max_num_tokens=max_num_tokens, max_seq_len=max_seq_len, max_batch_size=max_batch_size, block_size=block_size
    )  # fmt: skip
    counts = more_counts({sum(row.count for row in step.rows) for step in (*largest, *smaller)})
    more = [_step(_prompts(tokens, max_seq_len, max_batch_size, block_size), SAMPLING_VARIANTS[0]) for tokens in counts]
    sizes = {"max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    drafts = verifying_steps(max_drafts, block_size=block_size, **sizes) if max_drafts else []
    sparse = [] if topk is None else sparse_steps(topk, block_size=block_size, **sizes)
    steps = [*largest, *drafts, *more, *sparse, *smaller, StepBatch(released=list(range(max_batch_size)))]
    for row in {id(row): row for step in steps for row in step.rows}.values():  # steps share some
        row.blocks = row.blocks * groups
    return steps


def verifying_steps(
    max_drafts: int, *, max_num_tokens: int, max_seq_len: int, max_batch_size: int, block_size: int
) -> list[StepBatch]:  # fmt: skip
    """Steps whose rows verify drafts: the one with the most tokens, which all sample, with everything that takes memory; and
    smaller ones, for the kernels of more decode rows than requests."""
    width = 1 + max_drafts
    if max_seq_len <= 2 * width:
        return []
    most = min(max_decode_rows(max_batch_size, max_drafts), max_num_tokens) // width
    steps = []
    for number, count in enumerate(_doubled(1, most)[::-1]):
        rows = [
            StepRow(
                slot, max_drafts, width, [0] * width, [0] * -(-2 * width // block_size), samples=True, drafts=max_drafts
            )
            for slot in range(count)
        ]  # fmt: skip
        for params in SAMPLING_VARIANTS[:2] if number else [PEAK_MEMORY_PARAMS, *SAMPLING_VARIANTS]:
            step = _step(rows, params)
            step.propose = max_drafts
            steps.append(step)
    return steps


def sparse_steps(topk: int, *, max_num_tokens: int, max_seq_len: int, max_batch_size: int, block_size: int) -> list[StepBatch]:
    """Steps whose tokens all see more than topk: as many as there may be, which take memory that no other step does, and fewer, for
    each variant of the kernels that such tokens take."""
    most = min(max_num_tokens, max_batch_size * (each := max(max_seq_len - topk, 0)))
    steps = []
    for tokens in [*warmup_token_counts(min(most, KERNEL_ROWS)), most] if most else []:
        counts = [min(each, tokens - first) for first in range(0, tokens, each)]
        rows = [
            StepRow(slot, max_seq_len - count, count, [0] * count, [0] * -(-max_seq_len // block_size), samples=True)
            for slot, count in enumerate(counts)
        ]
        steps.append(_step(rows, SAMPLING_VARIANTS[0]))
    return steps


def kernel_warmup_steps(*, max_num_tokens: int, max_seq_len: int, max_batch_size: int, block_size: int) -> list[StepBatch]:
    """Steps that together launch every kernel variant that an eager step can launch, with few tokens. The variant depends on a
    step's tokens (`kernels.warmup_token_counts`), on the magnitudes of its decode rows and of its prefill rows, on whether any of
    few decode rows is long, and on how tokens are sampled, for few rows and for many."""
    max_rows = min(max_batch_size, max_num_tokens)
    alone = StepRow(0, max_seq_len - 1, 1, [0], [0] * -(-max_seq_len // block_size), samples=True)
    decodes = [[alone], *([_row(slot, 1, block_size) for slot in range(count)] for count in _doubled(1, max_rows))]
    steps = []
    for group in ([rows for rows in decodes if len(rows) < MANY_ROWS], [rows for rows in decodes if len(rows) >= MANY_ROWS]):
        count = max(len(group), len(SAMPLING_VARIANTS)) if group else 0
        variants = [SAMPLING_VARIANTS[number % len(SAMPLING_VARIANTS)] for number in range(count)]
        steps += [_step(group[number % len(group)], variant) for number, variant in enumerate(variants)]
    pairs = min(max_rows, max_num_tokens // 2) if max_seq_len > 1 else 0
    # Rows of two tokens: their token counts lie halfway between those of the decode steps.
    prefills = [[_row(slot, 2, block_size) for slot in range(count)] for count in _doubled(MANY_ROWS + MANY_ROWS // 2, pairs)]
    larger = [tokens for tokens in warmup_token_counts(max_num_tokens)[:-1] if tokens > max_rows]
    prefills += [_prompts(tokens, max_seq_len, max_batch_size, block_size) for tokens in larger]
    one_long = [[alone, *(_row(slot, 1, block_size) for slot in range(1, count))] for count in _doubled(2, min(max_rows, FEW_ROWS))]
    return [*steps, *(_step(rows, SAMPLING_VARIANTS[0]) for rows in (*one_long, *prefills))]


FEW_ROWS = 64
"""Up to so many decode rows, or fewer, attention has another variant where none of them is long."""

SAMPLING_VARIANTS = [
    *(
        SamplingParams(temperature=temperature, logprobs=logprobs, logit_bias=bias)
        for logprobs, bias in ((None, None), (0, None), (None, {0: 1.0}))
        for temperature in (0.0, 1.0)
    ),
    *(SamplingParams(temperature=1.0, top_p=0.9, logit_bias=bias) for bias in (None, {0: 1.0})),
]
"""How kernels sample: argmax and at random, on ranks that share the vocabulary, from gathered logits, and from adjusted logits in
fp32; and at random with a filter, from the last two."""


def _doubled(first: int, last: int) -> list[int]:
    """first, 2 * first, ... as long as they are less than `last`, then that; nothing where it is less than 1."""
    counts = [first << power for power in range(64) if first << power < last]
    return [*counts, last] if last > 0 else []


def _prompts(tokens: int, max_seq_len: int, max_rows: int, block_size: int) -> list[StepRow]:
    """So many tokens in as few prompts as possible, at most `max_rows`."""
    counts = [min(max_seq_len, tokens - first) for first in range(0, tokens, max_seq_len)][:max_rows]
    return [_row(slot, count, block_size) for slot, count in enumerate(counts)]


def _row(slot: int, count: int, block_size: int) -> StepRow:
    return StepRow(slot, 0, count, tokens=[0] * count, blocks=[0] * -(-count // block_size), samples=True)


def _step(rows: Sequence[StepRow], params: SamplingParams) -> StepBatch:
    return StepBatch(admitted=[_assignment(row, params) for row in rows], rows=list(rows))


PEAK_MEMORY_PARAMS = SamplingParams(
    temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, min_tokens=1,
    logit_bias={0: 1.0}, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS,
)  # fmt: skip
"""For memory: penalties count each token of the vocabulary, and without kernels top_p sorts it."""


def _assignment(row: StepRow, params: SamplingParams) -> SlotAssignment:
    return SlotAssignment(row.slot, row.tokens, row.count, params, seed=0, stop_token_ids=[0])


class ActivationPeak(NamedTuple):
    """Bytes of activations at their peak: what tensors took beside those that were there before, and what the allocator reserved on
    the device for them, its losses between blocks included. It reserves less where it had free memory: loading leaves holes."""

    tensors: int
    reserved: int


def counting(report: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """A function that reports (done, total), with one more done each time that it is called."""
    done = itertools.count(1)
    return lambda: report(next(done), total)


def measure_activations(
    runner: ModelRunner, steps: Sequence[StepBatch], device: torch.device, step_done: Callable[[], None] = lambda: None
) -> ActivationPeak:
    """The peak of these `profiling_steps`; `step_done` is called after each. Collective: every rank runs the same steps."""
    free_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    run_profiling_steps(runner, steps, step_done)
    return ActivationPeak(torch.cuda.max_memory_allocated(device) - allocated, torch.cuda.max_memory_reserved(device) - reserved)


def run_profiling_steps(runner: ModelRunner, steps: Sequence[StepBatch], step_done: Callable[[], None] = lambda: None) -> None:
    """Those behind the largest go through a few of the layers: they load kernels, and need less memory."""
    for number, step in enumerate(steps):
        with nullcontext() if number < LARGEST_STEPS else runner.distinct_layers():
            runner.run(step).results()
        step_done()


def measure_graphs(runner: ModelRunner, device: torch.device, step_done: Callable[[], None] = lambda: None) -> int:
    """Bytes that the graphs will take, 0 where there are none: the largest of each kind is captured on trial and dropped;
    `step_done` is called after each. Collective."""
    graphs = runner.graphs
    if graphs is None:
        return 0
    before = free_bytes(device)
    for _ in runner.capture(graphs.largest):
        shared = before - free_bytes(device)
        step_done()
    graphs.reset()
    return max(shared, 0) + GRAPH_BYTES * graphs.count


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device's memory, once the allocator has returned what it does not use."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
