# SPDX-License-Identifier: Apache-2.0
"""Starts one after the other with one cache: the record of an earlier start of the same kind spares a start its steps. Kernels are
compiled for Hopper, without a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.engine.messages import StepBatch
from phalanx.kernels.compiling.ahead import can_compile_ahead
from phalanx.kernels.compiling.record import FOLDER
from phalanx.models import registry
from phalanx.models.decoder import Decoder
from phalanx.models.slices import LayerContext
from phalanx.worker import memory_profile, warmup
from tests.support.checkpoints import write_checkpoint

triton = pytest.importorskip("triton")

from tests.support.comm_compiled import only  # noqa: E402 (needs triton)
from tests.support.kernels_doubling import double  # noqa: E402 (needs triton)

if not can_compile_ahead():
    pytest.skip("this Triton cannot be asked to compile later", allow_module_level=True)

CPU = torch.device("cpu")
OPTIONS = EngineOptions.of(model="a", device="cpu", max_batch_size=4, max_num_tokens=64, max_seq_len=64)


class Runner:
    """As ModelRunner: a step calls a kernel whose variant depends on its tokens, graphs call another one.

    fails: the kernel of graphs fails to compile. killed: the graphs are not reached."""

    def __init__(self, *, fails: bool = False, killed: bool = False) -> None:
        self.steps: list[StepBatch] = []
        self._fails, self._killed = fails, killed

    def run(self, step: StepBatch) -> Runner:
        self.steps.append(step)
        tokens = sum(row.count for row in step.rows)
        if tokens:
            self._call(max(16, triton.next_power_of_2(tokens)))
        return self

    def results(self) -> None:
        pass

    def warm_up_graphs(self) -> None:
        if self._killed:
            raise KeyboardInterrupt
        self._call(8, fails=self._fails)

    def distinct_layers(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _call(self, block: int, fails: bool = False) -> None:
        x = torch.ones(64)
        double[(1,)](x, torch.empty_like(x), 64, BLOCK=block, FAILS=int(fails))


class Start(NamedTuple):
    """Of how many steps how many were run, and how many kernels compiled."""

    steps: int
    run: int
    compiled: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Decoder]:
    """Of one and of two layers."""
    built = []
    for layers in (1, 2):
        folder = write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=layers)
        shape = ModelShape.from_folder(folder)
        built.append(registry.build(shape, range(layers), LayerContext(Solo(), torch.float32, CPU)))
    return built


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with only(90):
        yield tmp_path
    double.device_caches.clear()


def start(model: Decoder, runner: Any = None, /, *, rank: int = 0, **options: Any) -> Start:
    """As in a new process."""
    double.device_caches.clear()
    chosen = OPTIONS.model_copy(update=options)
    assert chosen.max_num_tokens is not None
    assert chosen.max_seq_len is not None
    steps: Sequence[StepBatch] = memory_profile.profiling_steps(
        max_num_tokens=chosen.max_num_tokens, max_seq_len=chosen.max_seq_len, max_batch_size=chosen.max_batch_size,
        block_size=chosen.kv_block_size,
    )  # fmt: skip
    runner = runner or Runner()
    record = warmup.kernel_record(chosen, rank, model, steps, CPU)
    compiled = warmup.warm_up(runner, steps, Solo(), CPU, 2, lambda *_: None, record=record)
    assert runner.steps[-1] is steps[-1]  # which leaves every slot free
    return Start(len(steps), len(runner.steps), compiled)


def test_a_second_start_with_the_same_options_runs_one_small_step(models: list[Decoder], cache: Path) -> None:
    first = start(models[0])
    assert first.run == first.steps
    assert first.compiled > 1
    again = start(models[0])
    assert again == (first.steps, 2, 0)  # the small step, and the one that releases slots
    assert start(models[0], model="b", start_timeout=1.0) == again  # another folder of the same model


def test_a_start_of_another_kind_runs_all_steps(models: list[Decoder], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its small step finds the kernels of the first start."""
    start(models[0])
    larger = start(models[0], max_num_tokens=512, max_seq_len=512)
    assert larger.run == larger.steps
    assert larger.compiled > 0
    for model, options in ((0, {"max_batch_size": 3}), (1, {}), (0, {"rank": 1})):
        other = start(models[model], **options)
        assert other.run == other.steps
        assert start(models[model], **options).run == 2  # it has a record of its own
    monkeypatch.setattr(warmup, "sources_digest", lambda: "of changed sources")
    changed = start(models[0])
    assert changed.run == changed.steps
    assert changed.compiled == 0
    assert start(models[0]).run == 2


def test_where_a_kernel_is_missing_all_steps_are_run_and_it_is_compiled(models: list[Decoder], cache: Path) -> None:
    start(models[0])
    kernels = sorted(path for path in cache.iterdir() if path.name != FOLDER)
    for kernel in kernels:
        shutil.rmtree(kernel)
        again = start(models[0])
        assert again == (again.steps, again.steps, 1)
        assert start(models[0]).run == 2


def test_a_start_that_was_killed_or_lacks_a_kernel_leaves_no_record(models: list[Decoder], cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(models[0], Runner(killed=True))
    for _ in range(2):
        incomplete = start(models[0], Runner(fails=True))
        assert incomplete.run == incomplete.steps
    complete = start(models[0])
    assert complete == (complete.steps, complete.steps, 1)
    assert start(models[0]).run == 2


def test_a_record_of_another_compiler_is_not_used(models: list[Decoder], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of an environment variable that Triton's keys depend on, and the record's name does not."""
    first = start(models[0])
    monkeypatch.setattr(triton.runtime.jit, "get_cache_invalidating_env_vars", lambda: {"DISABLE_LLVM_OPT": "1"})
    assert start(models[0]) == first


def test_a_cache_that_takes_no_record_costs_time_only(models: list[Decoder], cache: Path) -> None:
    (cache / FOLDER).touch()  # no folder can be made
    first = start(models[0])
    again = start(models[0])
    assert (again.run, again.compiled) == (first.steps, 0)
