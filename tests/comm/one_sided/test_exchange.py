# SPDX-License-Identifier: Apache-2.0
"""Who can form the one-sided exchange, and what is said where it cannot be."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from phalanx.comm import one_sided, shared_memory
from phalanx.comm.group import Solo
from phalanx.comm.local import LocalWorld
from phalanx.comm.one_sided import exchange
from phalanx.errors import EngineError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.exchange import ExchangeRow, ExchangeSpan, ExchangeTable


@pytest.mark.parametrize(
    ("link", "hidden", "dtype", "why"),
    [
        ("nvlink", 4096, torch.bfloat16, None),
        ("pcie_p2p", 4096, torch.float16, None),
        ("shm", 48, torch.float32, None),
        ("pcie", 4096, torch.bfloat16, "ranks on sm90.pcie.tp2 do not reach each other's memory"),
        ("nodes", 4096, torch.bfloat16, "ranks on sm90.nodes.tp2 do not reach each other's memory"),
        ("nvlink", 4104, torch.bfloat16, "rows of 4104 features are no multiple of 16 bytes in FP8"),
        ("nvlink", 4096, torch.float64, "it has no sums in torch.float64"),
    ],
)
def test_who_can(link: str, hidden: int, dtype: torch.dtype, why: str | None) -> None:
    assert one_sided.refusal(Fingerprint(0 if link == "shm" else 90, link, 2), hidden, dtype) == why


def test_of_more_ranks_than_a_host_has() -> None:
    assert one_sided.refusal(Fingerprint(90, "nvlink", 8), 4096, torch.bfloat16) is None
    assert one_sided.refusal(Fingerprint(90, "nvlink", 9), 4096, torch.bfloat16) == "it is between 2 to 8 ranks, not 9"


def test_ranks_compare_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, world = torch.device("cpu"), LocalWorld(2)
    assert world.run(lambda group: one_sided.agreed_table(group, cpu)) == [ExchangeTable(Fingerprint(0, "shm", 2))] * 2
    measured = ExchangeRow("16 bit", 1, 99, (ExchangeSpan(1, 9, "ALL_GATHER"),))
    monkeypatch.setattr(
        exchange, "table_for",
        lambda fingerprint: ExchangeTable(fingerprint, (measured,) if threading.current_thread().name.endswith("_1") else ()),
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"^the ranks differ in expert exchange table"):
        world.run(lambda group: one_sided.agreed_table(group, cpu))


def test_one_rank_needs_none() -> None:
    assert one_sided.form(Solo(), torch.device("cpu"), hidden=48, top_k=2, dtype=torch.float32, rows=8)[0] is None


def test_without_shared_memory_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "refusal", lambda *_: "the host has none")
    exchanges = LocalWorld(2).run(
        lambda group: one_sided.form(group, torch.device("cpu"), hidden=48, top_k=2, dtype=torch.float32, rows=8)
    )
    assert exchanges == [(None, "rank 0: the host has none")] * 2


def test_without_triton_there_is_a_reason_and_nothing_of_triton_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair(Solo):
        size = 2

    monkeypatch.setattr(exchange, "has_triton", lambda: False)
    monkeypatch.setattr(exchange, "detect_fingerprint", lambda *_: Fingerprint(90, "nvlink", 2))
    monkeypatch.setattr(exchange, "share_text", lambda group, text, device: [text, ""])
    monkeypatch.setitem(sys.modules, "phalanx.comm.one_sided.on_gpu", None)
    sizes = {"hidden": 4096, "top_k": 2, "dtype": torch.bfloat16, "rows": 8}
    assert one_sided.form(Pair(), torch.device("cuda"), **sizes) == (None, "Triton is not installed")
