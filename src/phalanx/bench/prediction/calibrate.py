# SPDX-License-Identifier: Apache-2.0
"""At most 12 points of a running engine, and the coefficients that explain them: `phalanx plan calibrate`.

A point is the step of one prompt, or the time per token of a number of requests. What a call takes beside its steps (messages
between the processes, the ranks' wake-up) is measured apart, with a prompt of one token, and taken off the prompts' points: steps
that follow one another hide it. Multipliers of the class's coefficients are fitted (`TUNED`), in turn, each to the least sum of
squared logarithms. A CPU, and a GPU that the catalogue does not hold, get a specification from what was measured first.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.bench import offline, roofline
from phalanx.bench.workloads import Workload, prompts
from phalanx.config.model import ModelShape
from phalanx.config.sources import RawOptions
from phalanx.engine.messages import EngineFacts
from phalanx.errors import OptionError
from phalanx.hardware import catalogue, probe, provenance
from phalanx.hardware.catalogue import GpuSpec
from phalanx.layout import Layout
from phalanx.layout.attention_calls import padded
from phalanx.layout.cache import kv_dtype
from phalanx.planner import burst, calibration, cost
from phalanx.planner.coefficients import Coefficients
from phalanx.planner.cost import Costs, MachineModel, Work
from phalanx.planner.search import BLOCK

MOST_POINTS = 12
_TOKENS = 32  # of each request of a decode point, after the first
_SIZES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("decode", (128,)), ("prompt", (128,)), ("decode", (128,) * 64), ("prompt", (512,)), ("decode", (128,) * 16), ("prompt", (32,)),
    ("decode", (128,) * 4), ("decode", (16, 144) * 2), ("prompt", (1536,)), ("decode", (128,) * 128), ("decode", (128,) * 256),
)  # fmt: skip
"""Points in the order in which they are measured: kind and lengths of the prompts. Those that bound the others come first: a step
of many rows cannot be told from steps of few."""
_LEAST_TURNS, _MOST_TURNS, _ALONE = 3, 7, 9
_CALL_US = 60.0  # of a call of attention on a CPU, from where the fit begins
_TURNS = 80  # of the fit, at most
_PULL = 0.01  # on the logarithm of each multiplier, towards 0: as much as an error of 1 percent for a factor of e
_STEP = 1e-4  # of a logarithm, for slopes
TUNED = {
    "memory": ("e_bytes", "e_bytes_16", "e_experts"), "kv": ("e_kv", "e_kv_fp8", "e_far", "e_far_fp8"),
    "flops": ("e_flops", "e_experts_flops", "tflops_per_watt"), "prompt": ("e_prompt", "e_prompt_fp8"),
    "chain": ("c_layer", "c_few"),
    "chain_of_one": ("c_one",), "rest": ("c_step",), "call": ("c_call",),
}  # fmt: skip
"""Multiplier -> the coefficients that it scales."""


@dataclass(frozen=True)
class Point:
    """lengths: of prompts in tokens. seconds: of the step of one such prompt (kind "prompt"), or of one token for each of the
    requests ("decode")."""

    kind: str
    lengths: tuple[int, ...]
    seconds: float


def run(model: str, device: str = "auto", seconds: float = 120.0) -> dict[str, Any]:
    """`measure`, and keep the coefficients for this host's GPU (or CPU). Raises what an LLM raises, and OptionError."""
    document = measure(model, device, seconds)
    coefficients = Coefficients.from_json(document.pop("coefficients"))
    path = calibration.install(document["gpu"]["name"], coefficients, document)
    return {**document, "coefficients": asdict(coefficients), "file": str(path)}


def measure(model: str, device: str = "auto", seconds: float = 120.0) -> dict[str, Any]:
    """Points of a running engine, and the coefficients that explain them. Raises as `run`."""
    begin = time.perf_counter()
    values = {"model": model, "enable_prefix_caching": False, "device": device, "skip_tokenizer_init": True}
    with offline.target(RawOptions(values, {})) as subject:
        spec = _spec(subject.device)
        with offline.engine(subject) as (llm, _):
            points, round_trip = _measure(llm, seconds - (time.perf_counter() - begin))
            dtype = llm.facts.dtype
        shape = subject.shape
        on_cpu = subject.device == "cpu"
    return explained(model, shape, dtype, spec, points, round_trip, on_cpu=on_cpu)


def explained(
    model: str, shape: ModelShape, dtype: str, spec: GpuSpec, points: Sequence[Point], round_trip: float, *, on_cpu: bool
) -> dict[str, Any]:
    """The document of a calibration: points of a model and the coefficients that are fitted to them. round_trip: seconds of a call
    beside its steps."""
    base, _ = cost.coefficients_for(spec)
    if on_cpu:
        base = replace(base, c_eager=0.0, c_eager_experts=0.0, c_call=_CALL_US)
    fitted, error = fit(points, shape, dtype, kv_dtype("model", dtype), spec, base)
    return {
        "about": provenance.collect().as_json(),
        "model": model,
        "dtype": dtype,
        "gpu": {name: value for name, value in asdict(spec).items() if name != "sources"},
        "points": [asdict(point) for point in points],
        "round_trip_s": round_trip,
        "mean_error": error,
        "coefficients": asdict(fitted),
    }


def _spec(device: str) -> GpuSpec:
    """Of the GPU at hand, or of this host's CPU: memory bandwidth as it copies, arithmetic as a matrix product in fp32 has it."""
    if device != "cpu":
        name = catalogue.at_hand(probe.usable_machine().gpus)
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


def _measure(llm: Any, seconds: float) -> tuple[list[Point], float]:
    """Points, as many as half of the time allows; and the seconds that a call takes beside its steps. Medians of turns over all of
    them, so that a machine that is busy for a while slows all alike."""
    begin = time.perf_counter()
    ids = {size: _prompts(size[1], llm.facts.vocab_size) for size in _SIZES if _runs(llm.facts, *size)}
    timings: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    alone: list[float] = []
    _alone(llm)
    for turn in range(_MOST_TURNS):
        alone.append(_alone(llm))
        for size, rows in list(ids.items()):
            spent = time.perf_counter() - begin
            if turn == 0 and len(timings) >= 3 and (spent > seconds / (2 * _LEAST_TURNS) or len(timings) == MOST_POINTS):
                del ids[size]
                continue
            if turn == 0:
                offline.seconds_of(llm, rows, 4)
            timings.setdefault(size, []).append(_point_seconds(llm, size[0], rows))
        if turn + 1 >= _LEAST_TURNS and time.perf_counter() - begin > seconds / 2:
            break
    round_trip, points = statistics.median(alone), []
    for (kind, lengths), times in timings.items():
        taken = statistics.median(times)
        # On a busy machine a short prompt's call may take less than another one's round trip.
        points.append(Point(kind, lengths, max(taken - round_trip, taken / 10) if kind == "prompt" else max(taken, 1e-6)))
    return points, round_trip


def _runs(facts: EngineFacts, kind: str, lengths: tuple[int, ...]) -> bool:
    """Whether the engine takes a point: its requests at once, its prompt in one step."""
    if kind == "prompt":
        return lengths[0] <= min(facts.max_num_tokens, facts.max_seq_len - 1)
    return len(lengths) <= facts.max_batch_size and max(lengths) + _TOKENS < facts.max_seq_len


def _point_seconds(llm: Any, kind: str, rows: list[list[int]]) -> float:
    """Of a prompt's call, the round trip included; or of one token for each request."""
    first = offline.seconds_of(llm, rows, 1)
    return first if kind == "prompt" else (offline.seconds_of(llm, rows, _TOKENS + 1) - first) / _TOKENS


def _alone(llm: Any) -> float:
    """Seconds of a call beside its steps: of one token in and one out, less the time per token, which such a step takes."""
    rows = _prompts((1,), llm.facts.vocab_size)
    one = statistics.median(offline.seconds_of(llm, rows, 1) for _ in range(_ALONE))
    return max(one - (offline.seconds_of(llm, rows, _TOKENS + 1) - one) / _TOKENS, 0.0)


def _prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    rows = prompts(Workload("calibration", "decode", len(lengths), max(lengths), _TOKENS + 1, repeats=1), vocab_size, 0)
    return [list(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def fit(
    points: Sequence[Point], shape: ModelShape, dtype: str, kv: str, spec: GpuSpec, base: Coefficients
) -> tuple[Coefficients, float]:
    """The coefficients that explain the points best, and the mean error that is left, as a part of the measured time."""

    base = replace(base, c_step=max(base.c_step, 20.0))

    def tuned(scales: dict[str, float]) -> Coefficients:
        return replace(
            base, **{name: getattr(base, name) * scale for part, scale in scales.items() for name in TUNED[part]}
        )  # fmt: skip

    def residuals(logs: Sequence[float]) -> list[float]:
        scales = dict(zip(TUNED, map(math.exp, logs), strict=True))
        now = tuned(scales)
        wild = [_PULL * each for each in logs]  # what no point tells of stays where it was
        return [math.log(predicted(point, shape, dtype, kv, spec, now) / point.seconds) for point in points] + wild

    fitted = tuned(dict(zip(TUNED, map(math.exp, _least_squares(residuals, len(TUNED))), strict=True)))
    errors = [abs(predicted(point, shape, dtype, kv, spec, fitted) / point.seconds - 1) for point in points]
    return fitted, sum(errors) / len(errors)


def _least_squares(residuals: Callable[[Sequence[float]], Sequence[float]], count: int) -> list[float]:
    """`count` variables, from 0, with the least sum of squared residuals, by Levenberg's and Marquardt's damped steps."""
    import numpy as np

    Vector = np.ndarray[Any, np.dtype[np.float64]]

    def errors_at(logs: Vector) -> Vector:
        return np.array(residuals(logs.tolist()), dtype=np.float64)

    at, damping = np.zeros(count), 1.0
    now = errors_at(at)
    for _ in range(_TURNS):
        slopes = np.stack([(errors_at(at + _STEP * unit) - now) / _STEP for unit in np.eye(count)], axis=1)
        while True:
            squares = slopes.T @ slopes
            move = np.linalg.solve(squares + damping * np.eye(count), -slopes.T @ now)
            move = np.clip(move, -1.0, 1.0)
            then = errors_at(at + move)
            if then @ then < now @ now:
                gain = 1 - (then @ then) / (now @ now)
                at, now, damping = at + move, then, max(damping / 4, 1e-9)
                break
            damping *= 4
            if damping > 1e6:
                return [float(each) for each in at]
        if gain < 1e-5:
            break
    return [float(each) for each in at]


def predicted(point: Point, shape: ModelShape, dtype: str, kv: str, spec: GpuSpec, coefficients: Coefficients) -> float:
    """Seconds of a point under the coefficients."""
    machine = MachineModel(spec, spec.link, 1, 1, None, coefficients, "measured")
    costs = Costs(shape, dtype, kv, Layout(), machine)
    decodes, length = point.kind == "decode", point.lengths[0]
    if not machine.replays_graphs:
        rows = [(1, each + _TOKENS // 2) for each in point.lengths] if decodes else [(length, 0)]
        attention = padded(rows, BLOCK)
        tokens = len(rows) if decodes else length
        return costs.seconds(Work(tokens, len(rows), attention.keys, attention.pairs, eager=True, calls=attention.calls))
    if decodes:
        mean = sum(point.lengths) / len(point.lengths)
        return burst.decode_round(costs, len(point.lengths), mean + _TOKENS / 2)
    pairs = length * length / 2
    tokens, eager = burst.computed_tokens(costs, length, pairs)
    return costs.seconds(Work(tokens, 1, 0.0, pairs, eager))


def text(document: dict[str, Any]) -> str:
    """What was measured, and how well the fit explains it."""
    lines = [f"{len(document['points'])} points of {document['model']} on {document['gpu']['name']}:"]
    lines.append(f"  a call beside its steps {document['round_trip_s'] * 1e3:10.3f} ms")
    for point in document["points"]:
        lengths = point["lengths"]
        tokens = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
        lines.append(f"  {point['kind']:7} {len(lengths):4} x {tokens:>9} tokens  {point['seconds'] * 1e3:10.3f} ms")
    kept = f"; kept in {document['file']}" if "file" in document else ""
    lines.append(f"mean error of the fit {document['mean_error']:.1%}{kept}")
    return "\n".join(lines)
