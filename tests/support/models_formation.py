# SPDX-License-Identifier: Apache-2.0
"""A checkpoint over tp x pp in-process ranks, with paged caches and shuffled block ids: what the model tests drive."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout import weight_tensors as catalog
from phalanx.layout.cache import group_windows
from phalanx.layout.families import model_cache
from phalanx.layout.weights import stage_layers, weight_bytes
from phalanx.models import registry, weights
from phalanx.models.batch import Batch, GroupTables
from phalanx.models.cache import LayerCache, empty_caches
from phalanx.models.decoder import Decoder
from phalanx.models.layers.attention.select import select_backend
from phalanx.models.slices import LayerContext
from tests.support.comm_poisoned import poisoned

CPU = torch.device("cpu")
SLOTS = 128
"""Sequences, at most: each has the slot of its number."""


class Formation:
    """Sequences by index, each with a block table that grows; block 0 is poison: it holds NaN, and nothing may read it.
    So does the state at slot 0 before a sequence begins there.

    options: those of `registry.build` for FP8 and experts.
    """

    def __init__(self, folder: Path, *, tp: int = 1, pp: int = 1, block_size: int = 4, blocks: int = 64, **options: Any) -> None:
        self.options = options
        self.shape = ModelShape.from_folder(folder)
        self.world, self.block_size = LocalWorld(tp), block_size
        ranges = stage_layers(self.shape, "fp32", pp)
        self.models = [self.world.run(lambda group, layers=layers: self._rank(group, layers, folder)) for layers in ranges]
        self.windows = group_windows(model_cache(self.shape))
        blocks *= len(self.windows)
        self.caches = [[self._caches(model, blocks) for model in stage] for stage in self.models]
        self.free = list(range(1, blocks))
        random.Random(7).shuffle(self.free)
        self.tables: dict[int, list[list[int]]] = {}  # of each sequence, one for each group of layers
        self.lengths: dict[int, int] = {}

    def randomize(self, seed: int) -> None:
        """Random weights instead of the checkpoint's."""
        for stage in self.models:
            for model in stage:
                weights.dummy(model, seed=seed)

    def _rank(self, group: Group, layers: range, folder: Path) -> Decoder:
        model = registry.build(self.shape, layers, LayerContext(group, torch.float32, CPU, **self.options))
        weights.load(model, folder)
        return model

    def _caches(self, model: Decoder, blocks: int) -> list[LayerCache]:
        caches = empty_caches(model.declared_caches(), blocks, self.block_size, CPU, slots=SLOTS)
        for cache in caches:
            for name, tensor in cache.tensors.items():
                if name != "token_scales":
                    tensor[0] = float("nan")
        return caches

    def step(self, rows: Sequence[tuple[int, Tensor]], *, padding: int = 0) -> list[Tensor]:
        """One forward. rows: (sequence, its next token ids). Returns the logits of each row's tokens, from tp rank 0."""
        with torch.inference_mode():
            hidden: list[Tensor | None] = [None] * self.world.size
            batches = self._batches(rows, padding)
            for models, caches in zip(self.models, self.caches, strict=True):
                hidden = self.world.run(
                    lambda group, m=models, c=caches, h=hidden: m[group.rank](batches[group.rank], c[group.rank], h[group.rank])
                )
            for other in hidden[1:]:
                torch.testing.assert_close(other, hidden[0], rtol=0, atol=0)
            return list(torch.split(hidden[0], [len(tokens) for _, tokens in rows]))

    def _batches(self, rows: Sequence[tuple[int, Tensor]], padding: int) -> list[Batch]:
        positions, starts, lengths = [], [0], []
        slots: list[list[int]] = [[] for _ in self.windows]
        for sequence, tokens in rows:
            own, begin = self.tables.setdefault(sequence, [[] for _ in self.windows]), self.lengths.get(sequence, 0)
            end = begin + len(tokens)
            for table, of_group in zip(own, slots, strict=True):
                while len(table) * self.block_size < end:
                    table.append(self.free.pop())
                of_group += [table[at // self.block_size] * self.block_size + at % self.block_size for at in range(begin, end)]
            positions += range(begin, end)
            starts.append(starts[-1] + len(tokens))
            lengths.append(end)
            self.lengths[sequence] = end
            for table, window in zip(own, self.windows, strict=True):
                self._forget_behind_window(table, window, begin)
        width = max(len(own[0]) for own in self.tables.values()) + 1
        known = [self.tables.get(sequence, [[]] * len(self.windows)) for sequence in range(SLOTS)]
        tables = torch.tensor(
            [[table + [0] * (width - len(table)) for table in of_group] for of_group in zip(*known, strict=True)], dtype=torch.int32
        )
        table_rows = torch.tensor([sequence for sequence, _ in rows])
        count = starts[-1]
        ids = torch.cat([tokens for _, tokens in rows] + [torch.zeros(padding, dtype=torch.int64)])
        batches = []
        for _ in range(self.world.size):
            kv_slots = torch.tensor([of_group + [-1] * padding for of_group in slots])
            batch = Batch(
                ids, torch.tensor(positions + [0] * padding), kv_slots[0], torch.tensor(starts, dtype=torch.int32),
                torch.tensor(lengths, dtype=torch.int32), tables[0], torch.arange(count), starts, lengths, table_rows=table_rows,
                more_groups=[GroupTables(*each, None) for each in zip(kv_slots[1:], tables[1:], strict=True)],
            )  # fmt: skip
            batch.attention = select_backend(CPU, torch.float32, self.shape.head_dim, self.shape.latent).plan(batch)
            batches.append(batch)
        return batches

    def _forget_behind_window(self, table: list[int], window: int | None, next_position: int) -> None:
        """As the scheduler does: a block that no query from next_position on can see goes back, and its entry is poison."""
        if window is None:
            return
        gone = max(0, next_position - window + 1) // self.block_size
        self.free += [block for block in table[:gone] if block]
        table[:gone] = [0] * gone


class ShardedFormation(Formation):
    """Its ranks own rows, by chunks of five; whoever reads a row that another owns reads NaN. groups: of all ranks and stages."""

    gemm_rs_min_tokens = 1 << 30

    def _rank(self, group: Group, layers: range, folder: Path) -> Decoder:
        self.groups = [*getattr(self, "groups", []), sharding := poisoned(group, gemm_rs_min_tokens=self.gemm_rs_min_tokens)]
        return super()._rank(sharding, layers, folder)


def run_steps(
    formation: Formation, steps: Sequence[Mapping[int, int]], ids: Sequence[Tensor], expected: Sequence[Tensor],
    assert_same: Callable[[Tensor, Tensor], None],
) -> None:  # fmt: skip
    """Forward all of `ids`, in steps of {sequence: number of its next tokens}, some of them padded. assert_same: compares the
    logits of a row with those of `expected`."""
    done = [0] * len(ids)
    for number, step in enumerate(steps):
        rows = [(sequence, ids[sequence][done[sequence] : done[sequence] + count]) for sequence, count in step.items()]
        for (sequence, tokens), logits in zip(rows, formation.step(rows, padding=number % 3), strict=True):
            assert logits.shape == (len(tokens), formation.shape.vocab_size)
            assert_same(logits, expected[sequence][done[sequence] : done[sequence] + len(tokens)])
            done[sequence] += len(tokens)
    assert done == [len(tokens) for tokens in ids]


def assert_every_weight_matters(formation: Formation, ids: Tensor, *, least: float, neutral: str = "") -> None:
    """Change the weights of the first rank one after the other, by up to a fifth (bytes by 1): each change must move some log
    probability of the next tokens by more than `least`, but one. Else an error in its arithmetic would go unseen."""
    torch.manual_seed(0)
    before = formation.step([(0, ids)])[0].log_softmax(-1)
    for number, (name, weight) in enumerate(formation.models[0][0].named_parameters(), start=1):
        kept = weight.detach().clone()
        if weight.dtype == torch.uint8:
            weight.add_(1)
        else:
            weight.mul_(1.0 + 0.2 * torch.rand_like(weight))
        after = formation.step([(number, ids)])[0].log_softmax(-1)
        weight.copy_(kept)
        assert (after - before).abs().max() > least or name == neutral, name
        formation.free += [block for table in formation.tables.pop(number) for block in table]


def assert_catalog_is_read(folder: Path, *, is_on_disk: bool = True) -> None:
    """The declared tensors are those that a rank reads, and those of the files (is_on_disk); their bytes are as declared."""
    formation = Formation(folder)
    model, declared = formation.models[0][0], catalog.tensors(formation.shape)
    if is_on_disk:
        assert declared == {name: tuple(weight.shape) for name, weight in load_file(folder / "model.safetensors").items()}
    parts = list(weights.slices(model))
    assert {part.name: part.shape for part in parts} == declared
    nbytes = sum(part.target.nbytes for part in parts) + sum(each.inv_freq.nbytes for each in model.rotary_embs.values())
    assert weight_bytes(formation.shape, "fp32", Layout()) == (nbytes,)
