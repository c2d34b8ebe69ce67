# SPDX-License-Identifier: Apache-2.0
"""The engine process, started as a client starts it, with the fake ranks."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from phalanx import launch
from phalanx.config import EngineOptions, SamplingParams
from phalanx.engine import process
from phalanx.engine.executor import FAKE_EXECUTOR, RANK_EXECUTOR
from phalanx.engine.fake import fake_tokens
from phalanx.engine.grammar import HEAD, Grammars
from phalanx.engine.messages import (
    AddRequest,
    EngineFacts,
    EngineToClient,
    Failed,
    Heartbeat,
    RankFacts,
    RequestUpdate,
    Shutdown,
    Started,
    Stopped,
    Vocabulary,
)
from phalanx.engine.process import _fit_length, _length_hint, facts_line
from phalanx.errors import RequestError
from phalanx.layout import Layout
from phalanx.layout.memory import most_positions, window_blocks

pytestmark = pytest.mark.usefixtures("forked_python")

SHAPE = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 90, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "sliding_window": None, "eos_token_id": 3,
}  # fmt: skip


class EngineProcess:
    """The client's end of a real engine process."""

    def __init__(self, folder: Path, options: dict[str, Any], **config: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.bind(address := f"ipc://{folder}/engine")
        full = {"executor": FAKE_EXECUTOR, "address": address, "options": {"device": "cpu", **options}, **config}
        self.child = launch.start("phalanx.engine", full, "phalanx engine")

    def say(self, message: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def hear(self, *kinds: type, seconds: float = 60.0) -> Any:
        """The next message of one of these kinds."""
        deadline = time.monotonic() + seconds
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            for frame in self.socket.recv_multipart():
                message = msgspec.msgpack.decode(frame, type=EngineToClient)
                if isinstance(message, kinds):
                    return message
        raise AssertionError(f"no {kinds} came")

    def close(self) -> None:
        launch.stop([self.child], 0.0)
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def engine() -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short: a socket's path is

        def make(options: dict[str, Any], **config: Any) -> EngineProcess:
            engines.append(EngineProcess(Path(folder), options, **config))
            return engines[-1]

        yield make
        for each in engines:
            each.close()


def test_a_whole_life(engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    process = engine({"model": str(tmp_path), "pipeline_parallel_size": 2})
    process.say(AddRequest("early", [1, 2], SamplingParams(temperature=0, max_tokens=1)))  # before it is ready
    facts = process.hear(Started).facts
    assert (facts.vocab_size, facts.eos_token_ids, facts.max_seq_len, facts.layout) == (90, [3], 256, Layout(pp=2))
    assert (facts.dtype, facts.device, len(facts.ranks)) == ("fp32", "cpu", 2)
    assert set(facts.reasons) >= {"max_seq_len", "dtype", "max_num_tokens"}
    assert facts.length_hint == "", "the model ends there"
    assert set(facts.phases) == {"read the model's shape", "start the ranks"}
    expected = fake_tokens([1, 2], SamplingParams(temperature=0), seed=0, vocab_size=90, count=1)
    assert process.hear(RequestUpdate).tokens == expected
    os.kill(process.child.pid, signal.SIGINT)  # Ctrl-C is the front's
    process.hear(Heartbeat)
    process.say(Shutdown())
    process.hear(Stopped)
    assert process.child.process.wait(20) == 0


def test_a_termination_signal_is_a_shutdown(engine: Callable[..., EngineProcess]) -> None:
    process = engine({"model": "none"}, fake={"vocab_size": 10, "eos_token_ids": [1], "num_blocks": 4})
    facts = process.hear(Started).facts
    assert (facts.num_blocks, facts.vocab_size, facts.max_seq_len) == (4, 10, 64), "no longer than the cache"
    assert "the KV cache holds" in facts.reasons["max_seq_len"]
    assert facts.length_hint == "give the KV cache more memory: raise kv_cache_bytes"
    process.child.process.send_signal(signal.SIGTERM)
    process.hear(Stopped)
    assert process.child.process.wait(20) == 0


@pytest.mark.parametrize("way", ["message", "signal"])
def test_a_shutdown_while_ranks_start_interrupts_that(engine: Callable[..., EngineProcess], tmp_path: Path, way: str) -> None:
    os.mkfifo(tmp_path / "config.json")  # reading it stands still, as a start may
    process = engine({"model": str(tmp_path)})
    process.hear(Heartbeat)
    time.sleep(0.2)
    if way == "message":
        process.say(Shutdown())
    else:
        process.child.process.send_signal(signal.SIGTERM)
    assert isinstance(process.hear(Stopped, Started, Failed), Stopped)
    assert process.child.process.wait(20) == 0


def test_what_stands_in_the_way_is_told(engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    process = engine({"model": str(tmp_path)})
    error = process.hear(Failed).error
    assert error["kind"] == "ModelNotFound"
    assert "config.json" in str(error)
    assert process.child.process.wait(20) == 1


def test_an_option_that_cannot_be_is_told(engine: Callable[..., EngineProcess]) -> None:
    process = engine({"model": "none", "max_batch_size": "many"}, fake={"vocab_size": 10})
    error = process.hear(Failed).error
    assert error["kind"] == "OptionError"
    assert "max_batch_size='many'" in error["failure"]
    assert process.child.process.wait(20) == 1


def test_a_layout_that_does_not_suit_the_model_starts_no_rank(engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    process = engine({"model": str(tmp_path), "tensor_parallel_size": 3}, executor=RANK_EXECUTOR)
    error = process.hear(Failed).error
    assert error["kind"] == "LayoutError"
    assert error["failure"] == "tensor_parallel_size=3 does not divide num_attention_heads=2"  # a rank would have named itself
    assert error["next"] == "use one of 1, 2"
    assert process.child.process.wait(20) == 1


def test_the_engine_ends_with_its_client(engine: Callable[..., EngineProcess]) -> None:
    process = engine({"model": "none"}, fake={"vocab_size": 10})
    process.hear(Started)
    assert process.child.process.stdin is not None
    process.child.process.stdin.close()
    assert process.child.process.wait(10) != 0


@pytest.mark.parametrize(
    ("options", "length", "hint"),
    [
        ({"device": "cuda", "max_seq_len": 256}, 96, "give the KV cache more memory: raise kv_cache_free_gpu_memory_fraction"),
        ({"device": "cuda", "max_seq_len": 256, "kv_cache_bytes": 9}, 96, "give the KV cache more memory: raise kv_cache_bytes"),
        ({"device": "cpu", "max_seq_len": 96}, 96, "raise max_seq_len (the model ends at 256)"),
        ({"device": "cpu", "max_seq_len": 256}, 256, ""),
    ],
)
def test_the_hint_says_what_raises_max_seq_len(options: dict[str, Any], length: int, hint: str) -> None:
    shape = SimpleNamespace(max_positions=256)
    assert _length_hint(EngineOptions.of(model="none", **options), shape, length) == hint  # type: ignore[arg-type]


def test_the_line_of_facts_has_the_numbers() -> None:
    ranks = [RankFacts(0, 0, "cpu", (0, 2), {"weights": 3 << 20, "kv": 5 << 30})]
    facts = EngineFacts("m", "fp32", "cpu", Layout(), 1000, 8, 64, 16, 500, 8000, 90, [], ranks, {"a": 1.0, "b": 2.5})
    line = facts_line(facts)
    for part in ("3.5 s", "8,000 tokens", "8.0 requests of full length 1,000", "rank 0 (cpu): weights 3.0 MiB, kv 5.00 GiB"):
        assert part in line


@pytest.mark.parametrize(("num_blocks", "expected"), [(3, 256), (2, 16)])
def test_a_window_needs_as_many_blocks_as_the_scheduler_says(num_blocks: int, expected: int) -> None:
    """With a window of 13 and blocks of 8 tokens, a request of any length needs 3 blocks."""
    options = EngineOptions.of(model="x", device="cpu", kv_block_size=8)
    resolved = options.model_copy(update={"max_seq_len": 256})
    assert window_blocks(13, 8) == 3
    assert _fit_length(options, resolved, most_positions((13,), num_blocks, 8), {}) == expected


def test_the_vocabulary_is_read_while_ranks_start_where_cores_are_left(monkeypatch):
    vocabulary = Future()
    shape = SimpleNamespace(vocab_size=2, eos_token_ids=(1,))
    prepared = threading.Event()
    prepare = Grammars.prepare
    monkeypatch.setattr(Grammars, "prepare", lambda self: (prepare(self), prepared.set())[0])
    monkeypatch.setattr(process, "cores", lambda: 6)
    threading.Timer(0.1, vocabulary.set_result, [Vocabulary([b"a", b"b"])]).start()
    for options, early in (
        (EngineOptions.of(model="m", device="cuda", tensor_parallel_size=2), True),
        (EngineOptions.of(model="m", device="cuda", tensor_parallel_size=4), False),
        (EngineOptions.of(model="m", device="cpu"), False),
    ):
        prepared.clear()
        grammars = process.grammars_of({"vocabulary": True}, options, shape, vocabulary)
        assert prepared.wait(10 if early else 0.1) == early
        assert grammars.open(HEAD + "start: /a/").mask()[0] == 1
    monkeypatch.setattr(process, "VOCABULARY_SECONDS", 0.05)
    for config, reason in (({}, "started without one"), ({"vocabulary": True}, "has not sent")):
        with pytest.raises(RequestError, match=reason):
            process.grammars_of(config, EngineOptions.of(model="m", device="cpu"), shape, Future()).open(HEAD + "start: /a/")
