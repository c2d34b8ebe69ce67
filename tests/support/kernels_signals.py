# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""`comm.signals` in Triton's interpreter, which has one thread and knows no PTX, so that nobody can wait: words are
read and written by plain loads and stores, and are never cleared."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def dependents(SM: tl.constexpr):
    pass


@triton.jit
def enter(epoch, SM: tl.constexpr):
    return tl.load(epoch[0])


@triton.jit
def mark(words, call):
    if (tl.program_id(0) == 0) & (call >= 0):
        count = words.to(tl.pointer_type(tl.int64))
        tl.store(count, tl.load(count) + (call.to(tl.int64) << 32) + 1)


@triton.jit
def mark_call(epoch):
    if len(epoch) > 1:
        mark(epoch[1], epoch[2])


@triton.jit
def draw_ticket(epoch, programs):
    mark_call(epoch)
    return programs


@triton.jit
def leave(epoch, programs, ticket):
    pass


@triton.jit
def clear(address):
    pass


@triton.jit
def push(address, sealed):
    place = address.to(tl.pointer_type(tl.int32))
    for k in tl.static_range(4):
        tl.store(place + k, sealed[k], address != 0)


@triton.jit
def poll(addresses, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    words = ()
    for source in tl.static_range(len(addresses)):
        place = addresses[source].to(tl.pointer_type(tl.int32))
        for k in tl.static_range(4):
            words = words + (tl.load(place + k, addresses[source] != 0, 0),)
    return words


@triton.jit
def write_board(board, place, value, number):
    tl.store(board + place * 2, value.to(tl.int64, bitcast=True))


@triton.jit
def read_board(board, places, mask, number):
    return tl.load(board + places * 2, mask, 0).to(tl.float64, bitcast=True)


def replace_signals(*modules: Any) -> None:
    """Let these modules of kernels use the functions above."""
    for module in modules:
        for act in (dependents, enter, mark, mark_call, draw_ticket, leave, clear, push, poll, write_board, read_board):
            if hasattr(module, act.__name__):
                setattr(module, act.__name__, act)
