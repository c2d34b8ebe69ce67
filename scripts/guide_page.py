# SPDX-License-Identifier: Apache-2.0
"""Write docs/guide.md: examples and figures that are commonly given for deployments, by a command of ours with its output.

python scripts/guide_page.py            writes the page
python scripts/guide_page.py --check    exits 1 if the page is not what the commands print now
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from phalanx.cli import main as phalanx
from phalanx.plan import footprint, search, subject
from phalanx.plan.search import Plan, PlannedLayout, PlanRequest, Rejected

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide.md"

HEAD = """# Common deployment figures, by commands

Examples, layouts and figures that are commonly given for inference on several GPUs (with `trtllm-serve` as the server), each as
a command and what it prints. On this page "the guide" stands for them: they come without the GPU, the workload or the measurement.
This page is written by `scripts/guide_page.py`, and a test compares it with what the commands print now. No GPU and no network is
needed.

A figure has a range and a label: `table` (a machine class that was measured: H200 with NVLink), `derived` (scaled from one),
`estimated` (parts of it were never measured). For which figures the range was checked, and how the figures are made:
[planner.md](planner.md).
"""

SEVENTY = (
    "phalanx plan meta-llama/Meta-Llama-3-70B --gpu A100-80 --gpus_per_node 4 --isl 512 --osl 512 --concurrency 256 --tp_size 4"
)

EXAMPLES = (
    ("8B on one A100", "`LLM(model=\"meta-llama/Meta-Llama-3-8B\", dtype=\"fp16\")`",
     "phalanx plan meta-llama/Meta-Llama-3-8B --gpu A100-80 --gpus_per_node 1 --dtype fp16 --isl 512 --osl 512"),
    ("70B on four A100", "`LLM(model=\"meta-llama/Meta-Llama-3-70B\", tensor_parallel_size=4, dtype=\"fp16\")`",
     f"{SEVENTY} --dtype fp16"),
    ("The same in FP8", "A100 has no FP8 arithmetic: the weights take half the memory, and GEMMs run in 16 bit.",
     f"{SEVENTY} --dtype fp8"),
    ("405B on eight H100, 4 x 2", "`tensor_parallel_size=4, pipeline_parallel_size=2, dtype=\"fp8\"`",
     "phalanx plan meta-llama/Meta-Llama-3-405B --gpu H100 --dtype fp8 --tp_size 4 --pp_size 2"),
    ("405B on two nodes of eight H100", "`tensor_parallel_size=8, pipeline_parallel_size=2`",
     "phalanx plan meta-llama/Meta-Llama-3-405B --gpu H100 --nodes 2 --dtype fp8 --concurrency 256 --tp_size 8 --pp_size 2"),
    ("Mixtral-8x22B with experts over two groups", "`tensor_parallel_size=4, expert_parallel_size=2, dtype=\"fp8\"`, 8 ranks",
     "phalanx plan mistralai/Mixtral-8x22B --gpu A100-80 --gpus_per_node 8 --dtype fp8 --tp_size 4 --ep_size 2"),
    ("70B on Kubernetes",
     "A Deployment of one container with four GPUs; the guide's has no selector, Service, shared memory and probes "
     "([kubernetes.md](kubernetes.md)).",
     "phalanx deploy k8s meta-llama/Meta-Llama-3-70B --tp_size 4 --max_batch_size 256"),
    ("What a GPU of 24 GB does with 70B", "Where nothing fits, the status is 2 and the nearest changes are named.",
     "phalanx plan meta-llama/Meta-Llama-3-70B --gpu RTX-4090 --gpus_per_node 2 --concurrency 1"),
)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A line of a table of the guide: a layout and what the guide says of it; None where it says nothing."""

    layout: PlannedLayout
    tokens_per_second: float | None = None
    ms_per_token: float | None = None
    efficiency: int | None = None
    out_of_memory: bool = False


@dataclass(frozen=True)
class Example:
    """An example of the guide with its figures, which are ranges."""

    name: str
    model: str
    gpu: str
    nodes: int
    dtype: str
    layout: PlannedLayout
    tokens_per_second: tuple[float, float]
    ms_per_token: tuple[float, float] | None = None


ONE = PlannedLayout(1, 1, 1, 1)
TP_CLAIMS = (
    Claim(PlannedLayout(1, 1, 1, 1), out_of_memory=True), Claim(PlannedLayout(2, 1, 1, 1), 6000, 18, 85),
    Claim(PlannedLayout(4, 1, 1, 1), 11000, 16, 78), Claim(PlannedLayout(8, 1, 1, 1), 18000, 15, 64),
)  # fmt: skip
EXAMPLE_CLAIMS = (
    Example("8B FP16 on one A100", "llama-3-8b", "A100-80", 1, "fp16", PlannedLayout(1, 1, 1, 1), (3000, 5000)),
    Example("70B FP8 on four A100", "llama-3-70b", "A100-80", 1, "fp8", PlannedLayout(4, 1, 1, 1), (10000, 15000), (15, 20)),
    Example("70B FP8 on four H100", "llama-3-70b", "H100", 1, "fp8", PlannedLayout(4, 1, 1, 1), (10000, 15000), (15, 20)),
    Example("405B FP8 on two nodes of eight H100", "llama-3.1-405b", "H100", 2, "fp8", PlannedLayout(8, 2, 1, 1), (20000, 30000)),
)  # fmt: skip
PP_CLAIMS = (
    Claim(PlannedLayout(8, 1, 1, 1), out_of_memory=True), Claim(PlannedLayout(8, 2, 1, 1), 25000),
    Claim(PlannedLayout(8, 4, 1, 1), 45000),
)  # fmt: skip


def page() -> str:
    parts = [HEAD]
    for title, text, command in EXAMPLES:
        parts += [f"## {title}\n", f"{text}\n", f"```\n{command}\n```\n", f"```text\n{printed(command)}\n```\n"]
    parts += [SERVE, "## The guide's figures, and by how much they err\n", ERRS, "### The examples\n", examples()]
    for gpu in ("H100", "H200"):
        parts += [f"### Tensor parallelism, 70B FP8 on {gpu}\n", table("llama-3-70b", gpu, 1, TP_CLAIMS)]
    parts += [
        "### Pipeline parallelism, 405B FP8 on nodes of 8 H100, InfiniBand NDR\n",
        table("llama-3.1-405b", "H100", 4, PP_CLAIMS),
    ]
    parts += ["### Bytes on one GPU\n", gpu_bytes(), closing()]
    return "\n".join(parts)


SERVE = """## The server, and two nodes

| the guide's command | ours |
|---|---|
| `trtllm-serve meta-llama/Meta-Llama-3-70B`, TP 4, batches of 256, FP8, at http://localhost:8000 | the first line below |
| Ray on two nodes, then the server with 2 workers, which are nodes | the second line, after `ray start` on both: [ray.md](ray.md) |
| (not in the guide) two nodes without Ray | the third line on node 0, and with `--node_rank 1` on node 1: [nodes.md](nodes.md) |

```
phalanx serve meta-llama/Meta-Llama-3-70B --tp_size 4 --max_batch_size 256 --dtype fp8
phalanx serve meta-llama/Meta-Llama-3-405B --tp_size 8 --pp_size 2 --num_workers 2 --dtype fp8
phalanx serve meta-llama/Meta-Llama-3-405B --tp_size 8 --pp_size 2 --nnodes 2 --node_rank 0 --master_addr node1 --dtype fp8
```

The same with the model of the package and CPU ranks; tests run these commands and compare what they print
(`tests/acceptance/test_guide.py`, `test_ray_hosts.py`, `test_two_hosts.py`).

### The server

```
phalanx serve demo --device cpu --tp_size 4 --max_batch_size 256 --dtype fp8
curl -s http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model": "demo", "prompt": "Phalanx", "max_tokens": 24, "temperature": 0}' | jq -r '.choices[0].text'
curl -s http://localhost:8000/metrics | grep ^phalanx:generation_tokens_total
```

```text
 Phalanx serves large language models over many GPUs, and tunes the one operation that all of them
phalanx:generation_tokens_total{engine="0",model_name="demo"} 24.0
```

### Two nodes of a Ray cluster

```sh no-run
ray start --head --port=6379          # on node1
ray start --address='node1:6379'      # on the other node
```

```
phalanx serve demo --device cpu --tp_size 2 --pp_size 2 --num_workers 2 --host node1
```

The same request, sent to node1:

```text
 Phalanx serves large language models over many GPUs, and tunes the one operation that all of them
```

### Two nodes without Ray

```
phalanx serve demo --device cpu --tp_size 2 --pp_size 2 --nnodes 2 --node_rank 0 --master_addr node1 --host node1
phalanx serve demo --device cpu --tp_size 2 --pp_size 2 --nnodes 2 --node_rank 1 --master_addr node1 --host node1
```

```text
 Phalanx serves large language models over many GPUs, and tunes the one operation that all of them
```
"""

ERRS = """The guide gives neither GPU nor workload. Ours: 512 requests at once of 1,000 tokens in and out, KV cache in FP8; ms per
token of one request of 128 tokens in. "Errs by" is the guide's figure over ours, less one; 0 inside our range. Of a range of
the guide, the nearer end counts.
"""

WATCH = """## What to watch, and what to do

| the guide | ours |
|---|---|
| `nvidia-smi dmon -s u`, `-s m` | `phalanx monitor URL` ([monitor.md](monitor.md)) |
| `nvidia-smi nvlink --status` | `phalanx topo` ([topology.md](topology.md)) |
| `curl localhost:8000/metrics` | the same ([operations.md](operations.md)) |
| GPU utilization of 80 to 95 percent, memory even over the GPUs, tokens/s over all GPUs | what `phalanx monitor` shows |
| uneven memory: check sizes and shards, restart | shards are equal, stages balanced in bytes; see `phalanx doctor` |
| NVLink under 100 GB/s at TP 4: topology, a fall-back to PCIe, the switch | `phalanx topo`, `phalanx doctor` |
| out of memory: larger TP, smaller batch, FP8, PP | `phalanx plan` names what would fit (70B on 24 GB, above) |

More: [troubleshooting.md](troubleshooting.md).
"""


def closing() -> str:
    shape = subject.shape_for("llama-3.1-405b")
    stages = footprint.stage_layers(shape, "fp8", 2)
    layers = " and ".join(f"{stage[0]}-{stage[-1]}" for stage in stages)
    return f"""{WATCH}
## What else the guide says

- "Layers 0-40 and 41-80" for 405B: it has {shape.num_layers} layers; with two stages they are {layers}.
- "The latency of TP is about that of one GPU, throughput 4x on 4": time per token of one request falls with TP (table above), and
  throughput grows less than the GPUs do where one GPU has room for all requests. Where it has not, as 70B on one H200, the second
  GPU brings more than twice.
- "NVLink 600 GB/s (A100), 900 GB/s (H100)": both directions together. One way, which bounds a collective, it is 300 and 450, as
  in the first line of each plan.
- "HDR InfiniBand, under 1 us": `--network ib-hdr` is 25 GB/s a GPU. TP over nodes is rejected by its all-reduces, not by
  latency alone.
"""


def printed(command: str) -> str:
    """What the command prints."""
    words, out = shlex.split(command), io.StringIO()
    with contextlib.redirect_stdout(out):
        phalanx(words[1:])
    return out.getvalue().rstrip()


def request(concurrency: int, isl: int, osl: int, dtype: str = "fp8", kv_cache_dtype: str = "fp8") -> PlanRequest:
    return PlanRequest(dtype=dtype, kv_cache_dtype=kv_cache_dtype, isl=isl, osl=osl, concurrency=concurrency, max_seq_len=4096)


def examples() -> str:
    """The guide's examples beside ours. A100 keeps its KV cache in 16 bit, as it has no FP8 arithmetic."""
    lines = ["| example | guide tok/s | ours | errs by | guide ms | ours | errs by |", "|---|---|---|---|---|---|---|"]
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
    """The guide's lines beside ours."""
    shape, machine = subject.shape_for(model), subject.machine_for(gpu, nodes=nodes)[0]
    lines = [
        "| layout | GPUs | guide tok/s | ours | errs by | guide ms | ours | errs by | efficiency |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base: tuple[float, int] | None = None
    for claim in claims:
        many = search.examine(shape, machine, request(512, 1000, 1000), claim.layout)
        one = search.examine(shape, machine, request(1, 128, 128), claim.layout)
        world, name = claim.layout.split.world, claim.layout.name
        if isinstance(many, Rejected) or isinstance(one, Rejected):
            reason = many.reason if isinstance(many, Rejected) else ""
            lines.append(f"| {name} | {world} | {_claimed(claim)} | {reason} | {'agrees' if claim.out_of_memory else ''} | | | | |")
            continue
        rate, wait = many.output_tokens_per_second, one.ms_per_token
        base = base or (rate.value / world, world)
        efficiency = f"{rate.value / world / base[0]:.0%} of {base[1]} GPU{'s' if base[1] > 1 else ''}"
        efficiency += f"; guide {claim.efficiency}%" if claim.efficiency else ""
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
    lines = ["| weights | guide | ours |", "|---|---|---|"]
    for name, model, dtype, layout, weights_text in (
        ("8B FP16 on 1", "llama-3-8b", "fp16", PlannedLayout(1, 1, 1, 1), "16 GB"),
        ("70B FP8 on 4", "llama-3-70b", "fp8", PlannedLayout(4, 1, 1, 1), "35 GB"),
        ("405B FP8 on 16", "llama-3.1-405b", "fp8", PlannedLayout(8, 2, 1, 1), "25 GB"),
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
        "", "| KV cache | guide | ours |", "|---|---|---|",
        f"| 8B FP16 on one A100 | 30 GB | room for {plan.bytes['kv'] / 1e9:.1f} GB; 64 x 1,024 tokens fill {used:.1f} GB |",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
