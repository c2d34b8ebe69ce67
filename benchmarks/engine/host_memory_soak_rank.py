# SPDX-License-Identifier: Apache-2.0
"""The process of a rank that knows what is in each of its KV blocks, and looks at each hit whether it still is: see
`host_memory_soak`, which starts it.

    a block is full            its content has a digest
    it goes to host memory     the slot has that digest, and the block still the content
    it comes back              the block has the content, whatever it was before
    a request begins with it   the block has the content, of the same place and the same tokens
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.engine.messages import BlockCopy, SlotAssignment, StepBatch, StepExtent, StepRow
from phalanx.errors import EngineError
from phalanx.kernels.ops.block_rows import BlockRows
from phalanx.worker import worker
from phalanx.worker.host_blocks import HostBlockStore
from phalanx.worker.model_runner import ModelRunner, StepOutput
from phalanx.worker.worker import Worker

VARIABLE = "PHALANX_HOST_MEMORY_SOAK"
"""Environment: JSON with folder, block_size, and corrupt: the copy to host memory whose slot is changed; 0: none."""
REPORT_SECONDS = 1.0


@dataclass
class Content:
    """Of a full block. place: its number in its request. key: of the tokens up to its end; None until a hit tells them."""

    place: int
    digest: bytes
    key: bytes | None = None


@dataclass
class BlockContents:
    """What each block of a rank, and each slot of host memory, has. rows: of all tensors, in words of this dtype."""

    rows: BlockRows
    dtype: torch.dtype
    size: int
    blocks: dict[int, Content] = field(default_factory=dict)
    slots: dict[int, Content] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)  # by slot of a request
    begun: dict[int, SlotAssignment] = field(default_factory=dict)  # requests without a row, by slot
    counts: dict[str, int] = field(default_factory=lambda: {"filled": 0, "saved": 0, "loaded": 0, "hits": 0})

    def digest(self, block: int) -> bytes:
        content = torch.empty((1, self.rows.words), dtype=self.dtype)
        self.rows.gather(torch.tensor([block]), content)
        return hashlib.blake2b(content.numpy(), digest_size=16).digest()

    def save(self, copies: Sequence[BlockCopy]) -> None:
        """Before these copies."""
        for copy in copies:
            self.slots[copy.slot] = self._verified(copy.block, "as it leaves")
            self.counts["saved"] += 1

    def load(self, copies: Sequence[BlockCopy]) -> None:
        """Behind these copies."""
        for copy in copies:
            self.blocks[copy.block] = self.slots[copy.slot]
            self._verified(copy.block, f"that came from slot {copy.slot}")
            self.counts["loaded"] += 1

    def begin(self, step: StepBatch) -> None:
        """Before the rows of a step."""
        for assignment in step.admitted:
            self.tables[assignment.slot] = []
            self.begun[assignment.slot] = assignment
        for row in step.rows:
            self.tables[row.slot] += row.blocks
            assignment = self.begun.pop(row.slot, None)
            if assignment is not None and row.start:
                self._check_hit(row, assignment.token_ids)

    def _check_hit(self, row: StepRow, tokens: Sequence[int]) -> None:
        for place in range(row.start // self.size):
            content = self._verified(self.tables[row.slot][place], "of a hit")
            key = hashlib.blake2b(repr(tokens[: (place + 1) * self.size]).encode(), digest_size=16).digest()
            if content.place != place or content.key not in (None, key):
                raise EngineError(
                    f"a hit has the block of other tokens at place {place}", held=f"the block was filled at place {content.place}"
                )
            content.key = key
            self.counts["hits"] += 1

    def end(self, step: StepBatch) -> None:
        """Behind the rows of a step."""
        for row in step.rows:
            for place in range(row.start // self.size, (row.start + row.count) // self.size):
                block = self.tables[row.slot][place]
                self.blocks[block] = Content(place, self.digest(block))
                self.counts["filled"] += 1

    def _verified(self, block: int, what: str) -> Content:
        content = self.blocks.get(block)
        if content is None or self.digest(block) != content.digest:
            raise EngineError(f"KV block {block}, {what}, has another content than it was filled with", held=f"{self.counts}")
        return content


def install(folder: Path, size: int, corrupt: int) -> None:
    """Check the blocks of this process's rank from the end of its start on. Every second it writes its counts."""
    run, ready, copy = ModelRunner.run, Worker._serve, HostBlockStore.copy
    contents: BlockContents | None = None
    reported = 0.0

    def serving(self: Worker, runner: ModelRunner) -> None:
        nonlocal contents
        assert self._host_blocks is not None
        contents = BlockContents(self._host_blocks._rows, self._host_blocks.slots.dtype, size)
        ready(self, runner)

    def copying(self: HostBlockStore, step: StepBatch) -> None:
        assert contents is not None
        contents.save(step.saved)
        copy(self, step)
        contents.load(step.loaded)
        if corrupt and contents.counts["saved"] >= corrupt > contents.counts["saved"] - len(step.saved):
            self.slots[:, 0] += 1

    def running(self: ModelRunner, step: StepBatch, extent: StepExtent | None = None) -> StepOutput:
        nonlocal reported
        if contents is None:
            return run(self, step, extent)
        contents.begin(step)
        output = run(self, step, extent)
        contents.end(step)
        if time.monotonic() > reported + REPORT_SECONDS:
            reported = time.monotonic()
            write(folder / f"{os.getpid()}.json", contents.counts)
        return output

    ModelRunner.run = running  # type: ignore[method-assign]
    Worker._serve = serving  # type: ignore[method-assign]
    HostBlockStore.copy = copying  # type: ignore[method-assign]


def write(path: Path, counts: dict[str, int]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(counts))
    part.replace(path)


def main() -> None:
    options: dict[str, Any] = json.loads(os.environ[VARIABLE])
    install(Path(options["folder"]), options["block_size"], options["corrupt"])
    worker.main()


if __name__ == "__main__":
    main()
