# SPDX-License-Identifier: Apache-2.0
"""Workloads by name: how many requests, how long, and how often. The same name means the same work on every machine.

decode-R         R requests of 128 random tokens each, at once; ms per token = (t(129 tokens) - t(1 token)) / 128, best of 2
decode-RxIxO     the same with I tokens in and O + 1 out
                 with O far below R * I / (tokens of a step), most of O is decoded beside the prompts of other requests
batch-RxIxO      R requests queued at once, I random tokens in and O out; output tokens per second

In all of them the temperature is 0 and no request ends early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.config import SamplingParams
from phalanx.errors import OptionError

WorkloadKind = Literal["decode", "batch"]

KNOWN = ("decode-1", "decode-64", "decode-256", "decode-512", "batch-512x1000x1000")
"""The default workloads; other numbers make a workload, too."""

_DECODE = re.compile(r"decode-([1-9]\d*)(?:x([1-9]\d*)x([1-9]\d*))?")
_BATCH = re.compile(r"batch-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")
_DECODE_TOKENS = 128


@dataclass(frozen=True)
class Workload:
    """requests: queued at once. input_len, output_len: tokens of each; a decode workload's output_len includes the first token.

    repeats: how often it is timed; the best counts.
    """

    name: str
    kind: WorkloadKind
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
        """Tokens that a decode step's token attends to, itself included, on average over the decode steps."""
        return self.input_len + self.output_len / 2


def parse(name: str, kind: WorkloadKind | None = None) -> Workload:
    """The workload of a name. kind: None, or the only kind that is allowed. Raises OptionError with the known ones."""
    if decode := _DECODE.fullmatch(name):
        requests, input_len, tokens = (int(part) if part else _DECODE_TOKENS for part in decode.groups())
        workload = Workload(name, "decode", requests, input_len, tokens + 1, repeats=2)
    elif batch := _BATCH.fullmatch(name):
        requests, input_len, output_len = map(int, batch.groups())
        workload = Workload(name, "batch", requests, input_len, output_len, repeats=1)
    else:
        raise OptionError(f"workload {name!r} is unknown", next=_known(kind))
    if kind not in (None, workload.kind):
        raise OptionError(f"workload {name!r} is not a {kind} workload", next=_known(kind))
    return workload


def _known(kind: WorkloadKind | None) -> str:
    names = [name for name in KNOWN if kind is None or name.startswith(kind)]
    patterns = {"decode": "decode-R, decode-RxIxO", "batch": "batch-RxIxO"}
    shown = patterns[kind] if kind else ", ".join(patterns.values())
    return f"use {', '.join(names)}, or with other numbers {shown} (requests, tokens in, tokens out)"


def prompts(workload: Workload, vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids: workload.requests lists of input_len ids below vocab_size. The same seed gives the same ids."""
    import numpy

    ids = numpy.random.default_rng(seed).integers(0, vocab_size, (workload.requests, workload.input_len))
    lists: list[list[int]] = ids.tolist()
    return lists


def params(output_len: int) -> SamplingParams:
    """Greedy, exactly `output_len` tokens, token ids only."""
    return SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True, detokenize=False)


def longest(workloads: Sequence[Workload]) -> int:
    return max(workload.seq_len for workload in workloads)
