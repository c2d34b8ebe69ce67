# SPDX-License-Identifier: Apache-2.0
"""The numbers that the flags of `phalanx plan` take: one place that refuses the others, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import OptionError
from phalanx.planner.arrivals import MOST_TOKENS
from phalanx.planner.subject import MOST_GPUS


@dataclass(frozen=True)
class Range:
    """From `least` to `most`, both included; above: `least` is not. Infinity and NaN are in none."""

    least: float
    most: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        return math.isfinite(value) and self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"a finite number above {self.least}" if self.above else f"at least {self.least}"
        return f"a number above {self.least}, up to {self.most}" if self.above else f"{self.least} to {self.most}"


_GPUS, _TOKENS, _TIME, _POSITIVE = Range(1, MOST_GPUS), Range(1, MOST_TOKENS), Range(0), Range(0, above=True)
RANGES = {
    "gpus_per_node": _GPUS, "nodes": _GPUS, "tp_size": _GPUS, "pp_size": _GPUS, "ep_size": _GPUS, "dcp_size": _GPUS,
    "replicas": Range(1, 1000),
    "isl": _TOKENS, "osl": _TOKENS, "max_num_tokens": Range(1), "max_seq_len": Range(2), "redundant_experts": Range(0),
    "kv_host_memory": Range(0), "max_batch_size": Range(1, 1 << 16), "concurrency": Range(1, 100_000),
    "requests": Range(0, 10_000_000),
    "slo_ttft": _POSITIVE, "slo_tpot": _POSITIVE, "slo_part": Range(0, 1, above=True), "gpu_hour": _TIME, "path_ms": _TIME,
    "event_us": _TIME, "speed": Range(0.001, 1_000_000), "verify_plans": Range(1), "seconds": _POSITIVE,
    "acceptance_length": Range(1), "seed": Range(-math.inf),
}  # fmt: skip
"""By flag. Burst and search take seconds at the most `concurrency` and GPUs, and would not end far beyond."""


def require(flags: Mapping[str, Any]) -> None:
    """Raise OptionError for the first number of these flags that is outside of its range. None: not given. A number without
    a range is a KeyError."""
    for name, value in flags.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not RANGES[name].holds(value):
            raise OptionError(f"{name}={value} is out of range", next=f"give {RANGES[name]}")
