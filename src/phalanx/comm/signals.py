# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
# ruff: noqa: RUF005 (Triton's tuples grow by +)
"""How kernels of one group exchange data: the data is its own signal, in two halves of a workspace.

Every rank maps every other rank's workspace. A word that holds SENTINEL has not arrived. A kernel that writes to a peer (`push`)
never sends that word. A kernel that waits (`poll`) reads until every word of its vectors has changed, then puts the sentinel back
(`clear`). So there is no flag and no barrier: the data's arrival is the signal.

SENTINEL is all ones: in bf16, fp16 and fp32 alike a NaN that no arithmetic produces. A payload that contains it is sent as
0x7FFF7FFF, which is a NaN in each of the three as well; every other value, -0.0 and infinities among them, travels bit for bit.

Call number n of a group, counted on the device, uses half n % 2. Two halves are enough: a peer that runs call n + 2 has finished
call n + 1, for which it needed data of this rank (directly or through a sum), which this rank sent after its call n had ended, with
that half cleared. This requires that all calls of a group run in one order on every rank, each after the one before it (one stream,
or streams joined by events), and that each rank of a call needs data of every other, as an all-reduce does.

Kernels get the counts of their group's calls as `epoch`, a tuple: (a pointer to two int32, the number and the tickets drawn), and
where the rank's GPU says where it is, the two numbers of `device_marks.DeviceMarks.of_kernel` behind it.

Data that other kernels wrote into a peer's memory has no such words. There a flag tells that it has arrived (`raise_flag`,
`await_flag`): the number of the call that reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SENTINEL = tl.constexpr(-1)
_SENT_INSTEAD = tl.constexpr(0x7FFF7FFF)

# An address of zero stands for a lane that is masked off.
_PUSH = tl.constexpr("""{
  .reg .pred %go;
  setp.ne.u64 %go, $1, 0;
  @%go st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
  mov.b32 $0, 0;
}""")
_CLEAR = tl.constexpr("""{
  .reg .pred %go;
  .reg .b32 %ones;
  setp.ne.u64 %go, $1, 0;
  mov.b32 %ones, -1;
  @%go st.global.v4.b32 [$1], {%ones, %ones, %ones, %ones};
  mov.b32 $0, 0;
}""")
_NUMBER = tl.constexpr("ld.volatile.global.b32 $0, [$1];")
# The first thread of each program draws a ticket; the last ticket of the grid advances the call number. `inc` wraps to zero by
# itself. The two steps are separate, so that the wait for the data hides the ticket's latency.
_TICKET = tl.constexpr("""{
  .reg .pred %first;
  .reg .b32 %thread;
  mov.u32 %thread, %tid.x;
  setp.eq.u32 %first, %thread, 0;
  mov.b32 $0, -1;
  @%first atom.relaxed.gpu.global.inc.u32 $0, [$1 + 4], $2;
}""")
_ADVANCE = tl.constexpr("""{
  .reg .pred %last;
  setp.eq.u32 %last, $2, $3;
  @%last red.relaxed.gpu.global.add.u32 [$1], 1;
  mov.b32 $0, 0;
}""")

# The first thread of the grid counts the call and adds its number, in one word of this GPU. Nothing waits for that: a load, or a
# store to the host, would keep a short kernel from its end. A number below zero is of no call.
_MARK = tl.constexpr("""{
  .reg .pred %go;
  .reg .b32 %thread, %program, %one;
  .reg .b64 %word;
  mov.u32 %thread, %tid.x;
  mov.u32 %program, %ctaid.x;
  or.b32 %thread, %thread, %program;
  setp.eq.u32 %go, %thread, 0;
  setp.ge.and.s32 %go, $2, 0, %go;
  mov.b32 %one, 1;
  mov.b64 %word, {%one, $2};
  @%go red.relaxed.gpu.global.add.u64 [$1], %word;
  mov.b32 $0, 0;
}""")


# Programs of one kernel exchange an fp64 on a board: each half of it lies beside the call's number, which marks it as new.
_WRITE_BOARD = tl.constexpr("""{
  .reg .pred %first;
  .reg .b32 %thread;
  .reg .b64 %one, %two;
  mov.u32 %thread, %tid.x;
  setp.eq.u32 %first, %thread, 0;
  mov.b64 %one, {$2, $4};
  mov.b64 %two, {$3, $4};
  @%first st.relaxed.gpu.global.v2.b64 [$1], {%one, %two};
  mov.b32 $0, 0;
}""")
_READ_BOARD = tl.constexpr("""{
  .reg .pred %go, %again;
  .reg .b32 %first, %second;
  .reg .b64 %one, %two;
  setp.ne.u64 %go, $2, 0;
  mov.b32 $0, 0;
  mov.b32 $1, 0;
  mov.b32 %first, $3;
  mov.b32 %second, $3;
HEAR:
  @%go ld.volatile.global.v2.b64 {%one, %two}, [$2];
  @%go mov.b64 {$0, %first}, %one;
  @%go mov.b64 {$1, %second}, %two;
  setp.ne.b32 %again, %first, $3;
  setp.ne.or.b32 %again, %second, $3, %again;
  @%again bra HEAR;
}""")
# All that this rank's kernels wrote before, to any memory, is visible to the one that has read the flag.
_RAISE = tl.constexpr("""{
  .reg .pred %first;
  .reg .b32 %thread;
  mov.u32 %thread, %tid.x;
  setp.eq.u32 %first, %thread, 0;
  @%first fence.acq_rel.sys;
  @%first st.relaxed.sys.global.b32 [$1], $2;
  mov.b32 $0, 0;
}""")
_AWAIT = tl.constexpr("""{
  .reg .pred %again;
  .reg .b32 %found;
AWAIT:
  ld.acquire.sys.global.b32 %found, [$1];
  setp.ne.b32 %again, %found, $2;
  @%again bra AWAIT;
  mov.b32 $0, 0;
}""")


@triton.constexpr_function
def _poll_asm(sources, pack):
    """Read `pack` vectors from each source, all of them again until no word is the sentinel."""
    groups = sources * pack
    # Triton orders registers by tensor, then by the element in the pack: word k of source s, element e.
    words = [[f"${(4 * s + k) * pack + e}" for k in range(4)] for s in range(sources) for e in range(pack)]
    at = [f"${4 * groups + g}" for g in range(groups)]
    lines = ["{", f"  .reg .pred %again, {', '.join(f'%go{g}' for g in range(groups))};"]
    for g in range(groups):
        lines.append(f"  setp.ne.u64 %go{g}, {at[g]}, 0;")
        lines += [f"  mov.b32 {word}, 0;" for word in words[g]]
    lines.append("READ:")
    lines += [f"  @%go{g} ld.volatile.global.v4.b32 {{{', '.join(words[g])}}}, [{at[g]}];" for g in range(groups)]
    every = [word for group in words for word in group]
    lines.append(f"  setp.eq.b32 %again, {every[0]}, -1;")
    lines += [f"  setp.eq.or.b32 %again, {word}, -1, %again;" for word in every[1:]]
    lines += ["  @%again bra READ;", "}"]
    return "\n".join(lines)


@triton.constexpr_function
def _poll_constraints(sources, pack):
    return ",".join(["=&r"] * (4 * sources * pack) + ["l"] * (sources * pack))


@triton.constexpr_function
def _poll_types(sources):
    return (tl.int32,) * (4 * sources)


@triton.constexpr_function
def _pack_of(sources, block, warps):
    """Vectors of one thread that are read together: two, where it has so many and enough registers."""
    return 2 if block % (64 * warps) == 0 and sources <= 3 else 1


@triton.constexpr_function
def slot(rank, source, world):
    """The slot of `source` in the workspace of `rank`: 0 .. world - 2."""
    return (source - rank + world - 1) % world


@triton.jit
def dependents(SM: tl.constexpr):
    """Let the next kernel start early, if it was launched so (PDL); it waits before it reads what this one writes."""
    if SM >= 90:
        gdc_launch_dependents()


@triton.jit
def enter(epoch, SM: tl.constexpr):
    """Wait for the kernels before this one; then return the number of this call."""
    if SM >= 90:
        gdc_wait()
    return tl.inline_asm_elementwise(_NUMBER, "=r,l", [epoch[0]], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def mark(words, call):
    """Say that the device has come to this call, where it is one: see `device_marks`. Behind `enter`, in every thread."""
    tl.inline_asm_elementwise(_MARK, "=r,l,r", [words, call], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def mark_call(epoch):
    """`mark` with what the epoch has for it, if anything."""
    if len(epoch) > 1:
        mark(epoch[1], epoch[2])


@triton.jit
def draw_ticket(epoch, programs):
    """Once per program, after all of its threads have used the number, and its data is sent: now it waits for that of its peers,
    and the device is at this call."""
    tl.debug_barrier()
    mark_call(epoch)
    return tl.inline_asm_elementwise(_TICKET, "=&r,l,r", [epoch[0], programs - 1], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def leave(epoch, programs, ticket):
    """Once per program, later: the program with the last ticket advances the number to the next call's."""
    tl.inline_asm_elementwise(_ADVANCE, "=r,l,r,r", [epoch[0], ticket, programs - 1], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def at(base, index, mask):
    """Addresses of vectors `index` behind the integer address `base`; zero where the mask is off."""
    return tl.where(mask, base + index.to(tl.int64) * 16, 0)


@triton.jit
def seal(words):
    """The vector as it may be sent: with no word that is the sentinel."""
    sealed = ()
    for k in tl.static_range(4):
        sealed = sealed + (tl.where(words[k] == SENTINEL, _SENT_INSTEAD, words[k]),)
    return sealed


@triton.jit
def push(address, sealed):
    """Write sealed vectors into a workspace, a peer's or this rank's own."""
    tl.inline_asm_elementwise(
        _PUSH, "=r,l,r,r,r,r", [address, sealed[0], sealed[1], sealed[2], sealed[3]], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def clear(address):
    """Put the sentinel back."""
    tl.inline_asm_elementwise(_CLEAR, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def poll(addresses, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """Wait for the vectors at each of these addresses (a tuple), all sources together: their words, one source after the other.

    BLOCK: vectors of each source; WARPS: of the program.
    """
    SOURCES: tl.constexpr = len(addresses)
    PACK: tl.constexpr = _pack_of(SOURCES, BLOCK, WARPS)
    return tl.inline_asm_elementwise(
        _poll_asm(SOURCES, PACK), _poll_constraints(SOURCES, PACK), addresses, dtype=_poll_types(SOURCES), is_pure=False, pack=PACK
    )


@triton.jit
def write_board(board, place, value, number):
    """Put an fp64 scalar on the board (a pointer, 16 bytes per place), for `read_board` in other programs of call `number`."""
    bits = value.to(tl.int64, bitcast=True)
    address = board.to(tl.int64) + place.to(tl.int64) * 16
    halves = [address, bits.to(tl.int32), (bits >> 32).to(tl.int32), number + 1]
    tl.inline_asm_elementwise(_WRITE_BOARD, "=r,l,r,r,r", halves, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_board(board, places, mask, number):
    """Wait for what `write_board` put at these places in call `number`: fp64; zero where the mask is off. Reading twice is
    harmless."""
    low, high = tl.inline_asm_elementwise(
        _READ_BOARD,
        "=&r,=&r,l,r",
        [at(board.to(tl.int64), places, mask), number + 1],
        dtype=(tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    return ((low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)).to(tl.float64, bitcast=True)


@triton.jit
def raise_flag(address, number):
    """Set the flag at this integer address of a peer's memory: all kernels before this one have written what call `number` reads
    there. Once per call, behind `enter`."""
    tl.inline_asm_elementwise(_RAISE, "=r,l,r", [address, number + 1], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_flag(address, number):
    """Wait for the flag of call `number`, in every thread, so that each may read what was written before it."""
    tl.inline_asm_elementwise(_AWAIT, "=r,l,r", [address, number + 1], dtype=tl.int32, is_pure=False, pack=1)
