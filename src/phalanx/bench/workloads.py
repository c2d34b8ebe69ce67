# SPDX-License-Identifier: Apache-2.0
"""Workloads by name: how many requests, how long, and how often. The same name means the same work on every machine.

decode-R         R requests of 128 random tokens each, all at once; ms per token = (t(129 tokens) - t(1 token)) / 128, best of 2
decode-RxIxO     the same with I tokens in and O + 1 out
batch-RxIxO      R requests queued at once, I random tokens in and O out; output tokens per second

In all of them temperature is 0 and no request ends early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.config import SamplingParams
from phalanx.errors import OptionError

Kind = Literal["decode", "batch"]

KNOWN = ("decode-1", "decode-64", "decode-256", "decode-512", "batch-512x1000x1000")
"""Those of the targets; any other numbers make a workload, too."""

_DECODE = re.compile(r"decode-([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?")
_BATCH = re.compile(r"batch-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")
_DECODE_TOKENS = 128


@dataclass(frozen=True)
class Workload:
    """requests: queued at once. input_len, output_len: tokens of each; a decode's output_len counts the first token, too.

    repeats: how often it is timed; the best counts.
    """

    name: str
    kind: Kind
    requests: int
    input_len: int
    output_len: int
    repeats: int

    @property
    def seq_len(self) -> int:
        """Tokens of one request when it ends."""
        return self.input_len + self.output_len

    @property
    def mean_context(self) -> float:
        """Tokens that attention looks back over, itself among them, on average over the tokens that decode steps compute."""
        return self.input_len + self.output_len / 2


def parse(name: str, kind: Kind | None = None) -> Workload:
    """The workload of a name, of this kind if one is given. Raises OptionError with the known ones."""
    if decode := _DECODE.fullmatch(name):
        requests, input_len, tokens = (int(part) if part else _DECODE_TOKENS for part in decode.groups())
        found = Workload(name, "decode", requests, input_len, tokens + 1, repeats=2)
    elif batch := _BATCH.fullmatch(name):
        requests, input_len, output_len = map(int, batch.groups())
        found = Workload(name, "batch", requests, input_len, output_len, repeats=1)
    else:
        raise OptionError(f"workload {name!r} is unknown", next=_known(kind))
    if kind not in (None, found.kind):
        raise OptionError(f"workload {name!r} was asked for", why=f"this verb runs {kind} workloads", next=_known(kind))
    return found


def _known(kind: Kind | None) -> str:
    names = [name for name in KNOWN if kind is None or name.startswith(kind)]
    patterns = {"decode": "decode-R, decode-RxIxO", "batch": "batch-RxIxO"}
    shown = patterns[kind] if kind else ", ".join(patterns.values())
    return f"known: {', '.join(names)}, or with other numbers {shown} (requests, tokens in, tokens out)"


def prompts(workload: Workload, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids: workload.requests lists of input_len ids below vocab_size. The same seed gives the same ids."""
    import numpy

    ids = numpy.random.default_rng(seed).integers(0, vocab_size, (workload.requests, workload.input_len))
    found: list[list[int]] = ids.tolist()
    return found


def params(output_len: int) -> SamplingParams:
    """Greedy, exactly so many tokens, and no text."""
    return SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True, detokenize=False)


def longest(workloads: Sequence[Workload]) -> int:
    return max(workload.seq_len for workload in workloads)
