# SPDX-License-Identifier: Apache-2.0
"""What speculative decoding gains: tokens of a row and step, which the user states, over the time of a step with drafts. A plan has
it for one number of drafts; `SimulatedDrafts` chooses it for each simulated step, as the engine does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

from phalanx.config.quantization import on_load
from phalanx.config.speculation import equal_rates
from phalanx.engine.draft_depth import DraftDepth
from phalanx.errors import OptionError
from phalanx.layout.draft import DraftNetwork, network_bytes
from phalanx.layout.eagle3 import Eagle3
from phalanx.layout.families import layer_tensors
from phalanx.layout.layout import Layout
from phalanx.layout.mtp import Mtp
from phalanx.layout.weights import tensor_bytes, weight_bytes
from phalanx.planner.burst import computed_rows, decode_round
from phalanx.planner.cost import Costs, Work


@dataclass(frozen=True)
class Speculation:
    """drafts: k, that each row verifies, or verifies at most. network: what proposes them; None: prompt lookup. tokens: of a row
    and step with k drafts on average, the sampled one among them (vLLM's acceptance length). stated: how often the draft at each
    place is accepted, if those before it are; empty: equally often. table: of drafts, by the rows of a step: see `DraftDepth`."""

    drafts: int
    network: DraftNetwork | None
    tokens: float
    stated: tuple[float, ...] = ()
    table: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.drafts + 1:
            raise OptionError(
                f"acceptance_length={self.tokens:g} is not from 1 to {self.drafts + 1}",
                why=f"a row of a step yields the sampled token and up to {self.drafts} drafts (num_speculative_tokens)",
            )

    @classmethod
    def of_rates(
        cls, rates: Sequence[float], network: DraftNetwork | None, table: tuple[tuple[int, int, int], ...] | None = None
    ) -> Speculation:  # fmt: skip
        """Of drafts that are accepted so often at each place."""
        return cls(len(rates), network, 1 + sum(accumulate(rates, mul)), tuple(rates), table)

    @property
    def rates(self) -> tuple[float, ...]:
        """At each place."""
        return self.stated or tuple(equal_rates(self.tokens, self.drafts))


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
    width, network = speculation.drafts + 1, DraftCosts(costs, speculation.network)
    tokens = requests * width
    draft = network.extend(_decodes(costs, tokens, context, most * width))
    draft += (speculation.drafts - 1 if network.reads_next else speculation.drafts) * network.advance(requests, context, most)
    return Gain(
        requests, speculation.drafts, speculation.tokens, 1e3 * decode_round(costs, requests, context, most),
        1e3 * decode_round(costs, tokens, context, most * width), 1e3 * draft,
    )  # fmt: skip


def _decodes(costs: Costs, tokens: int, context: float, most: int) -> Work:
    return Work(computed_rows(costs, tokens, max(most, tokens)), tokens, tokens * context, longest=context)


class DraftCosts:
    """Seconds of the passes of what proposes drafts, on the last stage. A language model is priced as any model, a head as the
    layer of Llama that it is, by its bytes; a module of multi-token prediction as the part of the target that its weights are.
    Prompt lookup takes none.

    reads_next: what takes in the step's tokens (`extend`) gives the first draft; else each draft is a pass of one token for each
    row (`advance`)."""

    def __init__(self, costs: Costs, network: DraftNetwork | None) -> None:
        self._costs: Costs | None = None
        self.reads_next = network is not None and network.reads_target
        if network is None:
            return
        layout, dtype = Layout(tp=costs.layout.tp), costs.dtype
        if isinstance(network, Mtp):
            self._costs = replace(costs, layout=layout)
            self._first = self._next = network_bytes(network, dtype, layout.tp) / sum(weight_bytes(costs.shape, dtype, layout))
            return
        shape, self._first, self._next = network.shape, 1.0, 1.0
        if isinstance(network, Eagle3):
            dtype = "bf16" if on_load(dtype) else dtype
            shape = replace(shape, vocab_size=network.draft_vocab)
            bytes_of = {tensor.name: tensor_bytes(shape, tensor, dtype, layout) for tensor in network.tensors()}
            layer = sum(tensor_bytes(shape, tensor, dtype, layout) for tensor in layer_tensors(shape, 0))
            read = sum(bytes_of.values()) - bytes_of.get("embed_tokens.weight", 0)
            known = layer + bytes_of["lm_head.weight"]
            self._first, self._next = read / known, (read - bytes_of["fc.weight"]) / known  # fc takes in the target's states
        self._costs = replace(costs, shape=shape, dtype=dtype, layout=layout)

    def extend(self, work: Work) -> float:
        """Beside a step of the target with this work, whose tokens it takes in."""
        return 0.0 if self._costs is None else self._first * sum(self._costs.step_seconds(work))

    def advance(self, rows: int, context: float, most: int) -> float:
        """One pass, of a token for each row. most: rows of the largest graph."""
        return (
            0.0 if self._costs is None else self._next * sum(self._costs.step_seconds(_decodes(self._costs, rows, context, most)))
        )


class SimulatedDrafts:
    """Speculative decoding in a simulation: how many drafts a step verifies is chosen by the engine's own `DraftDepth`, on steps
    that are priced instead of measured; how many are accepted is drawn at the stated rates. rows: of a step, at most."""

    def __init__(self, costs: Costs, speculation: Speculation, rows: int, seed: int = 0) -> None:
        self._costs, self._network, self._rates = costs, DraftCosts(costs, speculation.network), speculation.rates
        self._rows, self._context, self._random = rows, 0.0, random.Random(seed)
        self.depth = DraftDepth(self, speculation.drafts, speculation.table)

    def step_seconds(self, work: Work, rows: int, kv: float, proposed: int) -> float:
        """What a step takes longer on the last stage. work: of the step. rows: that it samples, of kv cached tokens together, for
        each of which so many drafts are proposed."""
        self._context = kv / rows if rows else self._context
        passes = max(proposed - 1, 0) if self._network.reads_next else proposed
        return self._network.extend(work) + (passes * self._network.advance(rows, self._context, self._rows) if rows else 0.0)

    def accepted(self, drafts: int) -> int:
        """Of a row that verifies so many."""
        return next((place for place in range(drafts) if self._random.random() >= self._rates[place]), drafts)

    def decode_seconds(self, tokens: int, drafts: int = 0) -> float:
        """As `StepTimes`: of a step of so many tokens of decode rows, that proposes so many drafts for each row."""
        rows = tokens // (drafts + 1)
        work = _decodes(self._costs, tokens, self._context, self._rows * (drafts + 1))
        return max(self._costs.step_seconds(work)) + self.step_seconds(work, rows, rows * self._context, drafts)

    def knows_decodes(self, tokens: int) -> bool:
        """As `StepTimes`: every step has its price."""
        return tokens > 0
