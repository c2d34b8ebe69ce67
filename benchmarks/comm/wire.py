# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Ceilings of the wire between GPUs: `torchrun --nproc-per-node N -m benchmarks.comm.wire`.

All ranks at once push to, or pull from, all peers: bare stores and loads, no waiting for data. Prints GB/s out of (or into) a rank
for several launches, the driver's own peer copy, and what an empty kernel costs in a chain of programmatic launches.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl

from benchmarks import harness
from phalanx.comm.signals import at, dependents
from phalanx.kernels.vectors import load

_STORES = {"weak": "st.global.v4.b32", "relaxed": "st.relaxed.sys.global.v4.b32"}


@triton.constexpr_function
def _store_text(instruction):
    return "{ .reg .pred %go; setp.ne.u64 %go, $1, 0; @%go " + instruction + " [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"


@triton.jit
def _empty(SM: tl.constexpr):
    dependents(SM)
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["vectors"])
def _push(x, peers, vectors, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(vectors, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            mask = index < vectors
            words = load(x, index + step * vectors, mask, 90)
            tl.inline_asm_elementwise(
                _store_text(STORE), "=r,l,r,r,r,r",
                [at(peers[(RANK + step) % WORLD], index + RANK * vectors, mask), words[0], words[1], words[2], words[3]],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit(do_not_specialize=["vectors"])
def _pull(x, peers, vectors, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr):
    for block in range(tl.program_id(0), tl.cdiv(vectors, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        for step in tl.static_range(1, WORLD):
            mask = index < vectors
            source = peers[(RANK + step) % WORLD].to(tl.pointer_type(tl.int32))
            words = load(source, index + RANK * vectors, mask, 90)
            tl.inline_asm_elementwise(
                _store_text(STORE), "=r,l,r,r,r,r",
                [at(x.to(tl.int64), index + step * vectors, mask), words[0], words[1], words[2], words[3]],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


def graph_time(call, calls: int) -> float:
    """Microseconds per call, of the slowest rank."""
    return harness.graph_us([call] * calls, replays=7, group=dist.group.WORLD)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    total = 48 << 20
    vectors = total // (world - 1) // 16 // 1024 * 1024
    nbytes = vectors * 16 * (world - 1)
    buffer = symmetric_memory.empty(world * vectors * 4, dtype=torch.int32, device=device)
    handle = symmetric_memory.rendezvous(buffer, dist.group.WORLD.group_name)
    x = torch.zeros(world * vectors * 4, dtype=torch.int32, device=device)
    lines = []
    for programs, warps in ((1, 1), (32, 1), (8, 4), (1, 16), (1, 32), (132, 16)):
        time = graph_time(lambda p=programs, w=warps: _empty[(p,)](SM=90, num_warps=w, launch_pdl=True), 100)
        lines.append(f"empty {programs}x{warps}w {time:.2f} us")
    for kernel in (_push, _pull):
        for name, store in _STORES.items():
            for programs, warps in ((132, 4), (132, 16), (264, 16), (132, 32), (528, 8), (32, 32), (64, 16)):
                if kernel is _pull and name == "relaxed":
                    continue
                time = graph_time(
                    lambda k=kernel, s=store, p=programs, w=warps: k[(p,)](
                        x, tuple(handle.buffer_ptrs), vectors, RANK=rank, WORLD=world, BLOCK=32 * w, STORE=s, num_warps=w
                    ),
                    10,
                )
                lines.append(f"{kernel.fn.__name__[1:]} {name} {programs}x{warps}w {nbytes / time / 1e3:.0f} GB/s")
    peers = [handle.get_buffer((rank + step) % world, (vectors * 4,), torch.int32, rank * vectors * 4) for step in range(1, world)]

    def copy() -> None:
        for step, peer in enumerate(peers):
            peer.copy_(x[step * vectors * 4 : (step + 1) * vectors * 4])

    lines.append(f"copy {nbytes / graph_time(copy, 10) / 1e3:.0f} GB/s")
    if rank == 0:
        print("; ".join(lines), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
