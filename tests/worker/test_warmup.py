# SPDX-License-Identifier: Apache-2.0
"""The warm-up of a start, on CPU: steps and sizes of graphs go through few layers, and leave nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.hardware.probe import Machine
from phalanx.kernels.compiling.record import KernelRecord
from phalanx.models import registry
from phalanx.models.llama import LlamaLayer
from phalanx.models.slices import LayerContext
from phalanx.worker import memory_profile, warmup
from phalanx.worker.cuda_graphs import EagerCapturer
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.warmup import warm_up
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import BLOCK, expected, prompts
from tests.support.worker_graphs import SLOTS, Counting, drive, make_runner

CPU = torch.device("cpu")


class Kernels:
    """As `Ahead`: all are cached or none, and none are compiled."""

    def __init__(self, cached: bool) -> None:
        self.cached, self.compiled, self.processes, self.own, self.loaded = cached, 0, 0, [False], False

    def folders(self) -> list[str]:
        return ["FIRST", "SECOND"]

    def all_cached(self) -> bool:
        return self.cached

    def load(self) -> None:
        self.loaded = True

    def keys(self) -> list[int]:
        return [5, 6]

    def compile(
        self, processes: int, tell: Callable[[int, int], None], own: list[bool], others: Callable[[], Any]
    ) -> None:  # fmt: skip
        self.processes, self.compiled, self.own = processes, 7, own
        others()
        tell(7, 7)


class Recorded(KernelRecord):
    """Says that all kernels are recorded, and cached."""

    def __init__(self) -> None:
        super().__init__({})

    def covers(self, folders: Collection[str] | None) -> bool:
        return folders == ["FIRST", "SECOND"]

    def write(self, folders: Collection[str] | None) -> None:
        assert folders == ["FIRST", "SECOND"]


class OneCannot(Solo):
    """Another rank says no."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([x, torch.zeros_like(x)], dim)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=5)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Counter[LlamaLayer]:
    """How often each layer was gone through."""
    counts: Counter[LlamaLayer] = Counter()
    plain = LlamaLayer.forward

    def forward(self: LlamaLayer, *args: Any) -> Any:
        counts[self] += 1
        return plain(self, *args)

    monkeypatch.setattr(LlamaLayer, "forward", forward)
    return counts


def with_kernels(monkeypatch: pytest.MonkeyPatch, cached: bool) -> Kernels:
    kernels = Kernels(cached)

    @contextmanager
    def ahead() -> Iterator[Kernels]:
        yield kernels

    monkeypatch.setattr(warmup, "ahead", ahead)
    monkeypatch.setattr(warmup, "can_compile_ahead", lambda: True)
    return kernels


def steps_of(runner: ModelRunner) -> list[Any]:
    return memory_profile.profiling_steps(
        max_num_tokens=64, max_seq_len=128, max_batch_size=runner.max_rows, block_size=BLOCK, groups=runner._model.cache_groups
    )


def test_every_step_goes_through_the_first_layer_and_the_last(
    folder: Path, forwards: Counter[LlamaLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, kernels = make_runner(folder, EagerCapturer()), with_kernels(monkeypatch, cached=False)
    assert runner.graphs is not None
    runner.graphs.reset()  # as before a start's first capture
    layers, caches = runner._model.layers, runner.caches
    forwards.clear()
    progress: list[tuple[int, int]] = []
    steps = steps_of(runner)
    assert warm_up(runner, steps, Solo(), CPU, 12, lambda *each: progress.append(each)) == 7
    assert (kernels.processes, kernels.own, progress) == (12, [True, True], [(7, 7)])
    met = len(steps) - 1 + runner.graphs.count  # all but the last, which has no rows
    assert {layers.index(layer): count for layer, count in forwards.items()} == {0: met, 4: met}
    assert runner._model.layers is layers
    assert runner.caches is caches
    assert not runner.graphs._ready_decode  # no graph is kept
    list(runner.capture())
    prompt_ids = prompts(SLOTS, seed=5)
    assert drive(runner).generate(prompt_ids, 6) == [expected(folder, prompt, 6) for prompt in prompt_ids]


def test_with_a_record_it_ends_with_the_first_step(
    folder: Path, forwards: Counter[LlamaLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, kernels = make_runner(folder, EagerCapturer()), with_kernels(monkeypatch, cached=True)
    forwards.clear()
    assert warm_up(runner, steps_of(runner), Solo(), CPU, 64, lambda *_: None, record=Recorded()) == 0
    assert sorted(forwards.values()) == [1, 1]
    assert (kernels.processes, kernels.loaded) == (0, True)
    prompt_ids = prompts(3, seed=5)
    assert drive(runner).generate(prompt_ids, 6) == [expected(folder, prompt, 6) for prompt in prompt_ids]


def test_cached_kernels_without_a_record_are_loaded_after_all_steps(
    folder: Path, forwards: Counter[LlamaLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, kernels = make_runner(folder, EagerCapturer()), with_kernels(monkeypatch, cached=True)
    assert runner.graphs is not None
    runner.graphs.reset()
    forwards.clear()
    steps = steps_of(runner)
    assert warm_up(runner, steps, Solo(), CPU, 64, lambda *_: None) == 0
    assert set(forwards.values()) == {len(steps) - 1 + runner.graphs.count}
    assert (kernels.processes, kernels.loaded) == (0, True)


def test_ranks_do_it_together_or_not_at_all(folder: Path, forwards: Counter[LlamaLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(folder, EagerCapturer())
    forwards.clear()
    with_kernels(monkeypatch, cached=False)
    assert warm_up(runner, steps_of(runner), OneCannot(), CPU, 64, lambda *_: None) == 0
    assert warm_up(runner, steps_of(runner), Solo(), CPU, 1, lambda *_: None) == 0  # there is nothing to gain
    monkeypatch.setattr(warmup, "can_compile_ahead", lambda: False)
    assert warm_up(runner, steps_of(runner), Solo(), CPU, 64, lambda *_: None) == 0
    assert not forwards


class AnotherLacksSome(Solo):
    """All ranks can; another has no record, and lacks kernels."""

    def __init__(self) -> None:
        self.gathers = 0

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.gathers += 1
        return torch.cat([x, torch.ones_like(x) if self.gathers == 1 else torch.zeros_like(x)], dim)


def test_a_rank_goes_on_where_another_lacks_kernels_and_leaves_no_slot_and_no_recording(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturer = Counting()
    runner = make_runner(folder, capturer)
    assert runner.graphs is not None
    runner.graphs.reset()
    for group, processes in ((AnotherLacksSome(), 12), (Solo(), 0)):
        kernels, capturer.recorded = with_kernels(monkeypatch, cached=True), 0
        warm_up(runner, steps_of(runner), group, CPU, 12, lambda *_: None, record=Recorded())
        assert kernels.processes == processes
        assert runner._sampler is not None
        assert not runner._sampler._state.occupied.any()  # every slot is free
        assert capturer.recorded == 0
    list(runner.capture())
    assert capturer.recorded == runner.graphs.count


def test_ranks_of_a_host_compile_a_kernel_once() -> None:
    """Of two hosts of two ranks; a kernel that only one rank calls is its own, as one of its stage of a pipeline."""
    keys = [[10, 11, 12, 13, 14], [10, 11, 12, 13, 99, 98], [10, 13], [10, 14, 50]]

    def of_rank(group: Group) -> list[int]:
        is_own = warmup._shared(keys[group.rank], group, CPU, 2)
        return [key for key, chosen in zip(keys[group.rank], is_own, strict=True) if chosen]

    own = LocalWorld(4).run(of_rank)
    for host in ((0, 1), (2, 3)):
        compiled = [key for number in host for key in own[number]]
        assert sorted(compiled) == sorted({key for number in host for key in keys[number]})
    assert own[:2] == [[10, 12, 14], [11, 13, 99, 98]]


@pytest.mark.parametrize(("cores", "gib", "ranks", "processes"), [(64, 500, 4, 16), (64, 500, 8, 8), (64, 6, 4, 3), (2, 500, 4, 0)])
def test_processes_share_cores_and_memory(
    cores: int, gib: int, ranks: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Machine((), 512 << 30, gib << 30, cores)
    monkeypatch.setattr(warmup.hardware, "detect_machine", lambda: host)
    assert warmup.compile_processes(ranks) == processes


def test_layers_of_other_kinds_stay(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "qwen2", "qwen2", num_hidden_layers=6, use_sliding_window=True, sliding_window=8, max_window_layers=3,
    )  # fmt: skip
    model = registry.build(ModelShape.from_folder(folder), range(6), LayerContext(Solo(), torch.float32, CPU))
    layers = model.layers
    with model.distinct_layers() as kept:
        assert kept == [0, 3, 5]
        assert model.layers == [layers[index] for index in kept]
    assert model.layers is layers
    layers[1].input_layernorm.half()  # such as a layer that a quantized checkpoint leaves alone
    with model.distinct_layers() as kept:
        assert kept == [0, 1, 3, 5]
    with pytest.raises(ZeroDivisionError), model.distinct_layers():
        raise ZeroDivisionError
    assert model.layers is layers
