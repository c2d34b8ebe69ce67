# SPDX-License-Identifier: Apache-2.0
"""`DraftDepth`: how many drafts the rows of a step verify, from the time of steps (`StepTimes`) and from how many are accepted.

A step of R rows with k drafts each computes n = R * (k + 1) tokens, and proposes the next k drafts, in T(n, k). A row yields E(k) =
1 + p1 + p1 * p2 + ... tokens, where p_i is how often the draft at place i is accepted if those before it are. The best k has the
most tokens in a second, E(k) / T(R * (k + 1), k); it is 0 where drafts would cost more than they give.

Both are measured as steps run. T of a size that was not met lately is taken to be the longest of the smaller ones with no more
drafts: then the size is tried, and known. While k is 0 nothing is learnt about the drafts, so a few steps verify some now and then,
as rarely as keeps their cost below PROBE_COST.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from phalanx.config.home import cache_folder
from phalanx.config.locate import checkpoint_digest, locate
from phalanx.config.options import EngineOptions
from phalanx.engine.messages import Stats
from phalanx.engine.step_times import StepTimes
from phalanx.layout.graphs import VERIFIED_TOKENS
from phalanx.log import get_logger

logger = get_logger(__name__)

PROBE_STEPS, PROBE_COST, PROBE_DRAFTS = 4, 0.003, 3
"""Steps that verify while k would be 0, one after the other, of which the first has no drafts yet; their cost as a part of all
time; their drafts, at most."""
LEAST_PROBE_INTERVAL, MOST_PROBE_INTERVAL = 64, 4096
"""Steps between two probes."""
RATE_ROWS = 60
"""A rate is an average of about so many of the latest rows."""
GAIN = 1.02
"""Drafts must promise so much more, since the estimates have errors."""


class DecodeTimes(Protocol):
    """What is known of the time of decode steps: `StepTimes` has measured it."""

    def decode_seconds(self, tokens: int, drafts: int = 0) -> float:
        """Of a step of so many tokens, that proposes so many drafts for each row."""

    def knows_decodes(self, tokens: int) -> bool:
        """Whether that of a step of so many tokens, that proposes none, is known."""


class DraftDepth:
    """Of one engine, whose steps `times` knows. table: [from, to, drafts] by the rows of a step, instead of what is measured; None:
    measure. watch: is told of each row, too."""

    def __init__(
        self, times: DecodeTimes, max_drafts: int, table: Sequence[tuple[int, int, int]] | None = None,
        watch: AcceptanceWatch | None = None,
    ) -> None:  # fmt: skip
        self._times, self.max_drafts, self._table, self._watch = times, max_drafts, table, watch
        self.rates = [0.7] * max_drafts
        """p_i, an average of the latest rows."""
        self._verified: list[tuple[int, int]] = []  # (drafts, accepted) of rows that are not in the rates yet
        self._since_probe = self._probing = 0

    @classmethod
    def of(cls, options: EngineOptions, times: StepTimes, stats: Stats) -> DraftDepth:
        """As options.speculation, which is not None, says. stats: see `AcceptanceWatch`."""
        assert options.speculation is not None
        table = options.speculation.num_speculative_tokens_per_batch_size
        return cls(times, options.max_drafts, table, AcceptanceWatch.of(options, stats))

    # ---- what is measured --------------------------------------------------------------------------------------------

    def verified(self, drafts: int, accepted: int) -> None:
        """Of a row that verified so many drafts, or places without one, so many were accepted."""
        if drafts and self._table is None:
            self._verified.append((drafts, accepted))
        if self._watch is not None:
            self._watch.verified(drafts, accepted)

    def _take_verified(self) -> None:
        """Take the rows that have been told into the rates."""
        rows, self._verified = self._verified, []
        deepest = max((drafts for drafts, _ in rows), default=0)
        for place in range(deepest):
            tried = [accepted > place for drafts, accepted in rows if drafts > place and accepted >= place]
            if tried:
                self.rates[place] += len(tried) / (len(tried) + RATE_ROWS) * (sum(tried) / len(tried) - self.rates[place])
        for place in range(deepest, self.max_drafts if deepest else 0):  # not tried: as the last one that was
            self.rates[place] += len(rows) / (len(rows) + RATE_ROWS) * (self.rates[deepest - 1] - self.rates[place])

    # ---- what is chosen ----------------------------------------------------------------------------------------------

    def choose(self, rows: int) -> int:
        """How many drafts each of so many rows of the next step verifies."""
        if self._table is not None:
            return next((drafts for first, last, drafts in self._table if first <= rows <= last), 0)
        self._take_verified()
        most = min(self.max_drafts, VERIFIED_TOKENS // rows - 1)
        if most < 1:
            return 0
        if not self._times.knows_decodes(rows):
            return 0  # what is to be gained is measured against this
        plain = self._times.decode_seconds(rows)
        best, value = 0, GAIN / plain
        expected = chance = 1.0
        for drafts in range(1, most + 1):
            chance *= self.rates[drafts - 1]
            expected += chance
            gain = expected / self._times.decode_seconds(rows * (drafts + 1), drafts)
            if gain > value:
                best, value = drafts, gain
        return best or self._probe(rows, min(most, PROBE_DRAFTS), plain)

    def _probe(self, rows: int, drafts: int, plain: float) -> int:
        """The drafts of a step in which none pay: 0, but for a few steps at a time."""
        if self._probing:
            self._probing -= 1
            return drafts
        self._since_probe += 1
        cost = PROBE_STEPS * max(self._times.decode_seconds(rows * (drafts + 1), drafts) / plain - 1, 0.0)
        if self._since_probe < min(max(cost / PROBE_COST, LEAST_PROBE_INTERVAL), MOST_PROBE_INTERVAL):
            return 0
        self._since_probe, self._probing = 0, PROBE_STEPS - 1
        return drafts


WATCHED_ROWS, WATCHED_PART = 200, 1 / 3
"""After so many rows with drafts the network that proposes is judged, and what part of the expected rate is too little."""
CERTAINTY = 1e-4
"""It is judged earlier where a rate that is not too little would give as few accepted drafts with this probability or less."""
PUBLISHED_RATE = 0.45
"""How often the first draft is accepted at least by the heads that are published for a model (`docs/speculative.md`)."""


class AcceptanceWatch:
    """Names a network that is likely none for its target: its first drafts are accepted less than a third as often as those of an
    earlier run of the same two checkpoints, or, without one, as those of published heads. record: the file that keeps the rate.
    stats: whose `wrong_head` says so."""

    def __init__(self, what: str, record: Path, stats: Stats) -> None:
        self._what, self._record, self._stats = what, record, stats
        self._rows = self._accepted = 0
        self._judged, self._earlier = False, _rate_in(record)
        self._expected = PUBLISHED_RATE if self._earlier is None else self._earlier

    @classmethod
    def of(cls, options: EngineOptions, stats: Stats) -> AcceptanceWatch | None:
        """None where no network proposes, or where drafts are not judged by their tokens."""
        config = options.speculation
        if config is None or not config.keeps_kv or config.acceptance is not None or options.load_format == "dummy":
            return None
        folders = [locate(options.model, options.revision)]
        if config.model is not None:
            folders.append(locate(config.model, config.revision))
        name = "-".join(checkpoint_digest(folder, weights=True) for folder in folders)
        return cls(config.model or config.method, cache_folder("acceptance") / f"{name}.json", stats)

    def verified(self, drafts: int, accepted: int) -> None:
        """As `DraftDepth`."""
        if drafts and not self._judged:
            self._rows += 1
            self._accepted += accepted > 0
            least = WATCHED_PART * self._expected
            enough = self._rows == WATCHED_ROWS
            if enough or (self._accepted < least * self._rows and _chance(self._accepted, self._rows, least) < CERTAINTY):
                self._judge(self._accepted / self._rows)

    def _judge(self, rate: float) -> None:
        self._judged, earlier = True, self._earlier
        if rate < WATCHED_PART * self._expected:
            self._stats.wrong_head = 1
            logger.warning(
                "speculative_config: %s is likely none for this model: its first draft was accepted in %.0f%% of %d rows; "
                "%s %.0f%%; it may be for another model, or read the states of other layers than it was trained with",
                self._what, 100 * rate, self._rows, "published heads reach" if earlier is None else "an earlier run had",
                100 * self._expected,
            )  # fmt: skip
        elif rate > (earlier or 0.0):
            try:
                self._record.parent.mkdir(parents=True, exist_ok=True)
                self._record.write_text(json.dumps({"first": rate}))
            except OSError as error:
                logger.info("%s cannot be written: %s", self._record, error)


def _rate_in(record: Path) -> float | None:
    try:
        return float(json.loads(record.read_text())["first"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _chance(accepted: int, rows: int, rate: float) -> float:
    """The probability that no more than so many drafts of so many rows are accepted at a rate: the binomial distribution."""
    return sum(math.comb(rows, count) * rate**count * (1 - rate) ** (rows - count) for count in range(accepted + 1))
