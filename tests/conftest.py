# SPDX-License-Identifier: Apache-2.0
"""What every test shares: GPU tests that cannot run are reported by name as not run."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

# Rank processes of the tests share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts us in the background has us ignore Ctrl-C, and so would the processes that tests press it on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """A command that runs inside a test configures the logger of its process; the next test has it as it was."""
    logger = logging.getLogger("phalanx")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.propagate, logger.handlers[:] = before[1], before[2]


def gpu_count() -> int:
    """Those that a process started here may use. By nvidia-smi: a machine may have torch alone."""
    from phalanx.hardware.probe import Gpu, choose

    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    here = re.findall(r"^GPU (\d+): (.*) \(UUID: (\S+)\)", listed.stdout, re.MULTILINE)
    gpus = [Gpu(int(index), uuid, name, 0, 0, 0) for index, name, uuid in here]
    return len(choose(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))


SLOW_FILES = (
    "acceptance/test_tokens.py", "acceptance/test_paths.py", "serve/test_llm.py", "acceptance/test_documents.py",
    "executor/test_rank_executor.py", "kernels/sampling/test_filter_thresholds.py", "tune/test_cli.py",
    "kernels/attention/test_decode.py", "kernels/attention/test_prefill.py", "acceptance/test_everything.py",
    "comm/test_twoshot.py",
    "bench/test_load.py", "kernels/gemm/test_block_gemm.py", "kernels/allreduce/test_oneshot.py", "serve/test_client.py",
    "serve/test_lifecycle.py", "executor/test_node.py", "acceptance/test_two_hosts.py", "tune/test_html_report.py",
    "comm/test_oneshot.py", "kernels/sampling/test_gumbel_argmax.py", "models/layers/test_linear_gemv.py",
    "serve/test_app_overload.py", "kernels/ops/test_embedding_rmsnorm.py", "kernels/ops/test_rope_kv_cache.py",
)  # fmt: skip
"""The longest files, the longest first: a file runs on one worker, and one that began last would leave the other worker idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {ROOT / name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
    wanting = {1: [], 2: [], 4: []}
    for item in items:
        for count in wanting:
            if item.get_closest_marker(f"gpu{count}"):
                wanting[count].append(item)
    have = gpu_count() if any(wanting.values()) else 0
    for count, found in wanting.items():
        for item in found:
            if have < count:
                item.add_marker(pytest.mark.skip(reason=f"not run: needs {count} GPU(s), this machine has {have}"))
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="not run: needs root for network namespaces"))
