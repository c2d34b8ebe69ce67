# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which rows of a tensor [T, H], and the tensor of which each rank holds its own rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_METADATA = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_cuda"))


class Gathers(Protocol):
    """What of a `Group` is needed here."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor: ...


def own_rows(tokens: int, at_once: int, rank: int, world: int) -> Iterator[range]:
    """The rows that `rank` owns: of each `at_once` rows (what is left, at the end), R of them, those from rank * ceil(R / world) to
    the next rank's."""
    for first in range(0, tokens, at_once):
        rows = min(at_once, tokens - first)
        depth = -(-rows // world)
        yield range(first + min(rank * depth, rows), first + min((rank + 1) * depth, rows))


def same_owners(tokens: int, at_once: int, other: int) -> bool:
    """Whether rows have the same owners by chunks of either size."""
    return min(at_once, tokens) == min(other, tokens)


class OwnedRows(Tensor):
    """A tensor [T, H] of which each rank of a group holds its own rows (`own_rows`); the others' rows mean nothing there.

    It flows where a tensor does, and refuses whatever would read it as one: only an all-reduce that knows of owners takes `held`,
    and `whole` makes a tensor of it. at_once: rows of a chunk, by which rows have owners.
    """

    held: Tensor
    at_once: int

    @staticmethod
    def of(held: Tensor, at_once: int) -> OwnedRows:
        made = held.as_subclass(OwnedRows)
        made.held, made.at_once = held, at_once
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__qualname__", repr(func))
        raise TypeError(f"{name} would read rows that other ranks own: comm.rows.whole makes a tensor of them")

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes more, and reads the values
        return f"OwnedRows({list(self.held.shape)}, {self.held.dtype}, at_once={self.at_once})"


def gathered(held: Tensor, at_once: int, group: Gathers) -> Tensor:
    """held [T, N] with the rows that each rank owns from that rank; collective."""
    tokens, parts = len(held), []
    for number, mine in enumerate(own_rows(tokens, at_once, group.rank, group.size)):
        rows = min(at_once, tokens - number * at_once)
        depth = -(-rows // group.size)
        sent = held[mine.start : mine.stop]
        if len(mine) < depth:
            sent = torch.cat((sent, sent.new_zeros(depth - len(mine), held.shape[1])))
        parts.append(group.all_gather(sent.contiguous(), dim=0)[:rows])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def whole(x: Tensor, group: Gathers) -> Tensor:
    """x as every rank may read it: itself, or gathered from its owners; collective where it is OwnedRows."""
    if not isinstance(x, OwnedRows):
        return x
    return gathered(x.held, x.at_once, group) if x.held.shape[0] else x.held
