# SPDX-License-Identifier: Apache-2.0
"""Two nodes on loopback, two stages across: they serve as one; whichever end is lost, the other ends in bounded time."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from phalanx.config.options import EngineOptions
from phalanx.engine.messages import RankFacts
from phalanx.errors import EngineError, LayoutError, NodeLost, OptionError, RankDied
from phalanx.executor import heartbeat, protocol
from phalanx.executor.node import Node, join
from phalanx.executor.rank_executor import RankExecutor
from phalanx.hardware.nvml import Gpu
from phalanx.hardware.probe import Machine
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import Drive, await_results, expected, options, prompts

pytestmark = pytest.mark.usefixtures("forked_python")

NODE = """
import json, sys
from phalanx import log
from phalanx.config.options import EngineOptions
from phalanx.executor.node import join
log.configure("node")
sys.exit(join(EngineOptions(**json.loads(sys.argv[1]))))
"""

FIRST_THING = """
import os, pathlib
places = ", ".join(os.environ.get(name, "unset") for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"))
pathlib.Path(__file__).with_name(f"{os.getpid()}").write_text(places)
"""

ENGINE = """
import json, sys, time
from phalanx.config.options import EngineOptions
from phalanx.executor.rank_executor import RankExecutor
executor = RankExecutor(EngineOptions(**json.loads(sys.argv[1])))
executor.start()
print("started", flush=True)
while True:
    executor._wait(1.0)
    executor.collect()
"""


TOKEN = "a secret of the hosts of one test"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> float:
    """The engine loses patience earlier than it does by default, which is early enough."""
    assert heartbeat.NODE_TIMEOUT < 10
    monkeypatch.setattr(heartbeat, "NODE_TIMEOUT", 4.0)
    return 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("node") / "llama", "llama")


def free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def two_nodes(folder: Path) -> EngineOptions:
    port = 23000 + os.getpid() % 4000 * 2
    while not (free(port) and free(port + 1)):
        port += 2
    return options(folder, pipeline_parallel_size=2, nnodes=2, master_port=port, cluster_token=TOKEN)


def start_node(engine: EngineOptions, code: str = NODE, node: int = 1) -> subprocess.Popen[bytes]:
    text = engine.model_copy(update={"node_rank": node}).model_dump_json()
    return subprocess.Popen([sys.executable, "-c", code, text], stdout=subprocess.PIPE)


@contextmanager
def formed(
    folder: Path, kernels: tuple[str | None, str | None] = (None, None), *, insecure: bool = False
) -> Iterator[tuple[RankExecutor, list[RankFacts], subprocess.Popen[bytes]]]:
    """kernels: where each host keeps them. insecure: without a token."""
    engine_options = two_nodes(folder)
    if insecure:
        engine_options = engine_options.model_copy(update={"cluster_token": None, "insecure_cluster": True})
    executor = RankExecutor(engine_options.model_copy(update={"kernel_cache_dir": kernels[0]}))
    assert isinstance(executor, RankExecutor)
    node = start_node(engine_options.model_copy(update={"kernel_cache_dir": kernels[1]}))
    try:
        facts, _ = executor.start()
        yield executor, facts, node
    finally:
        executor.shutdown()
        for child in psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []:
            with suppress(psutil.NoSuchProcess):  # it may end meanwhile
                child.kill()
        node.kill()
        node.communicate()


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def ranks_of(node: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(node.pid).children() if child.cmdline()[0].startswith("phalanx rank")]


def test_two_nodes_serve_as_one_and_end_together(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps kernels in a folder of its own, which its rank knows before it imports anything."""
    (tmp_path / "sitecustomize.py").write_text(FIRST_THING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kernels = str(tmp_path / "host 0"), str(tmp_path / "host 1")
    with formed(folder, kernels) as (executor, facts, node):
        for cache, pid in zip(kernels, [*(handle.pid for handle in executor._handles.values()), *ranks_of(node)], strict=True):
            assert (tmp_path / f"{pid}").read_text() == f"{cache}/triton, {cache}/flashinfer"
        assert [(rank.node, rank.layers) for rank in facts] == [(0, (0, 1)), (1, (1, 2))]
        texts = prompts(2, seed=9)
        tokens = Drive(executor.submit, executor.collect).generate(texts, 4)
        assert tokens == [expected(folder, prompt, 4) for prompt in texts]
        executor.shutdown()
        assert node.wait(15) == 0


def test_a_node_with_other_options_software_or_checkpoint_is_told_which(folder: Path, tmp_path: Path) -> None:
    engine_options = two_nodes(folder)
    altered = Path(shutil.copytree(folder, tmp_path / "altered"))
    (altered / "more.safetensors").write_bytes(b"another")
    executor = RankExecutor(engine_options)
    other = "from phalanx.config import host_facts\nhost_facts.__version__ = '0.0.1'\n" + NODE
    node = start_node(engine_options.model_copy(update={"max_num_tokens": 32, "model": str(altered)}), other)
    begin = time.monotonic()
    differs = (
        r"^node 1 \(127.0.0.1\) differs from the engine's host in checkpoint, max_num_tokens, phalanx version; checkpoint: .*; "
        r"max_num_tokens: 64 at the engine, 32 on node 1; phalanx version: .* at the engine, 0.0.1 on node 1;"
    )
    with pytest.raises(EngineError, match=differs):
        executor.start()
    assert time.monotonic() - begin < 10  # the imports of both processes included
    assert node.wait(20) == 1
    node.communicate()


def test_a_rank_killed_on_another_node_is_named(folder: Path) -> None:
    with formed(folder) as (executor, _, node):
        (rank,) = ranks_of(node)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(RankDied, match=rf"rank 1 \(pid {rank}, node 1\) was killed by SIGKILL"):
            await_results(executor.collect, 1, 10)
        assert node.wait(10) == 1


def test_a_silent_node_is_named_in_time(folder: Path, soon: float) -> None:
    """As when the link is cut: nothing comes any more, and no reset either."""
    with formed(folder) as (executor, _, node):
        stopped = [node.pid, *ranks_of(node)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(NodeLost, match=r"node 1 \(127.0.0.1\) has been silent"):
            await_results(executor.collect, 1, 30)
        assert time.monotonic() - begin < soon + 6
        # The node wakes up: its engine is gone, and so is it, and may have taken its ranks along by the time that they are woken.
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert node.wait(25) == 1
        assert gone(stopped[1:], 5)


def test_a_killed_node_takes_its_ranks_along_and_is_named_at_once(folder: Path) -> None:
    with formed(folder) as (executor, _, node):
        rank_pids = ranks_of(node)
        node.kill()
        node.wait()
        assert gone(rank_pids, 10)
        begin = time.monotonic()
        with pytest.raises(NodeLost, match="node 1"):
            await_results(executor.collect, 1, 10)
        assert time.monotonic() - begin < heartbeat.NODE_TIMEOUT


def test_a_killed_engine_ends_the_other_node_at_once(folder: Path) -> None:
    engine_options = two_nodes(folder)
    engine, node = start_node(engine_options, ENGINE, 0), start_node(engine_options)
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"started\n"
    rank_pids = [*ranks_of(node), *ranks_of(engine)]
    assert len(rank_pids) == 2
    engine.kill()
    engine.communicate()
    assert node.wait(10) == 1
    node.communicate()
    assert gone(rank_pids, 10)


@contextmanager
def stranger(options: EngineOptions, identity: bytes, *messages: protocol.RankToEngine, token: str | None = None) -> Iterator[None]:
    """Another process that connects to the engine's port and sends these messages."""
    context: zmq.Context[Any] = zmq.Context()
    socket = protocol.dealer(context, f"tcp://127.0.0.1:{options.master_port}", identity, token, max_frame=1 << 20)
    for message in messages:
        socket.send(protocol.encode(message))
    try:
        yield
    finally:
        socket.close(linger=0)
        context.term()


@pytest.mark.parametrize("token", [None, "another token, of a stranger"])
def test_a_stranger_ends_nothing(folder: Path, token: str | None) -> None:
    """Whatever it sends, under whatever name. Its junk, large frames and closed connections do not shorten the patience either."""
    with formed(folder) as (executor, _, node), ExitStack() as strangers:
        options = executor._options
        ranks = [*(handle.pid for handle in executor._handles.values()), *ranks_of(node)]
        sockets = [one for pid in ranks for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert sockets, "gloo listens"
        for one in sockets:
            with pytest.raises(TimeoutError):
                socket.create_connection(one.laddr, timeout=0.3)
        error = EngineError("forged").to_wire()
        messages = protocol.RankExit(1, 1, -9), protocol.RankError(1, error, consequence=False), protocol.NodeHeartbeat(7)
        for identity in (b"node-1", b"rank-1", b"stranger"):
            strangers.enter_context(stranger(options, identity, *messages, token=token))
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x01\x7f" + bytes(100_000)):
            with socket.create_connection(("127.0.0.1", options.master_port)) as connection, suppress(OSError):
                connection.sendall(junk)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            assert executor.collect() == []
            assert not executor._heartbeats._suspicious_until
            time.sleep(0.01)
        texts = prompts(2, seed=9)
        assert Drive(executor.submit, executor.collect).generate(texts, 4) == [expected(folder, text, 4) for text in texts]
        assert node.poll() is None


def test_a_process_speaks_only_for_itself(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor = RankExecutor(two_nodes(folder))
    facts = RankFacts(1, 1, "cpu", (0, 1))
    own: list[tuple[bytes, protocol.RankToEngine]] = [
        (b"node-1", protocol.RankExit(1, 1, -9)), (b"rank-1", protocol.RankReady(1, facts)),
        (b"store-rank-1", protocol.StoreRequest(1, 1, "get", ["x"], [])),
        (b"heartbeat-rank-1", protocol.RankHeartbeat(1)),
    ]  # fmt: skip
    for identity, message in own:
        assert executor._message([identity, protocol.encode(message)]) == message
    assert caplog.messages == []
    others: list[tuple[bytes, protocol.RankToEngine]] = [
        (b"rank-1", protocol.RankExit(1, 1, -9)), (b"node-1", protocol.RankExit(1, 0, -9)),
        (b"rank-0", protocol.RankReady(1, facts)),
        (b"rank-0", protocol.RankReady(0, facts)), (b"store-rank-1", protocol.StoreRequest(0, 1, "get", ["x"], [])),
        (b"rank-1", protocol.RankHeartbeat(1)),
        (b"rank-1", protocol.NodeHeartbeat(1)),
    ]  # fmt: skip
    for identity, message in others:
        assert executor._message([identity, protocol.encode(message)]) is None
    assert len(caplog.messages) == len(others)


def test_another_cluster_token_is_named_on_both_sides(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    options = two_nodes(folder)
    executor = RankExecutor(options.model_copy(update={"start_timeout": 12.0}))
    node = start_node(options.model_copy(update={"cluster_token": "not the token of this engine"}))
    with pytest.raises(NodeLost, match="node 1 has not joined"):
        executor.start()
    assert re.search(r"a peer at (127\.0\.0\.1|an unknown address) was refused: wrong cluster token", caplog.text)
    assert node.wait(1) == 1
    node.communicate()
    assert "refused this process as node 1; the cluster tokens differ" in capfd.readouterr().err


def test_a_second_holder_of_an_identity_is_refused_by_name(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with formed(folder) as (executor, _, node):
        second = start_node(executor._options)
        deadline = time.monotonic() + 60
        while second.poll() is None:
            assert executor.collect() == []
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second.communicate()
        assert second.returncode == 1
        assert "refused this process as node 1; another process is that node already" in capfd.readouterr().err
        assert "a second node-1, at 127.0.0.1, was refused: the first one is at 127.0.0.1" in caplog.text
        texts = prompts(2, seed=9)
        assert Drive(executor.submit, executor.collect).generate(texts, 4) == [expected(folder, text, 4) for text in texts]
        assert node.poll() is None


def test_no_rank_has_the_token_in_its_arguments_or_its_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with formed(folder) as (executor, _, node):
        pids = [*(handle.pid for handle in executor._handles.values()), *ranks_of(node)]
        assert all(TOKEN not in " ".join(psutil.Process(pid).cmdline()) for pid in pids)
    assert TOKEN not in capfd.readouterr().err


def test_several_nodes_without_a_token_are_refused_on_every_host(folder: Path) -> None:
    options = two_nodes(folder).model_copy(update={"cluster_token": None})
    with pytest.raises(OptionError, match="nnodes=2 needs a cluster token"):
        RankExecutor(options)
    with pytest.raises(OptionError, match="nnodes=2 needs a cluster token"):
        join(options.model_copy(update={"node_rank": 1}))


def test_an_insecure_cluster_works_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with formed(folder, insecure=True) as (executor, facts, _):
        assert len(facts) == 2
        assert "insecure_cluster: whoever reaches the ports" in caplog.text
        assert executor._cluster_token is None


def test_a_node_without_an_engine_says_why_and_gives_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine_options = two_nodes(folder).model_copy(update={"node_rank": 1, "start_timeout": 0.5})
    monkeypatch.setattr("phalanx.executor.node.LOG_SECONDS", 0.2)
    node = Node(engine_options)
    assert node.run() == 1
    assert re.search(
        r"engine at tcp://127.0.0.1:\d+ \(node 0\) has not answered for \d s: nothing listens at port \d+", caplog.text
    )
    assert all(not psutil.pid_exists(process.pid) for process in node._launcher._ranks.values())


def test_a_node_without_a_route_to_the_engine_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(peer: str) -> str:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("phalanx.executor.node.address_towards", unreachable)
    assert join(two_nodes(folder).model_copy(update={"node_rank": 1})) == 1
    assert "node 1 ends: no route leads to master_addr=127.0.0.1; Network is unreachable; check this host's network" in caplog.text


def test_an_engine_whose_node_never_comes_says_so(folder: Path) -> None:
    executor = RankExecutor(two_nodes(folder).model_copy(update={"start_timeout": 1.0}))
    with pytest.raises(NodeLost, match="node 1 has not joined"):
        executor.start()


def test_ranks_that_do_not_spread_over_the_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="2 nodes"):
        RankExecutor(options(Path("x"), tensor_parallel_size=3, nnodes=2))
    with pytest.raises(LayoutError, match="node_rank=1"):
        join(options(write_checkpoint(tmp_path / "llama", "llama"), node_rank=1))


def test_a_layout_that_the_model_cannot_have_is_refused_on_every_host(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"tensor_parallel_size=5 does not divide .*use one of"):
        join(options(write_checkpoint(tmp_path / "llama", "llama"), tensor_parallel_size=5, nnodes=5, node_rank=1))


def test_a_joining_process_needs_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "phalanx.hardware.probe.detect_machine", lambda: Machine((Gpu(0, "GPU-0", "NVIDIA H200", 90, 1, 1),), 1, 1, 1)
    )
    engine_options = options(Path("x"), device="cuda", tensor_parallel_size=2, nnodes=2, node_rank=1)
    with pytest.raises(LayoutError, match=r"2 ranks.*node 1 has 1 GPU;"):
        Node(engine_options, local_rank=1)
