# SPDX-License-Identifier: Apache-2.0
"""Rows that verify drafts: what the slots have, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.kernels.speculation.drafts import DRAFTS, IN_SLOT, LAST, LENGTH, NO_DRAFT, accept_drafts, expand_drafts, noise_keys
from phalanx.worker.sampler import _noise_keys
from tests.support.kernels_compiled import compiled_as
from tests.support.kernels_interpreted import interpret

pytestmark = pytest.mark.usefixtures("forked_python")

BLOCK = 4


def state_of(slots: int, k: int) -> torch.Tensor:
    state = torch.zeros(DRAFTS + k, slots, dtype=torch.int64)
    state[LAST], state[LENGTH] = torch.arange(slots) + 100, torch.arange(slots) * 3
    state[DRAFTS:] = torch.arange(k).unsqueeze(1) * 10 + torch.arange(slots)
    return state


def test_rows_take_from_their_slots_what_the_host_does_not_know() -> None:
    state, tables = state_of(5, 3), torch.arange(10, 60, dtype=torch.int32).view(5, 10)
    slots, starts = torch.tensor([3, 1, 4]), torch.tensor([IN_SLOT, 3, IN_SLOT])
    ids = torch.tensor([[IN_SLOT] * 3, [7, 8, NO_DRAFT], [IN_SLOT] * 3])
    token_ids, positions, kv_slots = (torch.full((12,), -9) for _ in range(3))
    kv_lengths, drafts = torch.full((12,), -9, dtype=torch.int32), torch.empty(3, 2, dtype=torch.int64)
    capacities = torch.tensor([12, 8, 12])
    expand_drafts(
        state, tables, BLOCK, slots, starts, capacities, ids, token_ids=token_ids, positions=positions, kv_slots=kv_slots,
        kv_lengths=kv_lengths, drafts=drafts,
    )  # fmt: skip
    assert starts.tolist() == [9, 3, 12]
    assert drafts.tolist() == [[3, 13], [8, NO_DRAFT], [NO_DRAFT, NO_DRAFT]], "slot 4 has no blocks from position 12 on"
    assert token_ids.tolist() == [103, 3, 13, 7, 8, 0, 104, 4, 14, -9, -9, -9]
    assert positions.tolist() == [9, 10, 11, 3, 4, 5, 11, 11, 11, -9, -9, -9]
    at = [(40 + 2) * BLOCK + 1, (40 + 2) * BLOCK + 2, (40 + 2) * BLOCK + 3, 20 * BLOCK + 3, 21 * BLOCK, -1, -1, -1, -1]
    assert kv_slots.tolist() == [*at, -9, -9, -9]
    assert kv_lengths.tolist() == [10, 11, 12, 4, 5, 6, 12, 12, 12, -9, -9, -9]


def test_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    state, slots, starts = state_of(6, 3), torch.tensor([0, 1, 2, 5]), torch.tensor([10, 20, 30, 40])
    drafts = torch.tensor([[1, 2], [1, 2], [NO_DRAFT, 2]])
    tokens = torch.tensor([1, 2, 3, 9, 2, 3, 4, 2, 6, 77])
    out = torch.empty(4, 4, dtype=torch.int64)
    accept_drafts(state, slots, starts, tokens, drafts, out)
    assert out.tolist() == [[1, 2, 3, 2], [9, -1, -1, 2], [4, -1, -1, 1], [77, -1, -1, 0]]
    assert state[LAST].tolist() == [3, 9, 4, 103, 104, 77]
    assert state[LENGTH].tolist() == [13, 21, 31, 9, 12, 41]
    assert (state[DRAFTS:, [0, 1, 2, 5]] == NO_DRAFT).all()
    assert (state[DRAFTS:, [3, 4]] >= 0).all()


def test_rates_decide_instead_of_tokens() -> None:
    rows, k = 4000, 3
    state, drafts = state_of(rows, k), torch.arange(rows * k).view(rows, k)
    out, rates = torch.empty(rows, k + 2, dtype=torch.int64), torch.tensor([0.9, 0.5, 0.5])
    tokens = torch.full((rows * (k + 1),), 10**6)
    drafts[7] = NO_DRAFT
    accept_drafts(state, torch.arange(rows), torch.arange(rows) % 50, tokens, drafts, out, rates)
    counts = (out[:, :-1] >= 0).sum(1) - 1
    assert [(counts >= place).double().mean().item() for place in (1, 2, 3)] == pytest.approx([0.9, 0.45, 0.225], abs=0.03)
    assert counts[7] == 0
    row = int((counts == 2).nonzero()[0])
    assert out[row].tolist() == [*drafts[row, :2].tolist(), 10**6, -1, 3]


def test_noise_is_that_of_the_host() -> None:
    chance = np.random.default_rng(0)
    seeds, positions = chance.integers(0, 2**64, 500, dtype=np.uint64), chance.integers(0, 2**20, 500, dtype=np.uint64)
    keys = noise_keys(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions.view(np.int64)))
    np.testing.assert_array_equal(keys.numpy(), _noise_keys(seeds, positions))


def check_kernels() -> None:
    from phalanx.kernels.speculation import draft_kernels
    from phalanx.kernels.speculation import drafts as plain

    plain._kernel_takes = lambda _: False
    torch.manual_seed(0)
    for rows, k, others in ((1, 1, 0), (5, 3, 2), (3, 7, 1), (4, 0, 3), (0, 0, 2)):
        slots = torch.randperm(12)[: rows + others]
        states = [torch.randint(0, 50, (DRAFTS + 7, 12)) for _ in range(1)]
        states[0][DRAFTS + 2] = NO_DRAFT
        states.append(states[0].clone())
        tables, width = torch.randint(0, 1000, (12, 20), dtype=torch.int32), k + 1
        starts = torch.randint(0, 60, (rows + others,))
        starts[:rows:2] = IN_SLOT
        capacities, ids = torch.randint(1, 80, (rows,)), torch.full((rows, width), IN_SLOT)
        ids[1::2] = torch.randint(-1, 9, ids[1::2].shape)
        ids[1::2, 0] = 5
        inputs = []
        for state, expand in zip(states, (draft_kernels.expand_drafts, expand_drafts), strict=True):
            outputs = {name: torch.full((rows * width + 2,), -9) for name in ("token_ids", "positions", "kv_slots")}
            outputs["kv_lengths"] = torch.full((rows * width + 2,), -9, dtype=torch.int32)
            outputs["drafts"], outputs["starts"] = torch.full((rows, k), -9), starts.clone()
            if rows:
                own = outputs["starts"][:rows]
                named = {name: value for name, value in outputs.items() if name != "starts"}
                expand(state, tables, BLOCK, slots[:rows], own, capacities, ids, **named)
            inputs.append(outputs)
        for name, values in inputs[0].items():
            assert torch.equal(values, inputs[1][name]), name
        tokens = torch.randint(0, 3, (rows * width + others,))
        drafts = torch.randint(-1, 3, (rows, k))
        for rates in (None, torch.rand(max(k, 1))):
            outs = []
            for state, accept in zip(states, (draft_kernels.accept_drafts, accept_drafts), strict=True):
                outs.append(torch.full((rows + others, k + 2), -9))
                accept(state, slots, inputs[0]["starts"], tokens, drafts, outs[-1], rates)
            assert torch.equal(*outs)
            assert torch.equal(*states)
    seeds, positions = torch.randint(-(2**62), 2**62, (700,)), torch.randint(0, 2**20, (700,))
    assert torch.equal(draft_kernels.noise_keys(seeds, positions), noise_keys(seeds, positions))


def test_kernels_in_the_interpreter() -> None:
    interpret([check_kernels])


@pytest.mark.gpu1
def test_kernels_on_gpu() -> None:
    with torch.device("cuda"):
        check_kernels()


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", ["expand_drafts", "accept_drafts", "noise_keys"])
def test_kernels_compile(name: str, arch: int) -> None:
    pytest.importorskip("triton")
    from phalanx.kernels.speculation import draft_kernels

    kernel = getattr(draft_kernels, f"_{name}")
    long = dict.fromkeys(("state", "slots", "starts", "capacities", "ids", "token_ids", "positions", "kv_slots", "drafts"), "*i64")
    long |= dict.fromkeys(("tokens", "out", "seeds"), "*i64")
    sizes = dict.fromkeys(("slot_count", "table_width", "block_size", "width", "draft_rows", "rows", "count"), "i32")
    kinds = long | sizes | {"tables": "*i32", "kv_lengths": "*i32", "rates": "*fp32", "keys": "*i32"}
    constants = {"LANES": draft_kernels.LANES, "RATES": True, "BLOCK": 256}
    known = {argument: value for argument, value in constants.items() if argument in kernel.arg_names}
    assert len(compiled_as(kernel, kinds, known, arch).asm["cubin"]) > 0
