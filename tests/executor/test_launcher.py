# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import psutil
import pytest

from phalanx import launch
from phalanx.config.options import EngineOptions
from phalanx.deploy.ray_serve import free_ports
from phalanx.errors import LayoutError, OptionError, RankDied
from phalanx.executor.launcher import (
    SLEEPING_THREADS,
    HostRanks,
    Launcher,
    LocalLauncher,
    host_ranks,
    kernel_folders,
    load_launcher,
)
from phalanx.executor.rank_executor import RankExecutor
from phalanx.hardware.nvml import Gpu
from phalanx.hardware.probe import Machine, cores
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_drive import Drive, await_results, expected, options, prompts

pytestmark = pytest.mark.usefixtures("forked_python")


def engine_options(tp: int, pp: int, nodes: int) -> EngineOptions:
    return EngineOptions(model="x", tensor_parallel_size=tp, pipeline_parallel_size=pp, nnodes=nodes)


def test_ranks_are_spread_evenly_in_order() -> None:
    assert [host_ranks(engine_options(2, 2, 2), node).ranks for node in (0, 1)] == [range(2), range(2, 4)]


def test_each_process_of_torchrun_is_a_node_with_one_rank_on_its_own_gpu() -> None:
    assert host_ranks(engine_options(4, 1, 4), 3, local_rank=1) == HostRanks(3, range(3, 4), 1)
    assert host_ranks(engine_options(4, 1, 2), 1, local_rank=1) == HostRanks(1, range(2, 4), 2)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"3 ranks.*2 nodes"):
        host_ranks(engine_options(3, 1, 2), 0)
    with pytest.raises(LayoutError, match="node_rank=2"):
        host_ranks(engine_options(2, 1, 2), 2)


def test_kernels_are_kept_where_the_option_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert kernel_folders(None) == {}
    assert caplog.messages == []
    folders = kernel_folders("new/kernels")
    parent = tmp_path / "new" / "kernels"
    assert folders == {"TRITON_CACHE_DIR": f"{parent}/triton", "FLASHINFER_WORKSPACE_BASE": f"{parent}/flashinfer"}
    assert all(Path(folder).is_dir() and not list(Path(folder).iterdir()) for folder in folders.values())
    assert caplog.messages == [f"kernel_cache_dir wins: kernels are kept in {parent}/triton, not in TRITON_CACHE_DIR=elsewhere"]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "home" / "kernels" / "triton"))
    assert kernel_folders("~/kernels")["TRITON_CACHE_DIR"] == os.environ["TRITON_CACHE_DIR"]
    assert len(caplog.messages) == 1, "a variable that says the same is no conflict"


@pytest.mark.parametrize("part", ["", "triton"])
def test_a_kernel_folder_that_others_can_write_is_refused(tmp_path: Path, part: str) -> None:
    kernels = tmp_path / "kernels"
    kernel_folders(str(kernels))
    (kernels / part).chmod(0o777)
    with pytest.raises(OptionError, match=r"is not safe; .*every user can write it \(mode 777\).*run: chmod o-w"):
        kernel_folders(str(kernels))
    (kernels / part).chmod(0o755)
    kernel_folders(str(kernels))


@pytest.mark.skipif(os.geteuid() != 0, reason="not run: only root can give a folder away")
@pytest.mark.parametrize(("owner", "group", "mode"), [(12345, 0, 0o755), (0, 12345, 0o775)])
def test_a_kernel_folder_of_another_user_is_refused(tmp_path: Path, owner: int, group: int, mode: int) -> None:
    tmp_path.chmod(mode)
    os.chown(tmp_path, owner, group)
    with pytest.raises(OptionError, match=r"is not safe; .*12345"):
        kernel_folders(str(tmp_path))


def test_device_i_of_a_rank_is_the_ith_usable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By UUID: CUDA's own numbers count GPUs that ail, and may have another order."""
    gpus = tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 90, 1, 1) for index in (0, 2, 3))
    monkeypatch.setattr("phalanx.hardware.probe.detect_machine", lambda: Machine(gpus, 1, 1, 1, unusable="GPU 1 is lost"))
    started = []
    monkeypatch.setattr(launch, "start", lambda module, config, title, **kinds: started.append((config, kinds)) or MagicMock())
    three = EngineOptions.of(model="demo", device="cuda", tensor_parallel_size=3)
    launcher = LocalLauncher(three)
    launcher.start(host_ranks(three, 0), {})
    assert [config["device_index"] for config, _ in started] == [0, 1, 2]
    assert {kinds["environment"]["CUDA_VISIBLE_DEVICES"] for _, kinds in started} == {"GPU-0,GPU-2,GPU-3"}
    instances = tuple(Gpu(0, f"MIG-{index}", "NVIDIA H200 MIG 1g.18gb", 90, 1, 1) for index in range(4))
    four = HostRanks(0, range(4))
    with pytest.raises(LayoutError, match="4 ranks do not fit on the GPUs of one host; node 0 has 3 GPUs; GPU 1 is lost"):
        launcher.require_devices(four)
    monkeypatch.setattr("phalanx.hardware.probe.detect_machine", lambda: Machine(instances, 1, 1, 1))
    launcher = LocalLauncher(three)
    with pytest.raises(LayoutError, match="4 ranks cannot share instances of MIG; CUDA shows one instance to a process"):
        launcher.require_devices(four)
    launcher.require_devices(HostRanks(0, range(1)))


def test_kernels_that_cannot_be_kept_are_an_error_before_any_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    executor = RankExecutor(options(Path("x"), kernel_cache_dir=str(tmp_path / "file")))
    with pytest.raises(
        OptionError, match=r"kernel_cache_dir='.*/file'.*file/triton cannot be made; Not a directory; give a folder"
    ):
        executor.start()
    assert executor._handles == {}

    def full(dir: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(OptionError, match=r"triton cannot be written; No space left on device; give a folder"):
        kernel_folders(str(tmp_path / "kernels"))
    with pytest.raises(OptionError, match=r"'~nobody-is-called-so/k' cannot be resolved; .*home directory"):
        kernel_folders("~nobody-is-called-so/k")


OWN_LAUNCHER = '''
"""A launcher outside of Phalanx: it splits the ranks over two imagined hosts, each with a LocalLauncher, reached over TCP."""
import selectors

from phalanx.executor.launcher import HostRanks, LocalLauncher

STARTED = []


class TwoHosts:
    on_this_host = False

    def __init__(self, options):
        self._hosts = [LocalLauncher(options) for _ in range(2)]
        self._selector = selectors.DefaultSelector()

    def require_devices(self, ranks):
        pass

    def start(self, ranks, config):
        half = len(ranks.ranks) // 2
        handles = {}
        for number, (host, part) in enumerate(zip(self._hosts, (ranks.ranks[:half], ranks.ranks[half:]), strict=True)):
            handles |= host.start(HostRanks(number, part), config)
            self._selector.register(host.fileno(), selectors.EVENT_READ)
        STARTED.append(dict(config))
        return handles

    def ended(self):
        return [ended for host in self._hosts for ended in host.ended()]

    def fileno(self):
        return self._selector.fileno()

    def stop(self, grace):
        for host in self._hosts:
            host.stop(grace)
        self._selector.close()
'''


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "own_launcher.py").write_text(OWN_LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_launcher")
    sys.modules.pop("own_launcher", None)


def test_a_launcher_of_ones_own_starts_real_ranks_through_configuration_alone(tmp_path: Path, two_hosts: ModuleType) -> None:
    folder, port = write_checkpoint(tmp_path / "llama", "llama"), free_ports(2)
    executor = RankExecutor(
        options(folder, tensor_parallel_size=2, launcher="own_launcher:TwoHosts", master_addr="127.0.0.1", master_port=port)
    )
    try:
        facts, _ = executor.start()
        assert [(rank.rank, rank.node) for rank in facts] == [(0, 0), (1, 1)]
        assert [(config["engine"], config["peer"]) for config in two_hosts.STARTED] == [(f"tcp://127.0.0.1:{port}", "127.0.0.1")]
        texts = prompts(2, seed=9)
        tokens = Drive(executor.submit, executor.collect).generate(texts, 4)
        assert tokens == [expected(folder, text, 4) for text in texts]
        pids = [handle.pid for handle in executor._handles.values()]  # type: ignore[attr-defined]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankDied, match=rf"rank 1 \(pid {pids[1]}, node 1\) was killed by SIGKILL"):
            await_results(executor.collect, 1, 10)
    finally:
        executor.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_launcher_that_cannot_be_loaded_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="launcher='nowhere:Launcher' cannot be loaded"):
        RankExecutor(options(Path("x"), launcher="nowhere:Launcher"))


def test_a_launcher_that_was_never_started_ends_quietly() -> None:
    launcher: Launcher = load_launcher(options(Path("x")))
    assert isinstance(launcher, LocalLauncher)
    assert launcher.ended() == []
    launcher.stop(1.0)
    launcher.stop(0.0)


def test_cpu_ranks_get_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def start(module: str, config: dict[str, object], title: str, **more: object) -> None:
        calls.append({**config, **more})
        raise OSError("not started")

    monkeypatch.setattr("phalanx.launch.start", start)
    monkeypatch.setattr("phalanx.executor.launcher.free_cores", lambda: 3)
    for device, free, defaults in (("cpu", 3, SLEEPING_THREADS), ("cuda", cores(), None)):
        with pytest.raises(OSError, match="not started"):
            LocalLauncher(EngineOptions(model="demo", device=device)).start(HostRanks(0, range(1)), {})
        assert (calls[-1]["free_cores"], calls[-1]["defaults"]) == (free, defaults)
