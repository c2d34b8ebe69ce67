# SPDX-License-Identifier: Apache-2.0
"""How many of the decodes of running requests one step of a pipeline may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DecodeCounts:
    """Numbers of running requests whose next row is a decode.

    all: whether they can go on now or not. ready: that can. last: ready ones whose next token is their last one. without_block:
    ready ones that need no new KV block for it.
    """

    all: int = 0
    ready: int = 0
    last: int = 0
    without_block: int = 0

    def share(self, stages: int, *, prompts_wait: bool) -> int:
        """Those that one step may hold. A step full of decodes takes no prompt, and while it is in flight the steps with prompts,
        which take much longer, pass the stages one after the other.

        Where no prompt waits, to spread last tokens would only take further steps: requests may end together.
        """
        spread = self.all if prompts_wait else self.all - self.last
        return min(self.ready, -(-spread // stages) + self.all - spread)
