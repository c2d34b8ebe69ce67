# SPDX-License-Identifier: Apache-2.0
"""Whether a strategy can run a message at all: exact, and the same on every rank."""

from __future__ import annotations

from phalanx.hardware.fingerprint import LINKS, Fingerprint
from phalanx.tables.message import Message
from phalanx.tables.strategy import SUPPORTED, Strategy

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
    return None
