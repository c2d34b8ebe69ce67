# SPDX-License-Identifier: Apache-2.0
"""Steps in parts give what whole steps give: over threads, over streams that are late, and over real ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.models.layers import overlap
from phalanx.models.layers.overlap import Overlap
from tests.checkpoints import write_checkpoint
from tests.comm import cpu_ranks
from tests.models.formation import Formation
from tests.quantized_checkpoints import rewrite

CPU = torch.device("cpu")
EIGHTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 128, "std": 0.15}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen2-window-above": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 6}),
}


def _overlap_of(tp: int, **options: int) -> Overlap:
    return LocalWorld(tp).run(lambda group: Overlap(group, CPU, **options))[0]


@pytest.mark.parametrize("tokens", [2048, 2049, 3071, 3072, 4100, 8192, 8191, 16384])
def test_parts_are_alike_and_whole_tiles(tokens: int) -> None:
    parts = _overlap_of(2).cut(tokens)
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) == min(4, tokens // 1024)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == tokens
    assert all(part.start % 128 == 0 for part in parts)
    assert max(sizes) - min(sizes) < 2 * 128


def test_short_steps_and_single_ranks_are_not_cut() -> None:
    assert _overlap_of(2).cut(2047) == [slice(0, 2047)]
    assert Overlap(Solo(), CPU).cut(8192) == [slice(0, 8192)]


def _logits(formation: Formation, tokens: list[Tensor]) -> list[Tensor]:
    """Of a long step and of a short one behind it."""
    long = formation.step([(number, part[:-1]) for number, part in enumerate(tokens)], padding=3)
    return long + formation.step([(number, part[-1:]) for number, part in enumerate(tokens)])


def _overlapping(formation: Formation, make: Callable[[Group], Overlap]) -> Formation:
    for model in (model for stage in formation.models for model in stage):
        model.overlap = make(model.seat.group)
    return formation


def _in_small_parts(group: Group) -> Overlap:
    return Overlap(group, CPU, part_tokens=128)


def _tokens(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 380, (length,), generator=generator) for length in lengths]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each sum that was begun."""
    begun, begin = [], Overlap.begin

    def counted(self: Overlap, layer: Any, x: Any, *rest: Any) -> Any:
        begun.append(x.shape[0])
        return begin(self, layer, x, *rest)

    monkeypatch.setattr(Overlap, "begin", counted)
    return begun


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_parts_give_the_logits_of_the_whole(case: str, tp: int, pp: int, tmp_path: Path, sums: list[int]) -> None:
    family, overrides = CASES[case]
    folder = write_checkpoint(tmp_path, family, **{"num_key_value_heads": 4, "max_position_embeddings": 512, **overrides})
    tokens = _tokens(230, 1 + 25, 1 + 1)
    plain = _logits(Formation(folder, tp=tp, pp=pp, blocks=80), tokens)
    assert not sums
    parts = _logits(_overlapping(Formation(folder, tp=tp, pp=pp, blocks=80), _in_small_parts), tokens)
    assert sorted(set(sums)) == [2, 256]  # 255 tokens and 3 of padding
    assert len(sums) == 2 * 2 * 2 * tp
    for one, other in zip(plain, parts, strict=True):
        torch.testing.assert_close(other.log_softmax(-1), one.log_softmax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("form", ["modelopt", "on load"])
def test_quantized_activations_are_cut_with_their_scales(form: str, products: bool, tmp_path: Path, sums: list[int]) -> None:
    folder = write_checkpoint(tmp_path / "plain", "llama", dtype=torch.bfloat16, max_position_embeddings=512, **EIGHTS)
    if form != "on load":
        folder = rewrite(folder, tmp_path / "quantized", form)[0]
    options = {"fp8": form == "on load", "fp8_products": products}
    tokens = _tokens(300, 230)
    plain = _logits(Formation(folder, tp=2, blocks=160, **options), tokens)
    parts = _logits(_overlapping(Formation(folder, tp=2, blocks=160, **options), _in_small_parts), tokens)
    assert set(sums) == {256, 128, 19}
    for one, other in zip(plain, parts, strict=True):
        # A product's last bit may hang on the rows beside it on CPU, and now and then tips a rounding to e4m3.
        assert (other.log_softmax(-1) - one.log_softmax(-1)).abs().mean() < 1e-3


class LateGroup:
    """A group on whose stream nothing happens before somebody waits for it; and then what was let go meanwhile is missed."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.late: list[weakref.ref[Tensor]] = []
        self.done = 0

    def sum_beside(self, x: Tensor) -> Tensor:
        self.late.append(weakref.ref(x))
        return x

    def wait_stream(self, other: Any) -> None:
        return

    def record_event(self) -> tuple[LateGroup, int]:
        return self, len(self.late)

    def catch_up(self, count: int) -> None:
        while self.done < count:
            x = self.late[self.done]()
            assert x is not None, "let go before its sum was waited for"
            x.copy_(self.group.all_reduce(x))
            self.done += 1


def test_nothing_is_read_or_let_go_before_its_sum_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_key_value_heads=4, max_position_embeddings=512)
    tokens = _tokens(1 + 420, 1 + 101)
    plain = _logits(Formation(folder, tp=2, blocks=200), tokens)
    caller = SimpleNamespace(wait_event=lambda event: event[0].catch_up(event[1]))
    spared: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", spared.append)
    made: list[LateGroup] = []

    def late(group: Group) -> Overlap:
        made.append(LateGroup(group))
        found = Overlap(made[-1], CPU, part_tokens=128)
        found._stream = made[-1]
        return found

    parts = _logits(_overlapping(Formation(folder, tp=2, blocks=200), late), tokens)
    for one, other in zip(plain, parts, strict=True):
        torch.testing.assert_close(other.log_softmax(-1), one.log_softmax(-1), rtol=0, atol=1e-4)
    for each in made:
        assert each.done == len(each.late) == 2 * 2 * 4  # every sum was waited for, of 2 layers in 4 parts
        assert not any(x() is not None for x in each.late)
    assert sorted(spared, key=str) == [overlap.SPARED] * 2 + [None] * 2


RANKS = """
import torch.distributed as dist
from collections import deque
from phalanx.comm.group import Solo
from phalanx.comm.tuned_group import tuned
from phalanx.config.model import ModelShape
from phalanx.engine.messages import StepResult
from phalanx.engine.runner import Runner
from phalanx.engine.sampler import Sampler
from phalanx.models import registry, weights
from phalanx.models.batch import LayerCache
from phalanx.models.layers.attention import backend
from phalanx.models.layers.overlap import Overlap
from tests.engine.drive import Drive

tp, pp, prompts, form = {asked}
cpu, shape = group.device, ModelShape.from_folder(folder / "model")
made = [[dist.new_group([s * tp + r for r in range(tp)]) for s in range(pp)],
        [dist.new_group([s * tp + r for s in range(pp)]) for r in range(tp)]]
stage, mine = divmod(rank, tp)
tensor = tuned(TorchGroup(made[0][stage], cpu), message_bytes=1 << 21, tables=folder / "none")
pipe = TorchGroup(made[1][mine], cpu) if pp > 1 else Solo()
model = registry.build(
    shape, group=tensor, layers=range(stage * 2 // pp, (stage + 1) * 2 // pp), dtype=torch.float32, device=cpu,
    fp8=form == "fp8", fp8_products=form == "fp8",
)
weights.load(model, folder / "model")
for name, overlap in (("plain", None), ("parts", Overlap(tensor, cpu))):
    model.overlap, tensor.calls = overlap, {}
    caches = [LayerCache.zeros(900, 4, s.heads, s.head_dim, torch.float32, cpu) for s in model.kv_specs()]
    runner = Runner(
        model, caches, backend(cpu, torch.float32, shape.head_dim), Sampler(4, shape.vocab_size, cpu) if stage == pp - 1 else None,
        pipe, max_batch_size=4, max_seq_len=2300, block_size=4, dtype=torch.float32, device=cpu,
    )
    results = deque()
    def submit(step):
        rows, _ = runner.run(step.batches[0]).results()
        rows = [rows]
        if pp > 1:
            dist.broadcast_object_list(rows, src=(pp - 1) * tp)
        results.append(StepResult(step.number, rows))
    drive = Drive(submit, lambda: [results.popleft()] if results else [], blocks=900)
    found[name] = drive.generate(prompts, 5, chunk=2200)
    found[name, "calls"] = dict(tensor.calls)
"""


@pytest.mark.parametrize(("tp", "pp", "form"), [(4, 1, "fp8"), (2, 2, "plain")])
def test_ranks_sample_the_same_tokens(tp: int, pp: int, form: str, tmp_path: Path) -> None:
    """Over gloo, with prompts of 2,048 tokens and one more: the fewest that are cut, and not evenly."""
    write_checkpoint(tmp_path / "model", "llama", max_position_embeddings=2304, **EIGHTS)
    prompts = [part.tolist() for part in _tokens(2000, 49)]
    body = RANKS.replace("{asked}", repr((tp, pp, prompts, form)))
    for found in cpu_ranks.run(tp * pp, body, tmp_path):
        assert found["parts"] == found["plain"]
        assert all(len(tokens) == 5 for tokens in found["parts"])
        beside = found["parts", "calls"].get("GLOO/NONE", 0) - found["plain", "calls"].get("GLOO/NONE", 0)
        assert beside == 2 * 2 * (2 // pp)  # 2 parts of 2 sums in each layer
