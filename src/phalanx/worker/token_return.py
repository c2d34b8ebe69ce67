# SPDX-License-Identifier: Apache-2.0
"""In a pipeline, the last stage returns the tokens that it samples, and what else it has of the slots, to the first: on the device,
so that the first stage begins a request's next step before the host knows the token. On GPUs of one host
(`executor/rank_executor.py:RankExecutor.from_options`).

Let P be the number of stages. Of a step m with rows whose token ids the engine does not know, each was sampled by step m - P or an
earlier one (`SchedulerOptions.token_lag`). Before the step,

    first stage, main stream: receive state                           -> forward m -> send hidden states
    last stage,  side stream: wait for the end of step m - P -> send state
    last stage,  main stream:                     receive hidden states -> forward m -> sample into state

state [.., slots] has the last token of each slot and, with speculation, its position and drafts. It travels as a whole: one message
of a fixed size and address, with no indices to copy. Slots that other steps write meanwhile have any value on the first stage,
which reads those of the step's own rows only. Step m itself writes these, but
after it has received hidden states which the first stage computed from them: they have been sent by then.

No rank waits for ever. Order all work by its step, and within a step as: return, forward of the first stage, ..., of the last.
Every piece waits for pieces before it only, whatever else a GPU lets wait for it (ranks of a stage exchange within one forward):

- The send of step m waits for step m - P on the last stage, and for the first stage to receive. That comes there after the hidden
  states of step m - 1, which the next stage receives after its step m - 2, and so on to the last stage: after its step m - P.
- So what a send waits for is never a step of the last stage that is still to come: kernels there that need all multiprocessors at
  once get that of the send in the end. Therefore it waits for step m - P, even if all of its tokens are older.

A return has a group, and so an NCCL stream, of its own: in the group of the stages it would stand in line with hidden states.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from phalanx.comm.group import Group

FIRST, LAST = 0, 1
"""Ranks in the group of the first and the last stage."""


class TokenReturn:
    """One end of it. group: of the first and the last stage; state int64: of this rank; stages: of the pipeline.

    Both ends call `return_tokens` before the same steps, and `step_queued` after each step, also one without rows.
    """

    def __init__(self, group: Group, state: Tensor, stages: int) -> None:
        self._group, self._state = group, state
        self._side: torch.cuda.Stream | None = None
        self._ended: deque[torch.cuda.Event] = deque()  # the ends of the latest steps, as many as there are stages
        if group.rank == LAST and state.is_cuda:
            self._side = torch.cuda.Stream(state.device)  # type: ignore[no-untyped-call]
            self._ended.extend(torch.cuda.Event() for _ in range(stages))  # type: ignore[no-untyped-call]

    def return_tokens(self) -> None:
        """Queue the return before the step that comes next. Over gloo the first stage waits here until the last one has come to
        this step, and nobody needs streams."""
        if self._group.rank == FIRST:
            self._group.receive(self._state, LAST)
        elif self._side is None:
            self._group.send(self._state, FIRST)
        else:
            with torch.cuda.stream(self._side):
                self._side.wait_event(self._ended[0])  # not for what is on the main stream since: the first stage goes on with it
                self._group.send(self._state, FIRST)

    def step_queued(self) -> None:
        """All work of a step is on the main stream."""
        if self._ended:
            self._ended.append(self._ended.popleft())
            self._ended[-1].record()
