# SPDX-License-Identifier: Apache-2.0
"""The ops that turn logits into tokens, the same on CPU and GPU, and on every rank.

`argmax` and `sample` (filtered or not) are all that most steps need: they have Triton kernels. The rest is plain torch. On a GPU
the mass above the last token of a nucleus is right to about 1e-6 of the total.

No op looks from one row into another, so that a request's tokens do not depend on what else is in the batch. Filters are
thresholds on values (tokens that tie with the last one kept are kept), so that no result depends on how a sort orders ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

import phalanx.kernels.reference as reference
from phalanx.kernels.capabilities import has_triton

_NEVER = float("-inf")


def allow(logits: Tensor, words: Tensor) -> Tensor:
    """logits [M, V] where the bit of the token is set in words [M, (V + 31) // 32] int32 (lowest bit first), -inf elsewhere."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(allowed.bool(), logits, _NEVER)


def forbid(logits: Tensor, rows: Tensor, tokens: Tensor, where: Tensor | None = None) -> Tensor:
    """Put -inf into logits [S, V] at each (rows[i], tokens[i]) where it is true, except in a row that would then have no token
    left."""
    before = logits[rows, tokens]
    after = _NEVER if where is None else torch.where(where, _NEVER, before)
    logits[rows, tokens] = after
    dead = logits.amax(-1) == _NEVER
    logits[rows, tokens] = torch.where(dead[rows], before, after)
    return logits


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Apply penalties to tokens of the prompt and the output. logits [M, V]; counts [M, V] int32 in the output; in_prompt [M, V]
    bool; penalties [M].

    Repetition (Keskar et al. 2019, as transformers has it; prompt and output): positive logits are divided by it, negative ones
    multiplied. Then OpenAI's (output only): logit -= presence * (count > 0) + frequency * count.
    """
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    in_output = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_output | in_prompt, scaled, logits)
    return logits - presence * in_output - frequency * counts


def argmax(logits: Tensor) -> Tensor:
    """argmax of each row of logits [S, V]: [S] int64, the lowest id among equals; `reference.NOT_FINITE` where the highest is NaN
    or infinite."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    decode_keys(packed_argmax_keys(logits, 0, logits.shape[1]).unsqueeze(0), tokens)
    return tokens


def packed_argmax_keys(logits: Tensor, begin: int, width: int) -> Tensor:
    """The argmax of each row of logits [S, W], of which columns 0 .. width - 1 are tokens begin, begin + 1, ... of a vocabulary
    that is split over ranks: [S, parts] int64, a key for each part of a row. `parts` depends on S and W alone.

    The largest of the keys of all parts and ranks is the argmax's: see `reference.packed_argmax_keys`.
    """
    if _kernel_takes(logits):
        from phalanx.kernels.sampling.gumbel_argmax import packed_argmax_keys as kernel

        return kernel(logits, begin, width)
    return reference.packed_argmax_keys(logits, begin, width)


def gumbel_max(
    logits: Tensor, begin: int, width: int, max_keys: Tensor, temperature: Tensor, noise: Tensor, thresholds: Tensor | None = None
) -> Tensor:
    """See `reference.gumbel_max`."""
    if _kernel_takes(logits):
        from phalanx.kernels.sampling.gumbel_argmax import gumbel_max as kernel

        return kernel(logits, begin, width, max_keys, temperature, noise, thresholds)
    return reference.gumbel_max(logits, begin, width, max_keys, temperature, noise, thresholds)


def filter_thresholds(logits: Tensor, max_keys: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    """See `reference.filter_thresholds`. max_keys [1, S, parts]: the keys of the logits. The kernel reads nothing back to the
    host."""
    if _kernel_takes(logits):
        from phalanx.kernels.sampling.filter_thresholds import filter_thresholds as kernel

        # Lanes add up as dtype and stride have it, and a neighbour with a bias makes all rows fp32.
        return kernel(contiguous_fp32(logits), max_keys, temperature, filters)
    return reference.filter_thresholds(logits, temperature, filters)


def sample(logits: Tensor, temperature: Tensor, noise: Tensor, filters: Tensor | None = None) -> Tensor:
    """One token per row of logits [S, V]: [S] int64, the argmax where temperature [S] is 0, else a sample of what the filters
    [3, S] keep; `reference.NOT_FINITE` as in `argmax`. See `reference.gumbel_max` and `reference.filter_thresholds`."""
    tokens, width = torch.empty(len(logits), dtype=torch.int64, device=logits.device), logits.shape[1]
    max_keys = packed_argmax_keys(logits, 0, width).unsqueeze(0)
    thresholds = None if filters is None else filter_thresholds(logits, max_keys, temperature, filters)
    decode_keys(gumbel_max(logits, 0, width, max_keys, temperature, noise, thresholds).unsqueeze(0), tokens)
    return tokens


def decode_keys(keys: Tensor, tokens: Tensor, remember: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
    """See `reference.decode_keys`."""
    if _kernel_takes(keys):
        from phalanx.kernels.sampling.gumbel_argmax import decode_keys as kernel

        kernel(keys, tokens, remember)
        return
    reference.decode_keys(keys, tokens, remember)


def contiguous_fp32(logits: Tensor, *, copy: bool = False) -> Tensor:
    """logits [S, V] in fp32, row behind row with nothing between, for any S; the same tensor if it is so and `copy` is off."""
    if not copy and logits.dtype == torch.float32 and logits.stride() == (logits.shape[1], 1):
        return logits
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def score(logits: Tensor, targets: Tensor, most: int) -> Tensor:
    """What is reported of targets [M] int64 under softmax(logits) [M, V], as one fp64 tensor [M, 2 + 2 * most].

    Columns: natural-log probability, rank (1 is the most likely; ties share the better rank), then the ids of the `most` most
    likely tokens, then their log probabilities. fp64 holds each of these exactly, so that one copy to the host carries all."""
    own, top = logits.gather(1, targets.unsqueeze(1)), logits.amax(-1, keepdim=True)
    # In fp64, which rounds to one fp32 in whatever order torch adds: that depends on the number of rows.
    norm = (top + (logits - top).exp_().sum(-1, keepdim=True, dtype=torch.float64).log()).float()
    rank = (logits > own).sum(-1, keepdim=True) + 1
    columns = [own - norm, rank]
    if most:
        best = logits.topk(most, dim=-1)
        columns += [best.indices, best.values - norm]
    return torch.cat([x.to(torch.float64) for x in columns], dim=1)


def warmup_token_counts(max_tokens: int) -> list[int]:
    """Numbers of rows to sample, up to max_tokens, that between them launch every variant of these kernels that any number does."""
    return [rows for rows in (1, MANY_ROWS) if rows <= max_tokens]


MANY_ROWS = 8
"""Rows that are no longer few: from here on a row of logits is split among fewer programs."""


def _kernel_takes(x: Tensor) -> bool:
    return x.is_cuda and x.stride(-1) == 1 and has_triton()
