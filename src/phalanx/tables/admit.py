# SPDX-License-Identifier: Apache-2.0
"""Whether a strategy can run a message at all: exact, and the same on every rank."""

from __future__ import annotations

from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.message import Caller, Message
from phalanx.tables.strategy import SEQUENCE_PARALLEL, SUPPORTED, Strategy

MAX_WORLD = 8


def admit(strategy: Strategy, message: Message, fingerprint: Fingerprint) -> str | None:
    """None where `strategy` can run `message`; else the reason why not, as text."""
    if strategy not in SUPPORTED:
        return f"{strategy.name} is not implemented"
    if message.fusion.quant == "nvfp4" and message.hidden % 16:
        return f"NVFP4 scales blocks of 16, and hidden size {message.hidden} is not a multiple of 16"
    if strategy is Strategy.NCCL:
        return None
    if not fingerprint.peers_reach:
        return f"ranks cannot reach each other's memory ({fingerprint.link}: {LINKS[fingerprint.link]})"
    if not 2 <= message.world <= MAX_WORLD:
        return f"{strategy.name} runs on 2 to {MAX_WORLD} ranks, not on {message.world}"
    if message.hidden % 8:
        return f"{strategy.name} moves 8 elements at a time, and hidden size {message.hidden} is not a multiple of 8"
    return _admit_sequence_parallel(strategy, message) if strategy in SEQUENCE_PARALLEL else None


def _admit_sequence_parallel(strategy: Strategy, message: Message) -> str | None:
    """What these strategies need beyond the others; any dtype will do."""
    if message.caller is Caller.REPLICATED:
        return f"{strategy.name} leaves the residual sharded, and every rank needs the whole residual here"
    if not message.fusion.shards:
        return f"{strategy.name} runs a norm, unquantized, in FP8 or both, and not {message.fusion.name}"
    if message.hidden % 16:
        return f"{strategy.name} gathers 16 elements at a time, and hidden size {message.hidden} is not a multiple of 16"
    if strategy is Strategy.RS_NORM_AG:
        return None
    if message.caller is not Caller.GEMM:
        return "GEMM_RS needs the GEMM: here its output is handed over as a tensor"
    depth = -(-message.tokens // message.world)
    if message.tokens <= depth * (message.world - 1):
        return f"GEMM_RS needs rows of every rank, and {message.tokens} tokens leave the last of {message.world} ranks without any"
    return None
