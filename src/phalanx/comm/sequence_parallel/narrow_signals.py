# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
# Kernels are written in Triton's language: its types are not Python's.
"""`signals` for data narrower than 16 bytes: vectors in e4m3, and single words. The protocol is the same: the sentinel is a word of
4 bytes, so that any number of words may be sent alone, and read together with others."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.comm.signals import SENTINEL

_SENT_INSTEAD = tl.constexpr(0x7FFF7FFF)  # four e4m3 that are NaN, as the sentinel's are; as fp32 it is a NaN too

# An address of zero stands for a lane that is masked off.
_PUSH_TWO = tl.constexpr("""{
  .reg .pred %go;
  setp.ne.u64 %go, $1, 0;
  @%go st.relaxed.sys.global.v2.b32 [$1], {$2, $3};
  mov.b32 $0, 0;
}""")
_PUSH_ONE = tl.constexpr("""{
  .reg .pred %go;
  setp.ne.u64 %go, $1, 0;
  @%go st.relaxed.sys.global.b32 [$1], $2;
  mov.b32 $0, 0;
}""")
_PUSH_ONCE = tl.constexpr("""{
  .reg .pred %first;
  .reg .b32 %thread;
  mov.u32 %thread, %tid.x;
  setp.eq.u32 %first, %thread, 0;
  @%first st.relaxed.sys.global.b32 [$1], $2;
  mov.b32 $0, 0;
}""")
_POLL_ONE = tl.constexpr("""{
  .reg .pred %go, %again;
  setp.ne.u64 %go, $1, 0;
  mov.b32 $0, 0;
WORD:
  @%go ld.volatile.global.b32 $0, [$1];
  setp.eq.b32 %again, $0, -1;
  @%again bra WORD;
}""")
_CLEAR_ONE = tl.constexpr("""{
  .reg .pred %go;
  .reg .b32 %ones;
  setp.ne.u64 %go, $1, 0;
  mov.b32 %ones, -1;
  @%go st.global.b32 [$1], %ones;
  mov.b32 $0, 0;
}""")


@triton.jit
def sealed_word(word):
    """The word as it may be sent: not the sentinel."""
    return tl.where(word == SENTINEL, _SENT_INSTEAD, word)


@triton.jit
def sealed_codes(codes):
    """A vector in e4m3 (int64 of 8 bytes, or int32 of 4) as it may be sent."""
    if codes.dtype == tl.int64:
        low, high = sealed_word(codes.to(tl.int32)), sealed_word((codes >> 32).to(tl.int32))
        sealed = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    else:
        sealed = sealed_word(codes)
    return sealed


@triton.jit
def push_codes(base, index, mask, codes):
    """Write sealed codes (int64 or int32) number `index` behind the integer address `base` of a peer's workspace."""
    if codes.dtype == tl.int64:
        address = tl.where(mask, base + index.to(tl.int64) * 8, 0)
        tl.inline_asm_elementwise(
            _PUSH_TWO, "=r,l,r,r", [address, codes.to(tl.int32), (codes >> 32).to(tl.int32)], tl.int32, is_pure=False, pack=1
        )
    else:
        address = tl.where(mask, base + index.to(tl.int64) * 4, 0)
        tl.inline_asm_elementwise(_PUSH_ONE, "=r,l,r", [address, codes], tl.int32, is_pure=False, pack=1)


@triton.jit
def push_once(address, word):
    """Write one sealed word (scalars) into a peer's workspace: by the first thread alone, since a word that arrived twice might
    arrive after its reader has cleared the first."""
    tl.inline_asm_elementwise(_PUSH_ONCE, "=r,l,r", [address, word], tl.int32, is_pure=False, pack=1)


@triton.jit
def poll_words(address):
    """Wait for the words at these addresses, one to a thread."""
    return tl.inline_asm_elementwise(_POLL_ONE, "=&r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def clear_word(address):
    """Put the sentinel back."""
    tl.inline_asm_elementwise(_CLEAR_ONE, "=r,l", [address], tl.int32, is_pure=False, pack=1)
