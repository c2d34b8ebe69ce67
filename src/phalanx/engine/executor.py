# SPDX-License-Identifier: Apache-2.0
"""What runs steps: the `Executor` seam, and how one is made.

The engine decides steps and hands them over; an executor runs them on ranks. `make` starts rank processes on this host (and
waits for those of other hosts); `join` is what the other hosts run. A fake ships in `engine.fake`; Ray is another executor, handed
in from above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.resolve import Resolved, resolve
from phalanx.hardware.probe import detect_machine
from phalanx.plan.layout import Layout, require_suits

if TYPE_CHECKING:
    from phalanx.config.options import EngineOptions
    from phalanx.engine.messages import RankFacts, RankStats, Step, StepResult


class Executor(Protocol):
    """Ranks that run steps. Asynchronous: up to `depth` steps are in flight, and results come in the order of the steps."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once: max(pipeline stages, 2)."""

    def start(self) -> tuple[list[RankFacts], int]:
        """Start the ranks, and return what each reports and the number of KV blocks (the least of what the ranks' budgets hold).

        Raises what a rank raised, naming the rank; RankDied, RankStalled, NodeLost; EngineError past `start_timeout`. When it
        raises, every process that it started is gone.
        """

    def submit(self, step: Step) -> None:
        """Hand a step to every rank. Steps are numbered from 1 without a gap."""

    def collect(self) -> list[StepResult]:
        """The results that have come in, in order; never blocks. Raises an EngineError, or what a rank raised: then every process
        is gone or going, and the executor is of no more use."""

    def waitables(self) -> list[Any]:
        """What a zmq.Poller should wait for before `collect` has something to say: sockets and file descriptors."""

    def stats(self) -> RankStats:
        """As last reported."""

    def shutdown(self) -> None:
        """End the ranks and return when their processes are gone. May be called at any time, and again."""


def make(options: EngineOptions) -> Executor:
    """The executor for these options (concrete ones: see `config.resolve`): one process per rank.

    Raises LayoutError, before anything starts, when this host has too few GPUs for its ranks or the ranks do not spread evenly over
    the nodes.
    """
    from phalanx.executor.rank_executor import RankExecutor

    return RankExecutor(options)


def join(options: EngineOptions, *, local_rank: int = 0) -> int:
    """Host this node's ranks for an engine on node 0 (`options.master_addr`) until it ends; returns an exit status (0: as asked).

    The options are those that were given on node 0, but for `node_rank`; "auto" is settled here as it is there. Raises OptionError,
    LayoutError or ModelError for what cannot be, before anything starts.

    For `--node_rank` > 0, and for every torchrun process with RANK > 0. Under torchrun each process counts as a node with one
    rank: nnodes = WORLD_SIZE, node_rank = RANK, `local_rank` = LOCAL_RANK (the first GPU to use), master_addr = MASTER_ADDR, and
    master_port = MASTER_PORT + 1, since torchrun itself listens on MASTER_PORT (and the second of our ports is the one after).
    """
    from phalanx.executor.node import Node

    _, settled = settle(options)
    return Node(settled.options, local_rank).run()


def settle(options: EngineOptions) -> tuple[ModelShape, Resolved]:
    """The model's shape, and the options with nothing left open; the same on every host, as the ranks will compare it.

    Raises OptionError, LayoutError or ModelError for what cannot be.
    """
    shape = ModelShape.from_folder(locate(options.model, options.revision))
    settled = resolve(options, shape, len(detect_machine().gpus))
    layout = Layout(options.pipeline_parallel_size, options.expert_parallel_size, options.tensor_parallel_size)
    require_suits(layout, shape)
    return shape, settled
