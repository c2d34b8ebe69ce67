# SPDX-License-Identifier: Apache-2.0
"""The engine process: start the ranks, say what came of it, and run the loop until the end.

Its config: {"options": fields of EngineOptions, "address": the client's zmq address, "executor": "ranks" or "fake",
"fake": {"num_blocks", "latency", "vocab_size", "eos_token_ids"}, each of them optional}. With "fake" there is no rank, and no
checkpoint is needed beyond its config.json; with a vocab_size not even that.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec
import zmq

from phalanx import log
from phalanx.comm import launch
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import resolve
from phalanx.engine.executor import Executor, make, settle
from phalanx.engine.fake import FakeExecutor
from phalanx.engine.loop import BEAT_SECONDS, Loop, decode_to_engine
from phalanx.engine.messages import EngineFacts, EngineToClient, Failed, Heartbeat, Shutdown, Started, Stopped
from phalanx.engine.scheduler import Scheduler, SchedulerOptions
from phalanx.errors import EngineError, PhalanxError
from phalanx.hardware.probe import detect_machine

logger = log.get_logger(__name__)

_LAST_WORDS_MS = 3000  # how long a message may take to leave once the process ends


def main() -> None:
    """The whole life of the process."""
    config = launch.read_config()
    log.configure("engine")
    sys.exit(run(config))


def run(config: dict[str, Any]) -> int:
    """Serve the client at config["address"] to the end; returns the exit status: 0 if asked to end, 1 on failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front process, which then ends this one in order
    ending = _Ending()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)  # a slow client must not stop the others' tokens; requests bound what is queued
    socket.connect(config["address"])
    try:
        return _serve(config, socket, ending)
    finally:
        socket.close(linger=_LAST_WORDS_MS)
        context.term()


def _serve(config: dict[str, Any], socket: zmq.Socket[bytes], ending: _Ending) -> int:
    herald = _Herald(socket)
    herald.begin()
    try:
        with ending:
            started = start(config)
    except _Ended:
        herald.end()
        _say(socket, Stopped())
        return 0
    except Exception as raised:
        herald.end()
        if not isinstance(raised, PhalanxError):
            logger.exception("the engine cannot start")
            raised = EngineError("an engine was started", held="it met an error that it does not know", why=repr(raised))
        _say(socket, Failed(raised.to_wire()))
        return 1
    herald.end()
    loop = Loop(socket, started.executor, started.scheduler, backlog=herald.frames)
    ending.then(loop.stop)
    _say(socket, Started(started.facts))
    # What is here now stays: a full collection would look through all of it, and ranks would wait meanwhile.
    gc.collect()
    gc.freeze()
    return loop.run()


@dataclass(frozen=True)
class Running:
    """An engine that takes requests."""

    executor: Executor
    scheduler: Scheduler
    facts: EngineFacts


def start(config: dict[str, Any]) -> Running:
    """Settle the options, start the ranks, and size the scheduler by what they have. Raises what stands in the way."""
    phases = log.Phases(logger)
    asked = EngineOptions.of(**config["options"])
    with phases.phase("read the model's shape"):
        shape, options, reasons = _settle(asked, config)
    with phases.phase("start the ranks"):
        executor = _executor(options, shape, config)
        try:
            ranks, num_blocks = executor.start()
        except BaseException:
            executor.shutdown()
            raise
    max_seq_len = _fit_length(asked, options, shape, num_blocks, reasons)
    longer = _longer(options, shape, max_seq_len)
    scheduler = Scheduler(
        SchedulerOptions(
            num_blocks=num_blocks, block_size=options.kv_block_size, max_batch_size=options.max_batch_size,
            max_num_tokens=_set(options.max_num_tokens), max_seq_len=max_seq_len, depth=executor.depth,
            pipeline_stages=options.pipeline_parallel_size, window=shape.window, prefix_caching=options.enable_prefix_caching,
            chunked_prefill=options.enable_chunked_prefill, vocab_size=shape.vocab_size, seed=options.seed,
            longer=longer,
        )
    )  # fmt: skip
    facts = EngineFacts(
        model=options.model, dtype=options.dtype, device=options.device, world=options.world_size,
        layout=(options.pipeline_parallel_size, options.expert_parallel_size, options.tensor_parallel_size),
        max_seq_len=max_seq_len, max_batch_size=options.max_batch_size, max_num_tokens=_set(options.max_num_tokens),
        block_size=options.kv_block_size, num_blocks=num_blocks, vocab_size=shape.vocab_size,
        eos_token_ids=list(shape.eos_token_ids), ranks=ranks, phases=phases.seconds, reasons=reasons, longer=longer,
    )  # fmt: skip
    for name, why in reasons.items():
        logger.info("%s = %s", name, why)
    logger.info("%s", facts_line(facts))
    return Running(executor, scheduler, facts)


def facts_line(facts: EngineFacts) -> str:
    """What the engine settled on, in one line: KV tokens, concurrency at full length, bytes per rank by kind."""
    tokens = facts.num_blocks * facts.block_size
    ranks = "; ".join(
        f"rank {rank.rank} ({rank.device}): " + ", ".join(f"{kind} {_bytes(size)}" for kind, size in rank.bytes.items())
        for rank in facts.ranks
    )
    return (
        f"ready in {sum(facts.phases.values()):.1f} s: the KV cache holds {tokens:,} tokens, "
        f"{tokens / facts.max_seq_len:.1f} requests of full length {facts.max_seq_len:,}; {ranks}"
    )


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _settle(asked: EngineOptions, config: dict[str, Any]) -> tuple[ModelShape, EngineOptions, dict[str, str]]:
    """The model's shape, options without "auto" and None, and why they have their values."""
    fake = config.get("fake", {})
    if "vocab_size" not in fake:
        shape, resolved = settle(asked)
    else:
        shape = ModelShape(
            architecture="none", vocab_size=fake["vocab_size"], hidden_size=1, intermediate_size=1,
            num_layers=asked.pipeline_parallel_size, num_heads=1, num_kv_heads=1, head_dim=1,
            max_positions=asked.max_seq_len or 2048, eos_token_ids=tuple(fake.get("eos_token_ids", ())),
        )  # fmt: skip
        resolved = resolve(asked, shape, len(detect_machine().gpus))
    return shape, resolved.options, dict(resolved.reasons)


def _executor(options: EngineOptions, shape: ModelShape, config: dict[str, Any]) -> Executor:
    if config.get("executor", "ranks") != "fake":
        return make(options)
    fake = config.get("fake", {})
    max_seq_len, block_size = _set(options.max_seq_len), options.kv_block_size
    return FakeExecutor.of(
        vocab_size=shape.vocab_size, num_blocks=fake.get("num_blocks", 512 + 8 * max_seq_len // block_size), block_size=block_size,
        max_batch_size=options.max_batch_size, max_num_tokens=_set(options.max_num_tokens), max_seq_len=max_seq_len,
        window=shape.window, pipeline_stages=options.pipeline_parallel_size, latency=fake.get("latency", 0.0),
    )  # fmt: skip


def _fit_length(
    asked: EngineOptions, options: EngineOptions, shape: ModelShape, num_blocks: int, reasons: dict[str, str]
) -> int:  # fmt: skip
    """max_seq_len, lowered to what the KV cache holds if nobody asked for one."""
    wanted, held = _set(options.max_seq_len), num_blocks * options.kv_block_size
    if held >= wanted or (shape.window is not None and shape.window + 2 * options.kv_block_size <= held):
        return wanted
    if asked.max_seq_len is None:
        reasons["max_seq_len"] = f"{held}: what the KV cache holds; the model's own limit is {wanted}"
        return held
    logger.warning("max_seq_len is %d, and the KV cache holds %d tokens: no request grows longer than that", wanted, held)
    return wanted


def _longer(options: EngineOptions, shape: ModelShape, max_seq_len: int) -> str:
    """What would raise max_seq_len; empty at the model's own limit."""
    if max_seq_len < _set(options.max_seq_len):
        of_memory = options.kv_cache_bytes is not None or options.device == "cpu"
        return f"give the KV cache more memory: raise {'kv_cache_bytes' if of_memory else 'kv_cache_free_gpu_memory_fraction'}"
    return "" if max_seq_len >= shape.max_positions else f"raise max_seq_len (the model ends at {shape.max_positions})"


def _set(value: int | None) -> int:
    assert value is not None, "resolve leaves no None"
    return value


class _Ended(BaseException):
    """The process was asked to end while it started."""


class _Ending:
    """What SIGTERM does. While the ranks start it interrupts that; later it stops the loop. In between it is remembered."""

    def __init__(self) -> None:
        self._asked = self._interrupts = False
        self._act: Callable[[], None] = lambda: None
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if self._interrupts:
            self._interrupts = False
            raise _Ended
        self._act()

    def __enter__(self) -> None:
        self._interrupts = True
        if self._asked:
            raise _Ended

    def __exit__(self, *_: object) -> None:
        self._interrupts = False

    def then(self, act: Callable[[], None]) -> None:
        """From now on, call `act`; at once if it was asked meanwhile."""
        self._act = act
        if self._asked:
            act()


class _Herald:
    """Holds the client's socket while the ranks start: a Beat each second, and whatever comes is kept for the loop. A Shutdown
    becomes a SIGTERM to this process."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.frames: list[bytes] = []
        self._socket = socket
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="herald", daemon=True)

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
                _say(self._socket, Heartbeat())
                due = time.monotonic() + BEAT_SECONDS
            if self._socket.poll(50):
                for frame in self._socket.recv_multipart():
                    if _is_shutdown(frame):
                        os.kill(os.getpid(), signal.SIGTERM)
                    else:
                        self.frames.append(frame)


def _is_shutdown(frame: bytes) -> bool:
    try:
        return isinstance(decode_to_engine(frame), Shutdown)
    except (msgspec.DecodeError, ValueError):
        return False


def _say(socket: zmq.Socket[bytes], message: EngineToClient) -> None:
    socket.send(msgspec.msgpack.encode(message))
