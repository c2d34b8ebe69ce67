# SPDX-License-Identifier: Apache-2.0
"""Four gloo processes run every collective once; the tests look at what each of them got."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx import launch
from phalanx.comm import torch_group
from phalanx.comm.group import Solo
from phalanx.comm.torch_group import GATHER_BYTES, SENDS_IN_FLIGHT
from phalanx.errors import LayoutError
from phalanx.layout.layout import Layout

pytestmark = pytest.mark.usefixtures("forked_python")

WORLD = 4
LARGE = GATHER_BYTES // 4 + 3

RANK = """
import torch
from phalanx.comm.group import ResidualRmsNorm, Solo, Splits
from phalanx.launch import read_config
from phalanx.comm.torch_group import connect, form, listen
from phalanx.layout.layout import Layout
import os, pathlib, time
config = read_config()
torch.set_num_threads(1)
rank, folder = config["rank"], pathlib.Path(config["folder"])
if rank == 0:
    store, address = listen("127.0.0.1", 0, 4, timeout=60)
    (folder / "address.part").write_text(address)
    (folder / "address.part").rename(folder / "address")
else:
    while not (folder / "address").exists():
        time.sleep(0.01)
    store = connect((folder / "address").read_text(), 4, timeout=60)
groups = form(rank, 4, Layout(pp=2, tp=2), store, torch.device("cpu"), timeout=60, returns_tokens=True)
world, tp, pp = groups.world, groups.tp, groups.pp

def mine(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float32).to(dtype)

out = {"places": torch.tensor([tp.rank, tp.size, pp.rank, pp.size, world.rank, world.size])}
for name, shape in (("small", (3, 5)), ("large", (1, config["large"])), ("empty", (0, 8))):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out[f"sum {name} {dtype}"] = world.all_reduce(mine(*shape, dtype=dtype))
out["tp sum"] = tp.all_reduce(torch.tensor([[1.0 + rank]]))
out["tp sum bf16"] = tp.all_reduce(mine(2, 7, dtype=torch.bfloat16))
norm, residual = tp.all_reduce(mine(2, 8), ResidualRmsNorm(torch.ones(2, 8), torch.full((8,), 2.0), 1e-6))
out["norm"], out["residual"] = norm, residual
out["gather last"] = world.all_gather(mine(2, 3))
out["gather first"] = world.all_gather(mine(2, 3), dim=0)
for dtype in (torch.float32, torch.bfloat16):
    out[f"all to all {dtype}"] = world.all_to_all(mine(8, 3, dtype=dtype))
    out[f"reduce-scatter {dtype}"] = world.reduce_scatter(mine(8, 3, dtype=dtype))
    counts = [(rank + to) % 3 for to in range(4)]
    splits = Splits(counts, [(source + rank) % 3 for source in range(4)])
    out[f"all to all uneven {dtype}"] = world.all_to_all(mine(sum(counts), 3, dtype=dtype), splits)
out["all to all empty"] = world.all_to_all(mine(0, 3))
out["broadcast"] = world.broadcast(mine(4), 2)
if pp.rank == 0:
    for number in range(config["sends"]):
        block = torch.full((3, 2), float(number + 10 * rank))
        pp.send(block, 1)
        block.fill_(-1.0)
else:
    time.sleep(0.3)
    out["received"] = torch.stack([pp.receive(torch.empty(3, 2), 0) for _ in range(config["sends"])])
if groups.ends.rank == 1:
    groups.ends.send(torch.tensor([rank]), 0)
else:
    out["returned"] = groups.ends.receive(torch.zeros(1, dtype=torch.int64), 1)
world.barrier()
torch.save(out, folder / f"out{rank}.part")
(folder / f"out{rank}.part").rename(folder / f"out{rank}")
os._exit(0)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "group_rank.py").write_text(RANK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        facts: dict[str, Any] = {"folder": str(folder), "large": LARGE, "sends": 2 * SENDS_IN_FLIGHT}
        children = [launch.start("group_rank", {"rank": rank, **facts}, f"phalanx rank {rank}") for rank in range(WORLD)]
    ended = launch.wait(children, 200)
    launch.stop(children, grace=0)
    assert ended
    return [torch.load(folder / f"out{rank}") for rank in range(WORLD)]


def part(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def test_each_rank_stands_where_the_layout_says(results: list[dict[str, torch.Tensor]]) -> None:
    assert [r["places"].tolist() for r in results] == [[r % 2, 2, r // 2, 2, r, 4] for r in range(WORLD)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "shape"), [("small", (3, 5)), ("large", (1, LARGE)), ("empty", (0, 8))])
def test_a_sum_is_rank_order_fp32_rounded_once_on_every_rank(
    results: list[dict[str, torch.Tensor]], name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [part(rank, *shape).to(dtype).float() for rank in range(WORLD)]
    expected = reduce(torch.add, parts).to(dtype)
    for result in results:
        assert torch.equal(result[f"sum {name} {dtype}"], expected)


def test_the_tensor_parallel_sum_is_among_its_own_ranks(results: list[dict[str, torch.Tensor]]) -> None:
    assert [r["tp sum"].item() for r in results] == [3.0, 3.0, 7.0, 7.0]
    for a, b in ((0, 1), (2, 3)):
        expected = (part(a, 2, 7).bfloat16().float() + part(b, 2, 7).bfloat16().float()).bfloat16()
        assert torch.equal(results[a]["tp sum bf16"], expected)
        assert torch.equal(results[b]["tp sum bf16"], expected)


def test_the_fusion_runs_behind_the_sum(results: list[dict[str, torch.Tensor]]) -> None:
    residual = part(0, 2, 8) + part(1, 2, 8) + 1.0
    norm = residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + 1e-6) * 2.0
    assert torch.equal(results[0]["residual"], residual)
    torch.testing.assert_close(results[1]["norm"], norm, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_to_all_and_reduce_scatter(results: list[dict[str, torch.Tensor]], dtype: torch.dtype) -> None:
    sent = [torch.randn(8, 3, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(WORLD)]
    for rank, out in enumerate(results):
        parts = [x[2 * rank : 2 * rank + 2] for x in sent]
        assert torch.equal(out[f"all to all {dtype}"], torch.cat(parts))
        assert torch.equal(out[f"reduce-scatter {dtype}"], reduce(lambda a, b: a + b, [x.float() for x in parts]).to(dtype))
        assert out["all to all empty"].shape == (0, 3)
        uneven = []
        for source in range(WORLD):
            counts = [(source + to) % 3 for to in range(WORLD)]
            rows = torch.randn(sum(counts), 3, generator=torch.Generator().manual_seed(source)).to(dtype)
            uneven.append(torch.split(rows, counts)[rank])
        assert torch.equal(out[f"all to all uneven {dtype}"], torch.cat(uneven))


def test_gather_joins_in_rank_order_along_any_dim(results: list[dict[str, torch.Tensor]]) -> None:
    parts = [part(rank, 2, 3) for rank in range(WORLD)]
    for result in results:
        assert torch.equal(result["gather last"], torch.cat(parts, -1))
        assert torch.equal(result["gather first"], torch.cat(parts, 0))


def test_broadcast_gives_everybody_the_sources_tensor(results: list[dict[str, torch.Tensor]]) -> None:
    for result in results:
        assert torch.equal(result["broadcast"], part(2, 4))


def test_a_sender_runs_ahead_and_may_rewrite_what_it_sent(results: list[dict[str, torch.Tensor]]) -> None:
    for rank in (2, 3):
        numbers = torch.arange(2.0 * SENDS_IN_FLIGHT) + 10 * (rank - 2)
        assert torch.equal(results[rank]["received"], numbers[:, None, None].expand(-1, 3, 2))


def test_the_last_stage_sends_to_the_first_of_its_own_slice(results: list[dict[str, torch.Tensor]]) -> None:
    assert [results[rank]["returned"].tolist() for rank in (0, 1)] == [[2], [3]]


def test_a_world_of_one_is_solo() -> None:
    groups = torch_group.form(0, 1, Layout(), "127.0.0.1:1", torch.device("cpu"))
    assert all(isinstance(group, Solo) for group in (groups.tp, groups.pp, groups.world))


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="has 4"):
        torch_group.form(0, 2, Layout(pp=2, tp=2), "127.0.0.1:1", torch.device("cpu"))


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2000"), True),
        (ConnectionResetError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("socket"), False),
    ],
)
def test_a_lost_peer_is_told_from_a_cause(error: BaseException, is_consequence: bool) -> None:
    assert torch_group.lost_peer(error) is is_consequence
