# SPDX-License-Identifier: Apache-2.0
"""What the host costs per step, without a GPU: the real loop, scheduler, executor, worker, channel and block tables.

Three processes, as in production: this one is the client, one is the engine, and each rank is one. Per kind of step it prints the
median CPU time that the main threads of the engine and of rank 0 take, and how long the pretended device stood idle between steps.
What a rank takes to launch kernels is not in it: benchmarks/engine/decode_step.py measures that on a GPU.

decode-R: R requests decode. prefill: chunks of 8,192 tokens of 1,000-token prompts. mixed: such a chunk beside 256 decodes or more.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks import harness
from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import SamplingParams
from phalanx.engine.messages import (
    AddRequest,
    EngineToClient,
    RankFacts,
    RequestRejected,
    RequestUpdate,
    RowOutput,
    RowResult,
    Shutdown,
    Started,
    Step,
    StepBatch,
    StepExtent,
    Stopped,
)
from phalanx.layout import Layout

DECODES = (1, 16, 64, 256, 512)
KINDS = [*(f"decode-{rows}" for rows in DECODES), "prefill", "mixed"]
VOCABULARY = 64
BLOCK = 16
BLOCKS = 80_000


def kind_of(batch: StepBatch) -> str:
    """Under which name a step's times are kept; "" for those on the way from one to the next."""
    chunks = [row for row in batch.rows if row.count > 1]
    if not chunks:
        return f"decode-{len(batch.rows)}" if batch.rows and not batch.released else ""
    if sum(row.count for row in batch.rows) < 8000:
        return ""
    singles = len(batch.rows) - len(chunks)
    return "prefill" if not singles else "mixed" if singles >= 256 else ""


@dataclass
class Log:
    """CPU and wall times between the beginnings of steps, by the kind of the earlier one."""

    kinds: list[str] = field(default_factory=list)
    marks: list[tuple[float, float, float]] = field(default_factory=list)
    idle: dict[str, list[float]] = field(default_factory=dict)

    def mark(self, kind: str) -> None:
        self.kinds.append(kind)
        self.marks.append((time.thread_time(), time.process_time(), time.perf_counter()))

    def summary(self) -> dict[str, dict[str, float]]:
        """Per kind the medians in ms: of the main thread's CPU time, of the whole process's, and of the wall's."""
        costs: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            places = [at for at in range(1, len(self.kinds)) if self.kinds[at - 1] == self.kinds[at] == kind]
            pairs = [(self.marks[at - 1], self.marks[at]) for at in places]
            if pairs:
                costs[kind] = {
                    name: 1e3 * statistics.median(b[at] - a[at] for a, b in pairs)
                    for at, name in enumerate(("thread_ms", "process_ms", "wall_ms"))
                } | {"steps": len(pairs)}
            if self.idle.get(kind):
                costs.setdefault(kind, {})["device_idle_ms"] = 1e3 * statistics.median(self.idle[kind])
        return costs


def finish(name: str, log: Log, profile: cProfile.Profile | None) -> None:
    folder = Path(os.environ["HOST_BENCH"])
    (folder / f"{name}.json").write_text(json.dumps(log.summary()))
    if profile is not None:
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(18)
        lines = [line for line in text.getvalue().splitlines() if line.strip()]
        (folder / f"{name}.profile").write_text("\n".join(lines))


# ---- the engine's process --------------------------------------------------------------------------------------------


def run_engine(args: dict[str, Any]) -> None:
    from phalanx.engine.loop import Loop
    from phalanx.engine.messages import EngineFacts
    from phalanx.engine.scheduler import Scheduler, SchedulerOptions
    from phalanx.executor.launcher import LocalLauncher
    from phalanx.executor.rank_executor import RankExecutor

    class Logged(RankExecutor):
        def submit(self, step: Step) -> None:
            log.mark(kind_of(step.batches[0]))
            super().submit(step)

    LocalLauncher.module = "benchmarks.engine.host"
    log, profile = Log(), cProfile.Profile() if args["profile"] else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(args["address"])
    executor = Logged(options(args["ranks"]))
    executor.start()
    scheduler = Scheduler(
        SchedulerOptions(
            num_blocks=BLOCKS, block_size=BLOCK, max_batch_size=512, max_num_tokens=8192, max_seq_len=4096, depth=executor.depth,
            prefix_caching=False, vocab_size=VOCABULARY,
        )
    )  # fmt: skip
    facts = EngineFacts("stub", "", "", Layout(), 4096, 512, 8192, BLOCK, BLOCKS, BLOCK * BLOCKS, VOCABULARY, [])
    socket.send(msgspec.msgpack.encode(Started(facts)))
    loop = Loop(socket, executor, scheduler)
    gc.collect()
    gc.freeze()  # as engine.process does
    if profile is not None:
        profile.runcall(loop.run)
    else:
        loop.run()
    finish("engine", log, profile)
    socket.close(linger=1000)
    context.term()


def options(ranks: int) -> EngineOptions:
    return EngineOptions(
        model="demo", device="cpu", dtype="fp32", kv_cache_dtype="model", tensor_parallel_size=ranks, max_batch_size=512,
        max_num_tokens=8192, max_seq_len=4096, kv_block_size=BLOCK, enable_prefix_caching=False,
    )  # fmt: skip


# ---- a rank's process ------------------------------------------------------------------------------------------------


def run_rank() -> None:
    """The same as `worker.main`, with a worker whose runner computes nothing."""
    from phalanx import launch
    from phalanx.executor.protocol import Allocate, Hello, KvCapacity, RankReady
    from phalanx.worker.channel import EngineChannel
    from phalanx.worker.worker import Worker

    config = launch.read_config()
    rank: int = config["rank"]
    args = json.loads((Path(os.environ["HOST_BENCH"]) / "asked.json").read_text())
    log, profile = Log(), cProfile.Profile() if args["profile"] else None

    class Stub(Worker):
        def _get_ready(self) -> Any:
            self.channel.start_heartbeat(dict, dict)
            self.channel.send(KvCapacity(self.rank, BLOCKS))
            self._await(Allocate)
            runner = stub_runner(log, args["device_ms"] / 1e3)
            self.channel.send(RankReady(self.rank, RankFacts(self.rank, 0, "stub", (0, 1))))
            return runner

    channel = EngineChannel(rank, config["engine"])
    channel.send(Hello(rank, 0, os.getpid()))
    worker = Stub(config, channel)
    if profile is not None:
        profile.runcall(worker.run)
    else:
        worker.run()
    if rank == 0:
        finish("rank", log, profile)
    channel.close()
    os._exit(0)


class StubOutput:
    """The output of a step, which is ready at the time `due`."""

    def __init__(self, step: StepBatch, due: float) -> None:
        self._rows, self._due = step.rows, due

    @property
    def ready(self) -> bool:
        return time.perf_counter() >= self._due

    def outputs(self) -> tuple[list[RowOutput], int]:
        return [0 if row.samples else RowResult() for row in self._rows], zlib.crc32(bytes(8 * len(self._rows)))


def stub_runner(log: Log, device_s: float) -> Any:
    """What a runner does on the host before it launches anything, for a device that takes so long for each step."""
    import torch

    from phalanx.worker.input_batch import BlockTables, PromptLogprobs

    class Slow:
        def __init__(self) -> None:
            self.free_at, self.kind = 0.0, ""
            self.tables, self.prompts = BlockTables(512, 4096, BLOCK, torch.device("cpu")), PromptLogprobs()

        def run(self, step: StepBatch, extent: StepExtent | None = None) -> StubOutput:
            kind = kind_of(step)
            log.mark(kind)
            for slot in step.released:
                self.prompts.release(slot)
            for assignment in step.admitted:
                self.tables.clear(assignment.slot)
                self.prompts.admit(assignment)
            if step.rows:
                self.tables.append(step.rows)
                self.tables.build(step.rows, [self.prompts.reported(row) for row in step.rows])
            now = time.perf_counter()
            if kind and kind == self.kind:
                log.idle.setdefault(kind, []).append(max(0.0, now - self.free_at))
            self.kind, self.free_at = kind, max(now, self.free_at) + device_s
            return StubOutput(step, self.free_at)

    return Slow()


# ---- the client ------------------------------------------------------------------------------------------------------


class Client:
    def __init__(self, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.bind(address)
        self._decode = msgspec.msgpack.Decoder(EngineToClient).decode
        self._number = 0

    def messages(self) -> Sequence[Any]:
        if not self.socket.poll(60_000):
            raise SystemExit("the engine says nothing")
        return [self._decode(frame) for frame in self.socket.recv_multipart()]

    def run(self, requests: int, prompt_tokens: int, new_tokens: int) -> None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        prompt = [index % VOCABULARY for index in range(prompt_tokens)]
        frames = [msgspec.msgpack.encode(AddRequest(str(self._number + i), prompt, params)) for i in range(requests)]
        self._number += requests
        self.socket.send_multipart(frames)
        left = requests
        while left:
            for message in self.messages():
                assert not isinstance(message, RequestRejected), message
                left -= isinstance(message, RequestUpdate) and message.finish_reason is not None


def measure(args: argparse.Namespace, *, profile: bool) -> dict[str, Any]:
    """Run all workloads once through fresh processes."""
    with tempfile.TemporaryDirectory(prefix="host-bench-") as folder:
        settings = {"address": f"ipc://{folder}/client", "ranks": args.ranks, "profile": profile, "device_ms": args.device_ms}
        (Path(folder) / "asked.json").write_text(json.dumps(settings))
        client = Client(settings["address"])
        root = str(harness.ROOT)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        engine = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine.host", "--engine", folder],
            env={**os.environ, "HOST_BENCH": folder, "PYTHONPATH": path}, cwd=root,
        )  # fmt: skip
        try:
            while not any(isinstance(message, Started) for message in client.messages()):
                pass
            for rows in () if profile and args.only_prefill else DECODES[-1:] if profile else DECODES:
                client.run(rows, 16, args.steps)
            if not profile or args.only_prefill:
                client.run(128, 1000, 1)
                client.run(512, 1000, 80)
            client.socket.send(msgspec.msgpack.encode(Shutdown()))
            while not any(isinstance(message, Stopped) for message in client.messages()):
                pass
            engine.wait(30)
        finally:
            engine.kill()
        names = ("engine", "rank")
        if profile:
            return {name: (Path(folder) / f"{name}.profile").read_text() for name in names}
        return {name: json.loads((Path(folder) / f"{name}.json").read_text()) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="decode steps of each kind")
    parser.add_argument("--device_ms", type=float, default=0.0, help="how long the pretended device takes for a step")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, at 512 rows, too")
    parser.add_argument("--only_prefill", action="store_true", help="with --profile: at prefill and mixed steps instead")
    parser.add_argument("--record", action="store_true", help="keep the figures in benchmarks/results")
    parser.add_argument("--before", type=Path, help="another tree, measured in turns with this one")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine is not None:
        run_engine(json.loads((args.engine / "asked.json").read_text()))
        return 0
    costs = measure(args, profile=False)
    before = None
    if args.before is not None:
        before = measure_elsewhere(args)
        costs, again = best(costs, measure(args, profile=False)), measure_elsewhere(args)
        before = best(before, again)
    show(costs, before)
    if args.json is not None:
        args.json.write_text(json.dumps(costs))
    if args.profile:
        for name, text in measure(args, profile=True).items():
            print(f"\n{name}\n{text}")
    if args.record:
        figures = {"asked": {"ranks": args.ranks, "steps": args.steps, "device_ms": args.device_ms}, "ms_per_step": costs}
        if before is not None:
            figures["before_ms_per_step"] = before
        print(f"written: {harness.write('engine_host_cpu', figures).relative_to(harness.ROOT)}")
    return 0


def measure_elsewhere(args: argparse.Namespace) -> dict[str, Any]:
    """The same through the sources of another tree, with this script."""
    root = args.before.resolve()
    script = root / "benchmarks" / "engine" / "host.py"
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [
            sys.executable, str(script), "--ranks", str(args.ranks), "--steps", str(args.steps),
            "--device_ms", str(args.device_ms), "--json", str(figures),
        ]  # fmt: skip
        path = os.pathsep.join([str(root / "src"), str(root)])
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
        costs: dict[str, Any] = json.loads(figures.read_text())
    return costs


def best(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The smaller of two figures, each by itself: what else the machine does only adds."""
    return {
        process: {
            kind: {name: min(value, other[process].get(kind, {}).get(name, value)) for name, value in row.items()}
            for kind, row in kinds.items()
        }
        for process, kinds in one.items()
    }


def show(costs: dict[str, Any], before: dict[str, Any] | None) -> None:
    print(
        f"{'ms per step':12} {'engine':>8} {'rank':>8} {'wall':>8} {'idle':>8}"
        + ("   before: engine, rank, wall, idle" if before else "")
    )
    for kind in KINDS:
        line = f"{kind:12}"
        for figures in (costs, before):
            if figures is None:
                continue
            engine, rank = figures["engine"].get(kind, {}), figures["rank"].get(kind, {})
            for row, name in ((engine, "thread_ms"), (rank, "thread_ms"), (rank, "wall_ms"), (rank, "device_idle_ms")):
                line += f" {row[name]:8.3f}" if name in row else f" {'-':>8}"
        print(line)


if __name__ == "__main__":
    if len(sys.argv) == 1 and "HOST_BENCH" in os.environ:
        run_rank()
    else:
        sys.exit(main())
