# SPDX-License-Identifier: Apache-2.0
"""The numeric test of a start: each kernel that multiplies quantized weights runs once on this device, for the model's own layers,
and is compared with the dequantized weights. It takes milliseconds, and so it is part of every start on a GPU.

A kernel that is right on one GPU may be compiled wrongly for another, by another Triton or driver: then a model gives fluent
nonsense, and nothing else says so. One layer of each shape is tested, with the numbers of tokens at which kernels change variants:
these are compiled by then. Layers of this rank have the sizes that slices leave, also uneven ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phalanx.errors import SelfCheckFailed
from phalanx.kernels.capabilities import sm_arch
from phalanx.kernels.moe import reference
from phalanx.kernels.moe.dispatch import experts_of
from phalanx.kernels.moe.tensors import ExpertTensors, Routing
from phalanx.kernels.scaled_tensors import Unscaled
from phalanx.kernels.warmup import warmup_token_counts
from phalanx.models.decoder import Decoder
from phalanx.models.layers.embedding import QuantizedVocabulary
from phalanx.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from phalanx.models.layers.linear_methods.adapted import Adapted
from phalanx.models.layers.linear_methods.batch_invariant import BatchInvariant
from phalanx.models.layers.linear_methods.method import LinearMethod
from phalanx.models.layers.linear_methods.unquantized import Unquantized
from phalanx.models.layers.moe import SparseMoe

MOST_TOKENS = 256
ROWS = 64
"""Outputs that are compared at the beginning, in the middle and at the end of a linear layer: a tile of any kernel's rows."""
BOUND, EXPERTS_BOUND = 0.02, 0.05
"""Relative error of a token's outputs. Right kernels are below a half of it, where the products of two projections of experts, and
what is quantized between them, add up; a wrong scale, column or lane of 64 outputs is above."""


class Case(NamedTuple):
    """A multiplication by a kernel. name: of the layer. kind: of its weights. shape: for people. expected: the
    outputs of the first so many tokens in plain torch. run: the same by the kernel. bound: of the relative error."""

    name: str
    kind: str
    shape: str
    expected: Callable[[int], Tensor]
    run: Callable[[int], Tensor]
    bound: float


@torch.inference_mode()
def check_quantized_kernels(model: Decoder, max_tokens: int) -> str:
    """Compare them all; returns a line for the log, "" where nothing is quantized. max_tokens: of a step. Raises SelfCheckFailed
    naming layer, kernels and GPU. Not collective."""
    begin = time.perf_counter()
    most = min(max_tokens, MOST_TOKENS)
    counts = [count - (count > 2) for count in warmup_token_counts(most)]  # uneven: tiles of tokens are not full
    runs, errors = list[tuple[Case, int]](), list[Tensor]()
    for case in _cases(model, max(counts, default=0)):
        for count in dict.fromkeys(counts):
            runs.append((case, count))
            errors.append(_error(case.run(count), case.expected(count)) / case.bound)
    if not runs:
        return ""
    parts = torch.stack(errors).tolist()  # the only wait for the device
    for (case, count), part in zip(runs, parts, strict=True):
        if not part <= 1.0:
            raise _failure(case, count, part * case.bound, model.context.device)
    worst = max(part * case.bound for (case, _), part in zip(runs, parts, strict=True))
    seconds = time.perf_counter() - begin
    shapes = len({(case.kind, case.shape) for case, _ in runs})
    return f"{shapes} shapes of quantized layers, relative error {worst:.2g} at most, {1000 * seconds:.0f} ms"


def _error(output: Tensor, expected: Tensor) -> Tensor:
    """Of the worst token, relative to the norm of its outputs. Weights that are not finite are no matter of a kernel's."""
    output, expected = output.float(), expected.float()
    difference = torch.where(expected.isfinite(), output - expected, 0.0).norm(dim=-1)
    size = expected.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    worst: Tensor = (difference / size).nan_to_num(torch.inf, torch.inf).max()
    return worst


def _cases(model: Decoder, tokens: int) -> Iterator[Case]:
    """One layer of each kind and shape, with so many tokens."""
    tested = set[str]()
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            method = _own(module.method)
            if not isinstance(method, Unquantized) and _is_new(method, tested):
                yield from _of_linear(_without_adapters(module.method), method, _inputs(tokens, method.in_features, model))
    if model.lm_head is not None and isinstance(model.lm_head.table, QuantizedVocabulary):
        head = model.lm_head.table.method
        if head is not None and _is_new(_own(head), tested):
            yield from _of_linear(head, _own(head), _inputs(tokens, head.in_features, model))
    for index, block in model.moe_layers.items():
        if _is_quantized(block.tensors()) and _is_new(block.experts, tested):
            yield _of_experts(f"the experts of layer {index}", block, _inputs(tokens, block.tensors().hidden, model))


def _own(method: LinearMethod) -> LinearMethod:
    return _own(method.method) if isinstance(method, Adapted | BatchInvariant) else method


def _without_adapters(method: LinearMethod) -> LinearMethod:
    """Adapters expect the tokens of a step."""
    return method.method if isinstance(method, Adapted) else method


def _is_quantized(experts: ExpertTensors) -> bool:
    return experts.packed is not None or experts.gate_up_scale is not None


def _is_new(module: nn.Module, tested: set[str]) -> bool:
    facts = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in module.named_parameters()]
    sizes = (module.out_features, module.in_features) if isinstance(module, LinearMethod) else ()  # packed weights do not tell
    fact = f"{type(module).__name__} {sizes} {facts}"
    is_new = fact not in tested
    tested.add(fact)
    return is_new


def _inputs(tokens: int, features: int, model: Decoder) -> Tensor:
    """The same in every start."""
    device = model.context.device
    generator = torch.Generator(device).manual_seed(features)
    return torch.randn(tokens, features, generator=generator, device=device).to(model.context.dtype)


def _of_linear(outer: LinearMethod, method: LinearMethod, x: Tensor) -> Iterator[Case]:
    """outer: as the layer has it, `method` or what is around it."""
    outputs = method.out_features
    begins = sorted({0, outputs // 2 // ROWS * ROWS, (outputs - 1) // ROWS * ROWS})
    rows = [slice(begin, min(begin + ROWS, outputs)) for begin in begins]

    def expected(count: int) -> Tensor:  # how activations are quantized may depend on how many they are
        return torch.cat([method.plain_rows(x[:count], part) for part in rows], 1)

    def run(multiply: Callable[[Tensor], Tensor | Unscaled], count: int) -> Tensor:
        output = multiply(x[:count])
        output = output.to_fp32() if isinstance(output, Unscaled) else output
        return torch.cat([output[:, part] for part in rows], 1)

    part = method.parts[0]
    shape = f"weight {outputs} x {method.in_features}"
    for multiply in (outer.multiply, outer.unscaled):
        yield Case(part.name, type(method).__name__, shape, expected, partial(run, multiply), BOUND)
        if type(outer).unscaled is LinearMethod.unscaled:
            return


def _of_experts(name: str, block: SparseMoe, x: Tensor) -> Case:
    """Each token with the first, the middle and the last expert of this rank, or as many of them as it has experts."""
    experts, top_k = block.tensors(), block.router.choice.top_k
    chosen = sorted({0, experts.count // 2, experts.count - 1})[:top_k]
    ids = torch.full((len(x), top_k), -1, dtype=torch.int32, device=x.device)
    ids[:, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32) + experts.first
    weights = torch.full(ids.shape, 1.0 / len(chosen), device=x.device)
    routing = Routing(weights, ids)

    def run(count: int) -> Tensor:
        some = Routing(*(each[:count] for each in routing))
        return experts_of(x[:count], experts, some, num_experts=block.config.count, dtype=x.dtype)

    shape = f"{experts.count} experts of {experts.inner} x {experts.hidden}"
    expected = reference.fused_experts(x, experts, routing)
    return Case(name, type(block.experts).__name__, shape, lambda count: expected[:count], run, EXPERTS_BOUND)


def _failure(case: Case, count: int, error: float, device: torch.device) -> SelfCheckFailed:
    gpu = f"{torch.cuda.get_device_name(device)}, sm {sm_arch(device)}" if device.type == "cuda" else device.type
    return SelfCheckFailed(
        f"the kernel of {case.kind} gives wrong values on this GPU ({gpu})",
        held=f"{case.name} ({case.shape}) with {count} tokens{_launched(case, count, device)}: relative error {error:.2g} beside "
        f"the dequantized weights, at most {case.bound}",
        why=f"it was compiled wrongly for this GPU, or the GPU is faulty; torch {torch.__version__}, {_triton()}",
        next="run `phalanx doctor`; clear Triton's cache and start again; else use a checkpoint in another format; report this",
    )  # fmt: skip


def _launched(case: Case, count: int, device: torch.device) -> str:
    """The kernels of a case by their names, which only a profiler has."""
    if device.type != "cuda":
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case.run(count)
        torch.cuda.synchronize(device)
    names = [event.key for event in profile.key_averages()]
    return f", by {', '.join(names)}" if names else ""


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"Triton {version('triton')}"
    except PackageNotFoundError:
        return "no Triton"
