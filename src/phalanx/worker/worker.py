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

from phalanx import launch, log
from phalanx.config.host_facts import host_facts
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.quantization import on_load
from phalanx.config.resolve import compute_dtype
from phalanx.engine.messages import ExpertMove, PlaceAdapter, RankFacts, Step
from phalanx.errors import EngineError, PhalanxError, SelfCheckFailed
from phalanx.executor.protocol import (
    Allocate,
    DropAdapter,
    Hello,
    KvCapacity,
    RankError,
    RankReady,
    ReadAdapter,
    StartupProgress,
    StepDone,
    Stop,
    WorkDone,
)
from phalanx.hardware.gauges import GpuSampler
from phalanx.hardware.probe import address_towards, cores, free_host_memory
from phalanx.layout import Layout
from phalanx.layout.cache import request_bytes
from phalanx.layout.draft import draft_network
from phalanx.layout.memory import block_bytes
from phalanx.layout.weights import stage_layers
from phalanx.worker.channel import EngineChannel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from phalanx.comm.device_marks import DeviceMarks
    from phalanx.comm.group import Group
    from phalanx.comm.one_sided import OneSided
    from phalanx.comm.torch_group import Groups
    from phalanx.layout.cache import Cache
    from phalanx.models.adapters import ModelAdapters
    from phalanx.models.decoder import Decoder
    from phalanx.models.layers.attention.backend import AttentionBackend
    from phalanx.tables.exchange import ExchangeTable
    from phalanx.worker.adapter_store import AdapterStore
    from phalanx.worker.cuda_graphs import StepCounts
    from phalanx.worker.engine_store import EngineStore
    from phalanx.worker.expert_load import ExpertLoad
    from phalanx.worker.expert_moves import ExpertMover, MoveTime
    from phalanx.worker.host_blocks import HostBlockStore
    from phalanx.worker.model_memory import ModelMemory
    from phalanx.worker.model_runner import ModelRunner, StepOutput
    from phalanx.worker.speculation.proposer import Proposer

logger = log.get_logger(__name__)

ReportProgress = Callable[[int, int], None]
"""Reports how much of a phase is done: (done, total)."""

_START_MARGIN_SECONDS = 30.0
"""How much longer than start_timeout a rank waits for its peers: the engine, which knows who is missing, gives up first."""
_READING_SECONDS = 2e-3
"""How often it asks whether an adapter has been read."""
_ALLOCATOR = {launch.M_TRIM_THRESHOLD: 64 << 20, launch.M_MMAP_THRESHOLD: 32 << 20}
"""Of ranks on CPU: else each step would take the pages of its tensors anew."""
_POLL_SECONDS = 80e-6
"""How often a rank asks whether the device has finished a step."""


class _QueuedStep(NamedTuple):
    """A step on the device's queue. moves: of experts, before it. calls: see `StepDone`."""

    number: int
    digest: bytes
    output: StepOutput
    moves: list[MoveTime]
    calls: bytes


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
        self._inner_layers: tuple[int, ...] = ()  # of the target, that what proposes drafts reads
        self._sent_experts = b""
        self._mover: ExpertMover | None = None
        self._memory: ModelMemory | None = None
        self._adapters: AdapterStore | None = None
        self._host_blocks: HostBlockStore | None = None
        self._on_host = Allocate(0)

    def run(self) -> None:
        """Get ready and run steps. Raises what goes wrong; returns when told to stop."""
        try:
            runner = self._get_ready()
            self._serve(runner)
        except StopRequested:
            return

    # ---- getting ready -----------------------------------------------------------------------------------------------

    def _get_ready(self) -> ModelRunner:
        with self._phase("import torch"), launch.importing():
            self._import()
        from phalanx.comm.marked_group import marked_groups

        with self._phase("open the device"):
            device = self._take_device()
        self.channel.start_heartbeat(self._bytes_now, self._counts)
        with self._phase("find the model"):
            folder = locate(self.options.model, self.options.revision)
            shape = self._shape_of(folder)
        with self._phase("form groups"):
            groups = self._form(device, folder)
        with self._phase("make the all-reduce"):
            self._groups = self._with_table(groups, shape, device)
            groups = marked_groups(self._groups, self.channel.progress, device)
        with self._phase("build"):
            self._warn_of_slower_kernels(device)
            model, layers = self._build(shape, groups, device)
            model.progress = self.channel.progress
            self._prepare_experts(model, device)
        with self._phase("load weights") as report:
            self._load(model, folder, report)
        return self._allocate(model, layers, groups, device, folder)

    def _shape_of(self, folder: Path) -> ModelShape:
        shape = ModelShape.from_folder(folder, quiet=True)  # the engine logs
        return shape.within(self.options.max_seq_len or shape.max_positions).with_drafts(self.options.max_drafts)

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
            launch.set_allocator(_ALLOCATOR)
            return torch.device("cpu")
        if not torch.cuda.is_available():
            cuda = torch.version.cuda
            raise EngineError(
                "device='cuda', but torch finds no GPU that it can use",
                held=f"torch {torch.__version__} is built {f'for CUDA {cuda}' if cuda else 'without CUDA'}",
                why="the driver is too old for it, or the GPU is out of order" if cuda else "",
                next="upgrade the driver, or use device='cpu'" if cuda else "install a CUDA build of torch, or use device='cpu'",
            )
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
            returns_tokens=self._returns_tokens, marks=self._marks(device),
        )  # fmt: skip

    def _marks(self, device: torch.device) -> DeviceMarks | None:
        """What this rank's GPU tells its place to."""
        from phalanx.kernels.capabilities import has_triton

        if not self.options.device_progress or device.type != "cuda" or not has_triton():
            return None
        from phalanx.comm.device_marks import DeviceMarks

        self.channel.progress.device = marks = DeviceMarks(self.channel.progress, device)
        return marks

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

    def _build(self, shape: ModelShape, groups: Groups, device: torch.device) -> tuple[Decoder, range]:
        from phalanx.kernels.adapters.rows import AdapterBatch
        from phalanx.kernels.dtypes import TORCH_DTYPES
        from phalanx.models import registry
        from phalanx.models.slices import LayerContext

        assert self._groups is not None
        options = self.options
        one_sided, table = self._form_exchange(self._groups.dp, shape, device)
        quantization = on_load(options.dtype)
        name = compute_dtype(options.dtype, shape, device.type)
        network = draft_network(options, shape)
        self._inner_layers = () if network is None else network.inner_layers
        layers = stage_layers(shape, options.dtype if quantization else name, self._layout.pp)[self._place.pp_index]
        context = LayerContext(
            groups.tp, TORCH_DTYPES[name], device, quantization=quantization,
            kv_cache_dtype=options.kv_cache_dtype, moe_ep=options.moe_expert_parallel_size, traffic=options.expert_traffic,
            dp=groups.dp, dcp=groups.dcp, expert_exchange=options.expert_exchange, one_sided=one_sided, exchange_table=table,
            redundant_experts=options.redundant_experts, row_by_row=options.deterministic and device.type == "cpu",
            batch_invariant=options.deterministic and device.type == "cuda",
            adapters=AdapterBatch(options.max_loras, options.max_lora_rank) if options.max_loras else None,
            last_embeds=network is not None and network.reads_target, int4_fp8=options.quantize_activations,
        )  # fmt: skip
        model = registry.build(shape, layers, context)
        if options.quantize_activations:
            from phalanx.models.layers.linear_methods.int4 import Int4Linear

            if not any(isinstance(module, Int4Linear) for module in model.modules()):
                logger.warning("rank %d: quantize_activations changes nothing: experts alone have 4-bit integers", self.rank)
        return model, layers

    def _form_exchange(
        self, dp: Group, shape: ModelShape, device: torch.device
    ) -> tuple[OneSided | None, ExchangeTable | None]:  # fmt: skip
        """What tokens go to their experts through, where that may be one-sided, and when; None for always. Collective over dp."""
        from phalanx.comm import one_sided
        from phalanx.comm.marked_group import marked_exchange
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
        return marked_exchange(exchange, self.channel.progress, device), table

    def _prepare_experts(self, model: Decoder, device: torch.device) -> None:
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

    def _load(self, model: Decoder, folder: Path, report: ReportProgress) -> None:
        from phalanx.models import weights

        if self.options.load_format == "dummy":
            weights.dummy(model, self.options.seed, report)
        else:
            weights.load(model, folder, report)
        tensors = [*model.parameters(), *model.buffers()]
        self._bytes["weights"] = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def _reload(self, model: Decoder, first: Path, folder: Path) -> None:
        """Read the weights of a folder again, or others. first: where dummy weights are made."""
        from phalanx.models import weights

        if self.options.load_format == "dummy" and folder == first:
            weights.dummy(model, self.options.seed)
        else:
            weights.load(model, folder)

    def _allocate(
        self, model: Decoder, layers: range, groups: Groups, device: torch.device, folder: Path
    ) -> ModelRunner:  # fmt: skip
        """Measure and report how many KV blocks fit, make caches of as many blocks as the engine decides, and capture graphs."""
        from phalanx.models.cache import CACHE_DTYPES, empty_caches
        from phalanx.models.layers.attention.select import select_backend
        from phalanx.worker import memory_profile
        from phalanx.worker.cuda_graphs import CudaGraphCapturer, StepCounts
        from phalanx.worker.model_runner import ModelRunner
        from phalanx.worker.sampler import Sampler

        assert self._groups is not None
        options, shape, dtype, tp = self.options, model.shape, model.context.dtype, self._groups.tp
        last, max_seq_len = groups.pp.rank == groups.pp.size - 1, options.max_seq_len or shape.max_positions
        proposer, network = self._proposer(model, max_seq_len) if last else (None, None)
        declared = [*model.declared_caches(), *([] if proposer is None else proposer.declared_caches())]
        memory_profile.require_state_fits(options, declared, device)
        caches = partial(empty_caches, declared, block_size=options.block_size, device=device)
        max_num_tokens = options.index_num_tokens or max_seq_len
        attention = select_backend(
            device, dtype, shape.head_dim, shape.latent, cache_dtype=CACHE_DTYPES[model.context.kv_dtype], sinks=shape.sinks,
            block_size=options.kv_block_size, windows=any(shape.windows), most_tokens=max_num_tokens, dcp=groups.dcp,
            by_torch=shape.attends_by_torch, capped=shape.is_capped, batch_invariant=model.context.batch_invariant,
        )  # fmt: skip
        sampler = Sampler(options.index_batch_size, shape.vocab_size, device) if last else None
        capturer = None
        if options.cuda_graphs and device.type == "cuda":
            capturer = CudaGraphCapturer(device, getattr(tp, "calls", None), self.channel.progress)
        first = caches(1, slots=options.index_states)
        runner = ModelRunner(
            model, first, attention, sampler, groups.pp,
            max_batch_size=options.index_batch_size, max_seq_len=max_seq_len, block_size=options.block_size, dtype=dtype,
            device=device, max_num_tokens=max_num_tokens, capturer=capturer, ends=groups.ends if self._returns_tokens else None,
            max_drafts=options.max_drafts, proposer=proposer, inner_layers=self._inner_layers, acceptance=self._acceptance(device),
            adapters=self._make_adapters(model),
        )  # fmt: skip
        one, state = block_bytes(declared, options.block_size), request_bytes(declared)
        buffers = self._staging(one, state, device)  # before memory is measured
        allocate = self._size_caches(self._measure(runner, model, declared, max_seq_len, groups.world, device), one, state)
        blocks = allocate.blocks
        with self._phase("make the KV cache"):
            runner.take_caches(caches(blocks, states=first))
            self._bytes["kv"] = blocks * one
            if state:
                self._bytes["state"] = options.index_states * state
        if buffers is not None:
            self._take_host_memory(runner, allocate, *buffers)
        self._capture(runner, device)
        checked = self._self_check(runner, model, groups, blocks, max_num_tokens, max_seq_len) if options.self_check else ""
        self._memory = self._memory_of(model, runner, folder, network)
        self._ran = runner.ran = StepCounts()  # from here on steps are the engine's
        if self._expert_load is not None:
            self._expert_load.reset()
        calls = getattr(tp, "calls", {})
        for name in calls:  # not cleared: a graph counts up the entries that it holds
            calls[name] = 0
        facts = self._facts(model, layers, attention, device)
        facts.self_check = checked
        self.channel.send(RankReady(self.rank, facts))
        return runner

    def _self_check(
        self, runner: ModelRunner, model: Decoder, groups: Groups, blocks: int, max_num_tokens: int, max_seq_len: int
    ) -> str:  # fmt: skip
        """What the check of the answers found, on a rank that compares them. Collective."""
        from phalanx.worker.self_check import check_answers

        assert self._groups is not None
        options, last = self.options, groups.pp.rank == groups.pp.size - 1
        with self._phase("check the answers"):
            return check_answers(
                runner, model, groups.world, self._groups.tp, options, blocks=blocks, max_num_tokens=max_num_tokens,
                max_seq_len=max_seq_len, compares=last and self._place.tp_index == 0,
            )  # fmt: skip

    def _facts(self, model: Decoder, layers: range, attention: AttentionBackend, device: torch.device) -> RankFacts:
        import torch

        assert self._groups is not None
        return RankFacts(
            self.rank, self._config["node"], device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            layers=(layers.start, layers.stop), bytes=self._bytes_now(), phases=self._phases.seconds, attention=attention.name,
            allreduce=getattr(self._groups.tp, "digest", ""), expert_bytes=0 if self._mover is None else self._mover.expert_bytes,
            moe_layers=list(model.moe_layers) if self._reports_experts else [],
            host_blocks=self._on_host.host_blocks, host_states=self._on_host.host_states,
            prompt_wave=(0, 0) if attention.graphs is None else attention.graphs.prompt_wave(),
        )  # fmt: skip

    def _size_caches(self, measured: int, block: int, state: int) -> Allocate:
        """Report how many KV blocks this rank has memory for, and the bytes of one and of a state. Returns what all ranks make."""
        free = free_host_memory() if self.options.kv_host_memory else 0
        self.channel.send(KvCapacity(self.rank, measured, block, free, state))
        allocate: Allocate = self._await(Allocate)
        return allocate

    def _staging(self, block: int, state: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What KV blocks and states of so many bytes go through on their way to host memory; None where they stay."""
        from phalanx.worker.host_blocks import staging, state_staging

        if not self.options.kv_host_memory:
            return None
        buffers = staging(block, device), state_staging(state, device)
        self._bytes["kv staging"] = sum(each.nbytes for each in buffers)
        return buffers

    def _take_host_memory(
        self, runner: ModelRunner, allocate: Allocate, of_blocks: torch.Tensor, of_states: torch.Tensor
    ) -> None:  # fmt: skip
        """Memory of the host for KV blocks and states, as far as the stage has some. of_blocks, of_states: see `_staging`."""
        from phalanx.worker.host_blocks import HostBlockStore

        self._on_host = allocate
        with self._phase("take host memory"):
            if of_blocks.nbytes:
                self._host_blocks = HostBlockStore(runner.all_caches, allocate.host_blocks, of_blocks)
            if of_states.nbytes:
                runner.host_states = HostBlockStore(runner.caches, allocate.host_states, of_states, states=True)
        stores = [store for store in (self._host_blocks, runner.host_states) if store is not None]
        self._bytes["kv on host"] = sum(store.slots.nbytes for store in stores)

    def _make_adapters(self, model: Decoder) -> ModelAdapters | None:
        """The layers that can be adapted, and a store for adapters; None where there are no slots."""
        from phalanx.models.adapters import ModelAdapters
        from phalanx.worker.adapter_store import AdapterStore

        if model.context.adapters is None:
            return None
        adapters = ModelAdapters(model, model.context.adapters)
        self._bytes["adapters"] = adapters.nbytes
        self._adapters = AdapterStore(self.rank, adapters)
        with self._phase("compile the kernels of adapters"):
            adapters.launch_kernels()
        return adapters

    def _memory_of(self, model: Decoder, runner: ModelRunner, folder: Path, network: nn.Module | None) -> ModelMemory:
        from phalanx.worker.model_memory import ModelMemory

        return ModelMemory(
            model, runner, folder, partial(self._reload, model, folder), self._shape_of, bytes_of=self._bytes,
            local_ranks=self._config["local_ranks"], expert_load=self._expert_load, more=[] if network is None else [network],
        )  # fmt: skip

    def _proposer(self, model: Decoder, max_seq_len: int) -> tuple[Proposer | None, nn.Module | None]:
        """What proposes drafts, None without speculation; and the network that it has, if it has one."""
        from phalanx.worker.speculation.build import build

        if self.options.speculation is None:
            return None, None
        with self._phase("load the proposer of drafts") as report:
            proposer, network = build(self.options, model, max_seq_len, report)
        if network is not None:
            tensors = [*network.parameters(), *network.buffers()]
            self._bytes["weights"] += sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
        return proposer, network

    def _acceptance(self, device: torch.device) -> torch.Tensor | None:
        """Synthetic rates of acceptance; None where tokens decide."""
        import torch

        rates = None if self.options.speculation is None else self.options.speculation.acceptance
        return None if rates is None else torch.tensor(rates, dtype=torch.float32, device=device)

    def _measure(
        self, runner: ModelRunner, model: Decoder, caches: Sequence[Cache], max_seq_len: int, world: Group, device: torch.device
    ) -> int:
        """How many KV blocks this rank has memory for: on a GPU measured by the largest steps, whose kernels are compiled first."""
        import torch

        from phalanx.comm.marked_group import unmarked
        from phalanx.comm.warmup import more_token_counts
        from phalanx.worker import memory_profile
        from phalanx.worker.self_check.quantized_kernels import check_quantized_kernels
        from phalanx.worker.warmup import compile_processes, kernel_record, warm_up

        options, graphs = self.options, runner.graphs
        if device.type != "cuda":
            with self._phase("measure"):
                return memory_profile.cpu_blocks(options, caches, max_seq_len, model.cache_groups)
        steps = memory_profile.profiling_steps(
            max_num_tokens=options.index_num_tokens or max_seq_len, max_seq_len=max_seq_len, max_batch_size=runner.max_rows,
            block_size=options.block_size, max_drafts=options.max_drafts, groups=model.cache_groups,
            topk=None if model.shape.indexer is None else model.shape.indexer.topk,
            more_counts=partial(
                more_token_counts, unmarked(model.context.group), max_tokens=options.index_num_tokens or max_seq_len,
                hidden=model.shape.hidden_size, dtype=model.context.dtype,
                num_sms=torch.cuda.get_device_properties(device).multi_processor_count,
            ),
        )  # fmt: skip
        local_ranks: int = self._config["local_ranks"]
        with self._phase("compile kernels", "kernel") as report:
            record = kernel_record(options, self.rank, model, steps, device)
            warm_up(runner, steps, world, device, compile_processes(local_ranks), report, local_ranks, record)
        with self._phase("test the kernels"):
            try:
                if line := check_quantized_kernels(model, options.index_num_tokens or max_seq_len):
                    logger.info("kernels of quantized weights: %s", line)
            except SelfCheckFailed as error:
                if options.self_check:
                    raise
                logger.warning("rank %d: answers may be wrong: %s", self.rank, error)
        with self._phase("measure", "step") as report:
            step_done = memory_profile.counting(report, len(steps) + len(graphs.largest if graphs else ()))
            peak = memory_profile.measure_activations(runner, steps, device, step_done)
            self._bytes["activations"] = peak.tensors
            graph_bytes = memory_profile.measure_graphs(runner, device, step_done)
            return memory_profile.gpu_blocks(
                options, caches, max_seq_len, peak.reserved, graph_bytes, device, model.cache_groups
            )  # fmt: skip

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
        host. The engine's depth bounds how many steps are queued.

        To queue a step that is no graph takes tens of milliseconds, and longer where the device's queue is full: results that come
        meanwhile are reported between two layers."""
        # The objects that exist now stay: a full collection would visit all of them, and the device would run dry meanwhile.
        gc.collect()
        gc.freeze()
        _sharpen_timers()
        queued: deque[_QueuedStep] = deque()
        progress = self.channel.progress
        load = self._expert_load

        def report_ready() -> None:
            if queued and queued[0].output.ready:
                self._report(queued.popleft())

        while True:
            # A new step wakes this at once. An event of the device does not: it is polled, and in between the core and the
            # interpreter are free for the other threads.
            timeout = None if not queued else 0.0 if queued[0].output.ready else _POLL_SECONDS
            if load is not None and timeout is None:
                timeout = load.seconds_left
            if self._adapters is not None and self._adapters.reading:
                timeout = _READING_SECONDS if timeout is None else min(timeout, _READING_SECONDS)
            message = self.channel.receive(timeout)
            if isinstance(message, Step):
                progress.begin(message.number)
                moves = self._work_before(message)
                batch = message.batches[self._place.dp_index]
                if self._host_blocks is not None:
                    self._host_blocks.copy(batch)
                progress.between_layers = report_ready if queued else None
                output = runner.run(batch, message.extent)
                progress.between_layers, progress.queued = None, True
                queued.append(_QueuedStep(message.number, self.channel.digest, output, moves, progress.packed_calls))
                if load is not None:
                    load.step_queued()
            elif isinstance(message, Stop):
                return
            elif self._adapters is not None and isinstance(message, ReadAdapter):
                self._adapters.read(message)
            elif self._adapters is not None and isinstance(message, DropAdapter):
                self._adapters.drop(message.key)
            elif message is not None:
                raise EngineError(f"rank {self.rank} received {type(message).__name__}", held="it waits for steps")
            report_ready()
            if load is not None:
                load.read()
            for answer in self._adapters.answers() if self._adapters is not None else []:
                self.channel.send(answer)

    def _work_before(self, step: Step) -> list[MoveTime]:
        """Queue what is to be done before the step's forward. Returns how long moves of experts on this rank take."""
        moves = []
        for work in step.before:
            match work:
                case ExpertMove():
                    if self._mover is not None:
                        moves.append(self._mover.apply(work))
                case PlaceAdapter():
                    assert self._adapters is not None
                    self._adapters.place(work)
                case _:
                    assert self._memory is not None
                    self.channel.send(WorkDone(self.rank, step.number, self._memory.apply(work)))
        return [move for move in moves if move is not None]

    def _report(self, step: _QueuedStep) -> None:
        rows, tokens = step.output.outputs()
        self.channel.progress.finished = step.number
        moved = sum(move.seconds for move in step.moves) if step.moves else None
        rows = rows if self._place.tp_index == 0 else None
        self.channel.send(StepDone(self.rank, step.number, step.digest, tokens, rows, moved, step.calls))


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
        channel.send(_rank_error(channel, error))
    channel.close()
    sys.stderr.flush()
    os._exit(status)


def _rank_error(channel: EngineChannel, error: BaseException) -> RankError:
    """The error as the engine raises it: it names the rank. The traceback of any other than a PhalanxError goes to the log."""
    rank, place = channel.rank, channel.place
    if isinstance(error, PhalanxError):
        wire = error.to_wire()
        return RankError(rank, {**wire, "failure": f"rank {rank}: {wire['failure']}"}, False, place)
    from phalanx.comm.torch_group import lost_peer

    consequence = lost_peer(error)
    if not consequence:
        logger.error("%s", "".join(traceback.format_exception(error)))
    failure = EngineError(f"rank {rank} failed: {type(error).__name__}: {error}", next="its traceback is in the log")
    return RankError(rank, failure.to_wire(), consequence, place)
