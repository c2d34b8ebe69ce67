# SPDX-License-Identifier: Apache-2.0
"""Ranks that fail, stand still or are told to go: the error names the rank, in bounded time, and no process is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from phalanx.config.options import EngineOptions
from phalanx.engine.executor import Executor
from phalanx.engine.messages import RankFacts, SlotAssignment, Step, StepBatch, StepExtent, StepRow, row_result
from phalanx.errors import EngineClosed, EngineError, LayoutError, OptionError, RankDied, RankStalled, WeightError
from phalanx.executor import protocol
from phalanx.executor.heartbeat import HeartbeatMonitor
from phalanx.executor.rank_executor import RankExecutor
from phalanx.hardware.nvml import Gpu
from phalanx.hardware.probe import Machine
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import GREEDY, Drive, all_gone, await_results, expected, options, pids, prompts

pytestmark = pytest.mark.usefixtures("forked_python")

PARENT = """
import json, sys, time
from phalanx.config.options import EngineOptions
from phalanx.executor.rank_executor import RankExecutor
executor = RankExecutor(EngineOptions(**json.loads(sys.argv[1])))
executor.start()
print([handle.pid for handle in executor._handles.values()], flush=True)
time.sleep(100)
"""

FIRST = StepBatch(admitted=[SlotAssignment(0, [5, 6, 7], 3, GREEDY, 1)], rows=[StepRow(0, 0, 3, [5, 6, 7], [1], samples=True)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("executor") / "llama", "llama")


Make = Callable[..., RankExecutor]


@pytest.fixture
def make_executor(folder: Path) -> Iterator[Make]:
    executors: list[RankExecutor] = []

    def make(model: Path = folder, **overrides: Any) -> RankExecutor:
        executors.append(RankExecutor(options(model, **overrides)))
        return executors[-1]

    yield make
    for executor in executors:
        executor.shutdown()


def await_error(executor: RankExecutor, kind: type[EngineError], seconds: float) -> str:
    with pytest.raises(kind) as caught:
        await_results(executor.collect, 100, seconds)
    return str(caught.value)


def test_a_rank_killed_in_mid_step_is_named_and_takes_all_along(make_executor: Make) -> None:
    executor = make_executor(tensor_parallel_size=2)
    executor.start()
    rank_pids = pids(executor)
    os.kill(rank_pids[1], signal.SIGSTOP)
    executor.submit(Step(1, [FIRST]))  # rank 0 now waits for rank 1 in an all-reduce
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(rank_pids[1], signal.SIGKILL)
    message = await_error(executor, RankDied, 10)
    assert message.startswith(f"rank 1 (pid {rank_pids[1]}, node 0) was killed by SIGKILL")
    assert all_gone(rank_pids)
    assert time.monotonic() - begin < 10
    with pytest.raises(RankDied):
        executor.submit(Step(2, [FIRST]))
    with pytest.raises(RankDied):
        executor.collect()
    assert executor.waitables() == []


@pytest.mark.parametrize(("victim", "exchange"), [(0, "ALL_GATHER"), (1, "ONE_SIDED")])
def test_a_rank_killed_within_an_exchange_is_named(make_executor: Make, tmp_path: Path, victim: int, exchange: str) -> None:
    """Data-parallel index 0 has a prompt and index 1 has nothing but experts: either waits for the other in each layer."""
    executor = make_executor(write_checkpoint(tmp_path, "mixtral"), expert_parallel_size=2, expert_exchange=exchange)
    executor.start()
    ranks = pids(executor)
    batches = [FIRST, StepBatch()]
    executor.submit(Step(1, batches, StepExtent.of(batches)))
    (result,) = await_results(executor.collect, 1)
    assert result.batches[1] == []
    assert row_result(result.batches[0][0]).tokens
    os.kill(ranks[victim], signal.SIGSTOP)
    batches = [StepBatch(rows=[StepRow(0, 3, 1, [], samples=True)]), StepBatch()]
    executor.submit(Step(2, batches, StepExtent.of(batches)))  # the other rank now waits in the exchange
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(ranks[victim], signal.SIGKILL)
    error = await_error(executor, RankDied, 10)
    assert error.startswith(f"rank {victim} (pid {ranks[victim]}, node 0) was killed by SIGKILL")
    assert all_gone(ranks)
    assert time.monotonic() - begin < 10


def test_a_rank_without_its_first_heartbeat_is_named(make_executor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped as soon as it is ready: it has sent no heartbeat from which its silence could be counted."""
    heard = HeartbeatMonitor.rank_heartbeat

    def of_rank_0(self: HeartbeatMonitor, rank: int, now: float, place: protocol.RankPlace) -> None:
        if rank == 0:
            heard(self, rank, now, place)

    monkeypatch.setattr(HeartbeatMonitor, "rank_heartbeat", of_rank_0)
    executor = make_executor(tensor_parallel_size=2, stall_timeout=2.0)
    executor.start()
    rank_pids = pids(executor)
    message = await_error(executor, RankStalled, 10)
    assert message.startswith(f"rank 1 (pid {rank_pids[1]}, node 0) has sent no heartbeat for 2 s; it had begun no step")
    assert all_gone(rank_pids)


def test_a_stopped_rank_is_named(make_executor: Make) -> None:
    executor = make_executor(tensor_parallel_size=2, stall_timeout=6.0)
    executor.start()
    rank_pids = pids(executor)
    executor.submit(Step(1, [FIRST]))
    await_results(executor.collect, 1)
    time.sleep(1.5)  # a heartbeat reports the step
    os.kill(rank_pids[1], signal.SIGSTOP)
    executor.submit(Step(2, [StepBatch(rows=[StepRow(0, 3, 1, [], samples=True)])]))
    message = await_error(executor, RankStalled, 30)
    assert f"rank 1 (pid {rank_pids[1]}, node 0) has sent no heartbeat" in message
    assert "finished step 1" in message
    assert all_gone(rank_pids)


def test_a_rank_that_was_stopped_for_a_while_goes_on(make_executor: Make, folder: Path) -> None:
    """SIGSTOP and SIGCONT; and SIGHUP, which is for the front process."""
    executor = make_executor(tensor_parallel_size=2, stall_timeout=6.0)
    executor.start()
    texts, rank_pids = prompts(2, seed=9), pids(executor)
    for pid in rank_pids:
        os.kill(pid, signal.SIGHUP)
    os.kill(rank_pids[1], signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (rank_pids[1], signal.SIGCONT)).start()
    begin = time.monotonic()
    assert Drive(executor.submit, executor.collect).generate(texts, 4) == [expected(folder, text, 4) for text in texts]
    assert time.monotonic() - begin > 1.5, "it did stand still"
    assert all(psutil.pid_exists(pid) for pid in rank_pids)


def test_a_stopped_rank_is_named_within_30_seconds_by_default() -> None:
    assert EngineOptions(model="x").stall_timeout + 2 < 30


def test_a_step_that_is_never_done_names_who_has_not_done_it(make_executor: Make, capfd: pytest.CaptureFixture[str]) -> None:
    executor = make_executor(step_timeout=2.0, stall_timeout=100.0)
    executor.start()
    rank_pids = pids(executor)
    os.kill(rank_pids[0], signal.SIGSTOP)
    executor.submit(Step(1, [FIRST]))
    message = await_error(executor, RankStalled, 20)
    assert message.startswith("rank 0 ")
    assert "step 1 has taken" in message
    assert "may take 2 s" in message
    assert all_gone(rank_pids)


def test_a_killed_parent_leaves_no_rank(folder: Path) -> None:
    text = options(folder, tensor_parallel_size=2).model_dump_json()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, text], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    line = parent.stdout.readline()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    rank_pids = [int(pid) for pid in line.strip(b"[]\n").split(b",")]
    assert len(rank_pids) == 2
    assert all_gone(rank_pids)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("mismatched", r"rank [01]: model\.layers\.1\.mlp\.down_proj\.weight in .*the two contradict each other"),
        ("truncated", r"rank [01]: .*model\.safetensors cannot be read.*truncated"),
        ("missing", r"rank [01]: .* holds no \*\.safetensors"),
    ],
)
def test_what_is_wrong_with_the_weights_reaches_the_caller(
    folder: Path, tmp_path: Path, make_executor: Make, wrong: str, problem: str
) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    file = tmp_path / "model.safetensors"
    if wrong == "mismatched":
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = tensors[name][:, :-8].contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    elif wrong == "truncated":
        file.write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    executor = make_executor(tmp_path, tensor_parallel_size=2)
    with pytest.raises(WeightError, match=problem):
        executor.start()
    assert all_gone(pids(executor))


def test_more_ranks_than_gpus_start_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    gpus = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", 90, 1, 1) for i in range(2))
    monkeypatch.setattr("phalanx.hardware.probe.detect_machine", lambda: Machine(gpus, 1, 1, 1))
    with pytest.raises(LayoutError, match=r"4 ranks.*node 0 has 2 GPUs.*at most 2"):
        RankExecutor(options(folder, device="cuda", tensor_parallel_size=4))
    RankExecutor(options(folder, device="cuda", tensor_parallel_size=2)).shutdown()


def test_a_late_start_names_the_laggard(make_executor: Make) -> None:
    executor = make_executor(start_timeout=0.01)
    with pytest.raises(EngineError, match=r"did not start within 0.01 s.*rank 0"):
        executor.start()
    assert all_gone(pids(executor))


def test_a_taken_port_is_said_before_anything_starts(make_executor: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        token = "a token of sixteen bytes or more"
        executor = make_executor(nnodes=2, tensor_parallel_size=2, master_port=port, cluster_token=token)
        with pytest.raises(OptionError, match="master_port"):
            executor.start()
    assert executor._handles == {}


def test_two_engines_on_one_machine_never_meet(make_executor: Make) -> None:
    engines = [make_executor(tensor_parallel_size=2), make_executor(tensor_parallel_size=2)]
    for engine in engines:
        engine.start()
        end = time.monotonic() + 10
        while engine._startup.folder is not None and time.monotonic() < end:  # on a busy host a rank's first heartbeat comes later
            assert engine.collect() == []
            time.sleep(0.01)
        assert engine._startup.folder is None  # nothing stays behind, even if all is killed from here on
    for engine in engines:
        for pid in pids(engine):
            os.kill(pid, signal.SIGTERM)  # as a service manager does to all: ranks end when their engine says so
        engine.submit(Step(1, [FIRST]))
    first, second = (await_results(engine.collect, 1)[0] for engine in engines)
    assert first == second
    rank_pids = [pid for engine in engines for pid in pids(engine)]
    begin = time.monotonic()
    for engine in engines:
        engine.shutdown()
    assert time.monotonic() - begin < 10
    assert all_gone(rank_pids, 0.1)
    assert [handle.child.process.returncode for handle in engines[0]._handles.values()] == [0, 0]
    engines[0].shutdown()
    with pytest.raises(EngineClosed):
        engines[0].submit(Step(2, [FIRST]))


def test_an_error_inside_a_rank_names_it(make_executor: Make) -> None:
    executor = make_executor()
    executor.start()
    rows = [StepRow(1, 0, 1, [5], [1], samples=True)]  # never admitted
    executor.submit(Step(1, [StepBatch(rows=rows)]))
    message = await_error(executor, EngineError, 20)
    assert message.startswith("rank 0 failed: ValueError: slots [1]")


def test_as_many_steps_are_in_flight_as_there_are_stages_and_never_less_than_two() -> None:
    depths = [RankExecutor(options(Path("x"), pipeline_parallel_size=stages)).depth for stages in (1, 2, 4)]
    assert depths == [2, 2, 4]


def test_a_message_about_another_place_than_its_senders_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    executor = RankExecutor(options(Path("x"), tensor_parallel_size=2))

    def received(message: Any) -> Any:
        return executor._message([protocol.sender_identity(message), protocol.encode(message)])

    facts = RankFacts(1, 0, "cpu", (0, 1))
    right = [protocol.Hello(1, 0, 7), protocol.RankReady(1, facts), protocol.RankExit(0, 1, -9)]
    assert [received(message) for message in right] == right
    for message in (
        protocol.Hello(1, 1, 7), protocol.Hello(1, -1, 7), protocol.Hello(2, 0, 7), protocol.RankExit(1, 1, -9),
        protocol.RankReady(1, RankFacts(0, 0, "cpu", (0, 1))), protocol.RankReady(1, RankFacts(1, 1, "cpu", (0, 1))),
    ):  # fmt: skip
        caplog.clear()
        assert received(message) is None
        assert f"it sent {type(message).__name__} of another process" in caplog.text


def test_a_request_to_the_store_that_no_rank_makes_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    executor = RankExecutor(options(Path("x")))
    executor._receive(protocol.StoreRequest(0, 1, "add", ["key"], [b"many"]))
    assert "a message of b'store-rank-0' was dropped: no rank makes such a request" in caplog.text


def test_an_executor_that_was_never_started_runs_nothing_and_ends_quietly() -> None:
    executor: Executor = RankExecutor(options(Path("x")))
    assert executor.waitables() == []
    assert all(counts == {} for counts in executor.stats())
    with pytest.raises(EngineClosed, match="not running"):
        executor.collect()
    executor.shutdown()
    executor.shutdown()


@pytest.mark.usefixtures("new_interpreters")
@pytest.mark.parametrize("module", ["engine.process", "executor.rank_executor", "executor.node"])
def test_torch_stays_out_of_the_engines_process(module: str) -> None:
    code = f"import sys, phalanx.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
