# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks a rank can offer: measured on GPU by running the largest steps, a number of bytes on CPU."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from phalanx.config.options import EngineOptions
from phalanx.config.sampling import MAX_LOGPROBS, SamplingParams
from phalanx.engine.messages import Admission, Row, StepBatch
from phalanx.engine.runner import Runner
from phalanx.errors import CapacityError
from phalanx.kernels.products.choice import MOST_FEW
from phalanx.plan.memory import GRAPH_BYTES, KvSpec, block_bytes, blocks_in, kv_budget

DEFAULT_CPU_BYTES = 1 << 30


def cpu_blocks(options: EngineOptions, specs: Sequence[KvSpec], max_seq_len: int) -> int:
    """Blocks in `kv_cache_bytes`, or in 1 GiB as far as max_batch_size full requests can use it. Raises CapacityError for none."""
    if options.kv_cache_bytes is not None:
        budget, what = options.kv_cache_bytes, f"kv_cache_bytes={options.kv_cache_bytes:,}"
    else:
        budget, what = DEFAULT_CPU_BYTES, "the default of 1 GiB"
    most = options.max_batch_size * -(-max_seq_len // options.kv_block_size)
    return min(blocks_in(budget, specs, options.kv_block_size, what=what), most)


def gpu_blocks(options: EngineOptions, specs: Sequence[KvSpec], activations: int, graphs: int, device: torch.device) -> int:
    """Blocks in the fraction of what is free once weights are there, less the bytes that the activations' peak and graphs will take
    of that."""
    if options.kv_cache_bytes is not None:
        return blocks_in(options.kv_cache_bytes, specs, options.kv_block_size, what=f"kv_cache_bytes={options.kv_cache_bytes:,}")
    free, total = free_bytes(device), torch.cuda.mem_get_info(device)[1]
    budget = kv_budget(options.kv_cache_free_gpu_memory_fraction, free, activations, graphs)
    what = (
        f"{options.kv_cache_free_gpu_memory_fraction:g} of the GPU memory left ({free:,} of {total:,} bytes free after weights, "
        f"{activations:,} of these for activations, {graphs:,} for graphs)"
    )
    if budget < block_bytes(specs, options.kv_block_size):
        raise CapacityError(
            f"{what} gives the KV cache {max(budget, 0):,} bytes",
            held=f"one block of {options.kv_block_size} tokens takes {block_bytes(specs, options.kv_block_size):,} bytes",
            why="not a single block fits", next="use a larger tensor_parallel_size, or lower max_num_tokens or max_batch_size",
        )  # fmt: skip
    return blocks_in(budget, specs, options.kv_block_size, what=what)


def largest_steps(*, max_num_tokens: int, max_seq_len: int, max_batch_size: int, block_size: int) -> list[StepBatch]:
    """The steps with the most to hold: all tokens in as few prompts as can be; and every slot sampling, beside what is left of the
    tokens in one prompt. Each row asks for all that takes memory, of the sampler and of the report on its prompt. Behind them,
    smaller ones of every kind: kernels are compiled at their first launch, and no request should wait for that.

    All their blocks are block 0, and their results mean nothing. The last step leaves every slot free.
    """
    prompts = _prompts(max_num_tokens, max_seq_len, max_batch_size, block_size)
    most = min(max_batch_size, max_num_tokens)
    mixed = [_row(slot, 1, block_size) for slot in range(most - 1)]
    mixed.append(_row(most - 1, min(max_num_tokens - most + 1, max_seq_len), block_size))
    steps = [_step(rows, HUNGRIEST) for rows in (prompts, mixed)]
    every = steps_of_every_kind(
        max_num_tokens=max_num_tokens, max_seq_len=max_seq_len, max_batch_size=max_batch_size, block_size=block_size
    )  # fmt: skip
    return [*steps, *every, StepBatch(released=list(range(max_batch_size)))]


def steps_of_every_kind(*, max_num_tokens: int, max_seq_len: int, max_batch_size: int, block_size: int) -> list[StepBatch]:
    """Steps that between them launch each kernel as any eager step may, in the fewest tokens. What a launch follows are a step's
    tokens, rows of one token, and rows of several, by their numbers' magnitude; the length of the only row; and how tokens are
    sampled, for a few rows and for more."""
    most = min(max_batch_size, max_num_tokens)
    alone = Row(0, max_seq_len - 1, 1, [0], [0] * -(-max_seq_len // block_size), samples=True)
    decodes = [[alone], *([_row(slot, 1, block_size) for slot in range(count)] for count in _doubled(1, most))]
    steps = []
    for some in ([rows for rows in decodes if len(rows) < MORE], [rows for rows in decodes if len(rows) >= MORE]):
        count = max(len(some), len(SAMPLED)) if some else 0
        steps += [_step(some[number % len(some)], SAMPLED[number % len(SAMPLED)]) for number in range(count)]
    pairs = min(most, max_num_tokens // 2) if max_seq_len > 1 else 0
    # With tokens halfway between those of the steps above, and of few tokens halfway again: where launches change, they may change
    # once more before twice as many.
    several = [[_row(slot, 2, block_size) for slot in range(count)] for count in _doubled(MORE + MORE // 2, pairs)]
    doubled = _doubled(2 * most, max_num_tokens)[:-1]
    halfway = [tokens for tokens in (3 * each // 2 for each in doubled) if tokens <= min(MOST_FEW, max_num_tokens)]
    several += [_prompts(tokens, max_seq_len, max_batch_size, block_size) for tokens in (*doubled, *halfway)]
    return [*steps, *(_step(rows, SAMPLED[0]) for rows in several)]


MORE = 8
"""Rows that are no longer few, for the kernels that sample."""

SAMPLED = [
    *(
        SamplingParams(temperature=temperature, logprobs=logprobs, logit_bias=bias)
        for logprobs, bias in ((None, None), (0, None), (None, {0: 1.0}))
        for temperature in (0.0, 1.0)
    ),
    *(SamplingParams(temperature=1.0, top_p=0.9, logit_bias=bias) for bias in (None, {0: 1.0})),
]
"""How tokens come from logits by kernels: the likeliest and a draw, on ranks that share the vocabulary, of gathered logits, and of
those in fp32 that something was added to; and a draw of what a filter leaves of the last two."""


def _doubled(first: int, last: int) -> list[int]:
    """first, 2 * first, ... as long as they are less than `last`, then that; nothing where it is less than 1."""
    found = [first << power for power in range(64) if first << power < last]
    return [*found, last] if last > 0 else []


def _prompts(tokens: int, max_seq_len: int, most: int, block_size: int) -> list[Row]:
    """So many tokens in as few prompts as can be, `most` at most."""
    counts = [min(max_seq_len, tokens - first) for first in range(0, tokens, max_seq_len)][:most]
    return [_row(slot, count, block_size) for slot, count in enumerate(counts)]


def _row(slot: int, count: int, block_size: int) -> Row:
    return Row(slot, 0, count, tokens=[0] * count, blocks=[0] * -(-count // block_size), samples=True)


def _step(rows: Sequence[Row], params: SamplingParams) -> StepBatch:
    return StepBatch(admitted=[_admission(row, params) for row in rows], rows=list(rows))


HUNGRIEST = SamplingParams(
    temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, min_tokens=1,
    logit_bias={0: 1.0}, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS,
)  # fmt: skip
"""For memory: penalties count each token of the vocabulary, and without kernels top_p sorts it."""


def _admission(row: Row, params: SamplingParams) -> Admission:
    return Admission(row.slot, row.tokens, row.count, params, seed=0, stop_token_ids=[0])


class Peak(NamedTuple):
    """Bytes of activations at their peak: what tensors held beside those that were there before; and what the allocator took from
    the device for them, with what it loses between its blocks. It takes less where it had room already: loading leaves holes."""

    held: int
    taken: int


def counting(tell: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """Tells (done, total), with one more done each time that it is called."""
    done = itertools.count(1)
    return lambda: tell(next(done), total)


def peak_of(runner: Runner, steps: Sequence[StepBatch], device: torch.device, one_more: Callable[[], None] = lambda: None) -> Peak:
    """Of these steps; `one_more` is called after each. Collective: every rank runs the same steps."""
    free_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    held, taken = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    for step in steps:
        runner.run(step).results()
        one_more()
    return Peak(torch.cuda.max_memory_allocated(device) - held, torch.cuda.max_memory_reserved(device) - taken)


def graphs_of(runner: Runner, device: torch.device, one_more: Callable[[], None] = lambda: None) -> int:
    """Bytes that the graphs will take, 0 where there are none: the largest of each kind is captured on trial and dropped;
    `one_more` is called after each. Collective."""
    graphs = runner.graphs
    if graphs is None:
        return 0
    before = free_bytes(device)
    for _ in runner.capture(graphs.largest):
        taken = before - free_bytes(device)
        one_more()
    graphs.forget()
    return max(taken, 0) + GRAPH_BYTES * graphs.count


def free_bytes(device: torch.device) -> int:
    """Of the device's memory, once nothing is kept for reuse."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
