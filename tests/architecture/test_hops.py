# SPDX-License-Identifier: Apache-2.0
"""How many files a reader opens to follow one call of a row-parallel FP8 linear layer with 64 tokens on a tensor-parallel group.

A file of the package counts if one of its Python functions runs during the call, or if it defines a kernel that the call
launches. The call is traced when it is made again: what runs for a new size only does not count, because its result is kept. This
is the choice of the strategy (`comm.choose`, `tables`), the split of its launches (`comm.chunked`, `comm.oneshot`), facts about
the device (`kernels.capabilities`), and compilation. Device functions that a kernel calls do not count either: they are compiled
into it. Neither do files of which the call uses a type only, without running a line of them: `comm/group.py` (the fusion),
`comm/symmetric.py` (the workspace) and `kernels/scaled_tensors.py` (tensors with scales).

The input of `down_proj` comes quantized, from the op that computes SiLU. That of `o_proj` comes in 16 bit from attention, which
adds the files of the op that quantizes it. On ranks (of CPUs, of GPUs) `down_proj` alone is traced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.comm.choose import Rules
from phalanx.comm.group import Group, Solo
from phalanx.comm.tuned_group import TunedGroup, tuned
from phalanx.config.quantization import ON_LOAD
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.kernels.scaled_tensors import FP8, Quantized
from phalanx.models.layers.activation import Activation
from phalanx.models.layers.linear import RowParallelLinear
from phalanx.models.layers.norm import RmsNorm
from phalanx.models.slices import LayerContext, WeightPart
from phalanx.tables.shipped import table_for
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import Entry
from tests.support import comm_cpu_ranks, comm_gpu_ranks

MAX_FILES = {"down_proj": 10, "o_proj": 13}
"""Of each layer. Of `o_proj` also `kernels/ops/dispatch.py`, which picks the op that quantizes the input, its kernel, and
`kernels/ops/heuristics.py`, which splits the launch."""
PACKAGE = Path(phalanx.__file__).parent
TOKENS, OUT, LOCAL_IN = 64, 8192, 512
HOPPER_PATH = {"kernels/gemm/fp8_skinny.py", "comm/sequence_parallel/rs_norm_ag.py"}
"""The kernels of the call on Hopper."""
QUANTIZATION: dict[str, set[str]] = {"down_proj": set(), "o_proj": {"kernels/ops/quantize_fp8.py"}}
"""The kernel that quantizes the input of each, where one does."""


@contextmanager
def traced() -> Iterator[set[str]]:
    """The files of the package of which a Python function runs inside, in this thread."""
    names: set[str] = set()
    files: set[str] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        files |= {_in_package(name) for name in names if Path(name).is_relative_to(PACKAGE)}


@contextmanager
def launched(*, run: bool) -> Iterator[set[str]]:
    """The files that define the kernels which are launched inside. run: whether the launches reach the GPU."""
    from triton.runtime.jit import JITFunction

    files: set[str] = set()
    plain = JITFunction.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        files.add(_in_package(self.fn.__code__.co_filename))
        return plain(self, *args, **options) if run else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", noted)
        yield files


def _in_package(name: str) -> str:
    return Path(name).relative_to(PACKAGE).as_posix()


def second_call(group: Group, device: torch.device, name: str = "down_proj") -> Callable[[], object]:
    """A call of the layer that has been made before, as behind any layer but the first."""
    context = LayerContext(group, torch.bfloat16, device, ON_LOAD, fp8_gemm=True)
    local = range(group.rank * LOCAL_IN, (group.rank + 1) * LOCAL_IN)
    part = WeightPart(name, (OUT, group.size * LOCAL_IN), range(OUT), local)
    layer = RowParallelLinear(part, bias=False, context=context)
    norm = RmsNorm("post_attention_layernorm", OUT, 1e-5, context=context)
    norm.set_quantizer(layer.method.input_quantizer)  # stands for the next layer, which is in FP8 as well
    for weight in (*layer.parameters(), *norm.parameters()):
        weight.view(torch.uint8).zero_()
    x: Activation = torch.zeros(TOKENS, LOCAL_IN, dtype=torch.bfloat16, device=device)
    if name == "down_proj":
        x = Quantized(torch.zeros(TOKENS, LOCAL_IN, dtype=FP8, device=device), torch.ones(TOKENS, 1, device=device))
    residual: torch.Tensor = torch.zeros(TOKENS, OUT, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        _, residual = layer(x, residual, norm)
    return lambda: layer(x, residual, norm)


def check(files: set[str], name: str = "down_proj") -> None:
    limit = MAX_FILES[name]
    assert len(files) <= limit, f"{name}: {len(files)} files, and {limit} are the limit: {', '.join(sorted(files))}"


@pytest.mark.parametrize("name", MAX_FILES)
def test_four_gpus_as_seen_without_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that picks kernels takes CPU tensors for a GPU's; launches are noted and left out. All else runs as on a rank."""
    pytest.importorskip("triton")
    from phalanx.comm.strategies import symmetric_strategies
    from phalanx.kernels.capabilities import HOPPER_SHARED_MEMORY, GpuCapabilities, has_gluon, simulated
    from tests.support.comm_compiled import NUM_SMS, workspace

    class LastOfFour(Solo):
        rank, size = 3, 4

    def is_cuda(tensor: torch.Tensor) -> bool:
        return str(sys._getframe(1).f_globals.get("__name__", "")).startswith("phalanx.kernels")

    machine = Fingerprint(90, "nvlink", 4)
    rules = Rules(machine, {}, table_for(machine).lookup)
    group = TunedGroup(LastOfFour(), rules, symmetric_strategies(workspace(4, 90)), "seed")
    with torch.inference_mode(), simulated(GpuCapabilities(90, NUM_SMS, HOPPER_SHARED_MEMORY)), launched(run=False) as kernels:
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(is_cuda), raising=False)
        call = second_call(group, torch.device("cpu"), name)
        kernels.clear()
        with traced() as files:
            call()
    assert set(group.calls) == {"RS_NORM_AG/RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE"}
    assert kernels == HOPPER_PATH | QUANTIZATION[name] or not has_gluon()
    check(files | kernels, name)


def test_two_cpu_ranks(tmp_path: Path) -> None:
    """The same call over gloo and shared memory, which has no kernels to launch and no sequence parallelism."""
    body = """
from tests.architecture.test_hops import second_call, traced
from phalanx.comm.tuned_group import tuned
with torch.inference_mode():
    call = second_call(tuned(group, message_bytes=1 << 20, strategy="TWOSHOT", tables=folder / "none"), torch.device("cpu"))
    with traced() as files:
        call()
results["files"] = files
"""
    for rank in comm_cpu_ranks.run(2, body, tmp_path):
        assert {"models/layers/linear.py", "comm/shared_memory.py"} <= rank["files"]
        check(rank["files"])


@pytest.mark.gpu2
def test_two_gpus() -> None:
    comm_gpu_ranks.run(2, "tests.architecture.test_hops", "hops")


def main() -> None:
    """One of several GPU ranks that torchrun starts: the call by the path that four GPUs take for as many tokens."""
    import torch.distributed as dist

    from phalanx.comm.torch_group import TorchGroup

    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    base = tuned(TorchGroup(dist.group.WORLD, device), message_bytes=TOKENS * OUT * 2)
    assert isinstance(base, TunedGroup)
    sharded = Entry(Strategy.RS_NORM_AG, True, "table", "as with four ranks")
    group = TunedGroup(base.base, replace(base.rules, lookup=lambda *_: sharded), base.strategies, base.digest)
    with torch.inference_mode(), launched(run=True) as kernels:
        call = second_call(group, device)
        kernels.clear()
        with traced() as files:
            call()
    torch.cuda.synchronize()
    if torch.cuda.get_device_capability() == (9, 0):
        assert kernels == HOPPER_PATH, kernels
    check(files | kernels)
    if base.rank == 0:
        print("ok hops", *sorted(files | kernels), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
