# SPDX-License-Identifier: Apache-2.0
"""A grammar for tests of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

VOCAB = 50


class Evens:
    """A grammar of even tokens that is complete after `length` of them."""

    def __init__(self, compiled: str) -> None:
        self.left = int(compiled)

    def mask(self) -> bytes:
        return bytes([0b01010101] * (4 * ((VOCAB + 31) // 32)))

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        taken = list(takewhile(lambda draft: draft >= 0 and draft % 2 == 0, drafts))
        return [self.mask()] * (1 + min(len(taken), max(self.left - 1, 0)))

    def accept(self, token: int) -> None:
        if token % 2:
            raise ValueError(f"{token} is odd")
        self.left -= 1

    @property
    def finished(self) -> bool:
        return self.left <= 0
