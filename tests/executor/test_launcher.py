# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.config.options import EngineOptions
from phalanx.errors import LayoutError, OptionError
from phalanx.executor.launcher import HostRanks, host_ranks, kernel_folders
from phalanx.executor.rank_executor import RankExecutor
from tests.support.engine_drive import options


def asked(tp: int, pp: int, nodes: int) -> EngineOptions:
    return EngineOptions(model="x", tensor_parallel_size=tp, pipeline_parallel_size=pp, nnodes=nodes)


def test_ranks_are_spread_evenly_in_order() -> None:
    assert [host_ranks(asked(2, 2, 2), node).ranks for node in (0, 1)] == [range(2), range(2, 4)]


def test_each_process_of_torchrun_is_a_node_with_one_rank_on_its_own_gpu() -> None:
    assert host_ranks(asked(4, 1, 4), 3, local_rank=1) == HostRanks(3, range(3, 4), 1)
    assert host_ranks(asked(4, 1, 2), 1, local_rank=1) == HostRanks(1, range(2, 4), 2)


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"3 ranks.*2 nodes"):
        host_ranks(asked(3, 1, 2), 0)
    with pytest.raises(LayoutError, match="node_rank=2"):
        host_ranks(asked(2, 1, 2), 2)


def test_kernels_are_kept_where_the_option_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert kernel_folders(None) == {}
    assert caplog.messages == []
    found = kernel_folders("new/kernels")
    kept = tmp_path / "new" / "kernels"
    assert found == {"TRITON_CACHE_DIR": f"{kept}/triton", "FLASHINFER_WORKSPACE_BASE": f"{kept}/flashinfer"}
    assert all(Path(folder).is_dir() and not list(Path(folder).iterdir()) for folder in found.values())
    assert caplog.messages == [f"kernel_cache_dir wins: kernels are kept in {kept}/triton, not in TRITON_CACHE_DIR=elsewhere"]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "home" / "kernels" / "triton"))
    assert kernel_folders("~/kernels")["TRITON_CACHE_DIR"] == os.environ["TRITON_CACHE_DIR"]
    assert len(caplog.messages) == 1, "a variable that says the same is no conflict"


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
