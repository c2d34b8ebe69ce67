# SPDX-License-Identifier: Apache-2.0
"""A grammar for tests of the scheduler."""

from __future__ import annotations

VOCAB = 50


class Evens:
    """A grammar of even tokens that is complete after `length` of them."""

    def __init__(self, compiled: str) -> None:
        self.left = int(compiled)

    def mask(self) -> bytes:
        return bytes([0b01010101] * (4 * ((VOCAB + 31) // 32)))

    def accept(self, token: int) -> None:
        if token % 2:
            raise ValueError(f"{token} is odd")
        self.left -= 1

    @property
    def finished(self) -> bool:
        return self.left <= 0
