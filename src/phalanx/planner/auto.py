# SPDX-License-Identifier: Apache-2.0
"""`--plan auto`: the layout of this host's best plan, chosen before anything starts, with its explanation in the log."""

from __future__ import annotations

from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import GPU_STEP_TOKENS, concrete_dtype, concrete_kv_cache_dtype
from phalanx.errors import OptionError
from phalanx.hardware import probe
from phalanx.layout.draft import network_for
from phalanx.log import get_logger
from phalanx.planner import explain, search, subject
from phalanx.planner.cost import MachineModel
from phalanx.planner.search import Plan, PlanRequest, SearchResult

logger = get_logger(__name__)

_LAYOUT = (
    "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "moe_expert_parallel_size",
    "decode_context_parallel_size", "replicas", "nnodes",
)  # fmt: skip
_TOKENS = 1024  # in and out of each of _REQUESTS at once, where max_seq_len allows it
_REQUESTS = 64


def planned(options: EngineOptions) -> EngineOptions:
    """The options with the layout of the best plan; the explanation is logged.

    Raises OptionError where a layout was given too, CapacityError with the nearest changes where none fits.
    """
    sizes = {name: getattr(options, name) for name in _LAYOUT if getattr(options, name) > 1}
    if sizes:
        raise OptionError(
            "plan='auto' was given beside a layout",
            held=", ".join(f"{name}={size}" for name, size in sizes.items()),
            why="either the planner or the user chooses it",
            next="leave the sizes out, or leave plan out",
        )
    if options.device == "cpu" or not probe.usable_machine(options.device).gpus:
        logger.info("plan auto: no GPU is used, so one rank on CPU")
        return options.model_copy(update={"plan": "off"})
    shape = subject.shape_for(options.model, options.revision)
    machine, _ = subject.machine_for()
    return choose(options, shape, machine)


def choose(options: EngineOptions, shape: ModelShape, machine: MachineModel) -> EngineOptions:
    """The options of the best layout on the machine. Raises as `planned`."""
    request = request_of(options, shape)
    result = search.search(shape, machine, request)
    result = SearchResult([plan for plan in result.plans if _holds(options, plan)], result.rejected, result.changes)
    best = search.require(result)
    for line in explain.text(options.model, shape, machine, request, result).splitlines():
        logger.info("%s", line)
    return options.model_copy(update={**best.layout.options, "plan": "off"})


def _holds(options: EngineOptions, plan: Plan) -> bool:
    """Whether the layout is one for which the options that depend on it have an effect."""
    moves = options.rebalance_experts_every is None or plan.layout.moe_ep > 1
    return moves and (options.expert_exchange in ("AUTO", "ALL_GATHER") or plan.layout.dp > 1)


def request_of(options: EngineOptions, shape: ModelShape) -> PlanRequest:
    """What the engine's options ask of a plan."""
    dtype = concrete_dtype(options.dtype, shape, "cuda")
    cache = concrete_kv_cache_dtype(options.kv_cache_dtype, shape)
    longest = min(options.max_seq_len or shape.max_positions, shape.max_positions)
    tokens = max(min(_TOKENS, longest // 2), 1)
    return PlanRequest(
        dtype, cache, tokens, tokens, min(_REQUESTS, options.max_batch_size), "throughput", max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens or GPU_STEP_TOKENS, max_seq_len=longest,
        fraction=options.kv_cache_free_gpu_memory_fraction,
        strategy="NCCL" if options.allreduce_strategy == "NCCL" else "AUTO", exchange=options.expert_exchange,
        redundant_experts=options.redundant_experts,
        speculative_config=options.speculative_config,
        draft=None if options.speculation is None else network_for(options.speculation, shape),
        adapters=(options.max_loras, options.max_lora_rank), deterministic=options.deterministic,
        quantize_activations=options.quantize_activations,
    )  # fmt: skip
