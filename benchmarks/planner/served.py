# SPDX-License-Identifier: Apache-2.0
"""A served trace beside the simulation of the same trace: `python -m benchmarks.planner.served`.

`phalanx serve` gets the requests of a trace over HTTP, each when it is due, whatever the server does (an open loop); the simulator
gets the same requests, with the engine's own KV blocks and limits. Percentiles of the time to the first token and of the time per
token, side by side. Each request generates as many tokens as the trace says; the prefix cache is off on both sides, as the trace
tells no contents.

Steps are priced by the coefficients of the machine: on a GPU by the committed ones, on a CPU by those that `phalanx plan calibrate`
measures a moment before and a moment after, together. What a virtual machine gives changes within minutes: a run between two
calibrations that differ by more than DRIFT says nothing about the simulator, and another one takes its place.

Two things that no step holds are measured on the running server, before the trace, with requests of their own (`Frontend`): what a
request of one token takes beyond its step, and how far apart the events of one step arrive.

    python -m benchmarks.planner.served                                                   # the demo on this CPU
    python -m benchmarks.planner.served --again benchmarks/results/plan_served_cuda.json  # what was served, simulated as of now
    python -m benchmarks.planner.served --device cuda --model llama-3-8b --dtype bf16 --kv_cache_dtype fp8 \\
        --trace AzureLLMInferenceTrace_conv.csv --speed 2 --requests 900               # 8B on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks import harness
from benchmarks.serve import started
from phalanx.bench import shapes
from phalanx.bench.load import open_loop
from phalanx.bench.prediction import calibrate
from phalanx.bench.prediction.calibrate import Point
from phalanx.bench.streaming_client import ApiEndpoint, Sample, body_of, send
from phalanx.engine.scheduler import SchedulerOptions
from phalanx.hardware.catalogue import GpuSpec
from phalanx.layout import Layout
from phalanx.layout.cache import kv_dtype
from phalanx.planner import arrivals, scenario, simulate, subject
from phalanx.planner.arrivals import Arrival
from phalanx.planner.coefficients import Coefficients
from phalanx.planner.cost import Costs, MachineModel
from phalanx.planner.simulate import Frontend, Served

GOALS = {50: 0.10, 90: 0.10, 99: 0.20}
"""By percentile: the part of the served figure by which the simulated one may differ."""

DRIFT = 0.06
"""Change of the machine's speed within a run. The mean of both ends is then off by 3 percent at most, a third of the goal."""
_TRIES = 4  # runs for each that must count
_CALIBRATION_SECONDS = 45.0
_VOCABULARY = (3, 250)  # ids of prompts: every vocabulary has them
_ALONE = 40  # requests that measure the path
_BURST, _BURST_TOKENS = 32, 48  # requests at once that measure events


def main() -> int:
    options = _parsed()
    if options.again is not None:
        document = again(options.again)
        show(document["figures"])
        options.again.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return int(missed(document["figures"]))
    if options.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # server, client and rank have a core each; both sides compute alike
    trace = trace_of(options)
    runs: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    for _ in range(_TRIES * options.repeats):
        one = run(options, trace)
        print(f"\nrun {len(runs) + 1} of {options.repeats}: {_line(one)}", flush=True)
        show(figures_of([one]))
        if (one["drift"] or 0.0) > DRIFT:
            print(f"does not count: the machine changed by more than {DRIFT:.0%}", flush=True)
            rejected.append({"drift": one["drift"], "figures": figures_of([one])})
            continue
        runs.append(one)
        if len(runs) == options.repeats:
            break
    else:
        print(f"the machine changed in too many runs; {len(runs)} of {options.repeats} count")
        return 1
    figures = figures_of(runs)
    print(f"\nmedian of {options.repeats} runs")
    show(figures)
    requests = " ".join(f"{each.at:.4f}:{each.input_len}:{each.output_len}" for each in trace)
    recorded_options = {name: value for name, value in vars(options).items() if name not in ("again", "events", "folder")}
    document = {"asked": recorded_options, "figures": figures, "runs": runs, "rejected": rejected, "requests": requests}
    print(f"written: {harness.write(options.name or f'plan_served_{options.device}', document, options.folder)}")
    return int(missed(figures))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a shape of `phalanx bench`, with dummy weights")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--kv_cache_dtype", default="model", choices=("model", "fp8", "int8"))
    parser.add_argument("--trace", default="poisson:8", help="as `phalanx plan simulate` takes it")
    parser.add_argument("--speed", type=float, default=1.0, help="times as fast as the trace")
    parser.add_argument("--shrink", type=int, default=1, help="lengths of the trace are divided by this")
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=64)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--step_tokens", type=int, default=2048)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=1, help="runs, of whose percentiles the medians are compared")
    parser.add_argument("--calibrate", action=argparse.BooleanOptionalAction, default=None, help="on a CPU unless told otherwise")
    parser.add_argument("--again", type=Path, metavar="FILE", help="nothing is served: simulate the runs of a results file again")
    parser.add_argument("--events", type=Path, help="folder for when each event of each run arrived, to look at single steps")
    parser.add_argument("--name", default="", help="of the results file")
    parser.add_argument("--folder", type=Path, help="of the results file")
    options = parser.parse_args()
    if options.calibrate is None:
        options.calibrate = options.device == "cpu"
    return options


def trace_of(options: argparse.Namespace) -> list[Arrival]:
    """The first requests of the trace that the engine takes, from time 0 on."""
    rows = arrivals.of(options.trace, isl=options.isl, osl=options.osl, requests=0 if "." in options.trace else options.requests)
    rows = [
        replace(row, input_len=max(row.input_len // options.shrink, 1), output_len=max(row.output_len // options.shrink, 2))
        for row in arrivals.paced(rows, options.speed)
    ]
    return [row for row in rows if row.input_len + row.output_len <= options.seq_len][: options.requests]


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Of the running server: the trace's requests, its frontend, and the limits of its scheduler."""

    samples: list[Sample]
    frontend: Frontend
    limits: SchedulerOptions


def run(options: argparse.Namespace, trace: Sequence[Arrival]) -> dict[str, Any]:
    """Calibrate, serve and simulate once; all that a simulation needs to be repeated, and both sides' percentiles in ms."""
    before = calibration(options)
    measured = serve(options, trace)
    coefficients = spec = drift = None
    if before is not None and (after := calibration(options)) is not None:
        both = together(before, after)
        coefficients, spec, drift = both["coefficients"], both["gpu"], drift_of(before, after)
        print(f"{calibrate.text(both)}\nthe calibrations before and after differ by {drift:.1%}", flush=True)
    facts: dict[str, Any] = {
        "model": options.model, "dtype": options.dtype, "kv_cache_dtype": options.kv_cache_dtype,
        "gpu": spec or subject.machine_for()[0].gpu.name, "coefficients": coefficients,
        "frontend": asdict(measured.frontend), "limits": vars(measured.limits), "drift": drift,
    }  # fmt: skip
    simulated = simulated_again(facts, trace)
    if options.events is not None:
        keep_events(options.events / f"{options.device}_{len(list(options.events.glob('*')))}.json", measured.samples, simulated)
    return {**facts, "served": percentiles(measured.samples), "simulated": percentiles(simulated)}


def calibration(options: argparse.Namespace) -> dict[str, Any] | None:
    return calibrate.measure(options.model, options.device, seconds=_CALIBRATION_SECONDS) if options.calibrate else None


def together(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """One calibration of two: of the points of both, the means."""
    seconds = [{(one["kind"], tuple(one["lengths"])): one["seconds"] for one in each["points"]} for each in (before, after)]
    points = [Point(*size, (taken + seconds[1][size]) / 2) for size, taken in seconds[0].items() if size in seconds[1]]
    round_trip = (before["round_trip_s"] + after["round_trip_s"]) / 2
    shape, spec = subject.shape_for(before["model"]), GpuSpec(**before["gpu"])
    return calibrate.explained(before["model"], shape, before["dtype"], spec, points, round_trip, on_cpu=spec.name == "CPU")


def drift_of(before: dict[str, Any], after: dict[str, Any]) -> float:
    """By how much the times of the points changed from one calibration to the other: the median, as a part."""
    then = {(one["kind"], tuple(one["lengths"])): one["seconds"] for one in after["points"]}
    times = [(one["seconds"], then.get((one["kind"], tuple(one["lengths"])))) for one in before["points"]]
    return abs(statistics.median(later / earlier for earlier, later in times if later is not None) - 1)


def again(path: Path) -> dict[str, Any]:
    """A results file with its runs simulated by the planner as it is now."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = (each.split(":") for each in document["requests"].split())
    trace = [Arrival(float(at), int(tokens_in), int(tokens_out)) for at, tokens_in, tokens_out in rows]
    for one in document["runs"]:
        one["simulated"] = percentiles(simulated_again(one, trace))
    document["figures"] = figures_of(document["runs"])
    return document


def keep_events(path: Path, samples: Sequence[Sample], simulated: Sequence[Served]) -> None:
    """Milliseconds from the first request's due time on: of each request due, then of each event; and the simulated first and last
    event."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = samples[0].begin
    rows = [
        {"events": [round(1e3 * (at - begin), 3) for at in (sample.begin, *sample.arrivals)],
         "simulated": [round(1e3 * at, 3) for at in (one.arrival, one.first, one.last)]}
        for sample, one in zip(samples, simulated, strict=True)
    ]  # fmt: skip
    path.write_text(json.dumps(rows), encoding="utf-8")


def simulated_again(facts: dict[str, Any], trace: Sequence[Arrival]) -> list[Served]:
    """The simulation of a run, from what its document holds. Without coefficients of its own: by the committed ones."""
    if facts["coefficients"] is None:
        machine, _ = subject.machine_for(facts["gpu"])
    else:
        gpu = GpuSpec(**facts["gpu"])
        machine = MachineModel(gpu, gpu.link, 1, 1, None, Coefficients.from_json(facts["coefficients"]), "measured")
    kv = kv_dtype(facts["kv_cache_dtype"], facts["dtype"])
    costs = Costs(subject.shape_for(facts["model"]), facts["dtype"], kv, Layout(), machine)
    names = {field.name for field in fields(SchedulerOptions)}  # a text for errors has had another name
    limits = SchedulerOptions(**{name: value for name, value in facts["limits"].items() if name in names})
    return simulate.run(costs, limits, trace, frontend=Frontend(**facts["frontend"])).served


def serve(options: argparse.Namespace, trace: Sequence[Arrival]) -> Measured:
    """Serve the trace. Raises SystemExit where a request fails."""
    begin = time.perf_counter()
    with _server(options) as url:
        print(f"the server is ready after {time.perf_counter() - begin:.1f} s", flush=True)
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        model = str(httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"])
        gc.collect()
        gc.freeze()
        gc.disable()  # the client's own pauses would be the server's
        try:
            frontend, samples = asyncio.run(_drive(Client(ApiEndpoint.of(url), model), trace))
        finally:
            gc.enable()
    failures = [sample.error for sample in samples if not sample.ok]
    if failures:
        raise SystemExit(f"{len(failures)} of {len(samples)} requests failed, the first with: {failures[0]}")
    return Measured(samples, frontend, limits_of(options, metrics))


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    with shapes.folder_of(options.model) as folder, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "phalanx", "serve", folder, "--device", options.device, "--no_enable_prefix_caching"]
        command += ["--max_batch_size", str(options.slots), "--max_num_tokens", str(options.step_tokens)]
        command += ["--max_seq_len", str(options.seq_len), "--dtype", options.dtype, "--kv_cache_dtype", options.kv_cache_dtype]
        command += ["--load_format", "dummy"] if folder != options.model else []
        try:
            with started.server(lambda port: [*command, "--port", str(port)], seconds=600, log=log) as (_, url):
                yield url
        except SystemExit:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:])
            raise


def limits_of(options: argparse.Namespace, metrics: str) -> SchedulerOptions:
    """The options of the engine's scheduler: those that it was started with, and the blocks that `/metrics` says it has."""
    labels = re.search(r"cache_config_info\{(.*)\}", metrics)
    assert labels is not None, "the server has no cache_config_info"
    config = dict(re.findall(r'(\w+)="([^"]*)"', labels.group(1)))
    return SchedulerOptions(
        num_blocks=int(config["num_gpu_blocks"]), block_size=int(config["block_size"]), max_batch_size=options.slots,
        max_num_tokens=options.step_tokens, max_seq_len=options.seq_len, depth=2, pipeline_stages=1, prefix_caching=False,
    )  # fmt: skip


# ---- the client ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Client:
    endpoint: ApiEndpoint
    model: str

    async def at(self, due: Sequence[float], lengths: Sequence[tuple[int, int]]) -> list[Sample]:
        """Requests (tokens in, out), each when it is due, and each with its own prompt, which shares nothing with another's."""
        draw = random.Random(0)
        bodies = [body_of(self.model, [draw.randrange(*_VOCABULARY) for _ in range(count)], out) for count, out in lengths]

        async def one(number: int, at: float) -> Sample:
            return await send(self.endpoint, bodies[number], due=at, expected=lengths[number][1], timeout=600)

        return await open_loop(one, due)


async def _drive(client: Client, trace: Sequence[Arrival]) -> tuple[Frontend, list[Sample]]:
    warm = trace[: min(16, len(trace))]
    await client.at([0.0] * len(warm), [(each.input_len, min(each.output_len, 16)) for each in warm])
    frontend = await frontend_of(client)
    return frontend, await client.at([each.at for each in trace], [(each.input_len, each.output_len) for each in trace])


async def frontend_of(client: Client) -> Frontend:
    """What the server takes beside the steps, of requests that hardly compute.

    A request of one token in and one out takes the path and one step; the time per token of one that goes on is that step alone,
    as the ranks have the next one before the last has ended. Of many requests at once the events of a step arrive one by one.
    """
    burst = await client.at([0.0] * _BURST, [(1, _BURST_TOKENS)] * _BURST)
    event = event_seconds(burst)
    firsts, steps = [], []
    for _ in range(_ALONE):
        [alone] = await client.at([0.0], [(1, 8)])
        firsts.append(alone.arrivals[0] - alone.begin)
        steps.append((alone.arrivals[-1] - alone.arrivals[0]) / (len(alone.arrivals) - 1))
    path = statistics.median(firsts) - statistics.median(steps) - event
    return Frontend(max(path, 0.0), event)


def event_seconds(samples: Sequence[Sample]) -> float:
    """Seconds between neighbouring events of a step: of groups of arrivals, which longer gaps separate."""
    step = statistics.median((each.arrivals[-1] - each.arrivals[0]) / (len(each.arrivals) - 1) for each in samples)
    times = sorted(at for each in samples for at in each.arrivals)
    groups, begin = [], 0
    for index in range(1, len(times) + 1):
        if index == len(times) or times[index] - times[index - 1] > step / 3:
            if index - begin > len(samples) / 2:
                groups.append((times[index - 1] - times[begin]) / (index - begin - 1))
            begin = index
    return statistics.median(groups) if groups else 0.0


# ---- figures ---------------------------------------------------------------------------------------------------------


def percentiles(each: Sequence[Sample] | Sequence[Served]) -> dict[str, dict[str, float]]:
    """Of TTFT and of time per token, over requests of more than one token, in ms."""
    ttft, tpot = [], []
    for one in each:
        if isinstance(one, Served):
            first, last, count, begin = one.first, one.last, one.output_len, one.arrival
        else:
            first, last, count, begin = one.arrivals[0], one.arrivals[-1], one.completion_tokens, one.begin
        ttft.append(first - begin)
        if count > 1:
            tpot.append((last - first) / (count - 1))
    return {
        name: {str(percent): 1e3 * scenario.percentile(values, percent / 100) for percent in GOALS}
        for name, values in (("ttft_ms", ttft), ("tpot_ms", tpot))
    }


def figures_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median over runs of each percentile, served and simulated, and the simulated one's error as a part of the served one."""
    rows = []
    for name in ("ttft_ms", "tpot_ms"):
        for percent in GOALS:
            served, simulated = (
                statistics.median(run[side][name][str(percent)] for run in runs) for side in ("served", "simulated")
            )
            error = simulated / served - 1
            rows.append({"what": name, "percentile": percent, "served": served, "simulated": simulated, "error": error})
    return rows


def missed(figures: Sequence[dict[str, Any]]) -> bool:
    return any(abs(row["error"]) > GOALS[row["percentile"]] for row in figures)


def _line(one: dict[str, Any]) -> str:
    frontend = one["frontend"]
    return f"path {1e3 * frontend['path']:.2f} ms, {1e6 * frontend['event']:.0f} us an event"


def show(figures: Sequence[dict[str, Any]]) -> None:
    for row in figures:
        over = "  MISSED" if abs(row["error"]) > GOALS[row["percentile"]] else ""
        print(
            f"{row['what']} p{row['percentile']}: served {row['served']:9.2f}  simulated {row['simulated']:9.2f}  "
            f"{row['error']:+.1%}{over}", flush=True
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
