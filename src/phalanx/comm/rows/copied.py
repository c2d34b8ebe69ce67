# SPDX-License-Identifier: Apache-2.0
"""`Beside` on GPUs that reach each other: copy engines carry the rows, `kernels.rows.arrived` does the rest.

    caller's stream   product | product .. | finish: await flags, add up, norm | product .. | take: await flags | product
    copy engines                send: others' rows of x, flags                   give: my rows to all, flags

So products have all multiprocessors, but for a small kernel in each all-reduce, which has them all as well.

Why nothing is overwritten that is still read. A part's turn n + 1 begins on a rank with `send`, after its `take` of turn n. That
took what every peer handed out in turn n, and a peer hands out after its `finish` of turn n has read what it was sent: so its space
for arriving rows may be written again. What was handed out in turn n is written again by a peer's `finish` of turn n + 1, behind
what this rank sent for it, which stands in its stream behind all that read turn n's rows. Flags hold one turn's number, and are
read in that turn: each of the two is awaited by whoever could send the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.comm.chunked import pitch_of
from phalanx.comm.group import ResidualRmsNorm
from phalanx.comm.oneshot import row_block
from phalanx.comm.rows.ownership import OwnedRows
from phalanx.comm.symmetric import Mapped

_ALIGNMENT = 1 << 12
_FLAG_BYTES = 256


class Space(NamedTuple):
    """Where things lie in each rank's memory, in bytes from a part's beginning: what peers send, by `signals.slot`, `share` bytes
    apart; what is handed out; scales of rows; flags [2, 32] int32: sent by, handed out by. size: of a part."""

    share: int
    handed_out: int
    scales: int
    flags: int
    size: int

    @classmethod
    def of(cls, part_tokens: int, row_bytes: int, world: int) -> Space:
        def ceil(count: int) -> int:
            return -(-count // _ALIGNMENT) * _ALIGNMENT

        share = ceil(-(-part_tokens // world) * row_bytes)
        handed_out = (world - 1) * share
        scales = handed_out + ceil(part_tokens * row_bytes)
        flags = scales + ceil(part_tokens * 4)
        return cls(share, handed_out, scales, flags, ceil(flags + _FLAG_BYTES))


def space_bytes(parts: int, part_tokens: int, row_bytes: int, world: int) -> int:
    """GPU memory per rank for so many parts of at most part_tokens tokens. Pure."""
    return parts * Space.of(part_tokens, row_bytes, world).size


class _Turn:
    """A part between its acts."""

    def __init__(self) -> None:
        self.sent, self.given = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.x: Tensor | None = None
        self.taken: tuple[Tensor, ...] | None = None


class Copied:
    """See the module. memory: of `space_bytes`, zeros. count: called once for each
    all-reduce."""

    def __init__(
        self, memory: Mapped, parts: int, part_tokens: int, row_bytes: int, count: Callable[[ResidualRmsNorm], None]
    ) -> None:
        self.parts, self.part_tokens = parts, part_tokens
        self._memory, self._count = memory, count
        self._space = Space.of(part_tokens, row_bytes, memory.world)
        device = memory.spaces[memory.rank].device
        self._turns = torch.ones(parts, 4, dtype=torch.int32, device=device)  # on 16 bytes each
        self._sending, self._giving = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._under_way = [_Turn() for _ in range(parts)]

    def send(self, part: int, x: Tensor) -> None:
        """As Beside."""
        rank, world, space = self._memory.rank, self._memory.world, self._space
        turn, depth = self._under_way[part], -(-len(x) // world)
        assert len(x) <= self.part_tokens, f"{len(x)} tokens in a part of {self.part_tokens} at most"
        assert turn.x is None, f"part {part} was sent and is not finished"
        assert turn.taken is None, f"part {part} was finished and is not taken"
        rows, row_bytes = x.view(torch.uint8).view(-1), x.shape[1] * x.element_size()
        self._sending.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._sending):
            for peer in self._peers():
                begin, end = depth * peer, min(depth * (peer + 1), len(x))
                if begin < end:
                    place = (rank - peer + world - 1) % world * space.share
                    self._there(peer, part, place, (end - begin) * row_bytes).copy_(rows[begin * row_bytes : end * row_bytes])
            self._flag(part, 0)
            turn.sent.record()
        turn.x = x

    def finish(self, part: int, fusion: ResidualRmsNorm) -> None:
        """As Beside."""
        turn, device = self._under_way[part], self._turns.device
        x, rank, world = turn.x, self._memory.rank, self._memory.world
        assert x is not None, f"part {part} was not sent"
        depth = -(-len(x) // world)
        begin, end = min(depth * rank, len(x)), min(depth * (rank + 1), len(x))
        torch.cuda.current_stream(device).wait_event(turn.sent)  # x is not read behind this any more
        new = torch.empty_like(x)
        outputs = self._outputs(part, x, fusion)
        if begin < end:
            self._add_up(part, x, fusion, outputs, new, range(begin, end))
        self._giving.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._giving):
            for peer in self._peers():
                if begin < end:
                    for mine, theirs in zip(outputs, self._outputs(part, x, fusion, peer), strict=True):
                        theirs[begin:end].copy_(mine[begin:end])
            self._flag(part, 1)
            turn.given.record()
        turn.x, turn.taken = None, (*outputs, OwnedRows.of(new, len(x)))
        self._count(fusion)

    def take(self, part: int) -> tuple[Tensor, ...]:
        """As Beside."""
        from phalanx.kernels.rows.arrived import end_turn

        turn, memory = self._under_way[part], self._memory
        assert turn.taken is not None, f"part {part} was not finished"
        torch.cuda.current_stream(self._turns.device).wait_event(turn.given)
        end_turn[(1,)](
            self._flags(memory.rank, part)[32:], self._turns[part], RANK=memory.rank, WORLD=memory.world, PTX=memory.ptx,
            num_warps=1,
        )  # fmt: skip
        taken, turn.taken = turn.taken, None
        return taken

    def _add_up(self, part: int, x: Tensor, fusion: ResidualRmsNorm, outputs: Sequence[Tensor], new: Tensor, mine: range) -> None:
        from phalanx.kernels.residual_rms_norm import quant_mode
        from phalanx.kernels.rows.arrived import arrived_norm
        from phalanx.kernels.vectors import KINDS

        memory, space, pitch, hidden = self._memory, self._space, pitch_of(x), x.shape[1]
        residual = fusion.residual
        if isinstance(residual, OwnedRows):
            if residual.at_once != len(x):
                raise ValueError(f"the residual's rows have owners by {residual.at_once} rows, and this part's by {len(x)}")
            residual = residual.held
        plain, vector = new.view(torch.int32), {8: torch.int64, 4: torch.int32}[16 // x.element_size()]
        norm = outputs[0].view(torch.int32) if fusion.quant == "none" else plain
        quantized = plain if fusion.quant == "none" else outputs[0].view(vector)
        sinks = (norm, plain, quantized, outputs[1] if len(outputs) > 1 else plain)
        block = row_block(pitch)
        arrived_norm[(len(mine),)](
            x.view(torch.int32), self._there(memory.rank, part, 0, space.handed_out).view(torch.int32),
            self._flags(memory.rank, part), self._turns[part], residual.view(torch.int32), fusion.weight.view(torch.int32), sinks,
            plain if fusion.scale is None else fusion.scale, mine.start, space.share // 16, hidden, fusion.eps,
            KIND=KINDS[x.dtype], QUANT=quant_mode(fusion.quant, fusion.scale), RANK=memory.rank, WORLD=memory.world, BLOCK=block,
            PTX=memory.ptx, num_warps=min(16, block // 32),
        )  # fmt: skip

    def _peers(self) -> Sequence[int]:
        """The others, each rank beginning with another one: so that no two send to the same one at once."""
        rank, world = self._memory.rank, self._memory.world
        return [(rank + step) % world for step in range(1, world)]

    def _there(self, rank: int, part: int, begin: int, count: int) -> Tensor:
        first = part * self._space.size + begin
        return self._memory.spaces[rank][first : first + count]

    def _flags(self, rank: int, part: int) -> Tensor:
        return self._there(rank, part, self._space.flags, _FLAG_BYTES).view(torch.int32)

    def _flag(self, part: int, act: int) -> None:
        """Tell all peers, behind the copies of the current stream, that this rank has done it."""
        for peer in self._peers():
            self._flags(peer, part)[32 * act + self._memory.rank :][:1].copy_(self._turns[part, :1])

    def _outputs(self, part: int, x: Tensor, fusion: ResidualRmsNorm, rank: int | None = None) -> list[Tensor]:
        """What is handed out, as it lies in a rank's memory, this one's if none is given: the norm [t, H], or its e4m3 and, where
        they are the tokens' own, scales [t, 1]."""
        rank, space, (tokens, hidden) = self._memory.rank if rank is None else rank, self._space, x.shape
        if fusion.quant == "none":
            return [self._there(rank, part, space.handed_out, x.nbytes).view(x.dtype).view(tokens, hidden)]
        values = self._there(rank, part, space.handed_out, tokens * hidden).view(torch.float8_e4m3fn).view(tokens, hidden)
        if fusion.scale is not None:
            return [values]
        return [values, self._there(rank, part, space.scales, 4 * tokens).view(torch.float32).view(tokens, 1)]
