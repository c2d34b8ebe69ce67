# SPDX-License-Identifier: Apache-2.0
"""Experts over data-parallel indices against the same experts on one rank: random routing, empty indices, padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm import one_sided
from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.comm.one_sided import OneSided
from phalanx.config.model import ModelShape
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.models import registry, weights
from phalanx.models.batch import DpTokens
from phalanx.models.layers.expert_exchange import dispatched_experts, one_sided_experts
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.slices import LayerContext
from phalanx.tables.exchange import ExchangeRow, ExchangeSpan, ExchangeTable
from tests.support.checkpoints import write_checkpoint

CPU = torch.device("cpu")
EXCHANGES = ["ALL_GATHER", "ALL_TO_ALL", "ONE_SIDED"]
COUNTS = [(3, 3), (0, 5), (7, 0), (1, 0), (2, 9), (1, 1)]


def block_of(folder: Path, dp: Group, **options: Any) -> SparseMoe:
    shape = ModelShape.from_folder(folder)
    if options.get("expert_exchange") == "ONE_SIDED":
        options["one_sided"] = one_sided_of(dp, shape.hidden_size, shape.experts.per_token)
    model = registry.build(shape, range(1), LayerContext(Solo(), torch.float32, CPU, dp=dp, **options))
    weights.load(model, folder)
    block = model.layers[0].mlp
    assert isinstance(block, SparseMoe)
    return block


def one_sided_of(dp: Group, hidden: int, top_k: int, dtype: torch.dtype = torch.float32) -> OneSided:
    exchange, reason = one_sided.form(dp, CPU, hidden=hidden, top_k=top_k, dtype=dtype, rows=64, timeout=60)
    assert exchange is not None, reason
    return exchange


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def tokens_of(folder: Path, count: int, seed: int) -> Tensor:
    hidden = ModelShape.from_folder(folder).hidden_size
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_equal_to_one_rank(folder: Path, size: int, exchange: str) -> None:
    alone, world = block_of(folder, Solo()), LocalWorld(size)
    blocks = world.run(lambda group: block_of(folder, group, expert_exchange=exchange))
    for block in blocks:
        assert len(block.own_experts) == alone.config.count // size
    assert [number for block in blocks for number in block.own_experts] == list(range(alone.config.count))
    for seed, pair in enumerate(COUNTS):
        counts = (pair * size)[:size]
        steps = [[tokens_of(folder, count, 10 * seed + index) for index, count in enumerate(counts)] for _ in range(2)]
        results = [world.run(lambda group, x=x, counts=counts: _exchanged(blocks, group, x, DpTokens.of(counts))) for x in steps]
        for x, total, again in zip(steps[0], *results, strict=True):
            torch.testing.assert_close(total, alone.partial_sum(x), rtol=1e-5, atol=1e-5)
            assert torch.equal(total, again)
    pairs = sum(sum((pair * size)[:size]) for pair in COUNTS) * 2 * alone.config.per_token
    assert sum(int(block.load.sum()) for block in blocks) == pairs


def _exchanged(blocks: Sequence[SparseMoe], group: Group, x: Sequence[Tensor], tokens: DpTokens) -> Tensor:
    return blocks[group.rank].exchanged(x[group.rank], tokens)


@pytest.mark.parametrize("path", ["partial_sum", "route"])
def test_the_router_runs_where_experts_are_drawn(folder: Path, path: str) -> None:
    """A benchmark that draws experts has the time of the router's GEMM, too."""
    block, calls = block_of(folder, Solo(), traffic=0.0), []
    block.router.register_forward_hook(lambda *_: calls.append(1))
    getattr(block, path)(tokens_of(folder, 5, 0))
    assert block.router.choice.pattern is not None
    assert calls == [1]


@pytest.mark.parametrize("exchange", ["ALL_GATHER", "ONE_SIDED"])
def test_padding_of_a_graph_reaches_no_expert(folder: Path, exchange: str) -> None:
    """A captured graph sends as many rows as it has; which are tokens lies on the device."""
    alone, world, rows = block_of(folder, Solo()), LocalWorld(2), 8
    blocks = world.run(lambda group: block_of(folder, group, expert_exchange=exchange))
    for seed, counts in enumerate(COUNTS[:4]):
        padding = torch.cat([torch.arange(rows) < count for count in counts]).long() - 1
        padded = [tokens_of(folder, rows, seed + 50 * index) for index in range(2)]
        totals = world.run(lambda group, p=padded, v=padding: _exchanged(blocks, group, p, DpTokens((rows, rows), rows, v)))
        for x, total, count in zip(padded, totals, counts, strict=True):
            assert total.shape == x.shape
            torch.testing.assert_close(total[:count], alone.partial_sum(x[:count]), rtol=1e-5, atol=1e-5)
            assert not total[count:].any()
    assert sum(int(block.load.sum()) for block in blocks) == sum(map(sum, COUNTS[:4])) * alone.config.per_token


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("reached", ["nothing", "one token", "everything"])
def test_an_index_whose_experts_get_nothing_and_one_whose_get_all(tmp_path: Path, reached: str, exchange: str) -> None:
    folder = write_checkpoint(tmp_path, "mixtral")
    world = LocalWorld(2)
    blocks = world.run(lambda group: block_of(folder, group, expert_exchange=exchange))
    alone = block_of(folder, Solo())
    for block in (*blocks, alone):
        block.router.weight.zero_()  # of equal experts the first are chosen, which are those of index 0
    counts = {"nothing": (0, 6), "one token": (0, 1), "everything": (5, 6)}[reached]
    x = [tokens_of(folder, count, index) for index, count in enumerate(counts)]
    totals = world.run(lambda group: _exchanged(blocks, group, x, DpTokens.of(counts)))
    for own, total in zip(x, totals, strict=True):
        torch.testing.assert_close(total, alone.partial_sum(own), rtol=1e-5, atol=1e-5)
    assert blocks[0].load.tolist() == [sum(counts), sum(counts)]
    assert blocks[1].load.tolist() == [0, 0]


class Counting:
    """A one-sided exchange that counts its dispatches."""

    def __init__(self, base: OneSided, max_rows: int) -> None:
        self.base, self.max_rows, self.rows = base, max_rows, list[int]()

    def dispatch(self, x: Any, routing: Routing, rows: int, experts: int) -> Any:
        self.rows.append(rows)
        return self.base.dispatch(x, routing, rows, experts)

    def combine(self, sums: Tensor, sent: Routing, received: Routing, experts: int) -> Tensor:
        return self.base.combine(sums, sent, received, experts)


@pytest.mark.parametrize(
    ("spans", "max_rows", "one_sided_rows"),
    [
        (None, 64, [1, 4, 7, 12]),
        (None, 7, [1, 4, 7]),
        ((ExchangeSpan(1, 4, "ALL_GATHER"), ExchangeSpan(5, 9, "ONE_SIDED")), 64, [7]),  # 12 is not measured
        ((ExchangeSpan(1, 99, "ALL_GATHER"),), 64, []),
    ],
)
def test_the_table_and_the_room_decide(
    tmp_path: Path, spans: tuple[ExchangeSpan, ...] | None, max_rows: int, one_sided_rows: list[int]
) -> None:  # fmt: skip
    folder, world = write_checkpoint(tmp_path, "mixtral"), LocalWorld(2)
    alone, table = block_of(folder, Solo()), None
    if spans is not None:
        table = ExchangeTable(Fingerprint(0, "shm", 2), (ExchangeRow("16 bit", 1, 99, spans),))
    shape = ModelShape.from_folder(folder)
    assert shape.experts is not None
    top_k = shape.experts.per_token
    counting = [Counting(each, max_rows) for each in world.run(lambda group: one_sided_of(group, shape.hidden_size, top_k))]
    blocks = world.run(lambda group: block_of(folder, group, one_sided=counting[group.rank], exchange_table=table))
    for rows in (1, 4, 7, 12):
        x = [tokens_of(folder, rows - index, index) for index in range(2)]
        totals = world.run(lambda group, x=x: _exchanged(blocks, group, x, DpTokens.of([len(part) for part in x])))
        for own, total in zip(x, totals, strict=True):
            torch.testing.assert_close(total, alone.partial_sum(own), rtol=1e-5, atol=1e-5)
    assert [each.rows for each in counting] == [one_sided_rows] * 2


class Oracle:
    """Experts of which each multiplies a token by its own number plus 1: what a token gets back says which experts it met."""

    def __init__(self, ids: Tensor, weights: Tensor, first: int, count: int) -> None:
        self.ids, self.weights, self.first, self.count = ids, weights, first, count
        self.received: list[Tensor] = []

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        return Routing(self.weights, self.ids)

    def payload(self, x: Tensor) -> Tensor:
        return x

    def routed(self, x: Tensor | Quantized, routing: Routing) -> Tensor:
        assert isinstance(x, Tensor)
        local = (routing.ids >= self.first) & (routing.ids < self.first + self.count)
        self.received.append(x[local.any(1)])
        return x * (routing.weights * (routing.ids + 1.0) * local).sum(1, keepdim=True).to(x.dtype)


@pytest.mark.parametrize("exchange", ["ALL_TO_ALL", "ONE_SIDED"])
def test_dispatch_and_combine_under_random_routing(exchange: str) -> None:
    """1,000 steps with random routing, also to one expert and from empty indices, in bf16 and fp32: equal to the oracle, the same
    bits each time, and no token twice at an index."""
    size, count, hidden, top_k = 4, 3, 16, 3
    world, generator = LocalWorld(size), torch.Generator().manual_seed(5)
    spaces = world.run(lambda group: one_sided_of(group, hidden, top_k))
    for step in range(125):
        tokens = [int(torch.randint(0, 6, (), generator=generator)) * (step % 5 != index) for index in range(size)]
        dtype = torch.bfloat16 if step % 2 else torch.float32
        x = [torch.randn(n, hidden, generator=generator).to(dtype) for n in tokens]
        shares = torch.rand(size * count, generator=generator) ** (8 if step % 3 else 0)
        ids = [torch.multinomial(shares.expand(max(n, 1), -1), top_k, generator=generator)[:n].int() for n in tokens]
        weights = [torch.rand(n, top_k, generator=generator) for n in tokens]
        oracles = [Oracle(ids[index], weights[index], index * count, count) for index in range(size)]
        tokens_of_all = DpTokens.of(tokens)

        def act(group: Group, x: Any = x, o: Any = oracles, tokens: DpTokens = tokens_of_all) -> Tensor:
            rank = group.rank
            if exchange == "ALL_TO_ALL" or not tokens.rows:
                return dispatched_experts(x[rank], group, size * count, o[rank])
            return one_sided_experts(x[rank], None, tokens, rank, spaces[rank], size * count, o[rank])

        run = [world.run(act) for _ in range(8)]
        for index, total in enumerate(run[0]):
            expected = x[index].float() * (weights[index] * (ids[index] + 1.0)).sum(1, keepdim=True)
            torch.testing.assert_close(total.float(), expected, rtol=3e-2 if step % 2 else 1e-5, atol=1e-2 if step % 2 else 1e-5)
            assert all(torch.equal(other[index], total) for other in run[1:])
            reached = sum(int(((each // count) == index).any(1).sum()) for each in ids)
            assert [len(part) for part in oracles[index].received] == [reached] * 8
