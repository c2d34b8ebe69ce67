# SPDX-License-Identifier: Apache-2.0
"""The process of a rank (`python -m phalanx.worker`, started by a launcher): it gets ready, then runs steps until told to stop.

Hello -> import torch -> agree -> form groups -> build, load -> compile, measure -> KvCapacity -> Allocate -> capture graphs ->
RankReady -> steps
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib.util
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from phalanx import log
from phalanx.comm import launch
from phalanx.config.host_facts import host_facts
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import compute_dtype
from phalanx.engine.messages import RankFacts, Step
from phalanx.errors import EngineError, PhalanxError
from phalanx.executor.protocol import (
    Allocate,
    Hello,
    KvCapacity,
    RankError,
    RankReady,
    StartupProgress,
    StepDone,
    Stop,
)
from phalanx.hardware.gauges import GpuSampler
from phalanx.hardware.probe import address_towards, cores
from phalanx.plan import Layout, stages
from phalanx.plan.weight_tensors import layer_bytes
from phalanx.worker.channel import EngineChannel

if TYPE_CHECKING:
    import torch

    from phalanx.comm.group import Group
    from phalanx.comm.one_sided import OneSided
    from phalanx.comm.torch_group import Groups
    from phalanx.models.registry import Model
    from phalanx.plan.memory import KvSpec
    from phalanx.tables.exchange import ExchangeTable
    from phalanx.worker.cuda_graphs import StepCounts
    from phalanx.worker.engine_store import EngineStore
    from phalanx.worker.expert_load import ExpertLoad
    from phalanx.worker.expert_moves import ExpertMover, MoveTime
    from phalanx.worker.model_runner import ModelRunner, StepOutput

logger = log.get_logger(__name__)

ReportProgress = Callable[[int, int], None]
"""Reports how much of a phase is done: (done, total)."""

_START_MARGIN_SECONDS = 30.0
"""How much longer than start_timeout a rank waits for its peers: the engine, which knows who is missing, gives up first."""
_POLL_SECONDS = 80e-6
"""How often a rank asks whether the device has finished a step."""


class _QueuedStep(NamedTuple):
    """A step on the device's queue. move: of experts, before it."""

    number: int
    digest: bytes
    output: StepOutput
    move: MoveTime | None


class StopRequested(Exception):
    """The engine asked this rank to end."""


class Worker:
    """One rank. `config`: see `executor.launcher.Launcher.start`."""

    def __init__(self, config: dict[str, Any], channel: EngineChannel) -> None:
        self.options = EngineOptions(**config["options"])
        self.rank: int = config["rank"]
        self.channel = channel
        self._config = config
        self._returns_tokens: bool = config.get("returns_tokens", False)
        self._layout = Layout.of(self.options)
        self._place = self._layout.place(self.rank)
        self._phases = log.Phases(logger)
        self._bytes: dict[str, int] = {}
        self._groups: Groups | None = None
        self._ran: StepCounts | None = None
        self._sampler: GpuSampler | None = None
        self._store: EngineStore | None = None  # groups use it for as long as they live
        self._expert_load: ExpertLoad | None = None
        self._sent_experts = b""
        self._mover: ExpertMover | None = None

    def run(self) -> None:
        """Get ready and run steps. Raises what goes wrong; returns when told to stop."""
        try:
            runner = self._get_ready()
            self._serve(runner)
        except StopRequested:
            return

    # ---- getting ready -----------------------------------------------------------------------------------------------

    def _get_ready(self) -> ModelRunner:
        with self._phase("import torch"):
            self._import()
        with self._phase("open the device"):
            device = self._take_device()
        self.channel.start_heartbeat(self._bytes_now, self._counts)
        with self._phase("find the model"):
            folder = locate(self.options.model, self.options.revision)
            shape = ModelShape.from_folder(folder)
        with self._phase("form groups"):
            groups = self._form(device, folder)
        with self._phase("make the all-reduce"):
            groups = self._groups = self._with_table(groups, shape, device)
        with self._phase("build"):
            self._warn_of_slower_kernels(device)
            model, layers = self._build(shape, device)
            self._prepare_experts(model, device)
        with self._phase("load weights") as report:
            self._load(model, folder, report)
        return self._allocate(model, layers, groups, device)

    def _import(self) -> None:
        """Import what takes long, so that the phases that follow are quick."""
        import phalanx.comm.torch_group
        import phalanx.models.weights
        import phalanx.worker.model_runner  # noqa: F401

    def _take_device(self) -> torch.device:
        """This rank's GPU; on CPU, its part of the cores."""
        import torch

        from phalanx.kernels.compiling import compile_time

        share = min(cores(), self._config.get("free_cores", cores())) // self._config["local_ranks"]
        torch.set_num_threads(max(1, min(torch.get_num_threads(), share)))
        if self.options.device != "cuda":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise EngineError(
                "device='cuda', but torch finds no GPU that it can use", held=f"torch {torch.__version__}",
                why="it is built without CUDA, or the driver is too old", next="install a CUDA build of torch, or use device='cpu'",
            )  # fmt: skip
        if importlib.util.find_spec("triton") is not None:
            compile_time.count_seconds(self._phases.seconds)
            compile_time.begin_hashing_compiler()
        device = torch.device("cuda", self._config["device_index"])
        torch.cuda.set_device(device)
        self._bytes["capacity"] = torch.cuda.mem_get_info(device)[1]
        self._sampler = GpuSampler(str(torch.cuda.get_device_properties(device).uuid))
        return device

    def _form(self, device: torch.device, folder: Path) -> Groups:
        import torch

        from phalanx.comm import torch_group
        from phalanx.comm.agreement import agree
        from phalanx.comm.reachability import require_mutual
        from phalanx.worker.engine_store import EngineStore

        world, timeout = self._layout.world, self.options.start_timeout + _START_MARGIN_SECONDS
        if world == 1:
            return torch_group.form(0, 1, self._layout, "", device)
        store = self._store = EngineStore(self.rank, self._config["engine"], self._config.get("cluster_token"), timeout=timeout)
        agree(store, self.rank, world, {**host_facts(self.options, folder), "torch version": torch.__version__})
        if self.options.nnodes > 1 and self.rank % self._config["local_ranks"] == 0:
            own_address = address_towards(self._config["peer"])
            require_mutual(store, self._config["node"], self.options.nnodes, own_address)
        collective_timeout = max(timeout, self.options.step_timeout)
        return torch_group.form(
            self.rank, world, self._layout, store, device, peer=self._config["peer"], timeout=collective_timeout,
            returns_tokens=self._returns_tokens,
        )  # fmt: skip

    def _with_table(self, groups: Groups, shape: ModelShape, device: torch.device) -> Groups:
        """The groups; the all-reduce of the tensor-parallel one follows the machine's table."""
        from phalanx.comm.tuned_group import tuned
        from phalanx.kernels.dtypes import TORCH_DTYPES

        options = self.options
        dtype = TORCH_DTYPES[compute_dtype(options.dtype, shape, device.type)]
        tokens = options.index_num_tokens or options.max_seq_len or shape.max_positions
        group = tuned(
            groups.tp, message_bytes=tokens * shape.hidden_size * dtype.itemsize, strategy=options.allreduce_strategy,
            deterministic=options.deterministic, timeout=options.step_timeout,
        )  # fmt: skip
        return replace(groups, tp=group)

    def _warn_of_slower_kernels(self, device: torch.device) -> None:
        from phalanx.kernels.capabilities import slower_kernels

        if self.rank == 0 and (warning := slower_kernels(device)):
            logger.warning("%s", warning)

    def _build(self, shape: ModelShape, device: torch.device) -> tuple[Model, range]:
        from phalanx.kernels.dtypes import TORCH_DTYPES
        from phalanx.models import registry

        assert self._groups is not None
        one_sided, table = self._form_exchange(self._groups.dp, shape, device)
        fp8 = self.options.dtype == "fp8"
        name = compute_dtype(self.options.dtype, shape, device.type)
        per_layer, embedding, head = layer_bytes(shape, "fp8" if fp8 else name)
        layers = stages(per_layer, self._layout.pp, first_bytes=embedding, last_bytes=head)[self._place.pp_index]
        model = registry.build(
            shape, group=self._groups.tp, layers=layers, dtype=TORCH_DTYPES[name], device=device, fp8=fp8,
            fp8_cache=self.options.kv_cache_dtype == "fp8", int8_cache=self.options.kv_cache_dtype == "int8",
            moe_ep=self.options.moe_expert_parallel_size, traffic=self.options.expert_traffic, dp=self._groups.dp,
            expert_exchange=self.options.expert_exchange, one_sided=one_sided, exchange_table=table,
            redundant_experts=self.options.redundant_experts,
        )  # fmt: skip
        return model, layers

    def _form_exchange(
        self, dp: Group, shape: ModelShape, device: torch.device
    ) -> tuple[OneSided | None, ExchangeTable | None]:  # fmt: skip
        """What tokens go to their experts through, where that may be one-sided, and when; None for always. Collective over dp."""
        from phalanx.comm import one_sided
        from phalanx.kernels.dtypes import TORCH_DTYPES

        options = self.options
        if options.expert_exchange not in ("ONE_SIDED", "AUTO") or shape.experts is None or dp.size == 1:
            return None, None
        table = one_sided.agreed_table(dp, device) if options.expert_exchange == "AUTO" else None
        if table is not None and not table.has_one_sided:
            return None, None
        exchange, reason = one_sided.form(
            dp, device, hidden=shape.hidden_size, top_k=shape.experts.per_token,
            dtype=TORCH_DTYPES[compute_dtype(options.dtype, shape, device.type)],
            rows=options.index_num_tokens or options.max_seq_len or shape.max_positions, timeout=options.step_timeout,
        )  # fmt: skip
        if exchange is None:
            say = logger.warning if table is None else logger.info  # asked for by name, or one of two
            say("expert_exchange ONE_SIDED is not used: %s; ALL_GATHER is", reason)
            return None, None
        decides = "" if table is None else ", where the table says so" if table.rows else " (no table: estimated)"
        logger.info("expert_exchange ONE_SIDED %s%s; else ALL_GATHER", reason, decides)
        return exchange, table

    def _prepare_experts(self, model: Model, device: torch.device) -> None:
        """Count their tokens, and get ready to move them. Collective where they can move."""
        from phalanx.worker.expert_load import ExpertLoad
        from phalanx.worker.expert_moves import ExpertMover

        layers = model.moe_layers
        if not layers:
            return
        each = list(layers.values())
        load = self._expert_load = ExpertLoad(each, each[0].config.count, device)
        if model.context.moves_experts:
            self._mover = ExpertMover(layers, model.context.group, model.context.moe_ep, load)
            self._mover.warm_up()

    def _load(self, model: Model, folder: Path, report: ReportProgress) -> None:
        from phalanx.models import weights

        if self.options.load_format == "dummy":
            weights.dummy(model, self.options.seed, report)
        else:
            weights.load(model, folder, report)
        tensors = [*model.parameters(), *model.buffers()]
        self._bytes["weights"] = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def _allocate(self, model: Model, layers: range, groups: Groups, device: torch.device) -> ModelRunner:
        """Measure and report how many KV blocks fit, make caches of as many blocks as the engine decides, and capture graphs."""
        import torch

        from phalanx.models.batch import KvCache, empty_cache
        from phalanx.models.layers.attention.select import select_backend
        from phalanx.worker.cuda_graphs import CudaGraphCapturer, StepCounts
        from phalanx.worker.model_runner import ModelRunner
        from phalanx.worker.sampler import Sampler

        options, specs, shape = self.options, model.kv_specs(), model.shape
        dtype = model.context.dtype
        max_seq_len = options.max_seq_len or shape.max_positions
        max_num_tokens = options.index_num_tokens or max_seq_len
        attention = select_backend(
            device, dtype, shape.head_dim, shape.latent, cache_dtype=model.context.cache_dtype, sinks=shape.sinks,
            block_size=options.kv_block_size, windows=any(window is not None for window in shape.windows),
            most_tokens=max_num_tokens,
        )  # fmt: skip
        last = groups.pp.rank == groups.pp.size - 1
        sampler = Sampler(options.index_batch_size, shape.vocab_size, device) if last else None

        def caches(blocks: int) -> list[KvCache]:
            return [empty_cache(spec, blocks, options.kv_block_size, model.context.cache_dtype, device) for spec in specs]

        graphs = options.cuda_graphs and device.type == "cuda"
        capturer = CudaGraphCapturer(device, getattr(groups.tp, "calls", None)) if graphs else None
        runner = ModelRunner(
            model, caches(1), attention, sampler, groups.pp, max_batch_size=options.index_batch_size, max_seq_len=max_seq_len,
            block_size=options.kv_block_size, dtype=dtype, device=device, max_num_tokens=max_num_tokens,
            capturer=capturer, ends=groups.ends if self._returns_tokens else None,
        )  # fmt: skip
        self.channel.send(KvCapacity(self.rank, self._measure(runner, model, specs, max_seq_len, groups.world, device)))
        blocks = self._await(Allocate).blocks
        with self._phase("make the KV cache"):
            runner.caches = caches(blocks)
            self._bytes["kv"] = sum(cache.nbytes for cache in runner.caches)
        self._capture(runner, device)
        self._ran = runner.ran = StepCounts()  # from here on steps are the engine's
        if self._expert_load is not None:
            self._expert_load.reset()
        calls = getattr(groups.tp, "calls", {})
        for name in calls:  # not cleared: a graph counts up the entries that it holds
            calls[name] = 0
        facts = RankFacts(
            self.rank, self._config["node"], device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            layers=(layers.start, layers.stop), bytes=self._bytes_now(), phases=self._phases.seconds, attention=attention.name,
            allreduce=getattr(groups.tp, "digest", ""), expert_bytes=0 if self._mover is None else self._mover.expert_bytes,
            moe_layers=list(model.moe_layers) if self._reports_experts else [],
        )  # fmt: skip
        self.channel.send(RankReady(self.rank, facts))
        return runner

    def _measure(
        self, runner: ModelRunner, model: Model, specs: Sequence[KvSpec], max_seq_len: int, world: Group, device: torch.device
    ) -> int:
        """How many KV blocks this rank has memory for: on a GPU measured by the largest steps, whose kernels are compiled first."""
        import torch

        from phalanx.comm.warmup import more_token_counts
        from phalanx.worker import memory_profile
        from phalanx.worker.warmup import compile_processes, kernel_record, warm_up

        options, graphs = self.options, runner.graphs
        if device.type != "cuda":
            with self._phase("measure"):
                return memory_profile.cpu_blocks(options, specs, max_seq_len)
        steps = memory_profile.profiling_steps(
            max_num_tokens=options.index_num_tokens or max_seq_len, max_seq_len=max_seq_len, max_batch_size=runner.max_rows,
            block_size=options.kv_block_size,
            more_counts=partial(
                more_token_counts, model.context.group, max_tokens=options.index_num_tokens or max_seq_len,
                hidden=model.shape.hidden_size, dtype=model.context.dtype,
                num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
            ),
        )  # fmt: skip
        local_ranks: int = self._config["local_ranks"]
        with self._phase("compile kernels", "kernel") as report:
            record = kernel_record(options, self.rank, model, steps, device)
            warm_up(runner, steps, world, device, compile_processes(local_ranks), report, local_ranks, record)
        with self._phase("measure", "step") as report:
            step_done = memory_profile.counting(report, len(steps) + len(graphs.largest if graphs else ()))
            peak = memory_profile.measure_activations(runner, steps, device, step_done)
            self._bytes["activations"] = peak.tensors
            graph_bytes = memory_profile.measure_graphs(runner, device, step_done)
            return memory_profile.gpu_blocks(options, specs, peak.reserved, graph_bytes, device)

    def _capture(self, runner: ModelRunner, device: torch.device) -> None:
        """Capture graphs of all sizes, where graphs are enabled and the attention back end supports them."""
        from phalanx.worker import memory_profile

        if runner.graphs is None:
            return
        total, before = len(runner.graphs.sizes), memory_profile.free_bytes(device)
        with self._phase("capture graphs", "size") as report:
            for done, _ in enumerate(runner.capture(), start=1):
                report(done, total)
        self._bytes["graphs"] = max(before - memory_profile.free_bytes(device), 0)

    @contextmanager
    def _phase(self, name: str, unit: str = "") -> Iterator[ReportProgress]:
        """A phase of the start-up. It yields what reports its progress to the engine, in `unit`s: see StartupProgress."""
        self.channel.send(StartupProgress(self.rank, name))
        with self._phases.phase(name):
            yield lambda done, total: self.channel.send(StartupProgress(self.rank, name, done, total, unit))

    def _await(self, kind: Any) -> Any:
        """The engine's next message, which is of this kind. Raises StopRequested for Stop."""
        message = self.channel.receive()
        if isinstance(message, Stop):
            raise StopRequested
        if not isinstance(message, kind):
            raise EngineError(f"rank {self.rank} received {type(message).__name__}", held=f"it waits for {kind.__name__}")
        return message

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    def _bytes_now(self) -> dict[str, int]:
        """Bytes by kind, as RankFacts names them."""
        import torch

        if self.options.device == "cuda":
            # The allocator's own count: a CUDA call from the heartbeat's thread might open a context on GPU 0.
            return {**self._bytes, "total": torch.cuda.memory_reserved(self._config["device_index"])}
        return {**self._bytes, "total": psutil.Process().memory_info().rss, "capacity": psutil.virtual_memory().total}

    @property
    def _reports_experts(self) -> bool:
        """Of the ranks that share each expert, the first one reports their tokens."""
        return self._place.tp_index % (self._layout.tp // self.options.moe_expert_parallel_size) == 0

    def _new_experts(self) -> bytes:
        """Tokens of experts that no heartbeat has reported yet."""
        load = self._expert_load
        if load is None or not self._reports_experts or load.latest is self._sent_experts:
            return b""
        self._sent_experts = load.latest
        return load.latest

    def _counts(self) -> tuple[dict[str, int], dict[str, int], dict[str, float], bytes]:
        """All-reduce calls, and how steps ran: see RankHeartbeat."""
        calls = {} if self._groups is None else getattr(self._groups.tp, "calls", {})
        gauges = {} if self._sampler is None else self._sampler.read()
        return (
            {name: count for name, count in calls.copy().items() if count},
            {} if self._ran is None else self._ran.by_name,
            gauges,
            self._new_experts(),
        )

    # ---- running steps -----------------------------------------------------------------------------------------------

    def _serve(self, runner: ModelRunner) -> None:
        """Queue each step on the device as it comes, and report the steps whose results are there: the device never waits for the
        host. The engine's depth bounds how many steps are queued."""
        # The objects that exist now stay: a full collection would visit all of them, and the device would run dry meanwhile.
        gc.collect()
        gc.freeze()
        _sharpen_timers()
        queued: deque[_QueuedStep] = deque()
        load = self._expert_load
        while True:
            # A new step wakes this at once. An event of the device does not: it is polled, and in between the core and the
            # interpreter are free for the other threads.
            timeout = None if not queued else 0.0 if queued[0].output.ready else _POLL_SECONDS
            if load is not None and timeout is None:
                timeout = load.seconds_left
            message = self.channel.receive(timeout)
            if isinstance(message, Step):
                self.channel.begun = message.number
                move = None if message.move is None or self._mover is None else self._mover.apply(message.move)
                output = runner.run(message.batches[self._place.dp_index], message.extent)
                queued.append(_QueuedStep(message.number, self.channel.digest, output, move))
                if load is not None:
                    load.step_queued()
            elif isinstance(message, Stop):
                return
            elif message is not None:
                raise EngineError(f"rank {self.rank} received {type(message).__name__}", held="it waits for steps")
            if queued and queued[0].output.ready:
                self._report(queued.popleft())
            if load is not None:
                load.read()

    def _report(self, step: _QueuedStep) -> None:
        rows, tokens = step.output.results()
        self.channel.finished = step.number
        moved = None if step.move is None else step.move.seconds
        self.channel.send(StepDone(self.rank, step.number, step.digest, tokens, rows if self._place.tp_index == 0 else None, moved))


def _sharpen_timers() -> None:
    """Let this thread's short sleeps end on time: Linux may add 50 us to each, which is as long as they are."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: nanoseconds, of the calling thread


def main() -> None:
    """Never returns: a rank ends at once, since the clean-up of a library may wait for peers that are gone."""
    config = launch.read_config()
    rank: int = config["rank"]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the engine sends it to a stalled rank before it kills it
    # Only its engine ends a rank: a service manager that sends signals to every process must not cut a drain short.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log.configure(f"rank {rank}", "INFO" if rank == 0 else "WARNING")
    channel = EngineChannel(rank, config["engine"], config.get("cluster_token"))
    channel.send(Hello(rank, config["node"], os.getpid()))
    status = 1
    try:
        Worker(config, channel).run()
        status = 0
    except BaseException as error:
        channel.send(_rank_error(rank, error))
    channel.close()
    sys.stderr.flush()
    os._exit(status)


def _rank_error(rank: int, error: BaseException) -> RankError:
    """The error as the engine raises it: it names the rank. The traceback of any other than a PhalanxError goes to the log."""
    if isinstance(error, PhalanxError):
        wire = error.to_wire()
        return RankError(rank, {**wire, "failure": f"rank {rank}: {wire['failure']}"}, consequence=False)
    from phalanx.comm.torch_group import lost_peer

    consequence = lost_peer(error)
    if not consequence:
        logger.error("%s", "".join(traceback.format_exception(error)))
    failure = EngineError(f"rank {rank} failed: {type(error).__name__}: {error}", next="its traceback is in the log")
    return RankError(rank, failure.to_wire(), consequence)
