# SPDX-License-Identifier: Apache-2.0
"""The engine process: start the ranks, report the outcome to the client, and run the loop until the end.

Its config: {"options": fields of EngineOptions, "address": the client's zmq address, "executor": the dotted path of an `Executor`,
by default that of rank processes, "vocabulary": whether the client sends a `Vocabulary`, for structured output, "fake": settings of
`FakeExecutor`, each of them optional: "num_blocks", "latency", "vocab_size", "eos_token_ids"}. The fake executor has no ranks and
needs no checkpoint beyond its config.json; with a vocab_size not even that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from phalanx import launch, log
from phalanx.config.generation import require_possible
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import resolve
from phalanx.engine.adapter_loads import ReadFile
from phalanx.engine.adapters import Adapters
from phalanx.engine.dp_scheduler import DpScheduler
from phalanx.engine.draft_depth import DraftDepth
from phalanx.engine.executor import RANK_EXECUTOR, Executor, load_executor
from phalanx.engine.grammar import Grammars
from phalanx.engine.grammar_threads import GrammarThreads
from phalanx.engine.loop import HEARTBEAT_SECONDS, Loop, decode_client_message
from phalanx.engine.messages import (
    EngineFacts,
    EngineToClient,
    Failed,
    Heartbeat,
    RankFacts,
    Shutdown,
    Started,
    Stopped,
    Vocabulary,
)
from phalanx.engine.resolve_options import resolve_options
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.engine.step_scheduler import StepScheduler
from phalanx.engine.step_times import StepTimes
from phalanx.errors import EngineError, PhalanxError, RequestError
from phalanx.hardware.probe import cores, usable_machine
from phalanx.layout import Layout
from phalanx.layout.adapter import read_adapter
from phalanx.layout.cache import group_windows
from phalanx.layout.draft import draft_network, network_caches
from phalanx.layout.families import model_cache
from phalanx.layout.memory import copied_blocks, most_positions, tokens_kept

if TYPE_CHECKING:
    from phalanx.engine.experts import ExpertLoads

logger = log.get_logger(__name__)

DIAGNOSIS = "phalanx.health.failed_start:explain"
"""Looks for the cause of a failed start. It stands above the engine, which knows it by this name alone."""

FULL_COLLECTION = 100_000
"""Collections of the middle generation before one of all objects (Python's default: 10). It visits every token id of every prompt:
0.2 s for a hundred prompts of 20,000 tokens, in which no rank gets a step."""
SWITCH_INTERVAL_SECONDS = 1e-3
"""For how long a thread that follows a grammar keeps the interpreter lock from the loop; Python's default is 5 ms."""
VOCABULARY_SECONDS = 30.0
"""How long the first constrained request waits for the client's vocabulary, which comes while the engine starts."""
_LINGER_MS = 3000  # how long the last messages may take to leave when the process ends


def main() -> None:
    """Read the config and serve until the end."""
    config = launch.read_config()
    log.configure("engine")
    sys.exit(run(config))


def run(config: dict[str, Any]) -> int:
    """Serve the client at config["address"] to the end; returns the exit status: 0 when asked to end, 1 on failure."""
    # Ctrl-C and the end of the terminal are for the server or script, which then ends this process in order.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    termination = _Termination()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)  # a slow client must not stop the tokens of the others; the requests bound the queue
    socket.connect(config["address"])
    try:
        return _serve(config, socket, termination)
    finally:
        socket.close(linger=_LINGER_MS)
        context.term()


def _serve(config: dict[str, Any], socket: zmq.Socket[bytes], termination: _Termination) -> int:
    vocabulary: Future[Vocabulary] = Future()
    listener = _StartupListener(socket, vocabulary)
    listener.begin()
    try:
        with termination:
            engine = start(config, vocabulary)
    except _Terminated:
        listener.end()
        _send(socket, Stopped())
        return 0
    except Exception as error:
        listener.end()
        if not isinstance(error, PhalanxError):
            logger.exception("the engine cannot start")
            error = EngineError("the engine cannot start", held="an unexpected error", why=repr(error))
        _send(socket, Failed(_explained(error, config).to_wire()))
        return 1
    listener.end()
    options = EngineOptions.of(**config["options"])
    loop = Loop(
        socket, engine.executor, engine.scheduler, backlog=listener.frames, vocabulary=vocabulary, experts=engine.experts,
        rebalance_every=options.rebalance_experts_every, folder="" if options.load_format == "dummy" else options.model,
        change_timeout=options.start_timeout, read_adapter=engine.read_adapter,
    )  # fmt: skip
    termination.then(loop.stop)
    _send(socket, Started(engine.facts))
    # The objects that exist now stay: a full collection would visit all of them, and ranks would wait meanwhile.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
    return loop.run()


_SLOW_DIAGNOSIS_SECONDS = 2.0
"""A failure whose explanation takes longer is logged meanwhile."""


def _explained(error: PhalanxError, config: dict[str, Any]) -> PhalanxError:
    """The error of a failed start with what `config["diagnosis"]` ("module:function", DIAGNOSIS by default) finds behind it."""
    module, _, function = str(config.get("diagnosis", DIAGNOSIS)).partition(":")
    slow = threading.Timer(_SLOW_DIAGNOSIS_SECONDS, logger.error, ("%s; (the doctor still looks for what is behind it)", error))
    slow.daemon = True
    slow.start()
    try:
        explained: PhalanxError = getattr(importlib.import_module(module), function)(error, config["options"])
    except Exception as raised:  # an explanation must never take the place of what it explains
        logger.warning("the failure could not be explained: %r", raised)
        return error
    finally:
        slow.cancel()
    return explained


@dataclass(frozen=True)
class EngineCore:
    """A started engine: its executor, the scheduler sized by what the ranks report, and the facts that clients are told."""

    executor: Executor
    scheduler: StepScheduler[Any]
    facts: EngineFacts
    read_adapter: ReadFile
    experts: ExpertLoads | None = None


def start(config: dict[str, Any], vocabulary: Future[Vocabulary] | None = None) -> EngineCore:
    """Resolve the options, start the ranks, and size the scheduler by what they report. Raises what prevents this. vocabulary:
    that the client sends, if it sends one."""
    phases = log.Phases(logger)
    given_options = EngineOptions.of(**config["options"])
    with phases.phase("read the model's shape"):
        shape, options, reasons = _resolve(given_options, config)
        sampling_defaults = require_possible(dict(shape.sampling_defaults) if options.generation_config == "auto" else {})
    grammars = grammars_of(config, options, shape, vocabulary or Future())
    with phases.phase("start the ranks"):
        executor = load_executor(config.get("executor", RANK_EXECUTOR), options, shape, config.get("fake", {}))
        try:
            ranks, num_blocks = executor.start()
        except BaseException:
            executor.shutdown()
            raise
    network = draft_network(options, shape)
    windows = group_windows([*model_cache(shape), *([] if network is None else network_caches(network, shape.dtype))])
    max_seq_len = _fit_length(given_options, options, most_positions(windows, num_blocks, options.block_size), reasons)
    length_hint = _length_hint(options, shape, max_seq_len)
    limits = SchedulerOptions(
        num_blocks=num_blocks, block_size=options.block_size, max_batch_size=options.index_batch_size,
        max_num_tokens=_resolved(options.index_num_tokens), max_seq_len=max_seq_len, depth=executor.depth,
        pipeline_stages=options.pipeline_parallel_size, returns_tokens=executor.returns_tokens, windows=windows,
        prefix_caching=options.enable_prefix_caching, chunked_prefill=options.enable_chunked_prefill,
        vocab_size=shape.vocab_size, seed=options.seed, length_hint=length_hint, max_drafts=options.max_drafts,
        drafts_keep_kv=options.speculation is not None and options.speculation.keeps_kv,
        max_decode_gap=options.max_decode_gap,
        state_snapshots=options.index_snapshots, **_of_host_memory(ranks, options, reasons),
        copied_blocks=copied_blocks(max(max(rank.bytes.get("kv", 0) for rank in ranks) // max(num_blocks, 1), 1)),
    )  # fmt: skip
    indices, grammar_calls, adapters = options.expert_parallel_size, GrammarThreads(), Adapters(options.max_loras)
    scheduler: StepScheduler[Any]
    if indices == 1:
        scheduler = Scheduler(limits, grammars.open, grammar_calls=grammar_calls, adapters=adapters)
    else:
        scheduler = DpScheduler(limits, indices, grammars.open, grammar_calls=grammar_calls, adapters=adapters)
    scheduler.times = StepTimes(options.step_timeout, max(rank.prompt_wave for rank in ranks))
    if options.speculation is not None:
        depth = DraftDepth.of(options, scheduler.times, scheduler.counters)
        scheduler.choose_drafts, scheduler.verified = depth.choose, depth.verified
    facts = EngineFacts(
        model=options.model, dtype=options.dtype, device=options.device, layout=Layout.of(options),
        max_seq_len=max_seq_len, max_batch_size=options.max_batch_size, max_num_tokens=_resolved(options.max_num_tokens),
        block_size=options.block_size, num_blocks=num_blocks * indices,
        kv_tokens=tokens_kept(windows, num_blocks, options.block_size, max_seq_len) * indices, vocab_size=shape.vocab_size,
        eos_token_ids=list(shape.eos_token_ids), ranks=ranks, phases=phases.seconds, reasons=reasons, length_hint=length_hint,
        sampling_defaults=sampling_defaults,
        max_prediction=0 if options.speculation is None else options.speculation.max_prediction(max_seq_len),
    )  # fmt: skip
    for name, why in reasons.items():
        logger.info("%s = %s", name, why)
    logger.info("%s", facts_line(facts))
    for rank in ranks:
        if rank.self_check:
            logger.info("self check: %s", rank.self_check)
    read = partial(read_adapter, shape=shape, max_rank=options.max_lora_rank)
    return EngineCore(executor, scheduler, facts, read, _expert_loads(options, shape, ranks))


def _expert_loads(options: EngineOptions, shape: ModelShape, ranks: list[RankFacts]) -> ExpertLoads | None:
    if shape.experts is None or not any(rank.moe_layers for rank in ranks):
        return None
    from phalanx.engine.experts import ExpertLoads  # and numpy

    return ExpertLoads(ranks, shape.experts.count, redundant=options.redundant_experts, clock=time.monotonic)


def grammars_of(config: dict[str, Any], options: EngineOptions, shape: ModelShape, vocabulary: Future[Vocabulary]) -> Grammars:
    """The grammars of the vocabulary that the client sends. It is read while the ranks start, where cores are left: nothing else
    runs in this process meanwhile, so that all streams would wait for the first constrained request."""
    sent = bool(config.get("vocabulary"))

    def received() -> Vocabulary:
        try:
            return vocabulary.result(VOCABULARY_SECONDS if sent else 0.0)
        except TimeoutError:
            reason = "the client has not sent its vocabulary" if sent else "the engine was started without one"
            raise RequestError("structured output needs the tokenizer", held=reason, next="see the log") from None

    grammars = Grammars(received, shape.vocab_size, shape.eos_token_ids)
    if sent and options.device == "cuda" and cores() >= 2 * options.world_size + 2:

        def prepare() -> None:
            with contextlib.suppress(Exception):  # the first constrained request fails in the same way, and says so
                grammars.prepare()

        threading.Thread(target=prepare, name="read the vocabulary", daemon=True).start()
    return grammars


def facts_line(facts: EngineFacts) -> str:
    """The size of the engine in one line: KV tokens, concurrency at full length, bytes per rank by kind."""
    ranks = "; ".join(
        f"rank {rank.rank} ({rank.device}): " + ", ".join(f"{kind} {_bytes(size)}" for kind, size in rank.bytes.items())
        for rank in facts.ranks
    )
    return (
        f"ready in {sum(facts.phases.values()):.1f} s: the KV cache holds {facts.kv_tokens:,} tokens, "
        f"{facts.kv_tokens / facts.max_seq_len:.1f} requests of full length {facts.max_seq_len:,}; {ranks}"
    )


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _resolve(given_options: EngineOptions, config: dict[str, Any]) -> tuple[ModelShape, EngineOptions, dict[str, str]]:
    """The model's shape, options without "auto" and None, and the reason for the value of each."""
    fake = config.get("fake", {})
    if "vocab_size" not in fake:
        shape, resolved = resolve_options(given_options)
    else:
        stages = given_options.pipeline_parallel_size
        shape = ModelShape(
            architecture="LlamaForCausalLM", vocab_size=fake["vocab_size"], hidden_size=1, intermediate_size=1,
            num_layers=stages, num_heads=1, num_kv_heads=1, head_dim=1, max_positions=given_options.max_seq_len or 2048,
            windows=(None,) * stages, eos_token_ids=tuple(fake.get("eos_token_ids", ())),
        )  # fmt: skip
        machine = usable_machine(given_options.device)
        resolved = resolve(given_options, shape, len(machine.gpus), machine.unusable)
    return shape, resolved.options, dict(resolved.reasons)


def _of_host_memory(ranks: list[RankFacts], options: EngineOptions, reasons: dict[str, str]) -> dict[str, int]:
    """What all ranks have host memory for, as options of the scheduler."""
    blocks, states = (min(getattr(rank, name) for rank in ranks) for name in ("host_blocks", "host_states"))
    if blocks:
        of_states = f", and {states:,} more states of prefixes" if states else ""
        reasons["kv_host_memory"] = f"{options.kv_host_memory}: {blocks:,} more blocks of {options.block_size} tokens{of_states}"
    return {"host_blocks": blocks, "host_states": states}


def _fit_length(
    given_options: EngineOptions, options: EngineOptions, capacity: int, reasons: dict[str, str]
) -> int:  # fmt: skip
    """max_seq_len, lowered to `capacity`, what the KV cache holds of one request, unless the user gave one."""
    wanted = _resolved(options.max_seq_len)
    if capacity >= wanted:
        return wanted
    if given_options.max_seq_len is None:
        reasons["max_seq_len"] = f"{capacity}: what the KV cache holds; the model's own limit is {wanted}"
        return capacity
    logger.warning("max_seq_len is %d, and the KV cache holds %d tokens: no request grows longer than that", wanted, capacity)
    return wanted


def _length_hint(options: EngineOptions, shape: ModelShape, max_seq_len: int) -> str:
    """What would raise max_seq_len; empty at the model's own limit."""
    if max_seq_len < _resolved(options.max_seq_len):
        by_bytes = options.kv_cache_bytes is not None or options.device == "cpu"
        return f"give the KV cache more memory: raise {'kv_cache_bytes' if by_bytes else 'kv_cache_free_gpu_memory_fraction'}"
    return "" if max_seq_len >= shape.max_positions else f"raise max_seq_len (the model ends at {shape.max_positions})"


def _resolved(value: int | None) -> int:
    assert value is not None, "resolve leaves no None"
    return value


class _Terminated(BaseException):
    """The process was asked to end while it started."""


class _Termination:
    """Handles SIGTERM. While the ranks start, it interrupts that; later it stops the loop; in between it is remembered."""

    def __init__(self) -> None:
        self._requested = self._interrupts = False
        self._act: Callable[[], None] = lambda: None
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._interrupts:
            self._interrupts = False
            raise _Terminated
        self._act()

    def __enter__(self) -> None:
        self._interrupts = True
        if self._requested:
            raise _Terminated

    def __exit__(self, *_: object) -> None:
        self._interrupts = False

    def then(self, act: Callable[[], None]) -> None:
        """From now on, call `act`; at once if SIGTERM has come meanwhile."""
        self._act = act
        if self._requested:
            act()


class _StartupListener:
    """Serves the client's socket while the ranks start: it sends a Heartbeat each second, and keeps what comes for the loop. A
    Shutdown becomes a SIGTERM to this process, a Vocabulary the result of `vocabulary`."""

    def __init__(self, socket: zmq.Socket[bytes], vocabulary: Future[Vocabulary]) -> None:
        self.frames: list[bytes] = []
        self._socket, self._vocabulary = socket, vocabulary
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="startup listener", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Give the socket back."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        while not self._ended.is_set():
            if time.monotonic() >= due:
                _send(self._socket, Heartbeat())
                due = time.monotonic() + HEARTBEAT_SECONDS
            if self._socket.poll(50):
                for frame in self._socket.recv_multipart():
                    match _decoded(frame):
                        case Shutdown():
                            os.kill(os.getpid(), signal.SIGTERM)
                        case Vocabulary() as vocabulary:
                            self._vocabulary.set_result(vocabulary)
                        case _:
                            self.frames.append(frame)


def _decoded(frame: bytes) -> object:
    """The message; None where it does not decode."""
    try:
        return decode_client_message(frame)
    except (msgspec.DecodeError, ValueError):
        return None


def _send(socket: zmq.Socket[bytes], message: EngineToClient) -> None:
    socket.send(msgspec.msgpack.encode(message))
