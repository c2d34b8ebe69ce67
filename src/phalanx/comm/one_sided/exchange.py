# SPDX-License-Identifier: Apache-2.0
"""What the one-sided exchange offers to a layer, and who can form it: GPUs that reach each other's memory (`on_gpu`), and CPU
ranks of one host (`on_cpu`). No size goes through the host: every shape follows from how many rows a rank may have."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from phalanx.comm.agreement import difference
from phalanx.comm.detect import detect_fingerprint
from phalanx.comm.group import Group
from phalanx.comm.shared_memory import share_text
from phalanx.comm.torch_group import TorchGroup
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.moe.tensors import Routing
from phalanx.kernels.scaled_tensors import Quantized
from phalanx.tables.admit import MAX_WORLD
from phalanx.tables.exchange import ExchangeTable, table_for


class OneSided(Protocol):
    """Dispatch and combine between the ranks of a group, of which each has an equal run of a layer's experts. Every method is
    collective: all ranks call `dispatch`, then `combine`, with the same rows."""

    @property
    def max_rows(self) -> int:
        """The most rows of a rank that the memory holds."""

    def dispatch(
        self, x: Tensor | Quantized, routing: Routing, rows: int, experts: int
    ) -> tuple[Tensor | Quantized, Routing]:  # fmt: skip
        """x [T, H], this rank's tokens, T <= rows <= max_rows, with their routing among `experts` experts -> the tokens of all
        ranks [size * rows, H], those of rank r from row r * rows on, in the dtype of x and with scales where x has them; and their
        routing, -1 for rows that are no tokens. Rows of tokens that have no expert on this rank have any content."""

    def combine(self, sums: Tensor, sent: Routing, received: Routing, experts: int) -> Tensor:
        """sums [size * rows, H]: what this rank's experts give to the tokens that `dispatch` returned, with both of its routings ->
        [T, H]: for each token of this rank the sum over the ranks that it went to, in fp32 in their order, rounded once."""


def form(
    group: Group, device: torch.device, *, hidden: int, top_k: int, dtype: torch.dtype, rows: int, timeout: float = 300.0
) -> tuple[OneSided | None, str]:  # fmt: skip
    """The one-sided exchange of a group for tokens of `hidden` features, `top_k` experts each, and up to `rows` rows of a rank;
    or None. Beside it why there is none, or for how many rows there is. Collective, and the same on every rank.

    device: of this rank. timeout: seconds that a CPU rank may keep the others waiting."""
    if group.size == 1:
        return None, "the group has one rank"
    why = refusal(detect_fingerprint(device, group.size, group), hidden, dtype)
    if why is not None:
        return None, why
    sizes = {"hidden": hidden, "top_k": top_k, "dtype": dtype, "rows": rows}
    exchange: OneSided | str
    if device.type == "cpu":
        import phalanx.comm.one_sided.on_cpu as on_cpu

        exchange = on_cpu.form(group, timeout=timeout, **sizes)  # type: ignore[arg-type]
    elif any(share_text(group, "" if has_triton() else "no", device)):
        exchange = "Triton is not installed"
    else:
        import phalanx.comm.one_sided.on_gpu as on_gpu

        assert isinstance(group, TorchGroup)
        exchange = on_gpu.form(group, **sizes)  # type: ignore[arg-type]
    if isinstance(exchange, str):
        return None, exchange
    return exchange, f"for up to {exchange.max_rows} tokens of each index"


def agreed_table(group: Group, device: torch.device) -> ExchangeTable:
    """The machine's table of exchanges, the same on every rank; collective. Raises EngineError where ranks hold different ones."""
    table = table_for(detect_fingerprint(device, group.size, group))
    error = difference([{"expert exchange table": digest} for digest in share_text(group, table.digest, device)])
    if error is not None:
        raise error
    return table


def refusal(fingerprint: Fingerprint, hidden: int, dtype: torch.dtype) -> str | None:
    """Why ranks on such a machine cannot write tokens of `hidden` features into each other's memory; None where they can. Pure."""
    if not fingerprint.peers_reach:
        return f"ranks on {fingerprint} do not reach each other's memory"
    if fingerprint.world > MAX_WORLD:
        return f"it is between 2 to {MAX_WORLD} ranks, not {fingerprint.world}"
    if hidden % _VECTOR_BYTES:
        return f"rows of {hidden} features are no multiple of {_VECTOR_BYTES} bytes in FP8"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it has no sums in {dtype}"
    return None


_VECTOR_BYTES = 16
