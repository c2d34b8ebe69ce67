# SPDX-License-Identifier: Apache-2.0
"""The ops that turn logits into tokens, row by row, in plain torch: the same on CPU and GPU, and on every rank. The likeliest
token, and a draw, filtered or not, have kernels: they are all that most steps need. On a GPU the mass above the last token of a
nucleus is right to about 1e-6 of the whole.

No op looks from one row into another, so that a request's tokens do not depend on what else is in the batch. Filters are
thresholds on values (tokens that tie with the last one kept are kept), so that no result depends on how a sort orders ties.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from phalanx.kernels.norms import triton_is_here

_NEVER = float("-inf")
_AT_ONCE = 2**24  # logits that plain torch makes temporaries of at a time: 64 MiB of fp32
_BELOW_ONE = 1.0 - 2.0**-24  # the largest fp32 below 1


def allow(logits: Tensor, words: Tensor) -> Tensor:
    """logits [M, V] where the bit of the token is set in words [M, (V + 31) // 32] int32 (lowest bit first), -inf elsewhere."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    return torch.where(allowed.bool(), logits, _NEVER)


def forbid(logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Put -inf into logits [S, V] at each (rows[i], tokens[i]), except in a row that would then have no token left."""
    before = logits[rows, tokens]
    logits[rows, tokens] = _NEVER
    dead = logits.amax(-1) == _NEVER
    logits[rows, tokens] = torch.where(dead[rows], before, _NEVER)
    return logits


def penalize(logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Push tokens down that were seen. logits [M, V]; counts [M, V] int32 in the output; in_prompt [M, V] bool; penalties [M].

    Repetition (Keskar et al. 2019, as transformers has it; prompt and output): positive logits are divided by it, negative ones
    multiplied. Then OpenAI's (output only): logit -= presence * (count > 0) + frequency * count.
    """
    repetition, presence, frequency = (x.unsqueeze(1) for x in (repetition, presence, frequency))
    made = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(made | in_prompt, scaled, logits)
    return logits - presence * made - frequency * counts


def likeliest(logits: Tensor) -> Tensor:
    """argmax of each row of logits [S, V]: [S] int64, the lowest id among equals, and the first NaN where there is one."""
    if not _kernel_takes(logits):
        return logits.argmax(-1)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    settle(keys(logits, 0, logits.shape[1]).unsqueeze(0), tokens)
    return tokens


def keys(logits: Tensor, begin: int, held: int) -> Tensor:
    """The best of each row of logits [S, W], of which columns 0 .. held - 1 are tokens begin, begin + 1, ... of a vocabulary that
    is split over ranks: [S, parts] int64, a key for each part of a row. `parts` depends on S and W alone.

    The largest of the keys of all parts and ranks is the likeliest token's: the high half of a key is its logit, as an integer in
    the order of the logits (NaN is the highest), the low half 2^32 - 1 - token. A part without tokens has the lowest of numbers.
    """
    if _kernel_takes(logits):
        from phalanx.kernels.between.likeliest import keys as kernel

        return kernel(logits, begin, held)
    return _best(logits[:, :held], begin)


def _best(values: Tensor, begin: int) -> Tensor:
    """One key [S, 1] for each row of values [S, held]."""
    if values.shape[1] == 0:
        return torch.full((len(values), 1), -(2**63), dtype=torch.int64, device=values.device)
    place = values.argmax(-1, keepdim=True)
    value = values.gather(1, place).float()
    bits = torch.where(value == 0, 0.0, value).view(torch.int32)
    order = torch.where(value.isnan(), 0x7FFFFFFF, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (order.long() << 32) | (0xFFFFFFFF - begin - place)


def race(
    logits: Tensor, begin: int, held: int, tops: Tensor, temperature: Tensor, noise: Tensor, floors: Tensor | None = None
) -> Tensor:
    """As `keys`, of a draw: the largest key's token is one of probability softmax(logits / temperature), as `scale` and `draw` find
    it in the whole vocabulary, to the bit where exp and log are the same.

    tops [ranks, S, parts]: the keys of the logits, of all ranks. temperature [S] fp32: 0 where the likeliest is to win. noise
    [2, S] int32: the rows' keys, as in `draw`. floors [S] fp32: what is scaled to less does not run (see `floors`); None: all run.
    """
    if _kernel_takes(logits):
        from phalanx.kernels.between.likeliest import race as kernel

        return kernel(logits, begin, held, tops, temperature, noise, floors)
    order = (tops.amax((0, 2)) >> 32).to(torch.int32)
    top = torch.where(order < 0, order ^ 0x7FFFFFFF, order).view(torch.float32).unsqueeze(1)
    parts = []
    step = max(1, _AT_ONCE // max(held, 1))
    for rows in (slice(at, at + step) for at in range(0, len(logits), step)):
        wide, drawn = logits[rows, :held].float(), (temperature[rows] > 0).unsqueeze(1)
        heat = torch.where(drawn, temperature[rows].unsqueeze(1), 1.0)
        runs = _scaled(wide, top[rows], heat)
        if floors is not None:
            runs = torch.where(runs >= floors[rows].unsqueeze(1), runs, _NEVER)
        runs = runs.sub_(_log_exponential(noise[:, rows], begin, begin + held))
        parts.append(_best(torch.where(drawn, runs, wide), begin))
    return torch.cat(parts) if parts else torch.empty(0, 1, dtype=torch.int64, device=logits.device)


def floors(logits: Tensor, tops: Tensor, temperature: Tensor, filters: Tensor) -> Tensor:
    """What the filters keep of each row of logits [S, V], as the least logit, scaled as `scale` does, that is kept: [S] fp32, -inf
    where all are, and in rows of temperature 0.

    tops [1, S, parts]: the keys of the logits. temperature: up to 100. filters [3, S] fp64: top_k, top_p and min_p of each row as
    in `keep_likely`, whose floor this is; off are V, 1 or more, and 0. Without the kernel, what rows ask for is read from the
    device.
    """
    if _kernel_takes(logits):
        from phalanx.kernels.between.floors import floors as kernel

        # Lanes add up as dtype and stride have it, and a neighbour with a bias makes all rows fp32.
        return kernel(widened(logits), tops, temperature, filters)
    found, width = torch.full_like(temperature, _NEVER), logits.shape[1]
    top_k, top_p, min_p = filters
    k_on, p_on, m_on = top_k < width, top_p < 1.0, min_p > 0.0
    asking = ((temperature > 0) & (k_on | p_on | m_on)).nonzero()[:, 0]
    for rows in asking.split(max(1, _AT_ONCE // width)):
        scaled = scale(logits[rows].float(), temperature[rows])
        some_k, some_p, some_m = (bool(on[rows].any()) for on in (k_on, p_on, m_on))
        most = width if (p_on & ~k_on)[rows].any() else int(top_k[rows].where(k_on[rows], 1.0).max())
        found[rows] = _floor(
            scaled, most, top_k[rows].long() if some_k else None, top_p[rows].where(p_on[rows], 2.0) if some_p else None,
            min_p[rows].float() if some_m else None,
        )[:, 0]  # fmt: skip
    return found


def drawn(logits: Tensor, temperature: Tensor, noise: Tensor, filters: Tensor | None = None) -> Tensor:
    """One token per row of logits [S, V]: [S] int64, the likeliest where temperature [S] is 0, else a draw of what the filters
    [3, S] keep. See `race` and `floors`."""
    tokens, width = torch.empty(len(logits), dtype=torch.int64, device=logits.device), logits.shape[1]
    tops = keys(logits, 0, width).unsqueeze(0)
    kept = None if filters is None else floors(logits, tops, temperature, filters)
    settle(race(logits, 0, width, tops, temperature, noise, kept).unsqueeze(0), tokens)
    return tokens


def widened(logits: Tensor, *, copy: bool = False) -> Tensor:
    """logits [S, V] in fp32, row behind row with nothing between, for any S; itself if it is so and no copy is asked for."""
    if not copy and logits.dtype == torch.float32 and logits.stride() == (logits.shape[1], 1):
        return logits
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def settle(keys: Tensor, tokens: Tensor, remember: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
    """From keys [ranks, S, parts] (see `keys`) to tokens [S] int64, written there.

    remember: (last_tokens [slots], slots [S], kv_slots [S]), all int64: the token is also written to last_tokens[slots[s]], except
    for padding, whose KV slot is negative.
    """
    if _kernel_takes(keys):
        from phalanx.kernels.between.likeliest import settle as kernel

        kernel(keys, tokens, remember)
        return
    tokens.copy_(0xFFFFFFFF - (keys.amax((0, 2)) & 0xFFFFFFFF))
    if remember is not None:
        last_tokens, slots, kv_slots = remember
        real = kv_slots >= 0
        last_tokens[slots[real]] = tokens[real]


def _kernel_takes(x: Tensor) -> bool:
    return x.is_cuda and x.stride(-1) == 1 and triton_is_here()


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - their row's maximum) / temperature; [R, V] and [R], fp32. The maximum is 0, and nothing is NaN or +inf."""
    return _scaled(logits, logits.amax(-1, keepdim=True), temperature.unsqueeze(1))


def _scaled(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    shifted = logits - torch.where(top == _NEVER, 0.0, top)
    return shifted.div_(temperature).nan_to_num_(nan=0.0, neginf=_NEVER)


def keep_likely(scaled: Tensor, most: int, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """What `floors` keeps, by definition: scaled [R, V] (see `scale`) with -inf at what the three filters drop; each is per row
    [R], or None where no row has it.

    top_k (int64, V is off): the k highest. top_p (fp64, above 1 is off): of those, the fewest whose probability reaches p.
    min_p (fp32, 0 is off): those at least min_p times as likely as the likeliest. `most`: no row that has a top_p has a higher
    top_k, and none that has a top_k; V means a full sort.
    """
    return torch.where(scaled >= _floor(scaled, most, top_k, top_p, min_p), scaled, _NEVER)


def _floor(scaled: Tensor, most: int, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """The least value that is kept, [R, 1]."""
    floor = torch.full_like(scaled[:, :1], _NEVER)
    if top_k is not None or top_p is not None:
        if most < scaled.shape[1]:
            highest = scaled.topk(most, dim=-1).values
        else:
            highest = _descending(scaled)
        if top_k is not None:
            kth = highest.gather(1, (top_k.clamp(max=most) - 1).unsqueeze(1))
            floor = torch.where((top_k < scaled.shape[1]).unsqueeze(1), kth, floor)
        if top_p is not None:
            floor = torch.maximum(floor, _nucleus_floor(scaled, highest, floor, top_p))
    if min_p is not None:
        floor = torch.maximum(floor, min_p.log().unsqueeze(1))
    return floor


def _descending(x: Tensor) -> Tensor:
    """Each row of x [R, V] sorted, highest first. Numpy sorts values alone with vector instructions; torch carries the indices."""
    if x.is_cpu:
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(dim=-1, descending=True).values


def _nucleus_floor(scaled: Tensor, highest: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """The value of the last token of the nucleus, [R, 1]. In fp64: how a sum is split must not move the edge."""
    total = torch.where(scaled >= floor, scaled.exp(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(highest >= floor, highest, _NEVER).to(torch.float64).exp()
    before = (mass.cumsum(-1) - mass) / total
    inside = before < top_p.unsqueeze(1)
    lowest = torch.where(inside, highest, float("inf")).amin(-1, keepdim=True)
    return torch.where(top_p.unsqueeze(1) > 1.0, _NEVER, lowest)


def draw(scaled: Tensor, keys: Tensor) -> Tensor:
    """What `race` draws, by definition: one token per row [R] int64 with probability softmax(scaled) [R, V], decided by keys [2, R]
    int32 alone.

    Gumbel-max as an exponential race: argmax(scaled - log(E)), E = -log(1 - u), u = hash(key, token). A token at -inf never wins
    while another is finite.
    """
    return (scaled - _log_exponential(keys, 0, scaled.shape[1])).argmax(-1)


def _log_exponential(keys: Tensor, begin: int, end: int) -> Tensor:
    return hashed_uniform(keys, end, begin).neg_().log1p_().neg_().log_()


def hashed_uniform(keys: Tensor, tokens: int, begin: int = 0) -> Tensor:
    """u [R, tokens - begin] fp32 in (0, 1), for tokens `begin` and on: a hash of (keys[0, r], keys[1, r], token), by 32-bit integer
    arithmetic that wraps.

    Resolution is 2^-31 near 0, where the race is decided. The mixing steps are Wellons' lowbias32
    (nullprogram.com/blog/2018/07/31), once over the token and once more with the keys worked in.
    """
    h = _mixed_ids(tokens, keys.device)[begin:] ^ keys[0].unsqueeze(1)
    h ^= (h >> 16) & 0xFFFF
    h *= _A
    h ^= (h >> 15) & 0x1FFFF
    h += keys[1].unsqueeze(1)
    h *= _B
    h ^= (h >> 16) & 0xFFFF
    h &= 0x7FFFFFFF
    return h.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)


_A = 0x7FEB352D
_B = 0x846CA68B - 2**32  # as a signed 32-bit number


@functools.lru_cache(maxsize=8)
def _mixed_ids(tokens: int, device: torch.device) -> Tensor:
    h = torch.arange(tokens, dtype=torch.int32, device=device) + (0x9E3779B9 - 2**32)
    h = (h ^ ((h >> 16) & 0xFFFF)) * _A
    h = (h ^ ((h >> 15) & 0x1FFFF)) * _B
    return h ^ ((h >> 16) & 0xFFFF)


def score(logits: Tensor, targets: Tensor, most: int) -> Tensor:
    """What is reported of targets [M] int64 under softmax(logits) [M, V], as one fp64 tensor [M, 2 + 2 * most].

    Columns: natural-log probability, rank (1 is the likeliest; ties share the better rank), then the ids of the `most` likeliest
    tokens, then their log probabilities. fp64 holds each of these exactly, so that one copy to the host carries all.
    """
    own = logits.gather(1, targets.unsqueeze(1))
    norm = logits.logsumexp(-1, keepdim=True)
    rank = (logits > own).sum(-1, keepdim=True) + 1
    columns = [own - norm, rank]
    if most:
        best = logits.topk(most, dim=-1)
        columns += [best.indices, best.values - norm]
    return torch.cat([x.to(torch.float64) for x in columns], dim=1)
