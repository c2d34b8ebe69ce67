# SPDX-License-Identifier: Apache-2.0
"""The committed measurements on H200, one row for each figure: what a prediction is held against, and what the coefficients are
fitted to. Read from benchmarks/results; nothing is typed in here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from phalanx.bench import shapes
from phalanx.bench.workloads import Workload, parse
from phalanx.config.model import ModelShape
from phalanx.layout import Layout
from phalanx.layout.families import known

RESULTS = Path(__file__).resolve().parents[1] / "results"
FOLDERS = (RESULTS / "serving", RESULTS / "experts")
H100 = RESULTS / "h100"
SERVING = FOLDERS[0]
BEFORE_AUTO = ("mixtral-8x7b_ep2_kv_fp8", "deepseek-v3_16_layers_ep2")
"""Reports that do not name the exchange of experts, and were made while its default was ALL_GATHER."""
MODEL = "llama-3-70b"  # of the scaling files that do not name theirs
REFERENCE_GBPS = 4380.0
"""Measured memory bandwidth of the machine that a row without its own stands for: the median of the rows."""

HELD_OUT = frozenset({
    "llama-3.1-8b_long_row_kv_fp8", "llama-3.1-8b_8x32768x512_kv_fp8", "llama-3.1-70b_fp8_tp2_contexts_kv_fp8",
    "llama-3.1-8b_long_prompts", "llama-3.1-8b_long_prompts_kv_fp8", "llama-3.1-70b_fp8_tp2_long_prompts_kv_fp8",
    "llama-3.1-70b_fp8_tp2_few_rows_kv_fp8", "llama-3-70b_fp8_tp4_again_kv_fp8", "deepseek-v2_tp4_prompt_graphs",
})  # fmt: skip
"""Files that no coefficient may be fitted to: decode rows of the present attention kernel at contexts of up to 32,768 tokens; and
rows of 70B and DeepSeek-V2 on four GPUs. With the latter in it, the fit moved to another optimum, by which 8x22B's layouts on eight
GPUs came in another order: its steps with 16 and more requests take longer than the model knows why."""

Kind = Literal["decode", "batch"]


@cache
def shape_named(model: str) -> ModelShape:
    """The shape of a row's model; of "NAME:LAYERS" that of NAME, cut to its first layers."""
    config = shapes.config_of(model) or known(model)
    assert config is not None, model
    return ModelShape.from_config(config)


@cache
def one_name(model: str) -> str:
    """The same name for all models of one size: Llama 3 and 3.1 differ in nothing that a step's time depends on."""
    size = shape_named(model).hidden_size, shape_named(model).num_layers
    names = (name for name in shapes.SHAPES if (shape_named(name).hidden_size, shape_named(name).num_layers) == size)
    return min(names, default=model)


def beside_prompts(work: Workload) -> bool:
    """Whether most tokens of a decode workload are decoded beside the prompts of other requests."""
    return work.kind == "decode" and work.requests * work.input_len > 8192 * work.output_len // 2


WITHOUT_ROUTER = {
    "mixtral-8x7b", "mixtral-8x7b_ep2_kv_fp8", "mixtral-8x7b_ep2_one_sided_kv_fp8", "mixtral-8x7b_ep2_a2a_kv_fp8",
    "mixtral-8x7b_replicas2_kv_fp8", "mixtral-8x7b_tp2_1024_decodes_kv_fp8", "qwen3-30b-a3b", "deepseek-v3_4_layers_tp2",
}  # fmt: skip
"""Files of before d4c3aa7, whose layers drew their experts and left the router's GEMM out."""

OLDER_SCHEDULERS_UNTIL = "2026-11-27"
"""The last day with figures of schedulers that let the decodes of a pipeline gather in the steps of one stage, and that left steps
of data-parallel indices half empty (`history.scheduler_of`)."""

GATHERED = {
    ("deepseek-v2_tp2_prompt_graphs", 64), ("deepseek-v2_tp2_prompt_graphs", 128), ("deepseek-v2_tp4_prompt_graphs", 128),
    ("mixtral-8x7b_tp2_512_kv_fp8", 64), ("mixtral-8x7b_tp2_moe_ep2_512_kv_fp8", 64), ("mixtral-8x7b_tp2_moe_ep2_512_kv_fp8", 128),
}  # fmt: skip
"""(file, requests) of engines by tuned tables in which only one of a layer's two norms ran RS_NORM_AG."""


@dataclass(frozen=True)
class Row:
    """One measured figure. bandwidth: GB/s that the machine's memory was measured at in the same run. measured: ms per token of a
    decode workload, output tokens per second of a batch workload. date: ISO, empty for early ones. first_s: seconds of the runs to
    the first token, which a decode workload's figure is a difference to."""

    file: str
    commit: str
    model: str
    dtype: str
    kv_fp8: bool
    tp: int
    pp: int
    strategy: str
    workload: Workload
    measured: float
    max_batch_size: int = 512
    kv_tokens: int = 0
    bandwidth: float = REFERENCE_GBPS
    moe_ep: int = 1
    ep: int = 1
    exchange: str = "AUTO"
    date: str = ""
    first_s: tuple[float, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.workload.kind

    @property
    def unlike(self) -> str:
        """Why the coefficients do not describe the row: that it is of an older kernel, or of no decodes alone; else empty."""
        if self.file in WITHOUT_ROUTER:
            return "measured without the GEMM of the router"
        if (self.file, self.workload.requests) in GATHERED and self.kind == "decode":
            return "each layer gathered its residual until 8e9951d"
        if self.file in ("gpt-oss-120b", "gpt-oss-120b_alone"):
            return "experts in MXFP4 had tiles of 16 tokens until 3540d73"
        if self.kind == "batch" and self.pp > 1 and self.date <= OLDER_SCHEDULERS_UNTIL:
            return "stages stood still then, how long depended on when requests arrived"
        if self.kind == "batch" and self.commit == "af61857":
            return "the grouped GEMM of 512 tokens took 577 us a layer of Mixtral-8x7B then, and 469 since 2b5ea0a"
        if beside_prompts(self.workload):
            return "most tokens are decoded beside the prompts of other requests"
        if self.file.startswith("llama-3.1-8b_contexts") and self.workload.input_len >= 8192:
            return "decode attention of long rows is faster since 3a955f5"
        if self.kind == "batch" and self.model.startswith("deepseek") and self.commit != "6c20f35" and self.date <= "2026-11-27":
            return "prompts of latent attention were expanded for eight heads at a time then"
        long_row = self.workload.requests == 1 and self.workload.input_len >= 2048 and self.kind == "decode"
        if long_row and self.file != "llama-3.1-70b_fp8_tp2_few_rows_kv_fp8":
            return "the splits of one long row have small programs, and a kernel that merges them, since b7c2001"
        split = self.moe_ep > 1 and self.commit == "87975dc"
        if split and self.workload.requests == 1:
            return "a token alone made each rank read an expert for each of its pairs then, also for those of other ranks"
        if split and self.model == "mixtral-8x7b" and self.workload.requests > 64:
            return "the second GEMM of two experts had programs for half of the multiprocessors then"
        return ""

    @property
    def spread(self) -> float:
        """Of a decode row: by which part of its figure its runs to the first token differ, of which it subtracts the fastest."""
        if not self.first_s or self.kind == "batch":
            return 0.0
        return (max(self.first_s) - min(self.first_s)) / (self.workload.output_len - 1) / (self.measured / 1e3)

    @property
    def name(self) -> str:
        kv = " kv8" if self.kv_fp8 else ""
        ep = (f" moe_ep{self.moe_ep}" if self.moe_ep > 1 else "") + (f" ep{self.ep}" if self.ep > 1 else "")
        ep += f" {self.exchange}" if self.ep > 1 else ""
        return f"{self.model} {self.dtype}{kv} tp{self.tp} pp{self.pp}{ep} {self.strategy} {self.workload.name}"


@dataclass(frozen=True)
class Start:
    """What one start gave: tokens of KV cache, and bytes of each rank by kind."""

    file: str
    model: str
    dtype: str
    kv_fp8: bool
    tp: int
    pp: int
    max_batch_size: int
    max_num_tokens: int
    fraction: float
    kv_tokens: int
    bytes: dict[str, dict[str, int]]
    moe_ep: int = 1
    gpu: str = "H200"
    ep: int = 1
    commit: str = ""
    date: str = ""

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, pp=self.pp, dp=self.ep, moe_ep=self.moe_ep)


def _documents(folders: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def _options(document: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = document.get("asked") or {}
    return {"model": MODEL, "kv_cache_dtype": "fp8", **options} if "rows" in document else options


def engines(
    folders: Sequence[Path] = FOLDERS,
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str, list[dict[str, Any]], float]]:
    """(file, options, engine, strategy, figures, measured GB/s) of each engine that was started."""
    for name, document in _documents(folders):
        options, gbps = _options(document), document.get("roof", {}).get("best_GBps", REFERENCE_GBPS)
        for strategy, engine in document.get("engines", {}).items():
            yield name, options, engine, strategy, [r for r in document["results"] if r["allreduce_strategy"] == strategy], gbps
        if "engine" in document:  # of `bench latency`, whose figures do not say by what they were measured
            figures = [{"measured": document["about"], **result} for result in document["results"]]
            yield name, options, document["engine"], "AUTO", figures, gbps
        for row in document.get("rows", []):
            if "engine" not in row:
                continue
            figures = [{"workload": workload, **figure} for workload, figure in row["decodes"].items()]
            batches = [each for each in options.get("workloads", ["batch-512x1000x1000"]) if each.startswith("batch")]
            figures += [{"workload": batches[0], "output_tok_s": row["output_tok_s"]}]
            yield name, options, row["engine"], "AUTO", figures, row["roof"]["best_GBps"]


def rows() -> list[Row]:
    """Every figure of every committed run of one replica on H200, but for skewed routing and the all-to-all exchange of experts,
    which the cost model does not know."""
    all_rows = []
    for name, options, engine, strategy, figures, bandwidth in engines():
        if options.get("replicas", 1) > 1 or options.get("expert_traffic") or options.get("expert_exchange") == "ALL_TO_ALL":
            continue
        shape = {"shape_8b_http": "llama-3-8b"}.get(options["model"], options["model"])
        for figure in figures:
            workload = parse(figure["workload"])
            measured = figure["tpot_ms"] if workload.kind == "decode" else figure["output_tok_s"]
            all_rows.append(
                Row(
                    name,
                    figure.get("measured", {}).get("commit", ""),
                    shape,
                    engine["dtype"],
                    options.get("kv_cache_dtype") == "fp8",
                    engine["tp"],
                    engine["pp"],
                    strategy,
                    workload,
                    measured,
                    engine["max_batch_size"],
                    engine["kv_tokens"],
                    bandwidth,
                    options.get("moe_expert_parallel_size", 1),
                    options.get("expert_parallel_size", 1),
                    options.get("expert_exchange", "ALL_GATHER" if name in BEFORE_AUTO else "AUTO"),
                    figure.get("measured", {}).get("date", ""),
                    tuple((figure.get("samples_s") or {}).get("first_token", ()) if workload.kind == "decode" else ()),
                )
            )
    return all_rows + _printed()


def _printed() -> list[Row]:
    """What `scaling_again.json` keeps of reports that were only printed."""
    document = json.loads((SERVING / "scaling_again.json").read_text(encoding="utf-8"))
    printed_rows = []
    for row in document["printed"]:
        for workload, value in (("decode-1", row["tpot_ms"]), ("batch-512x1000x1000", float(row["output_tok_s"]))):
            printed_rows.append(
                Row("scaling_again: printed", "79d94aa", MODEL, "fp8", True, row["tp"], row["pp"], "AUTO", parse(workload), value,
                    kv_tokens=row["kv_tokens"])
            )  # fmt: skip
    for strategy, figures in document["strategies_tp2"].items():
        printed_rows += [
            Row("scaling_again: tp2", "79d94aa", MODEL, "fp8", True, 2, 1, strategy, parse(w), ms) for w, ms in figures.items()
        ]
    return printed_rows


def starts() -> list[Start]:
    """What a replica of each committed start got, those printed and those of `starts.json` among them (without bytes by kind)."""
    all_starts = []
    gpu_engines = [(gpu, each) for gpu, folders in (("H200", FOLDERS), ("H100", (H100,))) for each in engines(folders)]
    for gpu, (name, options, engine, _, figures, _) in gpu_engines:
        measured = figures[0].get("measured", {}) if figures else {}
        shape = {"shape_8b_http": "llama-3-8b"}.get(options["model"], options["model"])
        replicas = options.get("replicas", 1)
        all_starts.append(
            Start(
                name,
                shape,
                engine["dtype"],
                options.get("kv_cache_dtype") == "fp8",
                engine["tp"],
                engine["pp"],
                engine["max_batch_size"] // replicas,
                engine["max_num_tokens"],
                options.get("kv_cache_free_gpu_memory_fraction", 0.9),
                engine["kv_tokens"] // replicas,
                engine["rank_bytes"],
                options.get("moe_expert_parallel_size", 1),
                gpu,
                options.get("expert_parallel_size", 1),
                measured.get("commit", ""),
                measured.get("date", ""),
            )
        )
    again = json.loads((SERVING / "scaling_again.json").read_text(encoding="utf-8"))
    for row in again["printed"]:
        all_starts.append(
            Start("scaling_again: printed", MODEL, "fp8", True, row["tp"], row["pp"], 512, 8192, 0.9, row["kv_tokens"], {})
        )
    for start in json.loads((SERVING / "starts.json").read_text(encoding="utf-8"))["starts"]:
        token = {"llama-3-8b": 32 * 2 * 1024, "llama-3-70b": 80 * 2 * 1024}[start["model"]]
        dtype = "fp8" if start["model"] == MODEL else "bf16"
        tokens = start["kv_MiB"] * (1 << 20) // token // 16 * 16
        all_starts.append(Start("starts", start["model"], dtype, True, 1, 1, 512, 8192, 0.9, tokens, {}))
    return all_starts
