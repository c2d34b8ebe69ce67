# SPDX-License-Identifier: Apache-2.0
"""The exchange of expert parallel over data-parallel indices: the tokens of all indices go to every expert, and the sums come back.

    gathered = all_gather(tokens of each index)          [D * rows, hidden], every rank
    partial  = what this rank's experts give to all of them
    sums     = reduce_scatter(partial)                   [rows, hidden], each index its own tokens

Padding up to `rows` is sent and never computed: an index without tokens takes part, and its experts see the tokens of the others
only. The sum over indices is in rank order: the same bits each time. Sizes are known beforehand, so graphs can contain it.

Or each token goes to those indices alone that have one of its experts, once to each, with its routing:

    sent     = the tokens of rank 0, of rank 1, ...      [S, hidden], S <= T * top_k: a token goes to as many indices as it reaches
    received = all_to_all(sent)                          by source, each in the order of its tokens
    back     = all_to_all(what this rank's experts give) [S, hidden]
    sums     = back, added up by token in rank order

That moves less where a token reaches few of the indices: 1 - (1 - 1/D)^top_k of them under even routing. But how many rows there
are is known on the device only: the host waits for it, in each layer.

Or one-sided, where ranks write into each other's memory: as the second way, but every rank has room for `rows` tokens of each other
one, and a token has its place there whether it comes or not. The host need not know which come, so graphs can contain it:

    received = the tokens of rank 0, of rank 1, ...      [D * rows, hidden], of which those that reach this rank are computed
    sums     = what each rank that a token reaches gives, back on the token's rank, added up in rank order
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.comm.group import Group, Splits, by_rank
from phalanx.comm.one_sided import OneSided
from phalanx.kernels.moe.tensors import ExpertTensors, Routing
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.models.batch import DpTokens
from phalanx.models.slices import LayerContext


class RankExperts(Protocol):
    """This rank's experts."""

    def __call__(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """x [N, hidden] -> what the experts give to them [N, hidden]: zeros where `padding` [N] is given and -1."""


def gathered_experts(x: Tensor, tokens: DpTokens, group: Group, experts: RankExperts) -> Tensor:
    """x [T, hidden], this index's tokens of a step -> [T, hidden], what all experts give to them on the ranks of `group`, which is
    all indices. Collective."""
    size, rows = group.size, tokens.rows
    gathered = group.all_gather(_padded(x, rows), dim=0)
    if tokens.padding is not None:
        return group.reduce_scatter(experts(gathered, tokens.padding))[: len(x)]
    if min(tokens.counts) == rows:
        return group.reduce_scatter(experts(gathered, None))
    by_index = by_rank(gathered, size)
    partial = experts(torch.cat([by_index[index, :count] for index, count in enumerate(tokens.counts)]), None)
    scattered = torch.cat([_padded(part, rows) for part in torch.split(partial, list(tokens.counts))])
    return group.reduce_scatter(scattered)[: len(x)]


class DispatchedExperts(Protocol):
    """A router, and this rank's experts: run `group.rank` of as many equal runs as the group has ranks."""

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        """x [T, hidden] -> its experts; none where `padding` [T] is given and negative."""

    def payload(self, x: Tensor) -> Tensor | Quantized:
        """x [T, hidden] as `routed` may take it: in e4m3 where the experts quantize tokens one by one anyway."""

    def routed(self, x: Tensor | Quantized, routing: Routing) -> Tensor:
        """x [N, hidden] with its routing -> what the experts of this rank give [N, hidden]."""


class ExchangedExperts(DispatchedExperts, Protocol):
    """Those of a layer, which take part in each exchange."""

    def partial_sum(self, x: Tensor, *, kv_slots: Tensor | None) -> Tensor:
        """As `RankExperts`."""

    def tensors(self) -> ExpertTensors:
        """As the kernels take them."""


class ExpertExchange:
    """The exchange of each step: by the option, by what the step has, and by the measured table."""

    def __init__(self, num_experts: int, context: LayerContext) -> None:
        self.num_experts, self.context = num_experts, context
        self.takes_quantized = context.dp.size == 1 or context.one_sided is not None
        """Whether what the norm before has quantized is used."""

    def __call__(self, x: Tensor, quantized: Quantized | None, tokens: DpTokens, experts: ExchangedExperts) -> Tensor:
        """As `gathered_experts`, of x and the same quantized. Collective."""
        dp, one_sided = self.context.dp, self.context.one_sided
        if one_sided is not None and self._goes_one_sided(tokens.rows, one_sided, experts.tensors()):
            return one_sided_experts(x, quantized, tokens, dp.rank, one_sided, self.num_experts, experts)
        if self.context.expert_exchange == "ALL_TO_ALL" and tokens.padding is None:
            return dispatched_experts(x, dp, self.num_experts, experts)
        return gathered_experts(x, tokens, dp, lambda rows, padding: experts.partial_sum(rows, kv_slots=padding))

    def _goes_one_sided(self, rows: int, one_sided: OneSided, experts: ExpertTensors) -> bool:
        """Whether a step in which each index sends `rows` rows takes the one-sided exchange: the same on all ranks."""
        table = self.context.exchange_table
        if rows > one_sided.max_rows or table is None:
            return rows <= one_sided.max_rows
        return table.lookup("e4m3" if experts.fp8_gemm else "16 bit", rows, experts.hidden).exchange == "ONE_SIDED"


def dispatched_experts(x: Tensor, group: Group, num_experts: int, experts: DispatchedExperts) -> Tensor:
    """As `gathered_experts`, of as many tokens on each index as it has, by two all-to-alls. Collective."""
    routing = experts.route(x)
    reaches = torch.zeros((len(x), group.size), dtype=torch.bool, device=x.device)
    reaches.scatter_(1, routing.ids.long() // (num_experts // group.size), True)
    sent = reaches.sum(0)
    received = group.all_to_all(sent)
    splits = Splits(sent.tolist(), received.tolist())
    rows = reaches.t().nonzero()[:, 1]  # rank-major
    parts = (x[rows], routing.weights[rows], routing.ids[rows])
    payload = group.all_to_all(torch.cat([_bytes(part) for part in parts], dim=1), splits)
    values, weights, ids = (
        columns.contiguous().view(part.dtype)
        for columns, part in zip(torch.split(payload, [_bytes(part).shape[1] for part in parts], dim=1), parts, strict=True)
    )
    back = group.all_to_all(experts.routed(values, Routing(weights, ids)), Splits(splits.received, splits.sent))
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for part, its_rows in zip(torch.split(back, list(splits.sent)), torch.split(rows, list(splits.sent)), strict=True):
        total.index_add_(0, its_rows, part.float())  # no row twice: the order is that of ranks
    return total.to(x.dtype)


def one_sided_experts(
    x: Tensor, quantized: Quantized | None, tokens: DpTokens, index: int, one_sided: OneSided, num_experts: int,
    experts: DispatchedExperts,
) -> Tensor:  # fmt: skip
    """As `gathered_experts`, on dp index `index`, by one-sided writes. quantized: x as `DispatchedExperts.payload` gives it, where
    the op before has quantized it. Collective."""
    padding = None if tokens.padding is None else tokens.padding[index * tokens.rows :][: len(x)]
    routing = experts.route(x, padding)
    received, its_routing = one_sided.dispatch(quantized or experts.payload(x), routing, tokens.rows, num_experts)
    return one_sided.combine(experts.routed(received, its_routing), routing, its_routing, num_experts)


def _bytes(x: Tensor) -> Tensor:
    """x [N, columns] -> [N, columns * itemsize] uint8."""
    return x.contiguous().view(torch.uint8)


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else F.pad(x, (0, 0, 0, rows - len(x)))
