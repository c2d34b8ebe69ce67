# SPDX-License-Identifier: Apache-2.0
"""Time the exchanges of expert parallel: `torchrun --nproc-per-node N -m benchmarks.comm.expert_exchange --out DIR`.

Dispatch and combine alone, with experts that return what they get: for T tokens of each rank, of which each goes to random experts
(hidden 4096: 2 of 8, as Mixtral-8x7B; 7168: 8 of 256, as DeepSeek-V3), until each rank has the sums of its tokens. ONE_SIDED with
tokens in 16 bit, and in e4m3 with a scale for each; `dispatch` is the first of its two kernels alone. Each is verified first. A
figure is 50 calls in one CUDA graph, the median of 9 replays, the maximum over ranks. ALL_TO_ALL cannot be in a graph: 50 calls one
behind the other, each of which waits for the host; the median of 3 such runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.comm.allreduce import CALLS, REPLAYS, measure, verdict
from phalanx.comm import one_sided
from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.torch_group import TorchGroup
from phalanx.kernels import quantize_fp8
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.models.batch import DpTokens
from phalanx.models.layers.expert_exchange import dispatched_experts, gathered_experts

TOKENS = (1, 8, 64, 256, 1024)
LAYERS = {4096: (8, 2), 7168: (256, 8)}
"""Hidden size -> experts, and of each token."""


class Case(NamedTuple):
    """exchange, payload: what runs. captured: in a CUDA graph. call: once."""

    exchange: str
    payload: str
    captured: bool
    call: Callable[[], Any]


class Echo:
    """Experts that give each token back, by a routing that is known."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        return self.routing

    def payload(self, x: Tensor) -> Tensor:
        return x

    def routed(self, x: Tensor | Quantized, routing: Routing) -> Tensor:
        assert isinstance(x, Tensor)
        return x


def routing_of(tokens: int, experts: int, top_k: int) -> Routing:
    ids = torch.rand(tokens, experts, device="cuda").argsort(dim=1)[:, :top_k].int().contiguous()
    return Routing(torch.rand(tokens, top_k, device="cuda"), ids)


def cases(tokens: int, hidden: int, exchange: one_sided.OneSided | None, group: TorchGroup) -> Iterator[Case]:
    """Each is verified before it is handed out: a token comes back once from each rank that has one of its experts."""
    (experts, top_k), world = LAYERS[hidden], group.size
    torch.manual_seed(group.rank)
    x, routing = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16), routing_of(tokens, experts, top_k)
    rows = DpTokens([tokens] * world, tokens, torch.zeros(world * tokens, dtype=torch.int64, device="cuda"))
    owner, reached = routing.ids // (experts // world), torch.zeros(tokens, 1, device="cuda")
    for rank in range(world):
        reached += (owner == rank).any(1, keepdim=True)

    def checked(case: Case, factor: Tensor | float, like: Tensor = x) -> Case:
        wanted = (like.float() * factor).to(torch.bfloat16)
        good = [torch.equal(case.call(), wanted) for _ in range(3)]  # a list: each rank calls as often
        verdict(all(good), f"{case.exchange} {case.payload}, {tokens} tokens of {hidden}", group.process_group)
        return case

    gathered = Case("ALL_GATHER", "bf16", True, lambda: gathered_experts(x, rows, group, lambda part, _: part))
    yield checked(gathered, float(world))
    echo = Echo(routing)
    yield checked(Case("ALL_TO_ALL", "bf16", False, lambda: dispatched_experts(x, group, experts, echo)), reached)
    if exchange is None or tokens > exchange.max_rows:
        return
    quantized = Quantized(*quantize_fp8(x))
    sums = exchange.dispatch(x, routing, tokens, experts)[0]
    assert isinstance(sums, Tensor)

    def both(payload: Tensor | Quantized) -> Tensor:
        received, its_routing = exchange.dispatch(payload, routing, tokens, experts)
        return exchange.combine(received if isinstance(received, Tensor) else sums, routing, its_routing, experts)

    for name, payload in (("bf16", x), ("e4m3", quantized)):
        yield checked(Case("ONE_SIDED", name, True, lambda payload=payload: both(payload)), reached)
        yield Case(
            "ONE_SIDED dispatch", name, True, lambda payload=payload: exchange.dispatch(payload, routing, tokens, experts)
        )  # fmt: skip


def measure_eagerly(call: Callable[[], Any], group: dist.ProcessGroup) -> float:
    """Microseconds per call as `measure`, without a graph."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    times = []
    for _ in range(REPLAYS // 3):
        dist.barrier(group)
        times.append(harness.events_us(calls) / CALLS)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest)


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    device, world = torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD
    assert world is not None
    group, rows, reasons = TorchGroup(world, device), [], {}
    machine = str(detect_fingerprint(device, group.size, group))
    for hidden, (_, top_k) in LAYERS.items():
        exchange, reasons[hidden] = one_sided.form(
            group, device, hidden=hidden, top_k=top_k, dtype=torch.bfloat16, rows=max(TOKENS)
        )  # fmt: skip
        for tokens in TOKENS:
            for case in cases(tokens, hidden, exchange, group):
                us = (measure if case.captured else measure_eagerly)(case.call, world)
                rows.append({"world": group.size, "hidden": hidden, "tokens": tokens, "exchange": case.exchange,
                             "payload": case.payload, "cuda_graph": case.captured, "us": round(us, 2)})  # fmt: skip
                if group.rank == 0:
                    print(*rows[-1].values(), flush=True)
    if group.rank == 0 and options.out:
        major, minor = torch.cuda.get_device_capability(device)
        stem = f"comm_expert_exchange.ep{group.size}.sm{10 * major + minor}"
        print(harness.write(stem, {"machine": machine, "one_sided": reasons, "rows": rows}, options.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the folder of the JSON file")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["RANK"])))
    run(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
