# SPDX-License-Identifier: Apache-2.0
"""Time sequence parallelism in all-reduces: `torchrun --nproc-per-node N -m benchmarks.comm.rs_norm_ag --csv OUT.csv --json
OUT.json`.

The sum over ranks of [tokens, 8192] bf16, residual, norm and e4m3 with a scale per token, as between the layers of a model in FP8:
by RS_NORM_AG, by what AUTO picks for a residual that is not sharded, by NCCL and a kernel. Each is verified first, against the
unfused kernels; a figure is 50 calls in one CUDA graph, the median of 9 replays, the maximum over ranks, as in allreduce.py. At
some sizes other launches run too: warps of a program, programs on a multiprocessor, movers among these.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.comm.allreduce import measure, verdict
from phalanx.comm.group import ResidualRmsNorm, finish
from phalanx.comm.sequence_parallel import ShardedResidual, rank_rows
from phalanx.comm.sequence_parallel.rs_norm_ag import RsNormAg
from phalanx.comm.symmetric import SymmetricWorkspace, form_workspace
from phalanx.comm.torch_group import TorchGroup
from phalanx.comm.tuned_group import tuned
from phalanx.kernels import reference
from phalanx.tables.message import Fusion

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SWEPT = (256, 512, 8192)
LAUNCHES = ((16, 1, 1), (32, 1, 1), (8, 2, 1), (16, 2, 1), (16, 2, 2), (16, 3, 1), (16, 3, 2))
HIDDEN, FUSION = 8192, Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE
Call = Callable[[], Any]


def cases(tokens: int, workspace: SymmetricWorkspace, base: TorchGroup, picked: Any) -> Iterator[tuple[str, Call]]:
    """(name, call), each verified before it is handed out."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16)
    shared = torch.Generator(device="cuda").manual_seed(99)
    residual = torch.randn(tokens, HIDDEN, device="cuda", generator=shared).to(torch.bfloat16)
    fusion = ResidualRmsNorm(residual, torch.ones_like(residual[0]), 1e-5, "fp8")
    parts = [torch.empty_like(x) for _ in range(base.size)]
    dist.all_gather(parts, x)
    wanted = finish(reference.all_reduce(parts), fusion)
    del parts
    for shape in (None, *(LAUNCHES if tokens in SWEPT else ())):
        *outputs, new = RsNormAg(workspace).all_reduce_norm(x, fusion, shape)
        assert isinstance(new, ShardedResidual)
        good = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(outputs, wanted, strict=False))
        for rows in rank_rows(tokens, new.chunk_rows, base.rank, base.size):
            good = good and torch.equal(new.local[rows.start : rows.stop], wanted[-1][rows.start : rows.stop])
        name = "RS_NORM_AG" if shape is None else "RS_NORM_AG {}w {} per sm, {} move".format(*shape)
        verdict(good, f"{name}, {tokens} tokens", base.process_group)
        again = replace(fusion, residual=new)  # as behind the second layer
        yield name, lambda s=shape, f=again: RsNormAg(workspace).all_reduce_norm(x, f, s)
    yield "AUTO, not sharded", lambda: picked.all_reduce(x, fusion)
    zeros = torch.zeros_like(x)  # summed in place
    yield "NCCL + ours", lambda: finish(base.all_reduce(zeros), fusion)


def run(options: argparse.Namespace) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    world = dist.group.WORLD
    assert world is not None
    base, longest = TorchGroup(world, device), max(TOKENS) * HIDDEN * 2
    workspace, picked = form_workspace(world, device, longest), tuned(base, message_bytes=longest)
    rows = []
    for tokens in TOKENS:
        for name, call in cases(tokens, workspace, base, picked):
            us = measure(call, world)
            decision = picked.decide(tokens, HIDDEN, "bf16", FUSION).name if name.startswith("AUTO") else ""
            rows.append({"world": base.size, "tokens": tokens, "hidden": HIDDEN, "what": name, "ran": decision, "us": round(us, 2)})
    if base.rank == 0:
        show(rows)
        if options.csv:
            with Path(options.csv).open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        if options.json:
            Path(options.json).write_text(json.dumps({"about": harness.about(), "rows": rows}, indent=1) + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each number of tokens, then the launches, the fastest first."""
    for tokens in TOKENS:
        row_of = {row["what"]: row for row in rows if row["tokens"] == tokens}
        auto = row_of["AUTO, not sharded"]
        ours, theirs, ran = row_of["RS_NORM_AG"]["us"], row_of["NCCL + ours"]["us"], auto["ran"].split("/")[0]
        print(f"tp{auto['world']} {tokens:>5} tokens: RS_NORM_AG {ours:>7} us, {ran} {auto['us']:>7}, NCCL {theirs:>7}")
        launches = sorted((row["us"], name) for name, row in row_of.items() if name.startswith("RS_NORM_AG "))
        if launches:
            print("    " + "; ".join(f"{name.removeprefix('RS_NORM_AG ')} {us}" for us, name in launches), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["RANK"])))
    run(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
