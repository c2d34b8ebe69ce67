# SPDX-License-Identifier: Apache-2.0
"""The kernels that each family's layers launch, with their arguments, in order: a record, for changes that must change none.

    python -m tests.support.kernel_launches write FILE      write the record
    python -m tests.support.kernel_launches compare FILE    exit status 1 and the first differences, if there are any

Steps run as in `kernels_variants`, without a GPU. Recorded is what happens inside `Decoder.hidden_states`, `serve_experts` and the
head: launches of our kernels with grid, constants and arguments, and operators of torch that compute or copy. An argument that is a
weight has the checkpoint's name, any other tensor its dtype, shape and strides. Addresses and who allocates what are not recorded.
"""

from __future__ import annotations

import difflib
import gzip
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from phalanx.config.experts import Experts
from phalanx.config.latent import Latent
from phalanx.config.quantization import INT4_ON_LOAD, Quantization
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import SlotAssignment, StepBatch, StepExtent, StepRow
from phalanx.models import weights
from phalanx.models.decoder import Decoder
from phalanx.models.layers.embedding import ParallelLMHead
from phalanx.worker.cuda_graphs import EagerCapturer
from tests.support.kernels_steps import BLOCK, BLOCKS, DEEPSEEK, EXPERTS, GPT_OSS, Case, made_runner
from tests.support.kernels_variants import recorded

RECORDED: dict[type, tuple[str, ...]] = {
    Decoder: ("hidden_states", "serve_experts"), ParallelLMHead: ("local", "gather", "argmax_keys", "argmax", "sample"),
}  # fmt: skip
COUNTS = (1, 2, 8, 64, 256, 2048)
SLOTS = 256
_GEMMS = {
    torch.nn.functional.linear, torch.mm, torch.addmm, torch.bmm, torch._scaled_mm, torch.Tensor.float, torch.cat,
    torch.matmul, torch.Tensor.__matmul__,
}  # fmt: skip
"""What `kernels_variants` may leave out: recorded as it is called."""
_NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::lift", "aten::detach", "aten::_local_scalar_dense")


class Log:
    """on: what happens now is recorded. names: of weights, by the addresses of their storage."""

    def __init__(self) -> None:
        self.on, self.lines, self.names = False, list[str](), dict[int, str]()

    def add(self, name: str, **arguments: Any) -> None:
        if self.on:
            self.lines.append(f"{name}({', '.join(f'{key}={self.text(value)}' for key, value in arguments.items())})")

    def text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            weight = self.names.get(value.untyped_storage().data_ptr())
            strides = "" if value.is_contiguous() else f"/{list(value.stride())}"
            place = "" if weight is None else f"@{weight}+{value.storage_offset()}"
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}{place}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}: {self.text(each)}' for key, each in value.items())}}}"
        if isinstance(value, JITFunction):
            return value.fn.__name__
        if isinstance(value, torch.UntypedStorage | torch.Generator) or callable(value):
            return type(value).__name__
        fields = getattr(value, "__dict__", None)
        return f"{type(value).__name__}{self.text(fields)}" if fields else str(value)


class _Functions(TorchFunctionMode):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.log.on or func not in _GEMMS:
            return func(*args, **(kwargs or {}))
        self.log.add(func.__name__, args=args, **(kwargs or {}))
        self.log.on = False
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.log.on = True


class _Operators(TorchDispatchMode):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.log.on and not func.is_view and not func.name().startswith(_NO_LAUNCH):
            self.log.add(func.name(), args=args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def logged() -> Iterator[Log]:
    """Inside, the log gets what models launch."""
    log = Log()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **fixed: Any) -> None:
        names = list(inspect.signature(self.fn).parameters)
        arguments = dict(zip(names, args, strict=False)) | fixed
        log.add(self.fn.__name__, grid=grid(arguments) if callable(grid) else grid, **arguments)

    def while_on(method: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            before, log.on = log.on, True
            try:
                return method(*args, **kwargs)
            finally:
                log.on = before

        return called

    with recorded(), _Functions(log), _Operators(log), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        for kind, methods in RECORDED.items():
            for name in methods:
                patch.setattr(kind, name, while_on(getattr(kind, name)))
        yield log


def record(case: Case) -> dict[str, list[str]]:
    """The name of a step, or of a captured graph -> what it launches."""
    launches: dict[str, list[str]] = {}
    with logged() as log:
        runner = made_runner(case, EagerCapturer())
        model = runner._model
        log.names = {part.target.untyped_storage().data_ptr(): part.name for part in reversed(list(weights.slices(model)))}
        graphs, runner.graphs = runner.graphs, None
        for name, step in steps(model.cache_groups).items():
            log.lines = []
            runner.run(step).results()
            launches[name] = log.lines
        if graphs is not None:
            for size in sorted({*graphs.sizes[:1], *(size for size in graphs.sizes if size.tokens in (8, 64)), *graphs.largest}):
                log.lines = []
                list(graphs.capture(runner.caches, [size]))
                launches[f"graph {size}"] = log.lines
        if case.dp > 1:
            log.lines = []
            runner.run(
                StepBatch(), StepExtent.of([StepBatch(), *[steps(model.cache_groups)["8 decodes"]] * (case.dp - 1)])
            ).results()
            launches["no rows here"] = log.lines
    return launches


def steps(groups: int) -> dict[str, StepBatch]:
    """groups: of layers, each with blocks of its own."""
    params = SamplingParams(temperature=0.0)

    def step(rows: list[StepRow]) -> StepBatch:
        return StepBatch(admitted=[SlotAssignment(row.slot, [0], 1, params, seed=1) for row in rows], rows=rows)

    def row(slot: int, start: int, count: int) -> StepRow:
        return StepRow(slot, start, count, [0] * count, [0] * groups * -(-(start + count) // BLOCK), samples=True)

    decodes = {f"{count} decodes": step([row(slot, 100, 1) for slot in range(count)]) for count in COUNTS if count <= SLOTS}
    prompts = {f"prompt of {count}": step([row(0, 0, count)]) for count in COUNTS}
    mixed = step([*(row(slot, 100, 1) for slot in range(7)), row(7, 16, 57), row(8, 0, 200)])
    return {**decodes, **prompts, "mixed": mixed}


STATIC = Quantization("modelopt", "tensor", "static")
CHANNEL = Quantization("compressed-tensors", "channel", "token", ignore=(r"model\.layers\.0\..*down_proj",))
WEIGHTS_ONLY = Quantization("compressed-tensors", "tensor", "none")
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
QWEN3_MOE = {
    "architecture": "Qwen3MoeForCausalLM", "qk_norm": True, "experts": Experts(16, 4, 1024, dense_layers=(1,), renormalize=False),
}  # fmt: skip
V2_LITE = {
    "architecture": "DeepseekV2ForCausalLM", "num_kv_heads": 16, "head_dim": 192,
    "latent": Latent(None, 512, 128, 64, 128, softmax_scale=0.1), "experts": Experts(16, 4, 1024, shared=2048, dense_layers=(0,)),
}  # fmt: skip
GPT_OSS_16 = GPT_OSS | {"quantization": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "llama with biases, tied": BIASES | {"tie_word_embeddings": True},
    "mistral": {"architecture": "MistralForCausalLM", "windows": (64, 64)},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "windows": (None, 64)},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True}, "mixtral": EXPERTS, "qwen3_moe": QWEN3_MOE,
    "deepseek_v2": V2_LITE, "deepseek_v3": DEEPSEEK,
}  # fmt: skip


def cases() -> dict[str, Case]:
    several = {
        f"{name}, {dtype}, {ranks} ranks": Case(shape | extra, fp8=dtype != "bf16", ranks=ranks, slots=SLOTS)
        for name, shape in FAMILIES.items() for ranks in (1, 2)
        for dtype, extra in (("bf16", {}), ("fp8", {}), ("blocks", {"quantization": BLOCKS}))
    }  # fmt: skip
    some = {name: FAMILIES[name] for name in ("llama", "llama with biases, tied", "mixtral", "deepseek_v3")}
    for name, shape in some.items():
        for kind, quantization in (("static", STATIC), ("channel", CHANNEL), ("weights only", WEIGHTS_ONLY)):
            several[f"{name}, {kind}"] = Case(shape | {"quantization": quantization}, fp8=True, ranks=2, slots=SLOTS)
        several[f"{name}, blocks, no FP8 GEMM"] = Case(shape | {"quantization": BLOCKS}, fp8=True, fp8_gemm=False, slots=SLOTS)
    for ranks in (1, 4):
        several[f"gpt-oss, mxfp4, {ranks} ranks"] = Case(GPT_OSS, ranks=ranks, slots=SLOTS)
        several[f"gpt-oss, bf16, {ranks} ranks"] = Case(GPT_OSS_16, ranks=ranks, slots=SLOTS)
        several[f"llama, fp8, wide, {ranks} ranks"] = Case(
            {"intermediate_size": 4 * 12288, "vocab_size": 151936}, fp8=True, ranks=ranks, slots=SLOTS
        )
    several["llama, int8 cache"] = Case({}, int8=True, slots=SLOTS)
    several["llama, last stage"] = Case(fp8=True, ranks=2, slots=2 * SLOTS, stages=2)
    for name, shape in {"mixtral": EXPERTS, "deepseek_v3": DEEPSEEK}.items():
        for fp8 in (False, True):
            for exchange in ("ALL_GATHER", "ALL_TO_ALL", "ONE_SIDED"):
                several[f"{name}, fp8 {fp8}, dp 2, {exchange}"] = Case(
                    shape, fp8=fp8, dp=2, one_sided=exchange == "ONE_SIDED", context={"expert_exchange": exchange}, slots=SLOTS
                )
            several[f"{name}, fp8 {fp8}, moe_ep 2"] = Case(
                shape, fp8=fp8, ranks=4, context={"moe_ep": 2, "redundant_experts": 2}, slots=SLOTS
            )
        several[f"{name}, int4"] = Case(shape | {"quantization": INT4_ON_LOAD}, slots=SLOTS)
    several["mixtral, drawn"] = Case(EXPERTS, context={"traffic": 0.5}, slots=SLOTS)
    return several


def main(verb: str, file: str) -> int:
    path, now = Path(file), {name: record(case) for name, case in cases().items()}
    if verb == "write":
        path.write_bytes(gzip.compress(json.dumps(now).encode()))
    before, different = json.loads(gzip.decompress(path.read_bytes())), 0
    for name, launches in now.items():
        known = before.get(name, {})
        for step in sorted({*launches, *known}):
            lines = list(difflib.unified_diff(known.get(step, []), launches.get(step, []), n=1, lineterm=""))
            different += bool(lines)
            if lines and different <= 10:
                print(f"--- {name}: {step}", *lines[2:14], sep="\n")
    launched = sum(len(lines) for launches in now.values() for lines in launches.values())
    print(f"{len(now)} cases, {launched} launches, {different} steps differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
