# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding gains: tokens of a row and step, which the user states, over the time of a step with drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import OptionError
from phalanx.layout.draft import DraftLm, DraftNetwork, network_bytes
from phalanx.layout.weights import weight_bytes
from phalanx.planner.burst import decode_round
from phalanx.planner.cost import Costs


@dataclass(frozen=True)
class Speculation:
    """drafts: k, that each row verifies. network: what proposes them; None: prompt lookup. tokens: of a row and step on average,
    the sampled one among them (vLLM's acceptance length)."""

    drafts: int
    network: DraftNetwork | None
    tokens: float

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.drafts + 1:
            raise OptionError(
                f"acceptance_length={self.tokens:g} is not from 1 to {self.drafts + 1}",
                why=f"a row of a step yields the sampled token and up to {self.drafts} drafts (num_speculative_tokens)",
            )


@dataclass(frozen=True)
class Gain:
    """Of one plan, for decode steps of `rows` requests on a replica. step_ms: without drafts; verify_ms: of the target's step with
    drafts; draft_ms: of what proposes the next ones."""

    rows: int
    drafts: int
    tokens: float
    step_ms: float
    verify_ms: float
    draft_ms: float

    @property
    def ms_per_token(self) -> float:
        return (self.verify_ms + self.draft_ms) / self.tokens

    @property
    def speed_up(self) -> float:
        """Below 1 drafts cost more than they give, and the engine verifies none."""
        return self.step_ms / self.ms_per_token

    @property
    def least_tokens(self) -> float:
        """Tokens of a row and step with which drafts pay."""
        return (self.verify_ms + self.draft_ms) / self.step_ms

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.rows, "num_speculative_tokens": self.drafts, "acceptance_length": self.tokens,
            "step_ms": self.step_ms, "verify_ms": self.verify_ms, "draft_ms": self.draft_ms, "ms_per_token": self.ms_per_token,
            "speed_up": self.speed_up, "least_acceptance_length": self.least_tokens,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For the report."""
        return [
            f"speculation: {self.ms_per_token:.2f} ms/token instead of {self.step_ms:.2f} with {self.rows} requests at once, "
            f"{self.speed_up:.2f}x: {self.tokens:g} tokens",
            f"of a row and step as stated, over {self.verify_ms:.2f} ms that verify {self.drafts} drafts and "
            f"{self.draft_ms:.2f} ms that propose them; drafts pay from {self.least_tokens:.2f} tokens",
        ]


def gain(costs: Costs, speculation: Speculation, requests: int, context: float, most: int) -> Gain:
    """requests: at once in one replica; context: mean tokens of one; most: as of `decode_round`. Each token of a row attends as a
    row of its own."""
    width = speculation.drafts + 1
    return Gain(
        requests, speculation.drafts, speculation.tokens, 1e3 * decode_round(costs, requests, context, most),
        1e3 * decode_round(costs, requests * width, context, most * width),
        1e3 * _draft_seconds(costs, speculation, requests, context, most),
    )  # fmt: skip


def _draft_seconds(costs: Costs, speculation: Speculation, requests: int, context: float, most: int) -> float:
    """Of the passes that propose the next drafts: one takes in the step's tokens, which gives a head's first draft; the others have
    a token of each row. A language model's are priced as those of any model. A head's take the part of the target's step that its
    weights are of the target's."""
    network, drafts = speculation.network, speculation.drafts
    if network is None:
        return 0.0
    stage = costs.layout
    if isinstance(network, DraftLm):
        own = Costs(network.shape, costs.dtype, costs.kv, type(stage)(tp=stage.tp), costs.machine, costs.strategy)
        first = decode_round(own, requests * (drafts + 1), context, most * (drafts + 1))
        return first + drafts * decode_round(own, requests, context, most)
    part = network_bytes(network, costs.dtype, stage.tp) / sum(weight_bytes(costs.shape, costs.dtype, type(stage)(tp=stage.tp)))
    first = decode_round(costs, requests * (drafts + 1), context, most * (drafts + 1))
    return part * (first + (drafts - 1) * decode_round(costs, requests, context, most))
