# SPDX-License-Identifier: Apache-2.0
"""The `Proposer` seam: what proposes drafts of the tokens that follow, at the end of a step and on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from phalanx.engine.messages import SlotAssignment
from phalanx.layout.cache import Cache
from phalanx.models.batch import Batch
from phalanx.models.cache import LayerCache

if TYPE_CHECKING:
    from phalanx.worker.cuda_graphs import GraphCapturer
    from phalanx.worker.graph_buffers import GraphSize


@dataclass(frozen=True)
class SampledRows:
    """What the last stage has computed in a step: its forward, of T tokens, and the S rows that sample; none in a step of parts of
    prompts.

    batch: the forward's input. In a captured step its tensors are those of the graph of `size`, and longer than `tokens`.
    slots [S] int64.
    sampled [S, k + 2] int64: the tokens of each row's result, then -1: see `accept_drafts`.
    lengths [S] int64: the position of the last of them.
    at [S] int64: which of the T tokens gave the first of them; the next ones gave the others.
    capacities [S] int64: positions of each slot that have blocks.
    inner [T, L * hidden_size]: the residual stream before each of the proposer's `inner_layers`; None where it has none.
    """

    batch: Batch
    tokens: int
    slots: Tensor
    sampled: Tensor
    lengths: Tensor
    at: Tensor
    capacities: Tensor
    inner: Tensor | None = None
    size: GraphSize | None = None


class Proposer(ABC):
    """Every call is made in the order of the steps, on the main stream of each rank of the last stage. Nothing here waits for the
    device, or for other data-parallel indices. What is not overridden is of one that needs no layers, caches or graphs."""

    inner_layers: tuple[int, ...] = ()
    """The layers before which it needs the residual stream; the model's number of layers stands for the end of the last one."""
    caches: Sequence[LayerCache] = ()
    """Made as it declares them, with the block ids of the model's. May be replaced between steps while nothing is captured."""

    def declared_caches(self) -> list[Cache]:
        """What it keeps of each token; in the memory of each block, beside the model's layers."""
        return []

    def capture(self, capturer: GraphCapturer, batches: Mapping[GraphSize, Batch]) -> None:  # noqa: B027
        """Capture what it does behind captured steps of these sizes, whose inputs these are. Collective."""

    def graphs(self, sizes: Sequence[GraphSize]) -> int:
        """How many graphs it captures for steps of these sizes."""
        return 0

    def reset(self) -> None:  # noqa: B027
        """Drop what was captured."""

    @abstractmethod
    def admit(self, assignment: SlotAssignment) -> None:
        """A request takes a slot; `token_ids` are its tokens so far."""

    @abstractmethod
    def propose(self, rows: SampledRows, count: int) -> Tensor | None:
        """Take in the tokens of a step, and propose `count` drafts of those that follow, 0 for none: [S, count] int64, NO_DRAFT
        where there is none."""
