# SPDX-License-Identifier: Apache-2.0
"""One GPU rank of the checks of expert parallel's exchanges: `torchrun --nproc-per-node N -m tests.support.comm_one_sided_rank
CHECK ...`. Each raises at the first difference."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.bench import shapes
from phalanx.comm import one_sided
from phalanx.comm.group import Solo
from phalanx.comm.torch_group import TorchGroup
from phalanx.config.model import ModelShape
from phalanx.config.quantization import ON_LOAD
from phalanx.kernels.moe.tensors import Routing
from phalanx.models import registry, weights
from phalanx.models.batch import DpTokens
from phalanx.models.layers.moe import SparseMoe
from phalanx.models.slices import LayerContext
from tests.support.comm_gpu_ranks import replayed
from tests.support.one_sided_cases import EXPERTS, Case, random_cases

ROWS = 600
EXCHANGES = ("ALL_GATHER", "ALL_TO_ALL", "ONE_SIDED")
REPEATS = 1000


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def formed(group: TorchGroup, hidden: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> one_sided.OneSided:
    exchange, reason = one_sided.form(group, device(), hidden=hidden, top_k=top_k, dtype=dtype, rows=ROWS)
    assert exchange is not None, reason
    return exchange


def cases(group: TorchGroup) -> None:
    """Random routing, ranks without tokens, one token, all to one rank, each kind of payload: twice, with the same bits."""
    world, rank = group.size, group.rank
    for hidden in (4096, 7168):
        exchange = formed(group, hidden, EXPERTS)
        each = random_cases(world, 12, torch.bfloat16, hidden=hidden, most=9)
        each += random_cases(world, 6, torch.bfloat16, hidden=hidden, most=300)
        each += [Case((5,) * world, 5, torch.bfloat16, scale, hidden, seed=50) for scale in ("static", "token", "block")]
        each += [Case((300,) * world, 311, torch.bfloat16, "token", hidden, to=EXPERTS // world, seed=51)]
        each += [Case((0,) * (world - 1) + (1,), 1, torch.bfloat16, "token", hidden, seed=52)]
        for case in each:
            for one, two in zip(case.run(exchange, rank, "cuda"), case.run(exchange, rank, "cuda"), strict=True):
                assert torch.equal(one, two), case


def graph(group: TorchGroup) -> None:
    """One graph of many sizes, replayed 1,000 times by ranks that sleep at random, with routing and values that change from replay
    to replay; it checks itself. Values are small integers, so that sums are exact."""
    hidden, top_k, rank, world = 4096, 3, group.rank, group.size
    exchange = formed(group, hidden, top_k)
    sizes = (1, 8, 64, 65, 300)
    x = {rows: torch.randint(-2, 3, (rows, hidden), device="cuda").to(torch.bfloat16) for rows in sizes}
    ids = {rows: torch.rand(rows, EXPERTS, device="cuda").argsort(dim=1)[:, :top_k] for rows in sizes}
    step, wrong = (torch.zeros(1, device="cuda", dtype=torch.int64) for _ in range(2))

    def once(rows: int) -> None:
        now = (ids[rows] + step) % EXPERTS
        absent = (torch.arange(rows, device="cuda") + step) % 4 == 0  # padding of the graph
        now = now.masked_fill(absent.unsqueeze(1), -1).int()
        routing = Routing(torch.ones(rows, top_k, device="cuda"), now)
        own = x[rows] + (step % 3).to(torch.bfloat16)
        received, its = exchange.dispatch(own, routing, rows, EXPERTS)
        assert isinstance(received, Tensor)
        local = (its.ids >= 0) & (its.ids // (EXPERTS // world) == rank)
        factor = (its.weights * (its.ids + 1) * local).sum(1, keepdim=True)
        sums = torch.where(local.any(1, keepdim=True), received.float() * factor, 0.0).to(torch.bfloat16)
        out = exchange.combine(sums, routing, its, EXPERTS)
        wanted = own.float() * torch.where(now >= 0, now + 1, 0).sum(1, keepdim=True)
        wrong.add_((out.float() != wanted.to(torch.bfloat16).float()).sum())

    def body() -> None:
        step.add_(1)
        for rows in sizes:
            once(rows)

    replayed(body, rank, lambda replay: once(sizes[replay % len(sizes)]))
    if wrong.item():
        raise AssertionError(f"{wrong.item()} elements were wrong in 1,000 replays")


def block_of(group: TorchGroup | Solo, *, fp8: bool, exchange: str = "ALL_GATHER") -> SparseMoe:
    """The experts of Mixtral-8x7B's first layer, with random weights."""
    shape = ModelShape.from_config(shapes.SHAPES["mixtral-8x7b"])
    assert shape.experts is not None
    over = None
    if exchange == "ONE_SIDED":
        assert isinstance(group, TorchGroup)
        over = formed(group, shape.hidden_size, shape.experts.per_token)
    quantization = ON_LOAD if fp8 else None
    context = LayerContext(
        Solo(), torch.bfloat16, device(), quantization=quantization, dp=group, expert_exchange=exchange, one_sided=over
    )  # fmt: skip
    model = registry.build(shape, range(1), context)
    weights.dummy(model, 0)
    block = model.layers[0].mlp
    assert isinstance(block, SparseMoe)
    return block


def _layers(group: TorchGroup, *, fp8: bool) -> None:
    """A layer's experts by each exchange: as on one rank but for rounding, and the same bits 1,000 times, in a graph where the
    exchange may be in one."""
    rank, world = group.rank, group.size
    alone, blocks = block_of(Solo(), fp8=fp8), {name: block_of(group, fp8=fp8, exchange=name) for name in EXCHANGES}
    hidden = alone.tensors().hidden
    x = torch.randn(20, hidden, device="cuda", dtype=torch.bfloat16)
    routing = alone.route(x)
    assert torch.equal(alone.routed(alone.payload(x), routing), alone.routed(x, routing)), "quantized by its own rank or another"
    for rows, count in ((1, 1), (8, 5 * (rank != 0)), (64, 64 - rank)):
        x = torch.randn(count, hidden, device="cuda", generator=torch.Generator("cuda").manual_seed(7 + rank)).to(torch.bfloat16)
        counts = torch.zeros(world, dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(counts, torch.full((1,), count, device="cuda"))
        wanted = alone.partial_sum(x) if count else x
        for name, block in blocks.items():
            tokens = DpTokens(counts.tolist(), rows)
            first = block.exchanged(x, tokens)
            torch.testing.assert_close(first, wanted, rtol=2e-2, atol=2e-2 * float(wanted.float().std() if count else 1))
            if name == "ALL_TO_ALL":
                for _ in range(REPEATS // 10):  # the host waits in each
                    assert torch.equal(block.exchanged(x, tokens), first), name
                continue
            _replay(block, x, tokens, first, rows, rank, name)


def _replay(block: SparseMoe, x: Tensor, tokens: DpTokens, first: Tensor, rows: int, rank: int, name: str) -> None:
    """As a captured graph has it: all rows, of which some are padding."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)))
    valid = [torch.arange(rows) < count for count in tokens.counts]
    fixed = DpTokens([rows] * len(valid), rows, torch.cat(valid).long().cuda() - 1)
    once = block.exchanged(padded, fixed).clone()
    torch.testing.assert_close(once[: len(x)], first, rtol=2e-2, atol=2e-2)
    assert not once[len(x) :].any(), f"{name}: padding"
    wrong = torch.zeros(1, device="cuda", dtype=torch.int64)
    replayed(lambda: wrong.add_((block.exchanged(padded, fixed) != once).sum()), rank, lambda _: None)
    assert not wrong.item(), f"{name}, {rows} rows: {wrong.item()} elements differ between replays"


def layers_in_16_bit(group: TorchGroup) -> None:
    _layers(group, fp8=False)


def layers_in_fp8(group: TorchGroup) -> None:
    _layers(group, fp8=True)


CHECKS = {check.__name__: check for check in (cases, graph, layers_in_16_bit, layers_in_fp8)}


@torch.inference_mode()
def main(names: list[str]) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=device())
    assert dist.group.WORLD is not None
    group = TorchGroup(dist.group.WORLD, device())
    for name in names or list(CHECKS):
        began = time.monotonic()
        CHECKS[name](group)
        torch.cuda.synchronize()
        if rank == 0:
            print(f"ok {name} {time.monotonic() - began:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
