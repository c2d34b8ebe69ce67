# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepRow
from phalanx.worker.input_batch import BlockTables, PromptLogprobs, Upload

BLOCK = 4
rows_of = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows_of, st.randoms())
def test_index_arrays_equal_a_loop_over_tokens(parts: list[tuple[int, int, bool]], chance: object) -> None:
    tables = BlockTables(8, 64, BLOCK, torch.device("cpu"))
    slots = chance.sample(range(8), len(parts))  # type: ignore[attr-defined]
    free = list(range(200))
    chance.shuffle(free)  # type: ignore[attr-defined]
    rows, owned = [], {}
    for slot, (start, count, samples) in zip(slots, parts, strict=True):
        owned[slot] = [free.pop() for _ in range(-(-(start + count) // BLOCK))]
        known = count > 1 or not samples
        rows.append(StepRow(slot, start, count, list(range(100, 100 + count)) if known else [], owned[slot], samples))
    tables.append(rows)
    reported = [range(row.count // 2) for row in rows]
    batch = tables.build(rows, reported)

    ids, positions, places, ends, at, scored = [], [], [], [], [], []
    for row, part in zip(rows, reported, strict=True):
        scored += [len(ids) + i for i in part]
        for i in range(row.count):
            if not row.tokens:
                at.append(len(ids))
            ids.append(row.tokens[i] if row.tokens else 0)
            positions.append(row.start + i)
            places.append(owned[row.slot][(row.start + i) // BLOCK] * BLOCK + (row.start + i) % BLOCK)
        ends.append(len(ids))
    assert batch.token_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.kv_slots.tolist() == places
    assert batch.query_starts.tolist() == [0, *ends]
    assert batch.kv_lengths.tolist() == [row.start + row.count for row in rows]
    assert batch.logit_rows.tolist() == [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples] + scored
    assert batch.from_slot_at.tolist() == at
    assert batch.from_slot.tolist() == [row.slot for row in rows if not row.tokens]
    assert batch.sampled_slots.tolist() == [row.slot for row in rows if row.samples]
    sent = Upload(torch.device("cpu")).send(batch.arrays)
    assert [tensor.tolist() for tensor in sent] == [array.tolist() for array in batch.arrays]


def test_tables_grow_and_begin_anew() -> None:
    tables = BlockTables(2, 16, BLOCK, torch.device("cpu"))
    places, ids = tables.append([StepRow(1, 0, 8, [1] * 8, [7, 9])])
    assert (places.tolist(), ids.tolist()) == ([4, 5], [7, 9])
    places, _ = tables.append([StepRow(1, 8, 1, [1], [3]), StepRow(0, 0, 1, [1], [])])
    assert places.tolist() == [6]
    assert tables.device[0, 1].tolist() == [7, 9, 3, 0]
    tables.clear(1)
    places, _ = tables.append([StepRow(1, 0, 1, [1], [5])])
    assert places.tolist() == [4]


def test_prompt_tokens_are_reported_up_to_the_prompts_end() -> None:
    prompts = PromptLogprobs()
    prompts.admit(SlotAssignment(0, [10, 11, 12, 13, 99], 4, SamplingParams(prompt_logprobs=2), 1))
    prompts.admit(SlotAssignment(1, [10, 11], 2, SamplingParams(), 1))
    assert prompts.targets(StepRow(0, 0, 2, [10, 11])) == ([11, 12], [2, 2])
    assert prompts.targets(StepRow(0, 2, 3, [12, 13, 99])) == ([13], [2])
    assert prompts.reported(StepRow(0, 5, 1)) == range(0)
    assert prompts.targets(StepRow(1, 0, 2, [10, 11])) == ([], [])
    prompts.release(0)
    assert prompts.reported(StepRow(0, 0, 2, [10, 11])) == range(0)
