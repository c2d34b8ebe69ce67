# SPDX-License-Identifier: Apache-2.0
"""The verbs of `phalanx plan`: MODEL (layouts), simulate, calibrate."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from phalanx.errors import OptionError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A known name, a folder, a config.json, a Hub id, or 'demo'.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="GPU of the catalogue. Default: those of this host, else H100.")]
PerNode = Annotated[int | None, typer.Option("--gpus_per_node", help="GPUs per node.")]
Nodes = Annotated[int, typer.Option("--nodes", help="Number of nodes.")]
Link = Annotated[
    str | None, typer.Option("--link", metavar="nvlink|pcie", help="Link between the GPUs of a node. Default: the GPU's own.")
]
Network = Annotated[str | None, typer.Option("--network", help="Network between nodes, such as ib-ndr.")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="auto|fp32|fp16|bf16|fp8", help="As for `phalanx serve`.")]
KvDtype = Annotated[str, typer.Option("--kv_cache_dtype", metavar="auto|model|fp8|int8", help="As for `phalanx serve`.")]
Isl = Annotated[int, typer.Option("--isl", help="Input length: tokens per prompt.")]
Osl = Annotated[int, typer.Option("--osl", help="Output length: new tokens per request.")]
SloTtft = Annotated[
    float | None, typer.Option("--slo_ttft", help="Limit of the time to the first token under a steady load, in ms.")
]
SloTpot = Annotated[float | None, typer.Option("--slo_tpot", help="Limit of the time per output token under a steady load, in ms.")]
Slots = Annotated[
    int | None,
    typer.Option(
        "--max_batch_size", help="Requests at once in one replica. Default: 256, as for `phalanx serve`, or all if these are more."
    ),
]
StepTokens = Annotated[int, typer.Option("--max_num_tokens", help="Maximum number of tokens per step.")]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--max_seq_len",
        help="Maximum length of one request, prompt and output. Default: what the requests need.",
    ),
]
Copies = Annotated[int, typer.Option("--redundant_experts", help="Extra copies of experts per layer, as for `phalanx serve`.")]
HostBytes = Annotated[
    int,
    typer.Option("--kv_host_memory", help="Bytes, as for `phalanx serve`: the report says how many tokens of prefixes they keep."),
]
QuantizeActivations = Annotated[
    bool, typer.Option("--quantize_activations", help="As for `phalanx serve`: the report has what it gains.")
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="As for `phalanx serve`: the report has its price.")]
Speculation = Annotated[
    str | None,
    typer.Option("--speculative_config", help="As for `phalanx serve`: the memory of a draft model or head is counted."),
]
AcceptanceLength = Annotated[
    float | None,
    typer.Option(
        "--acceptance_length",
        help="With --speculative_config: tokens of a row and step, on average, the sampled one among them. The report has the "
        "gain then. Not where the configuration has synthetic acceptance.",
    ),
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON to this new file; - for stdout.")
]
Trace = Annotated[
    str, typer.Argument(metavar="TRACE|poisson:RATE|burst", help="A trace (.csv of Azure, .jsonl of Mooncake), or arrivals.")
]
FindReplicas = Annotated[bool, typer.Option("--find_replicas", help="Find the smallest number of replicas that meets the limits.")]
GpuHour = Annotated[
    float | None, typer.Option("--gpu_hour", help="Price of one GPU per hour; the report then has the cost per million tokens.")
]
Prefixes = Annotated[
    bool, typer.Option("--prefix_caching/--no_prefix_caching", help="Simulate the prefix cache, for traces with contents.")
]
PathMs = Annotated[
    float | None, typer.Option("--path_ms", help="Time of a request in HTTP and server, in ms. Default: as measured.")
]
EventUs = Annotated[
    float | None, typer.Option("--event_us", help="Time of one streamed token in server and client, in us. Default: as measured.")
]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Draw the latencies to this file; needs phalanx[tune].")]
Yaml = Annotated[
    str | None, typer.Option("--yaml", metavar="FILE", help="Write the options of the best plan to this file, for --config.")
]
Verify = Annotated[bool, typer.Option("--verify", help="Run the best plans on this host, and compare with the prediction.")]
VerifyPlans = Annotated[int, typer.Option("--verify_plans", help="Number of plans to run with --verify.")]


class _PlanGroup(TyperGroup):
    """`phalanx plan MODEL` is `phalanx plan layouts MODEL`."""

    default_verb = "layouts"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [self.default_verb, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Those of `phalanx plan MODEL`, too."""
        super().format_options(ctx, formatter)
        records = [parameter.get_help_record(ctx) for parameter in self.commands[self.default_verb].get_params(ctx)]
        with formatter.section("Options of phalanx plan MODEL"):
            formatter.write_dl([record for record in records if record is not None])


def register(command: typer.Typer) -> None:
    """Add `plan` to the command."""
    app = typer.Typer(
        name="plan", cls=_PlanGroup, rich_markup_mode=None, no_args_is_help=True,
        help="Choose a layout without a GPU, with predicted speed and its uncertainty: phalanx plan MODEL.",
    )  # fmt: skip
    app.command()(layouts)
    app.command()(simulate)
    app.command()(calibrate)
    command.add_typer(app)


def layouts(
    model: Model,
    gpu: Gpu = None,
    gpus_per_node: PerNode = None,
    nodes: Nodes = 1,
    link: Link = None,
    network: Network = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvDtype = "auto",
    isl: Isl = 1024,
    osl: Osl = 1024,
    concurrency: Annotated[int, typer.Option(help="Number of requests at once.")] = 64,
    goal: Annotated[str, typer.Option(metavar="latency|throughput", help="What the best plan is best at.")] = "throughput",
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    max_batch_size: Slots = None,
    max_num_tokens: StepTokens = 8192,
    max_seq_len: SeqLen = None,
    redundant_experts: Copies = 0,
    kv_host_memory: HostBytes = 0,
    deterministic: Deterministic = False,
    quantize_activations: QuantizeActivations = False,
    speculative_config: Speculation = None,
    acceptance_length: AcceptanceLength = None,
    json: Json = None,
    yaml: Yaml = None,
    tp_size: Annotated[int | None, typer.Option("--tp_size", help="Only layouts with this size.")] = None,
    pp_size: Annotated[int | None, typer.Option("--pp_size", help="Only layouts with this number of stages.")] = None,
    ep_size: Annotated[int | None, typer.Option("--ep_size", help="Only layouts with this number of groups.")] = None,
    dcp_size: Annotated[
        int | None, typer.Option("--dcp_size", help="Only layouts in which this number of ranks divide the tokens of latents.")
    ] = None,
    verify: Verify = False,
    verify_plans: VerifyPlans = 3,
) -> None:
    """Predict memory, time per token and throughput of every layout of a model on a machine, and say why others are rejected."""
    flags = dict(locals())
    from phalanx.bench import report
    from phalanx.bench.prediction import ranges
    from phalanx.planner import explain, search, subject

    report.json_path(json)
    yaml_path = report.json_path(yaml, what="the YAML file")
    ranges.require(flags)
    shape = subject.shape_for(model)
    machine, _ = subject.machine_for(gpu, gpus_per_node=gpus_per_node, nodes=nodes, link=link, network=network)
    request = request_of(shape, machine.device, flags)
    result = search.search(shape, machine, request)
    document = explain.as_json(model, shape, machine, request, result)
    if json != "-":
        print(explain.text(model, shape, machine, request, result), flush=True)
    if verify and result.plans:
        document["verified"] = _verified(model, machine, request, result.plans[:verify_plans], silent=json == "-")
    _write(document, json)
    if result.plans and yaml_path is not None:
        from phalanx.tables.table_file import write_whole

        write_whole(yaml_path, explain.yaml(explain.options(model, shape, machine, request, result.plans[0])))
    if not result.plans:
        raise typer.Exit(2)


def _verified(model: str, machine: Any, request: Any, plans: Any, *, silent: bool) -> Any:
    """Run the plans here, and show them beside their predictions unless `silent`."""
    from phalanx.bench.prediction import verified

    rows = verified.run(model, machine, request, plans)
    if not silent:
        print(verified.text(rows))
    return rows


def _give(document: dict[str, Any], text: str, json: str | None) -> None:
    """Show a report as text, and write it as JSON where that was asked for; "-": JSON alone, on stdout."""
    if json != "-":
        print(text)
    _write(document, json)


def _write(document: dict[str, Any], json: str | None) -> None:
    """Write a report as JSON where that was asked for; "-": on stdout."""
    from phalanx.bench import report

    if json == "-":
        print(json_format.dumps(document, indent=1))
    elif (path := report.json_path(json)) is not None:
        report.write(path, document)


_AS_ASKED = (
    "isl", "osl", "concurrency", "goal", "max_batch_size", "max_num_tokens", "max_seq_len", "redundant_experts", "kv_host_memory",
    "deterministic", "quantize_activations", "tp_size", "pp_size", "ep_size", "dcp_size",
)  # fmt: skip
"""Flags that a request has under the same name."""


def request_of(shape: Any, device: str, flags: dict[str, Any]) -> Any:
    """What the flags ask for, with every "auto" replaced as an engine on this device ("cuda" or "cpu") does. Raises OptionError."""
    from phalanx.config.dtypes import DTYPE_SPELLINGS
    from phalanx.config.resolve import check_quantize_activations, concrete_dtype, concrete_kv_cache_dtype
    from phalanx.config.speculation import SpeculativeConfig
    from phalanx.layout.draft import network_for
    from phalanx.planner import speculation as gains
    from phalanx.planner.explain import checkpoint_of
    from phalanx.planner.search import PlanRequest
    from phalanx.planner.subject import shape_for

    dtypes = {"auto": "auto", "fp8": "fp8", "int4": "int4", **DTYPE_SPELLINGS}
    if (spelling := flags["dtype"].removeprefix("torch.")) not in dtypes:
        raise OptionError(f"dtype {flags['dtype']!r} is unknown", next=f"use one of {', '.join(dtypes)}")
    for name, known in (("kv_cache_dtype", ("auto", "model", "fp8", "int8")), ("goal", ("latency", "throughput"))):
        if flags[name] not in known:
            raise OptionError(f"{name} {flags[name]!r} is unknown", next=f"known: {', '.join(known)}")
    speculative_config, acceptance_length = flags["speculative_config"], flags["acceptance_length"]
    speculation = None if speculative_config is None else SpeculativeConfig.of(speculative_config)
    if speculation is None and acceptance_length is not None:
        raise OptionError("acceptance_length has no effect without speculative_config", next="give both, or none")
    if speculation is not None and speculation.acceptance is not None and acceptance_length is not None:
        raise OptionError("acceptance_length is stated twice", held="speculative_config has synthetic acceptance", next="give one")
    if flags["quantize_activations"]:
        check_quantize_activations(dtypes[spelling], shape, deterministic=flags["deterministic"])
    draft = None if speculation is None else network_for(speculation, shape, shape_of=shape_for)
    if speculation is not None and speculation.model is not None:
        speculation = speculation.model_copy(update={"model": checkpoint_of(speculation.model)})
    stated = None
    if speculation is not None:
        table = speculation.num_speculative_tokens_per_batch_size
        entries = None if table is None else tuple(table)
        if acceptance_length is not None:
            stated = gains.Speculation(speculation.num_speculative_tokens, draft, acceptance_length, table=entries)
        elif speculation.acceptance is not None:
            stated = gains.Speculation.of_rates(speculation.acceptance, draft, entries)
    objectives: dict[str, Any] = {name: None if flags[name] is None else flags[name] / 1e3 for name in ("slo_ttft", "slo_tpot")}
    return PlanRequest(
        concrete_dtype(dtypes[spelling], shape, device), concrete_kv_cache_dtype(flags["kv_cache_dtype"], shape), **objectives,
        speculative_config=None if speculation is None else speculation.canonical(), draft=draft, speculation=stated,
        **{name: flags[name] for name in _AS_ASKED},
    )  # fmt: skip


def simulate(
    trace: Trace,
    model: Annotated[str, typer.Option("--model", help="As for `phalanx plan`.")],
    gpu: Gpu = None,
    gpus_per_node: PerNode = None,
    nodes: Nodes = 1,
    link: Link = None,
    network: Network = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvDtype = "auto",
    isl: Isl = 1024,
    osl: Osl = 1024,
    tp_size: Annotated[int, typer.Option("--tp_size", help="Number of ranks that each layer is split over.")] = 1,
    pp_size: Annotated[int, typer.Option("--pp_size", help="Number of pipeline stages.")] = 1,
    ep_size: Annotated[int, typer.Option("--ep_size", help="Number of groups that experts are split over.")] = 1,
    dcp_size: Annotated[int, typer.Option("--dcp_size", help="Number of ranks that divide the tokens of latents.")] = 1,
    replicas: Annotated[int, typer.Option(help="Number of engines behind one server, 1 to 1000.")] = 1,
    requests: Annotated[int, typer.Option(help="Use only this number of requests from the start of the trace; 0: all.")] = 0,
    speed: Annotated[float, typer.Option(help="Factor by which requests arrive faster than in the trace.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: keep this number of requests open, whatever the arrival times.")
    ] = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_part: Annotated[float, typer.Option("--slo_part", help="Fraction of the requests that must meet both limits.")] = 0.99,
    find_replicas: FindReplicas = False,
    gpu_hour: GpuHour = None,
    max_batch_size: Slots = None,
    max_num_tokens: StepTokens = 8192,
    max_seq_len: SeqLen = None,
    prefix_caching: Prefixes = True,
    kv_host_memory: HostBytes = 0,
    deterministic: Deterministic = False,
    quantize_activations: QuantizeActivations = False,
    speculative_config: Speculation = None,
    acceptance_length: AcceptanceLength = None,
    path_ms: PathMs = None,
    event_us: EventUs = None,
    seed: int = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Simulate a trace with the engine's own scheduler on the clock of the cost model. Shows latencies, goodput, cost, and the
    number of replicas that an objective needs."""
    flags = dict(locals())
    from phalanx.bench import report
    from phalanx.bench.prediction import picture, ranges
    from phalanx.layout import Layout
    from phalanx.planner import arrivals, scenario, subject

    report.json_path(json)
    picture.picture_path(plot)
    ranges.require(flags)
    shape = subject.shape_for(model)
    machine, _ = subject.machine_for(gpu, gpus_per_node=gpus_per_node, nodes=nodes, link=link, network=network)
    trace_rows = arrivals.paced(arrivals.of(trace, isl=isl, osl=osl, requests=requests, seed=seed), speed)
    longest = max(each.input_len + each.output_len for each in trace_rows)
    flags |= {"concurrency": 1, "goal": "throughput", "redundant_experts": 0, "tp_size": None, "pp_size": None, "ep_size": None}
    flags["max_batch_size"] = 256 if max_batch_size is None else max_batch_size
    flags["max_seq_len"] = min(longest, shape.max_positions) if max_seq_len is None else max_seq_len
    request = request_of(shape, machine.device, flags)
    if request.speculative_config is not None and request.speculation is None:
        raise OptionError(
            "a simulation with speculative_config must know how many drafts are accepted",
            next="give acceptance_length: 1 + accepted / drafts of a server's /metrics",
        )  # fmt: skip
    frontend, frontend_source = scenario.frontend_of(machine, path_ms, event_us)
    replica = scenario.ReplicaSpec.of(
        shape, machine, request, Layout(pp_size, ep_size, tp_size, dcp=dcp_size), prefix_caching=prefix_caching, frontend=frontend,
        sharing=machine.gpus_per_node if find_replicas else replicas,
    )  # fmt: skip
    bounds = scenario.Bounds(request.slo_ttft, request.slo_tpot, slo_part)
    if find_replicas:
        replicas = scenario.fewest_replicas(replica, trace_rows, bounds)
    document = scenario.document(
        replica, trace_rows, replicas, bounds, concurrency=concurrency, gpu_hour=gpu_hour, trace=trace, model=model,
        frontend_source=frontend_source,
    )  # fmt: skip
    _give(document, scenario.text(document), json)
    if plot is not None:
        picture.draw(document, plot)


def calibrate(
    model: Annotated[str, typer.Option("--model", help="Model whose layers are timed.")] = "llama-3-8b",
    device: Annotated[str, typer.Option(metavar="auto|cuda|cpu", help="Device to measure.")] = "auto",
    seconds: Annotated[float, typer.Option(help="Maximum duration in seconds.")] = 120.0,
    json: Json = None,
) -> None:
    """Measure at most 12 points on this machine, fit the coefficients to them, and keep them for `phalanx plan`."""
    from phalanx.bench import report
    from phalanx.bench.prediction import calibrate as bench
    from phalanx.bench.prediction import ranges

    report.json_path(json)
    ranges.require({"seconds": seconds})
    document = bench.run(model, device, seconds)
    _give(document, bench.text(document), json)
