# SPDX-License-Identifier: Apache-2.0
"""The engine under test, offline: options as in the method of the targets, a start that is timed, and timed calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx.bench import report, shapes
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
"""What the peers ran with. A flag, a variable or a file may say otherwise, and the report says so."""


@dataclass(frozen=True)
class BenchmarkTarget:
    """What is measured. name: the model as it was asked for; device: "cuda" or "cpu"; gpus: how many this host shows; commit: of
    the sources, where they came without their history."""

    name: str
    options: EngineOptions
    shape: ModelShape
    device: str
    gpus: int
    commit: str | None = None


@contextmanager
def target(asked: RawOptions, commit: str | None = None) -> Iterator[BenchmarkTarget]:
    """Settle what was asked for. A shape's name stands for dummy weights of that shape. Nothing is started.

    Raises what `build_options`, `locate` and `ModelShape.from_folder` raise.
    """
    first = build_options(EngineOptions, asked)
    with shapes.folder_of(first.model) as folder:
        shape = ModelShape.from_folder(locate(folder, first.revision))
        method = {**METHOD, "max_seq_len": min(METHOD["max_seq_len"], shape.max_positions)}
        if folder != first.model:
            method["load_format"] = "dummy"
        values = {**method, **asked.values, "model": folder}
        options = build_options(EngineOptions, RawOptions(values, {**dict.fromkeys(values, "the method of the bench"), **asked.origins}))
        gpus = len(probe.detect_machine().gpus)
        device = options.device if options.device != "auto" else "cuda" if gpus else "cpu"
        yield BenchmarkTarget(first.model, options, shape, device, gpus, commit)


def check(target: BenchmarkTarget, workloads: Sequence[Workload]) -> None:
    """Refuse, before anything is started, what the engine could not run. Raises OptionError or LayoutError."""
    options = resolve(target.options, target.shape, target.gpus).options
    if options.max_seq_len is not None and longest(workloads) > options.max_seq_len:
        raise OptionError(
            f"requests of {longest(workloads)} tokens were asked for", held=f"max_seq_len is {options.max_seq_len}",
            next="give a larger --max_seq_len where the model has one, or a workload of shorter requests",
        )  # fmt: skip
    for workload in workloads:
        if workload.kind == "decode" and workload.requests > options.max_batch_size:
            raise OptionError(
                f"{workload.name} was asked for", held=f"max_batch_size is {options.max_batch_size}",
                why="its requests decode together, or the time per token is that of several rounds",
                next="give a larger --max_batch_size, or other workloads",
            )  # fmt: skip


@contextmanager
def engine(target: BenchmarkTarget) -> Iterator[tuple[LLM, float]]:
    """The running LLM, and the seconds that its start took. It has ended when the context has."""
    begin = time.perf_counter()
    with LLM(**target.options.model_dump()) as llm:
        seconds = time.perf_counter() - begin
        logger.info("%s is up after %.1f s", target.name, seconds)
        yield llm, seconds


def seconds_of(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int) -> float:
    """Seconds until every prompt has so many new tokens. Raises EngineError when the engine gave another number."""
    begin = time.perf_counter()
    outputs = llm.generate(list(prompts), params(output_len), use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output in outputs:
        if len(output.outputs[0].token_ids) != output_len:
            raise EngineError(
                f"{output_len} new tokens were asked for", held=f"{len(output.outputs[0].token_ids)} came",
                why="a figure of other work would mean nothing",
            )  # fmt: skip
    return seconds


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
    """The options that differ from an engine's defaults, and the model by the name that it was asked for."""
    given = {name: value for name, value in target.options if value != EngineOptions.model_fields[name].default}
    return {**given, "model": target.name}


def engine_summary(facts: EngineFacts, start_s: float) -> dict[str, Any]:
    pp, dp, tp = facts.layout
    slowest: dict[str, float] = {}
    for rank in facts.ranks:
        for name, seconds in rank.phases.items():
            slowest[name] = round(max(seconds, slowest.get(name, 0.0)), 2)
    return {
        "start_s": round(start_s, 1), "phases_s": {name: round(value, 2) for name, value in facts.phases.items()},
        "rank_phases_s": slowest,
        "dtype": facts.dtype, "device": facts.device, "tp": tp, "pp": pp, "dp": dp,
        "kv_tokens": facts.num_blocks * facts.block_size,
        "max_batch_size": facts.max_batch_size, "max_num_tokens": facts.max_num_tokens, "max_seq_len": facts.max_seq_len,
        "attention": sorted({rank.attention for rank in facts.ranks}),
        "allreduce": sorted({rank.allreduce for rank in facts.ranks}),
        "rank_bytes": {str(rank.rank): rank.bytes for rank in facts.ranks},
    }  # fmt: skip
