# SPDX-License-Identifier: Apache-2.0
"""A plan in words: the decision tree with the branch that was taken, the tables, the serve command and its YAML. Plain text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.config.model import ModelShape
from phalanx.config.quantization import loaded_as, on_load
from phalanx.config.resolve import GPU_STEP_TOKENS, concrete_dtype, concrete_kv_cache_dtype
from phalanx.layout import Layout
from phalanx.layout.cache import kv_dtype
from phalanx.layout.families.registry import hub_id
from phalanx.layout.weights import weight_bytes
from phalanx.planner.cost import MachineModel
from phalanx.planner.footprint import Sizes, host_tokens
from phalanx.planner.search import BATCH_SIZE, Figure, Plan, PlanRequest, Rejected, SearchResult, block_size, closest, examine

LABELS = {
    "measured": "coefficients measured on this machine", "table": "a machine class that was measured",
    "derived": "scaled from a measured class", "estimated": "parts of it were never measured",
}  # fmt: skip

RANGES = {
    True: "the range held 9 of 10 measured figures that were not fitted",
    False: "the range is meant for 9 of 10 measurements, which was not checked on such a machine and model",
}
"""By `Plan.checked`."""

# A usual decision tree is by bytes of weights, for GPUs of 80 GB; a node has 8.
_BRANCHES = (
    (20e9, "under 20 GB: one GPU"),
    (80e9, "under 80 GB: tp 2 or 4 in one node"),
    (320e9, "under 320 GB: tp 4 or 8 in one node, over NVLink"),
    (float("inf"), "else: tp 8 x pp 2, over nodes"),
)


def branch(weights: float) -> int:
    """Index of the branch for so many bytes of weights."""
    return next(index for index, (below, _) in enumerate(_BRANCHES) if weights < below)


def _reason(plans: Sequence[Plan], request: PlanRequest) -> str:
    """Why the first plan leads."""
    throughput = request.goal == "throughput"
    goal = "tokens per second" if throughput else "time per token"
    values = [(plan.output_tokens_per_second if throughput else plan.ms_per_token).value for plan in plans]
    best = max(values) if throughput else min(values)
    if values[0] == best:
        return f"the best {goal} of all that fit"
    return f"within {abs(values[0] / best - 1):.1%} of the best {goal}, which predictions do not tell apart, and surer"


def tree(shape: ModelShape, request: PlanRequest, plans: Sequence[Plan]) -> list[str]:
    """The usual decision tree with the branch that it takes, and what the search chose instead, with its reason."""
    weights = weight_bytes(shape, request.dtype, Layout())[0]
    taken = branch(weights)
    lines = [f"weights: {weights / 1e9:,.1f} GB in {stored(shape, request.dtype)}"]
    for index, (_, text) in enumerate(_BRANCHES):
        lines.append(f"  {'->' if index == taken else '  '} {text}")
    if plans:
        lines.append(f"  chosen: {plans[0].layout.name}, {_reason(plans, request)}")
    return lines


def describe(machine: MachineModel) -> str:
    """One line: GPUs, link, nodes and network."""
    gpu = machine.gpu
    nodes = f"{machine.nodes} nodes of {machine.gpus_per_node}" if machine.nodes > 1 else f"{machine.gpus_per_node}"
    between = f", {machine.network.name} ({machine.network.bandwidth / 1e9:g} GB/s) between nodes" if machine.network else ""
    return f"{nodes} x {gpu.name} ({gpu.memory_bytes / 1e9:.1f} GB), {machine.link} at {gpu.link_bandwidth / 1e9:g} GB/s{between}"


def text(
    model: str, shape: ModelShape, machine: MachineModel, request: PlanRequest, result: SearchResult, *, rejected: int = 12
) -> str:
    """All of it: what was asked, the tree, the plans, the rejected, the command. rejected: how many of these at most."""
    bounds = [
        f"{name} <= {value * 1e3:g} ms" for name, value in (("TTFT", request.slo_ttft), ("time per token", request.slo_tpot))
        if value is not None
    ]  # fmt: skip
    lines = [
        f"{model} on {describe(machine)}",
        f"{request.concurrency} requests at once, {request.isl:,} tokens in, {request.osl:,} out; "
        f"weights in {stored(shape, request.dtype)}, KV cache {request.kv_cache_dtype}; goal {'; '.join([request.goal, *bounds])}",
        "",
        *tree(shape, request, result.plans),
        "",
    ]
    if result.plans:
        lines += plans_table(result.plans)
        lines += ["", *(f"note: {note}" for note in result.plans[0].notes)]
        lines += host_memory(shape, machine, request, result.plans[0])
        lines += [] if result.plans[0].gain is None else result.plans[0].gain.lines()
        lines += price(shape, machine, request, result.plans[0])
        label = result.plans[0].output_tokens_per_second.label
        lines.append(f"label {label}: {LABELS[label]}; {RANGES[result.plans[0].checked]}")
        lines.append(
            "time per token = (end - first token) / (tokens - 1), mean over requests; TTFT of the median request when all come"
        )
        lines.append(
            "at once; steady: its mean when they come one by one, as many as keep so many running, which --slo_ttft bounds"
        )
        lines += simulation(model, shape, machine, request, result.plans[0]) if bounds else []
    else:
        lines += ["no layout fits", *(f"  nearest: {change}" for change in result.changes)]
        plan = closest(shape, machine, request)
        lines += simulation(model, shape, machine, request, plan) if plan else []
    if result.rejected:
        lines += ["", f"rejected ({len(result.rejected)}):"]
        lines += _table([["", each.layout.name, each.reason] for each in result.rejected[:rejected]], left=3)
        if len(result.rejected) > rejected:
            lines.append(f"  and {len(result.rejected) - rejected} more (--json - has all)")
    if result.plans:
        lines += ["", *command(model, shape, machine, request, result.plans[0])]
    return "\n".join(line.rstrip() for line in lines)


def plans_table(plans: Sequence[Plan]) -> list[str]:
    """One line for each plan, under a head."""
    head = [
        "layout", "GPUs", "ms/token", "range", "TTFT ms", "steady", "tokens/s", "range", "label", "weights", "other", "KV GB",
        "KV tokens", "requests",
    ]  # fmt: skip
    rows = [head]
    for plan in plans:
        rank_bytes = plan.bytes
        other = rank_bytes["activations_and_context"] + rank_bytes["graphs"]
        rows.append(
            [
                plan.layout.name,
                str(plan.layout.gpus),
                f"{plan.ms_per_token.value:.2f}",
                _range(plan.ms_per_token, 2),
                f"{plan.ttft_ms.value:,.0f}",
                f"{plan.steady.ttft_s * 1e3:,.0f}",
                f"{plan.output_tokens_per_second.value:,.0f}",
                _range(plan.output_tokens_per_second, 0),
                plan.output_tokens_per_second.label,
                f"{rank_bytes['weights'] / 1e9:.1f}",
                f"{other / 1e9:.1f}",
                f"{rank_bytes['kv'] / 1e9:.1f}",
                f"{plan.kv_tokens:,}",
                f"{plan.max_concurrency:,}",
            ]
        )
    return _table(rows, left=1)


def _range(figure: Figure, digits: int) -> str:
    return f"{figure.low:,.{digits}f}-{figure.high:,.{digits}f}"


def _table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns as wide as they must be, the first `left` to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def layout_options(machine: MachineModel, plan: Plan) -> dict[str, int]:
    """The engine's options that make the plan's layout, by their long names."""
    layout = plan.layout
    sizes = layout.options if layout.gpus <= machine.gpus_per_node else replace(layout, replicas=1).options
    sizes["nnodes"] = -(-layout.world // machine.gpus_per_node)
    chosen = {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp}
    return chosen | {name: size for name, size in sizes.items() if size > 1}


def options(model: str, shape: ModelShape, machine: MachineModel, request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """The options of a server with the plan's layout. Others stay at their default, but what was asked for, and the limits that a
    start needs: a server also takes other requests than those of the plan."""
    size = block_size(plan.layout)
    longest = plan.kv_tokens // plan.layout.dp // size * size
    values = {
        "dtype": (request.dtype, concrete_dtype("auto", shape, machine.device)),
        "kv_cache_dtype": (request.kv_cache_dtype, concrete_kv_cache_dtype("auto", shape)),
        "max_batch_size": (plan.max_batch_size, BATCH_SIZE), "max_num_tokens": (request.max_num_tokens, GPU_STEP_TOKENS),
        "max_seq_len": (request.max_seq_len or min(longest, shape.max_positions), shape.max_positions),
    }  # fmt: skip
    chosen = {name: value for name, (value, default) in values.items() if value != default}
    if request.speculative_config is not None:
        chosen["speculative_config"] = request.speculative_config
    if request.kv_host_memory:
        chosen["kv_host_memory"] = request.kv_host_memory
    if request.deterministic:
        chosen["deterministic"] = True
    if request.quantize_activations:
        chosen["quantize_activations"] = True
    return {"model": checkpoint_of(model), **layout_options(machine, plan), **chosen}


def price(shape: ModelShape, machine: MachineModel, request: PlanRequest, plan: Plan) -> list[str]:
    """A line with what `--deterministic` and `--quantize_activations` cost or gain the plan, and, where the checkpoint has dense
    layers in 4 bits, one with what a copy of them in FP8 would."""
    lines = []
    if request.deterministic:
        lines += _beside("--deterministic", shape, machine, replace(request, deterministic=False), plan)
    if request.quantize_activations:
        lines += _beside("--quantize_activations", shape, machine, replace(request, quantize_activations=False), plan)
    if machine.gpu.fp8_flops and loaded_as(shape.quantization, on_load("fp8")) != shape.quantization and shape.quantization:
        if request.dtype == "fp8":
            return lines + _beside("--dtype fp8, a copy of 4 bits", shape, machine, replace(request, dtype="bf16"), plan)
        in_fp8 = replace(request, dtype="fp8", quantize_activations=False, slo_ttft=None, slo_tpot=None)
        copy = examine(shape, machine, in_fp8, plan.layout)
        if isinstance(copy, Rejected):
            return [*lines, f"note: a copy of the dense layers in FP8 (--dtype fp8) does not run so: {copy.reason}"]
        lines.append(
            f"note: a copy of the dense layers in FP8 (--dtype fp8): {copy.output_tokens_per_second.value:,.0f} output tokens per "
            f"second, {copy.ms_per_token.value:.3g} ms per token, {copy.bytes['weights'] / 1e9:.1f} GB of weights on a GPU"
        )
    return lines


def _beside(name: str, shape: ModelShape, machine: MachineModel, without: PlanRequest, plan: Plan) -> list[str]:
    """A line with the plan's times beside those of a request without something; none where that does not run."""
    free = examine(shape, machine, replace(without, slo_ttft=None, slo_tpot=None), plan.layout)
    if isinstance(free, Rejected):
        return []
    slower = 100 * (plan.ms_per_token.value / free.ms_per_token.value - 1)
    more = 100 * (plan.output_tokens_per_second.value / free.output_tokens_per_second.value - 1)
    return [
        f"{name}: time per token {plan.ms_per_token.value:.3g} ms instead of {free.ms_per_token.value:.3g} "
        f"({slower:+.0f} %), output tokens per second {more:+.0f} %"
    ]


def host_memory(shape: ModelShape, machine: MachineModel, request: PlanRequest, plan: Plan) -> list[str]:
    """A line with what the host memory of the request is for the plan; none without."""
    if not request.kv_host_memory:
        return []
    sizes = Sizes(
        request.dtype, kv_dtype(request.kv_cache_dtype, request.dtype), plan.max_batch_size, request.max_num_tokens,
        block_size(plan.layout), draft=request.draft,
    )  # fmt: skip
    tokens, states = host_tokens(shape, plan.layout, machine.gpus_per_node, request.kv_host_memory, sizes)
    of_states = f", and {states:,} states of prefixes, of which a hit needs one" if states else ""
    return [
        f"note: {request.kv_host_memory:,} bytes of each host keep {tokens:,} tokens of prefixes that leave the GPUs, which hold "
        f"{plan.kv_tokens * plan.layout.replicas:,}{of_states}"
    ]


def checkpoint_of(model: str) -> str:
    """What `phalanx serve` takes for the MODEL of a plan: the Hub id of a name that is none, the folder of a config.json."""
    path = Path(model).expanduser()
    return hub_id(model) or (str(path.parent) if path.is_file() else model)


def stored(shape: ModelShape, dtype: str) -> str:
    """How most weights are stored: "MXFP4", "FP8", "INT4", or the dtype."""
    quantization = loaded_as(shape.quantization, on_load(dtype))
    return dtype if quantization is None else quantization.stored


def simulation(model: str, shape: ModelShape, machine: MachineModel, request: PlanRequest, plan: Plan) -> list[str]:
    """A line with the command that simulates the plan's steady load; none for a layout that it does not take."""
    layout, rate = plan.layout, plan.steady.requests_per_second * plan.layout.replicas
    if layout.moe_ep > 1 or not rate:
        return []
    flags: dict[str, Any] = {
        "model": model, "gpu": machine.gpu.name, "gpus_per_node": machine.gpus_per_node, "nodes": machine.nodes,
        "tp_size": layout.tp, "pp_size": layout.pp, "ep_size": layout.dp, "dcp_size": layout.dcp,
        "replicas": layout.replicas, "isl": request.isl, "osl": request.osl,
    }  # fmt: skip
    flags = {name: value for name, value in flags.items() if value != 1}
    flags |= {name: value for name, value in options(model, shape, machine, request, plan).items() if name.endswith("dtype")}
    for name, bound in (("slo_ttft", request.slo_ttft), ("slo_tpot", request.slo_tpot)):
        flags |= {} if bound is None else {name: f"{bound * 1e3:g}"}
    words = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items())
    words += " --deterministic" if request.deterministic else ""
    words += " --quantize_activations" if request.quantize_activations else ""
    return [f"to simulate a steady load: phalanx plan simulate poisson:{rate:.3g} --requests 500 {words}"]


_SHORT = {
    "tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size", "expert_parallel_size": "ep_size",
    "moe_expert_parallel_size": "moe_ep_size", "decode_context_parallel_size": "dcp_size",
}  # fmt: skip


def command(model: str, shape: ModelShape, machine: MachineModel, request: PlanRequest, plan: Plan) -> list[str]:
    """The serve command and the same as YAML for `--config`."""
    chosen = options(model, shape, machine, request, plan)
    words = {_SHORT.get(name, name): "" if value is True else f" {shlex.quote(str(value))}" for name, value in chosen.items()}
    flags = " ".join(f"--{name}{value}" for name, value in words.items() if name != "model")
    lines = [f"phalanx serve {shlex.quote(chosen['model'])} {flags}"]
    if plan.layout.replicas > 1 and "replicas" not in chosen:
        world = plan.layout.world
        lines.append(f"# on each of {plan.layout.replicas} groups of {world} GPU{'s' if world > 1 else ''}, each on its own --port")
    return [*lines, "", *yaml(chosen).splitlines()]


def yaml(chosen: dict[str, Any]) -> str:
    """As a file for `phalanx serve --config`."""
    return "".join(f"{name}: {value}\n" for name, value in chosen.items())


def as_json(model: str, shape: ModelShape, machine: MachineModel, request: PlanRequest, result: SearchResult) -> dict[str, Any]:
    """For programs: every plan and every rejected layout."""
    document: dict[str, Any] = {
        "model": model, "machine": describe(machine), "isl": request.isl, "osl": request.osl, "concurrency": request.concurrency,
        "replicas": "each layout stands once, with as many replicas as the GPUs hold",
        "plans": [plan.as_json() for plan in result.plans], "rejected": [each.as_json() for each in result.rejected],
    }  # fmt: skip
    if result.plans:
        document["serve"] = command(model, shape, machine, request, result.plans[0])[0]
    else:
        document["changes"] = result.changes
    return document
