# SPDX-License-Identifier: Apache-2.0
"""What to measure, in which order. Pure, so that every rank and the parent hold the same list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from phalanx.config.dtypes import DTYPES, parse_dtype
from phalanx.errors import OptionError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.admit import admit
from phalanx.tables.grid import HIDDEN, LOOKUP_FUSIONS, TOKENS
from phalanx.tables.message import Caller, Fusion, Message
from phalanx.tables.strategy import SUPPORTED, Choice, Strategy, choices

_Item = TypeVar("_Item")
ALL_REDUCE, GEMM_ALL_REDUCE = "all_reduce", "gemm_all_reduce"
"""The operations that a benchmark measures: the all-reduce alone, and the row-parallel linear layer whose output it sums."""
_OPS = {"all_reduce": ALL_REDUCE, "allreduce": ALL_REDUCE, "gemm_all_reduce": GEMM_ALL_REDUCE, "gemm_allreduce": GEMM_ALL_REDUCE}
"""What the column `op` of a CSV may say, here and in TensorRT-LLM's tools."""
GEMM_MIN_ROWS = 16
"""Rows that each rank must have for a layer with its GEMM to be measured: a tile of a GEMM has no fewer, so that below GEMM_RS runs
the whole GEMM once for each rank."""
MAX_CPU_GEMM_FLOP = 1 << 27
"""Of one rank's GEMM on a CPU: a larger one would make a benchmark take hours, and hide the all-reduce that is to be timed."""
_GEMM = "GEMM+"


@dataclass(frozen=True, slots=True)
class Task:
    """One choice in one cell. op: ALL_REDUCE or GEMM_ALL_REDUCE."""

    dtype: str
    fusion: Fusion
    tokens: int
    hidden: int
    choice: Choice
    op: str = ALL_REDUCE

    def __str__(self) -> str:
        return f"{self.dtype} {self.fusion.name} {self.tokens}x{self.hidden} {self.name()}"

    def name(self, sm: int = 90) -> str:
        """As in CSVs: that of the choice, with "GEMM+" before it where the time contains the GEMM and the name does not say so."""
        contains = self.op == GEMM_ALL_REDUCE and self.choice.strategy is not Strategy.GEMM_RS
        return (_GEMM if contains else "") + self.choice.name(sm)

    @classmethod
    def named(cls, dtype: str, fusion: Fusion, tokens: int, hidden: int, name: str, op: str = "") -> Task:
        """The task of a `name`. op: the operation, where a CSV says it, which then need not be in the name.

        Raises OptionError for an unknown name or operation, and for a name of another operation.
        """
        choice = Choice.parse(name.removeprefix(_GEMM))
        of_name = GEMM_ALL_REDUCE if name.startswith(_GEMM) or choice.strategy is Strategy.GEMM_RS else ALL_REDUCE
        task_op = parse_op(op) if op else of_name
        if of_name == GEMM_ALL_REDUCE != task_op:
            raise OptionError(f"op {op!r} is not of strategy {name!r}", why="its time contains a GEMM", next=f"say {of_name}")
        return cls(dtype, fusion, tokens, hidden, choice, task_op)

    @classmethod
    def parse(cls, text: str) -> Task:
        """The inverse of str()."""
        dtype, fusion, cell, name = text.split(" ")
        tokens, _, hidden = cell.partition("x")
        return cls.named(dtype, Fusion.named(fusion), int(tokens), int(hidden), name)

    @property
    def bytes(self) -> int:
        """Of one rank's tensor."""
        return self.tokens * self.hidden * DTYPES[self.dtype].itemsize

    @property
    def cell(self) -> tuple[str, Fusion, int, int, str]:
        return self.dtype, self.fusion, self.tokens, self.hidden, self.op


@dataclass(frozen=True)
class Sweep:
    """A grid of cells, and the choices to measure in each. max_bytes: larger tensors are skipped, with that reason."""

    fingerprint: Fingerprint
    dtype: str = "bf16"
    tokens: tuple[int, ...] = TOKENS
    hidden: tuple[int, ...] = HIDDEN
    fusions: tuple[Fusion, ...] = tuple(Fusion)
    strategies: tuple[Strategy, ...] = SUPPORTED
    auto: bool = False
    max_bytes: int | None = None

    @classmethod
    def from_text(
        cls,
        fingerprint: Fingerprint,
        *,
        dtype: str = "bf16",
        tokens: str | None = None,
        hidden: str | None = None,
        fusions: str | None = None,
        strategies: str | None = None,
        auto: bool = False,
        max_bytes: int | None = None,
    ) -> Sweep:
        """From comma-separated lists, as a command line has them. None: the default grid, and everything that runs.

        Raises OptionError for an unknown name, a strategy that does not run here, a size below 1, or one given twice.
        """
        sweep = cls(fingerprint, parse_dtype(dtype), auto=auto, max_bytes=max_bytes)
        if tokens is not None:
            sweep = replace(sweep, tokens=_parse_sizes(tokens, "--tokens"))
        if hidden is not None:
            sweep = replace(sweep, hidden=_parse_sizes(hidden, "--hidden"))
        if fusions is not None:
            sweep = replace(sweep, fusions=_unique([Fusion.named(name) for name in _split(fusions)], "--fusions"))
        if strategies is not None:
            parsed = parse_strategies(strategies, "--strategies")
            sweep = replace(sweep, strategies=tuple(s for s in parsed if s is not Strategy.AUTO))
            sweep = replace(sweep, auto=auto or Strategy.AUTO in parsed)
        if fingerprint.world < 2:
            raise OptionError(f"--tp_size {fingerprint.world} has nothing to reduce", next="use at least 2")
        return sweep

    def plan(self) -> tuple[list[Task], dict[Task, str]]:
        """(what to measure, in order; what is skipped, and why).

        The largest hidden size first, the four fusions of the look-up table before the others, and all choices of a cell one after
        the other: they share tensors and compiled kernels, and a run that is interrupted has complete columns. Where GEMM_RS runs,
        layers with their GEMM follow the all-reduces of the same size, by every choice, so that it is compared with what a layer
        runs otherwise.
        """
        tasks: list[Task] = []
        skipped: dict[Task, str] = {}
        waves = [[f for f in self.fusions if f in LOOKUP_FUSIONS], [f for f in self.fusions if f not in LOOKUP_FUSIONS]]
        for wave in waves:
            for hidden in sorted(self.hidden, reverse=True):
                for tokens in sorted(self.tokens):
                    for fusion in wave:
                        for task in self._tasks(fusion, tokens, hidden):
                            reason = self._refuses(task)
                            if reason is None:
                                tasks.append(task)
                            else:
                                skipped[task] = reason
        return tasks, skipped

    def _tasks(self, fusion: Fusion, tokens: int, hidden: int) -> list[Task]:
        gemm = fusion.shards and Strategy.GEMM_RS in self.strategies and tokens >= GEMM_MIN_ROWS * self.fingerprint.world
        planned = [(Caller.SHARDED, ALL_REDUCE), *([(Caller.GEMM, GEMM_ALL_REDUCE)] if gemm else [])]
        tasks = []
        for caller, op in planned:
            chosen = [choice for choice in choices(fusion, caller) if choice.strategy in self.strategies]
            chosen += [Choice(Strategy.AUTO)] if self.auto else []
            tasks += [Task(self.dtype, fusion, tokens, hidden, choice, op) for choice in chosen]
        return tasks

    def _refuses(self, task: Task) -> str | None:
        if self.max_bytes is not None and task.bytes > self.max_bytes:
            return f"{task.bytes / 2**20:.1f} MiB is more than --max_mib {self.max_bytes / 2**20:g}"
        flop = 2 * task.tokens * task.hidden * task.hidden // self.fingerprint.world
        if task.op == GEMM_ALL_REDUCE and not self.fingerprint.on_gpu and flop > MAX_CPU_GEMM_FLOP:
            most = MAX_CPU_GEMM_FLOP / 1e9
            return f"a GEMM of {flop / 1e9:.1f} GFLOP takes too long on a CPU, where layers of at most {most:.1f} are timed"
        caller = Caller.GEMM if task.op == GEMM_ALL_REDUCE else Caller.SHARDED
        message = Message("all_reduce", task.fusion, task.dtype, task.tokens, task.hidden, self.fingerprint.world, caller)
        strategy = Strategy.NCCL if task.choice.strategy is Strategy.AUTO else task.choice.strategy
        return admit(strategy, message, self.fingerprint)

    def grid(self) -> dict[str, Any]:
        """As plain data, for the sidecar."""
        return {
            "dtype": self.dtype,
            "tokens": list(self.tokens),
            "hidden": list(self.hidden),
            "fusions": [fusion.name for fusion in self.fusions],
        }


def parse_op(text: str) -> str:
    """ALL_REDUCE or GEMM_ALL_REDUCE, by any of its spellings. Raises OptionError for another operation."""
    if text not in _OPS:
        raise OptionError(f"op {text!r} is unknown", next=f"known: {', '.join(_OPS)}")
    return _OPS[text]


def parse_strategies(text: str, flag: str) -> tuple[Strategy, ...]:
    """The strategies of a comma-separated list. Raises OptionError for an unknown one, one that does not run here, or one given
    twice."""
    strategies = [Choice.parse(name).strategy for name in _split(text)]
    for strategy in strategies:
        if strategy not in (*SUPPORTED, Strategy.AUTO):
            raise OptionError(
                f"{flag} {strategy.name} does not run here",
                held="Phalanx knows the name from TensorRT-LLM's tables only",
                next=f"choose among {', '.join(one.name for one in SUPPORTED)} (between CPU ranks NCCL is GLOO) and AUTO",
            )
    return _unique(strategies, flag)


def _split(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise OptionError("a list is empty", next="give at least one name, separated by commas, or leave the flag out")
    return names


def _parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    sizes = []
    for name in _split(text):
        if not name.isdecimal() or not 1 <= int(name) < 2**31:
            raise OptionError(f"{flag} {name!r} is not a size", next="give whole numbers from 1, separated by commas")
        sizes.append(int(name))
    return _unique(sizes, flag)


def _unique(items: Sequence[_Item], flag: str) -> tuple[_Item, ...]:
    if len(set(items)) != len(items):
        raise OptionError(f"{flag} names something twice", next="name each once")
    return tuple(items)
