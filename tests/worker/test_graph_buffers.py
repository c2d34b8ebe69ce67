# SPDX-License-Identifier: Apache-2.0
"""Of what sizes graphs are, and the facts that they find in their buffers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.bench import shapes
from phalanx.config.model import ModelShape
from phalanx.engine.messages import StepRow
from phalanx.worker.graph_buffers import DecodeGraphBuffers, GraphSize, MixedGraphBuffers, graph_sizes, max_graph_tokens
from phalanx.worker.input_batch import BlockTables

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
MODEL: Any = SimpleNamespace(stream_width=4, output_width=4, lm_head=None, cache_groups=1)


def test_sizes_end_at_the_most_and_stay_close() -> None:
    assert [size.tokens for size in graph_sizes(1, 0)[0]] == [1]
    assert [size.tokens for size in graph_sizes(11, 0)[0]] == [1, 2, 4, 8, 11]
    for most in (64, 256, 512):
        rows, none = graph_sizes(most, 0)
        assert none == []
        assert all(size == GraphSize(size.decode_rows, size.decode_rows, 0) for size in rows)
        token_counts = [size.tokens for size in rows]
        assert token_counts == sorted(set(token_counts))
        assert token_counts[-1] == most
        assert len(token_counts) < 40
        assert all(later <= 2 * size and later - size <= 32 for size, later in itertools.pairwise(token_counts))


@pytest.mark.parametrize(
    ("slots", "most", "last"), [(512, 50_000, 16384), (256, 8192, 8192), (8, 1000, 1000), (256, 32, 32), (1, 20, 20), (3, 2, 2)]
)
def test_sizes_of_any_rows_are_close_where_padding_costs(slots: int, most: int, last: int) -> None:
    sizes = graph_sizes(slots, most)[1]
    assert sizes[-1].tokens == last
    assert len(sizes) <= 19
    for size in sizes:
        assert size.decode_rows == min(size.tokens, slots)  # so that decode rows always have room
        assert 0 < size.prefill_rows == min(-(-size.tokens // 4), slots, max(64, size.tokens // 64))
    for size, later in itertools.pairwise(sizes):
        assert size.tokens < later.tokens
        assert later.tokens <= (2 if later.tokens <= 128 else 1.5) * size.tokens
    assert graph_sizes(slots, 1)[1] == graph_sizes(slots, 0)[1] == []


@pytest.mark.parametrize(
    ("name", "weight_dtype", "ranks", "tokens"),
    [
        ("llama-3-8b", torch.bfloat16, 1, 1375),
        ("llama-3-70b", FP8, 1, 700),
        ("llama-3-70b", FP8, 4, 2802),
        ("mixtral-8x7b", FP8, 1, 2280),  # 2 of 8 experts
        ("qwen3-30b-a3b", FP8, 2, 16384),
    ],
)
def test_large_steps_of_large_layers_are_not_max_graph_tokens(
    tmp_path: Path, name: str, weight_dtype: torch.dtype, ranks: int, tokens: int
) -> None:
    """Ranks come to the same whatever each holds of a layer. Of experts, a token is multiplied with those that it reaches."""
    group, alone = SimpleNamespace(size=ranks), SimpleNamespace(size=1)
    context = SimpleNamespace(dtype=torch.bfloat16, quantization=None, group=group, dp=alone, moe_ep=1, redundant_experts=0)
    layer = SimpleNamespace(parameters=lambda: [torch.empty(1, dtype=weight_dtype, device="meta")])
    model: Any = SimpleNamespace(layers=[layer], context=context, shape=ModelShape.from_folder(shapes.write(name, tmp_path / name)))
    assert max_graph_tokens(model) == tokens


def test_facts_of_decode_rows() -> None:
    """What is filled for a small batch after a large one ends in padding."""
    buffers = DecodeGraphBuffers(8, MODEL, first=True, last=False, dtype=torch.float32, device=CPU)
    for rows, size in ((7, 8), (3, 4), (1, 1)):
        numbers = np.arange(rows, dtype=np.int64)
        host_batch: Any = SimpleNamespace(
            slots=numbers + 1, token_ids=numbers + 50, from_slot_at=numbers[:1], positions=numbers + 20, kv_slots=numbers + 90,
            kv_lengths=(numbers + 21).astype(np.int32),
        )  # fmt: skip
        buffers.fill(host_batch, (numbers[:-1] * 2, numbers[:-1].astype(np.int32) + 30), GraphSize(size, size))
        assert buffers.columns.table_entries.tolist() == [*range(0, 2 * rows - 2, 2), *[-1] * (9 - rows)]
        assert buffers.columns.block_ids[: rows - 1].tolist() == [*range(30, 29 + rows)]
        batch = buffers.batch(GraphSize(size, size), torch.zeros(1, 8, 2, dtype=torch.int32), None)
        pad = size - rows
        assert batch.decodes == size
        assert batch.token_ids.tolist() == [-1, *range(51, 50 + rows), *[0] * pad]
        assert batch.positions.tolist() == [*range(20, 20 + rows), *[0] * pad]
        assert batch.kv_slots.tolist() == [*range(90, 90 + rows), *[-1] * pad]
        assert batch.kv_lengths.tolist() == [*range(21, 21 + rows), *[1] * pad]
        assert batch.table_rows is not None
        assert batch.table_rows.tolist() == [*range(1, 1 + rows), *[0] * pad]


@pytest.mark.parametrize("seed", range(4))
def test_facts_of_any_rows(seed: int) -> None:
    """A few steps after one another at the same buffers: each row is told as it is, and the rest is padding."""
    chance, slots, block = random.Random(seed), 9, 4
    sizes = graph_sizes(slots, 40)[1]
    buffers = MixedGraphBuffers(sizes[-1], MODEL, first=False, dtype=torch.float32, device=CPU)
    assert buffers.hidden is not None
    assert buffers.out is not None
    assert buffers.hidden.shape == buffers.out.shape == (40, 4)
    for _ in range(6):
        size = chance.choice(sizes)
        leading = chance.randrange(5)
        counts = [1] * leading + [chance.randint(2, 6) for _ in range(chance.randrange(0 if leading else 1, 4))]
        tables = BlockTables(slots, 80, block, CPU)
        own, rows = chance.sample(range(slots), len(counts)), []
        for slot, count in zip(own, counts, strict=True):
            start, known = chance.randrange(30), count > 1 or chance.random() < 0.5
            blocks = [chance.randrange(100) for _ in range(-(-(start + count) // block))]
            rows.append(
                StepRow(slot, start, count, [chance.randrange(50) for _ in range(count)] if known else [], blocks, count != 3)
            )
        new = tables.append(rows)
        host_batch = tables.build(rows, [range(min(row.count - 1, 2)) for row in rows])
        new_blocks = new[0][: buffers.max_new_blocks], new[1][: buffers.max_new_blocks]
        buffers.fill(host_batch, new_blocks, size)
        last = torch.arange(100, 100 + slots)
        batch = buffers.batch(size, tables.device, last)
        total, begin, behind = len(host_batch.token_ids), size.decode_rows, len(rows) - leading
        pad, absent = [0] * (size.tokens - total), [0] * (size.prefill_rows - behind)
        assert batch.last is not None
        assert batch.table_rows is not None
        unknown = batch.token_ids == -1
        ids = torch.where(unknown, batch.last[0][batch.last[1]], batch.token_ids)
        wanted = torch.from_numpy(host_batch.token_ids.copy())
        wanted[host_batch.from_slot_at] = last[host_batch.from_slot]
        assert ids.tolist() == wanted.tolist() + pad
        assert batch.positions.tolist() == host_batch.positions.tolist() + pad
        assert batch.kv_slots.tolist() == host_batch.kv_slots.tolist() + [-1] * len(pad)
        gap = [0] * (begin - leading)
        for fact, expected_values in ((batch.table_rows, host_batch.slots), (batch.kv_lengths, host_batch.kv_lengths)):
            assert fact.tolist() == [*expected_values[:leading], *gap, *expected_values[leading:], *absent]
        starts = batch.query_starts.tolist()
        assert starts[: begin + 1] == [min(row, leading) for row in range(begin + 1)]
        assert starts[begin:] == [*host_batch.query_starts[leading:], *[total] * len(absent)]
        assert buffers.columns.table_entries.tolist() == [*new_blocks[0], *[-1] * (buffers.max_new_blocks - len(new_blocks[0]))]
        assert buffers.columns.block_ids[: len(new_blocks[0])].tolist() == new_blocks[1].tolist()
        assert buffers.columns.logit_rows[: len(host_batch.logit_rows)].tolist() == host_batch.logit_rows.tolist()
        assert buffers.columns.sampled_slots[: len(host_batch.sampled_slots)].tolist() == host_batch.sampled_slots.tolist()
