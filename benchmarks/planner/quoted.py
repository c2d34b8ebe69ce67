# SPDX-License-Identifier: Apache-2.0
"""Figures that are commonly quoted for inference on several GPUs, beside the planner's.

    python -m benchmarks.planner.quoted

They are quoted without the GPU, the workload or the measurement. Ours are of 512 requests at once, each of 1,000 tokens in and out,
with the KV cache in FP8, and of one request of 128 tokens in. "errs by" is the quoted figure over ours, less one; it is 0 inside
our range. Of a quoted range, the nearer end counts. No GPU and no network is needed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from phalanx.layout import Layout
from phalanx.planner import search, subject
from phalanx.planner.search import Plan, PlanRequest, Rejected


@dataclass(frozen=True)
class Claim:
    """A layout and what is quoted for it; None where nothing is."""

    layout: Layout
    tokens_per_second: float | None = None
    ms_per_token: float | None = None
    efficiency: int | None = None
    out_of_memory: bool = False


@dataclass(frozen=True)
class Example:
    """A deployment and what is quoted for it, as ranges."""

    name: str
    model: str
    gpu: str
    nodes: int
    dtype: str
    layout: Layout
    tokens_per_second: tuple[float, float]
    ms_per_token: tuple[float, float] | None = None


ONE = Layout()
TP_CLAIMS = (
    Claim(Layout(), out_of_memory=True), Claim(Layout(tp=2), 6000, 18, 85),
    Claim(Layout(tp=4), 11000, 16, 78), Claim(Layout(tp=8), 18000, 15, 64),
)  # fmt: skip
EXAMPLE_CLAIMS = (
    Example("8B FP16 on one A100", "llama-3-8b", "A100-80", 1, "fp16", Layout(), (3000, 5000)),
    Example("70B FP8 on four A100", "llama-3-70b", "A100-80", 1, "fp8", Layout(tp=4), (10000, 15000), (15, 20)),
    Example("70B FP8 on four H100", "llama-3-70b", "H100", 1, "fp8", Layout(tp=4), (10000, 15000), (15, 20)),
    Example("405B FP8 on two nodes of eight H100", "llama-3.1-405b", "H100", 2, "fp8", Layout(tp=8, pp=2), (20000, 30000)),
)  # fmt: skip
PP_CLAIMS = (
    Claim(Layout(tp=8), out_of_memory=True), Claim(Layout(tp=8, pp=2), 25000),
    Claim(Layout(tp=8, pp=4), 45000),
)  # fmt: skip


def page() -> str:
    parts = ["## Deployments\n", examples()]
    for gpu in ("H100", "H200"):
        parts += [f"## Tensor parallelism, 70B FP8 on {gpu}\n", table("llama-3-70b", gpu, 1, TP_CLAIMS)]
    parts += [
        "## Pipeline parallelism, 405B FP8 on nodes of 8 H100, InfiniBand NDR\n",
        table("llama-3.1-405b", "H100", 4, PP_CLAIMS),
    ]
    return "\n".join([*parts, "## Bytes on one GPU\n", gpu_bytes()])


def request(concurrency: int, isl: int, osl: int, dtype: str = "fp8", kv_cache_dtype: str = "fp8") -> PlanRequest:
    return PlanRequest(dtype=dtype, kv_cache_dtype=kv_cache_dtype, isl=isl, osl=osl, concurrency=concurrency, max_seq_len=4096)


def examples() -> str:
    """The quoted deployments beside ours. A100 keeps its KV cache in 16 bit, as it has no FP8 arithmetic."""
    lines = ["| example | quoted tok/s | ours | errs by | quoted ms | ours | errs by |", "|---|---|---|---|---|---|---|"]
    for each in EXAMPLE_CLAIMS:
        shape, machine = subject.shape_for(each.model), subject.machine_for(each.gpu, nodes=each.nodes)[0]
        kv = "model" if machine.gpu.fp8_flops is None else "fp8"
        many = search.examine(shape, machine, request(512, 1000, 1000, each.dtype, kv), each.layout)
        one = search.examine(shape, machine, request(1, 128, 128, each.dtype, kv), each.layout)
        assert isinstance(many, Plan)
        assert isinstance(one, Plan)
        rate, wait = many.output_tokens_per_second, one.ms_per_token
        low, high = each.tokens_per_second
        claimed = "" if each.ms_per_token is None else f"{each.ms_per_token[0]:g}-{each.ms_per_token[1]:g}"
        lines.append(
            f"| {each.name} | {low:,.0f}-{high:,.0f} | {rate.value:,.0f} ({rate.low:,.0f}-{rate.high:,.0f}, {rate.label}) "
            f"| {_off_range(each.tokens_per_second, rate)} | {claimed} | {wait.value:.1f} | {_off_range(each.ms_per_token, wait)} |"
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def table(model: str, gpu: str, nodes: int, claims: tuple[Claim, ...]) -> str:
    """The quoted lines beside ours."""
    shape, machine = subject.shape_for(model), subject.machine_for(gpu, nodes=nodes)[0]
    lines = [
        "| layout | GPUs | quoted tok/s | ours | errs by | quoted ms | ours | errs by | efficiency |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base: tuple[float, int] | None = None
    for claim in claims:
        many = search.examine(shape, machine, request(512, 1000, 1000), claim.layout)
        one = search.examine(shape, machine, request(1, 128, 128), claim.layout)
        world, name = claim.layout.world, claim.layout.name
        if isinstance(many, Rejected) or isinstance(one, Rejected):
            reason = many.reason if isinstance(many, Rejected) else ""
            lines.append(f"| {name} | {world} | {_claimed(claim)} | {reason} | {'agrees' if claim.out_of_memory else ''} | | | | |")
            continue
        rate, wait = many.output_tokens_per_second, one.ms_per_token
        base = base or (rate.value / world, world)
        efficiency = f"{rate.value / world / base[0]:.0%} of {base[1]} GPU{'s' if base[1] > 1 else ''}"
        efficiency += f"; quoted {claim.efficiency}%" if claim.efficiency else ""
        off = "runs" if claim.out_of_memory else _off(claim.tokens_per_second, rate)
        lines.append(
            f"| {name} | {world} | {_claimed(claim)} | {rate.value:,.0f} ({rate.low:,.0f}-{rate.high:,.0f}, {rate.label}) "
            f"| {off} | "
            f"{claim.ms_per_token or ''} | {wait.value:.1f} | {_off(claim.ms_per_token, wait)} | {efficiency} |"
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _claimed(claim: Claim) -> str:
    return "out of memory" if claim.out_of_memory else f"{claim.tokens_per_second:,.0f}"


def _off(claimed: float | None, figure: search.Figure) -> str:
    if claimed is None:
        return ""
    return "0" if figure.low <= claimed <= figure.high else f"{claimed / figure.value - 1:+.0%}"


def _off_range(claimed: tuple[float, float] | None, figure: search.Figure) -> str:
    """By how much the nearer end of a range errs."""
    if claimed is None:
        return ""
    low, high = claimed
    if low <= figure.high and figure.low <= high:
        return "0"
    return f"{(low if low > figure.high else high) / figure.value - 1:+.0%}"


def gpu_bytes() -> str:
    """Weights, and the KV cache of the one example that names its bytes: as much as the GPU has room for, which is more."""
    lines = ["| weights | quoted | ours |", "|---|---|---|"]
    for name, model, dtype, layout, weights_text in (
        ("8B FP16 on 1", "llama-3-8b", "fp16", Layout(), "16 GB"),
        ("70B FP8 on 4", "llama-3-70b", "fp8", Layout(tp=4), "35 GB"),
        ("405B FP8 on 16", "llama-3.1-405b", "fp8", Layout(tp=8, pp=2), "25 GB"),
    ):  # fmt: skip
        machine = subject.machine_for("H100", nodes=2)[0]
        request = PlanRequest(dtype=dtype, isl=512, osl=512)
        plan = search.examine(subject.shape_for(model), machine, request, layout)
        assert isinstance(plan, Plan)
        lines.append(f"| {name} | {weights_text} | {plan.bytes['weights'] / 1e9:.1f} GB |")
    alone = subject.machine_for("A100-80", gpus_per_node=1)[0]
    plan = search.examine(subject.shape_for("llama-3-8b"), alone, PlanRequest(dtype="fp16", isl=512, osl=512), ONE)
    assert isinstance(plan, Plan)
    used = 64 * 1024 / plan.kv_tokens * plan.bytes["kv"] / 1e9
    lines += [
        "", "| KV cache | quoted | ours |", "|---|---|---|",
        f"| 8B FP16 on one A100 | 30 GB | room for {plan.bytes['kv'] / 1e9:.1f} GB; 64 x 1,024 tokens fill {used:.1f} GB |",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
