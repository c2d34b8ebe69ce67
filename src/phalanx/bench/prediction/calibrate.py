# SPDX-License-Identifier: Apache-2.0
"""At most 12 points of a running engine, and the coefficients that explain them: `phalanx plan calibrate`.

Each number of requests gives two points: its prompts' step, and the time per token. Five multipliers of the class's coefficients
are fitted (bandwidth, arithmetic, a layer's chain at one token and at more, a step's rest), in turn, each to the least sum of
squared logarithms. A CPU, and a GPU that the catalogue does not hold, get a specification from what was measured first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.bench import offline, roofline
from phalanx.bench.workloads import Workload, prompts
from phalanx.config.sources import RawOptions
from phalanx.errors import OptionError
from phalanx.hardware import catalogue, probe, provenance
from phalanx.hardware.catalogue import GpuSpec
from phalanx.plan import burst, calibration, cost
from phalanx.plan.coefficients import Coefficients
from phalanx.plan.cost import Costs, Machine, Work
from phalanx.plan.footprint import Split
from phalanx.plan.shape import Shape

MOST_POINTS = 12
_PROMPT, _TOKENS = 128, 32
_REQUESTS = (1, 4, 16, 64, 128, 256)
_TURNS = 40  # of the fit, each over all multipliers
TUNED = ("memory", "flops", "chain", "chain_of_one", "rest")


@dataclass(frozen=True)
class Point:
    """seconds: of a step with all prompts (kind "prompt"), or of one token for each request ("decode")."""

    kind: str
    requests: int
    seconds: float


def run(model: str, device: str = "auto", seconds: float = 120.0) -> dict[str, Any]:
    """Measure, fit, and keep the coefficients for this host's GPU (or CPU). Raises what an LLM raises, and OptionError."""
    begin = time.perf_counter()
    values = {"model": model, "enable_prefix_caching": False, "device": device, "skip_tokenizer_init": True}
    with offline.target(RawOptions(values, {})) as subject:
        spec = _spec(subject.device)
        with offline.engine(subject) as (llm, _):
            points = _measure(llm, seconds - (time.perf_counter() - begin))
            dtype = llm.facts.dtype
        shape = Shape.of(subject.shape)
    kv_size = 4 if dtype == "fp32" else 2
    base, _ = cost.coefficients_for(spec)
    if subject.device == "cpu":
        base = replace(base, c_eager=0.0)
    fitted, error = fit(points, shape, dtype, kv_size, spec, base)
    document = {
        "about": provenance.collect().as_json(),
        "model": model,
        "gpu": {name: value for name, value in asdict(spec).items() if name != "sources"},
        "points": [asdict(point) for point in points],
        "mean_error": error,
    }
    path = calibration.install(spec.name, fitted, document)
    return {**document, "coefficients": asdict(fitted), "file": str(path)}


def _spec(device: str) -> GpuSpec:
    """Of the GPU at hand, or of this host's CPU: memory bandwidth as it copies, arithmetic as a matrix product in fp32 has it."""
    if device != "cpu":
        name = catalogue.at_hand(probe.detect_machine().gpus)
        if name is None:
            raise OptionError("the GPUs of this host are not in the catalogue", next=f"known: {', '.join(catalogue.names())}")
        return catalogue.gpu(name)
    import numpy

    bandwidth = roofline.measure("cpu").best or 10e9
    side = 1024
    left = numpy.ones((side, side), dtype=numpy.float32)
    numpy.matmul(left, left)
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        numpy.matmul(left, left)
        best = min(best, time.perf_counter() - begin)
    memory = probe.detect_machine().host_memory
    return GpuSpec("CPU", 0, memory, bandwidth, 2.0 * side**3 / best, None, "shm", bandwidth, bandwidth, None, 1)


def _measure(llm: Any, seconds: float) -> list[Point]:
    """Points by rising numbers of requests, as long as there is time; two for each."""
    begin, points = time.perf_counter(), list[Point]()
    for requests in _REQUESTS:
        if len(points) == MOST_POINTS or requests > llm.facts.max_batch_size or time.perf_counter() - begin > seconds / 2:
            break
        if requests * _PROMPT > llm.facts.max_num_tokens:
            break
        workload = Workload("calibration", "decode", requests, _PROMPT, _TOKENS + 1, repeats=3)
        ids = prompts(workload, llm.facts.vocab_size, 0)
        offline.seconds_of(llm, ids, 4)
        first = min(offline.seconds_of(llm, ids, 1) for _ in range(3))
        all_tokens = min(offline.seconds_of(llm, ids, _TOKENS + 1) for _ in range(3))
        points += [Point("prompt", requests, first), Point("decode", requests, (all_tokens - first) / _TOKENS)]
    return points


def fit(
    points: Sequence[Point], shape: Shape, dtype: str, kv_size: int, spec: GpuSpec, base: Coefficients
) -> tuple[Coefficients, float]:
    """The coefficients that explain the points best, and the mean error that is left, as a part of the measured time."""

    def tuned(scales: dict[str, float]) -> Coefficients:
        return replace(
            base,
            e_bytes=base.e_bytes * scales["memory"],
            e_bytes_16=base.e_bytes_16 * scales["memory"],
            e_kv=base.e_kv * scales["memory"],
            e_kv_fp8=base.e_kv_fp8 * scales["memory"],
            e_flops=base.e_flops * scales["flops"],
            e_prompt=base.e_prompt * scales["flops"],
            e_prompt_fp8=base.e_prompt_fp8 * scales["flops"],
            tflops_per_watt=base.tflops_per_watt * scales["flops"],
            c_layer=base.c_layer * scales["chain"],
            c_one=base.c_one * scales["chain_of_one"],
            c_step=max(base.c_step, 20.0) * scales["rest"],
        )

    def loss(scales: dict[str, float]) -> float:
        now = tuned(scales)
        wild = sum(0.002 * math.log(scale) ** 2 for scale in scales.values())  # what no point tells of stays where it was
        return wild + sum(math.log(predicted(point, shape, dtype, kv_size, spec, now) / point.seconds) ** 2 for point in points)

    scales = dict.fromkeys(TUNED, 1.0)
    for turn in range(_TURNS):
        reach = 3.0 if turn < _TURNS // 2 else 0.5
        for name in TUNED:
            scales[name] = _least(lambda value, name=name: loss({**scales, name: value}), scales[name], reach)  # type: ignore[misc]
    fitted = tuned(scales)
    errors = [abs(predicted(point, shape, dtype, kv_size, spec, fitted) / point.seconds - 1) for point in points]
    return fitted, sum(errors) / len(errors)


def _least(loss: Callable[[float], float], at: float, reach: float) -> float:
    """Where the loss of a multiplier is least, by golden section over its logarithm, `reach` to both sides."""
    low, high, ratio = math.log(at) - reach, math.log(at) + reach, (math.sqrt(5) - 1) / 2
    for _ in range(24):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(math.exp(left)) < loss(math.exp(right)):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def predicted(point: Point, shape: Shape, dtype: str, kv_size: int, spec: GpuSpec, coefficients: Coefficients) -> float:
    """Seconds of a point under the coefficients."""
    machine = Machine(spec, spec.link, 1, 1, None, coefficients, "measured")
    costs = Costs(shape, dtype, kv_size, Split(), machine)
    if point.kind == "decode":
        return burst.decode_round(costs, point.requests, _PROMPT + _TOKENS / 2)
    tokens = point.requests * _PROMPT
    return costs.seconds(Work(tokens, point.requests, 0.0, tokens * _PROMPT / 2, tokens > costs.graph_tokens))


def text(document: dict[str, Any]) -> str:
    """What was measured, and how well the fit explains it."""
    lines = [f"{len(document['points'])} points of {document['model']} on {document['gpu']['name']}:"]
    for point in document["points"]:
        lines.append(f"  {point['kind']:7} {point['requests']:4} requests  {point['seconds'] * 1e3:10.3f} ms")
    lines.append(f"mean error of the fit {document['mean_error']:.1%}; kept in {document['file']}")
    return "\n".join(lines)
