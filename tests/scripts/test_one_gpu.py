# SPDX-License-Identifier: Apache-2.0
"""The copy of the tree whose ranks share one GPU: each of its edits has its place, and says what it is meant to."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("forked_python")

SCRIPT = Path(__file__).parents[2] / "scripts" / "one_gpu.py"


@pytest.fixture(scope="module")
def one_gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_ranks_stand_on_the_first_gpu_and_each_is_a_host_to_nccl(one_gpu: ModuleType, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ran = subprocess.run([sys.executable, SCRIPT, copy, "--gpus", "3"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{copy}: its ranks share GPU 0, which replaces 3\n"
    edited = {edit.file for edit in one_gpu.edits(3)}
    for file in edited:
        ast.parse((copy / file).read_text(encoding="utf-8"))
        assert (copy / file).read_text(encoding="utf-8") != (one_gpu.ROOT / file).read_text(encoding="utf-8")
    assert not any((copy / file).read_bytes() != (one_gpu.ROOT / file).read_bytes() for file in unedited(copy, edited))
    program = """if True:
        import json, sys
        from unittest.mock import MagicMock, patch
        from phalanx import launch
        from phalanx.config.options import EngineOptions
        from phalanx.executor.launcher import LocalLauncher, host_ranks
        from phalanx.hardware import nvml, probe
        from phalanx.worker import worker
        with patch.object(probe, "list_gpus", lambda: nvml.Listed((nvml.Gpu(0, "GPU-1", "H200", 90, 1, 1),))):
            gpus = len(probe.detect_machine("0").gpus)
        started = []
        with patch.object(launch, "start", lambda module, config, *_, **__: started.append(config["device_index"]) or MagicMock()):
            options = EngineOptions(model="demo", tensor_parallel_size=3)
            LocalLauncher(options).start(host_ranks(options, 0), {})
        import os
        with patch.object(launch, "read_config", lambda: {"rank": 2, "node": 0, "engine": "tcp://127.0.0.1:1"}):
            with patch.object(worker, "EngineChannel", side_effect=KeyboardInterrupt):
                try:
                    worker.main()
                except KeyboardInterrupt:
                    pass
        print(json.dumps([gpus, started, os.environ["NCCL_HOSTID"]]))
    """
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=copy, env={"PYTHONPATH": str(copy / "src")}
    )
    assert completed.stdout == '[3, [0, 0, 0], "rank2"]\n'


def unedited(copy: Path, edited: set[str]) -> list[str]:
    names = [str(path.relative_to(copy)) for path in copy.rglob("*.py")]
    assert len(names) > 300
    return [name for name in names if name not in edited]


def test_a_place_that_has_changed_is_named(one_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = one_gpu.Edit("src/phalanx/errors.py", "what was there once", "")
    monkeypatch.setattr(one_gpu, "edits", lambda gpus: iter([gone]))
    with pytest.raises(SystemExit, match=r"errors.py has 0 places like 'what was there once', not one"):
        one_gpu.make(tmp_path / "copy", 2)
    with pytest.raises(SystemExit, match="exists: name a new folder"):
        one_gpu.make(tmp_path, 2)
