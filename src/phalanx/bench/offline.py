# SPDX-License-Identifier: Apache-2.0
"""The engine under test, offline: default options of the benchmarks, a start that is timed, and timed calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx.bench import report, roofline, shapes
from phalanx.bench.roofline import Bandwidth
from phalanx.bench.workloads import Workload, longest, params
from phalanx.config import EngineOptions
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.resolve import resolve
from phalanx.config.sources import RawOptions, build_options
from phalanx.engine.messages import EngineFacts
from phalanx.errors import EngineError, OptionError
from phalanx.hardware import probe, provenance
from phalanx.log import get_logger
from phalanx.serve.llm import LLM

logger = get_logger(__name__)

METHOD: dict[str, Any] = {
    "max_batch_size": 512, "max_num_tokens": 8192, "max_seq_len": 4096, "enable_prefix_caching": False, "skip_tokenizer_init": True,
}  # fmt: skip
"""Default options, with which other engines were measured, too. A flag, a variable or a file overrides them; the report names what
differs from an engine's defaults."""


@dataclass(frozen=True)
class BenchmarkTarget:
    """What is measured. name: the model as the user gave it. device: "cuda" or "cpu". gpus: GPUs of this host. commit: recorded
    where the sources are not a git checkout."""

    name: str
    options: EngineOptions
    shape: ModelShape
    device: str
    gpus: int
    commit: str | None = None


@contextmanager
def target(raw_options: RawOptions, commit: str | None = None) -> Iterator[BenchmarkTarget]:
    """Resolve options and shape. The name of a shape means dummy weights of that shape. Nothing is started.

    Raises what `build_options`, `locate` and `ModelShape.from_folder` raise.
    """
    first = build_options(EngineOptions, raw_options)
    with shapes.folder_of(first.model) as folder:
        shape = ModelShape.from_folder(locate(folder, first.revision))
        method = {**METHOD, "max_seq_len": min(METHOD["max_seq_len"], shape.max_positions)}
        if folder != first.model:
            method["load_format"] = "dummy"
        values = {**method, **raw_options.values, "model": folder}
        origins = {**dict.fromkeys(values, "the method of the bench"), **raw_options.origins}
        options = build_options(EngineOptions, RawOptions(values, origins))
        gpus = len(probe.usable_machine(options.device).gpus)
        device = options.device if options.device != "auto" else "cuda" if gpus else "cpu"
        yield BenchmarkTarget(first.model, options, shape, device, gpus, commit)


def check(target: BenchmarkTarget, workloads: Sequence[Workload]) -> None:
    """Raise OptionError or LayoutError, before anything is started, for what the engine cannot run."""
    options = resolve(target.options, target.shape, target.gpus).options
    if options.max_seq_len is not None and longest(workloads) > options.max_seq_len:
        raise OptionError(
            f"requests of {longest(workloads)} tokens do not fit max_seq_len={options.max_seq_len}",
            next="give a larger --max_seq_len if the model allows it, or a workload of shorter requests",
        )  # fmt: skip
    for workload in workloads:
        if workload.kind == "decode" and workload.requests > options.max_batch_size:
            raise OptionError(
                f"{workload.name} does not fit max_batch_size={options.max_batch_size}",
                why="its requests must decode together, or the time per token would be that of several rounds",
                next="give a larger --max_batch_size, or other workloads",
            )  # fmt: skip


@contextmanager
def engine(target: BenchmarkTarget) -> Iterator[tuple[LLM, float]]:
    """The running LLM, and the seconds of its start. It ends with the context."""
    begin = time.perf_counter()
    with LLM(**target.options.model_dump()) as llm:
        seconds = time.perf_counter() - begin
        logger.info("%s started in %.1f s", target.name, seconds)
        yield llm, seconds


def self_check_lines(options: EngineOptions) -> list[str]:
    """Start an engine with the self check, and end it: what each rank that compares has found. Raises what fails the start."""
    checked = {**options.model_dump(), "self_check": True, "skip_tokenizer_init": True}
    with LLM(**checked) as llm:
        return [rank.self_check for rank in llm.facts.ranks if rank.self_check]


Measure = Callable[[BenchmarkTarget, LLM, Workload, Bandwidth], dict[str, Any]]
"""A workload's row of a report."""
SecondsOf = Callable[[Sequence[Sequence[int]], int], float]
"""(prompts, output_len) -> seconds: `seconds_of` of one engine."""


def seconds_of(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int) -> float:
    """Seconds until every prompt has `output_len` new tokens. Raises EngineError when the engine gave another number."""
    begin = time.perf_counter()
    outputs = llm.generate(list(prompts), params(output_len), use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output in outputs:
        if len(output.outputs[0].token_ids) != output_len:
            raise EngineError(
                f"the engine gave {len(output.outputs[0].token_ids)} new tokens instead of {output_len}",
                why="the figure would be that of other work",
            )  # fmt: skip
    return seconds


def run(target: BenchmarkTarget, workloads: Sequence[Workload], measure: Measure) -> report.Document:
    """Start an engine, measure every workload, end it; the report. Raises what an LLM raises."""
    check(target, workloads)
    bandwidth = roofline.measure(target.device)
    with engine(target) as (llm, start_s):
        results = [measure(target, llm, workload, bandwidth) for workload in workloads]
        return document(target, llm.facts, bandwidth, start_s, results)


def document(
    target: BenchmarkTarget, facts: EngineFacts, bandwidth: Bandwidth, start_s: float, results: list[Any]
) -> report.Document:
    """The JSON report of one engine."""
    return {
        "about": provenance.collect(target.commit).as_json(),
        "asked": requested_options(target),
        "engine": engine_summary(facts, start_s),
        "roof": bandwidth.as_json(),
        "results": results,
    }


def requested_options(target: BenchmarkTarget) -> dict[str, Any]:
    """The options that differ from an engine's defaults, and the model as the user gave it."""
    return changed_options(target.options, target.name)


_NEVER_TOLD = {"cluster_token", "cluster_token_file"}


def changed_options(options: EngineOptions, name: str) -> dict[str, Any]:
    """As `requested_options`. Reports are shown to others: no secret is among them."""
    changed = {name: value for name, value in options if value != EngineOptions.model_fields[name].default}
    return {**{name: value for name, value in changed.items() if name not in _NEVER_TOLD}, "model": name}


def engine_summary(facts: EngineFacts, start_s: float) -> dict[str, Any]:
    layout = facts.layout
    slowest: dict[str, float] = {}
    for rank in facts.ranks:
        for name, seconds in rank.phases.items():
            slowest[name] = round(max(seconds, slowest.get(name, 0.0)), 2)
    return {
        "start_s": round(start_s, 1), "phases_s": {name: round(value, 2) for name, value in facts.phases.items()},
        "rank_phases_s": slowest,
        "dtype": facts.dtype, "device": facts.device, "tp": layout.tp, "pp": layout.pp, "dp": layout.dp,
        "kv_tokens": facts.kv_tokens,
        "max_batch_size": facts.max_batch_size, "max_num_tokens": facts.max_num_tokens, "max_seq_len": facts.max_seq_len,
        "attention": sorted({rank.attention for rank in facts.ranks}),
        "allreduce": sorted({rank.allreduce for rank in facts.ranks}),
        "rank_bytes": {str(rank.rank): rank.bytes for rank in facts.ranks},
    }  # fmt: skip
