# SPDX-License-Identifier: Apache-2.0
"""The `Executor` seam: what runs the steps that the engine decides.

The engine's configuration names an implementation by a dotted path, so the engine knows none of them: `phalanx.executor` runs steps
on rank processes, and `engine.fake` without any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from phalanx.config import dotted_path

if TYPE_CHECKING:
    from phalanx.config.model import ModelShape
    from phalanx.config.options import EngineOptions
    from phalanx.engine.messages import RankFacts, RankStats, Step, StepResult
    from phalanx.errors import PhalanxError
    from phalanx.layout.adapter import AdapterFile

RANK_EXECUTOR = "phalanx.executor.rank_executor:RankExecutor"
FAKE_EXECUTOR = "phalanx.engine.fake:FakeExecutor"


class Executor(Protocol):
    """Ranks that run steps. Asynchronous: up to `depth` steps are in flight, and results come in the order of the steps."""

    @classmethod
    def from_options(cls, options: EngineOptions, shape: ModelShape, settings: dict[str, Any]) -> Executor:
        """The executor for concrete options (see `config.resolve`). `settings`: of the implementation, from the engine's config.

        Raises LayoutError, before anything starts, for ranks that this machine cannot hold.
        """

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once: see `limits.depth_of`."""

    @property
    def returns_tokens(self) -> bool:
        """With pipeline stages: whether the last stage returns the tokens that it samples to the first on the device, so that a
        request goes on before the engine knows its token."""

    def start(self) -> tuple[list[RankFacts], int]:
        """Start the ranks. Returns what each rank reports, and the number of KV blocks (the smallest of what the ranks have memory
        for).

        Raises what a rank raised, naming the rank; RankDied, RankStalled, NodeLost; EngineError past `start_timeout`. When it
        raises, every process that it started is gone.
        """

    def submit(self, step: Step) -> None:
        """Hand a step to every rank. Steps are numbered from 1 without a gap."""

    def collect(self) -> list[StepResult]:
        """The results that have come in, in order; never blocks. Raises an EngineError, or what a rank raised: then every process
        is gone or going, and the executor is of no more use."""

    def read_adapter(self, key: int, file: AdapterFile) -> None:
        """Have every rank read its part of an adapter into host memory, beside the steps. key: of no other adapter before."""

    def drop_adapter(self, key: int) -> None:
        """Have every rank forget an adapter that has been read, or that some of them could not read."""

    def adapters_read(self) -> list[tuple[int, PhalanxError | None]]:
        """The keys of the adapters that all ranks have answered for since the last call, with the first error. Never blocks."""

    def waitables(self) -> list[Any]:
        """The sockets and file descriptors that a zmq.Poller waits for: one is readable when `collect` has something to do."""

    def stats(self) -> RankStats:
        """The latest statistics that ranks have reported."""

    def shutdown(self) -> None:
        """End the ranks and return when their processes are gone. May be called at any time, and again."""


def load_executor(path: str, options: EngineOptions, shape: ModelShape, settings: dict[str, Any]) -> Executor:
    """The executor at a dotted path, for these options. Raises OptionError when there is none, and what `from_options` raises."""
    implementation: type[Executor] = dotted_path.load(path, option="executor")
    return implementation.from_options(options, shape, settings)
