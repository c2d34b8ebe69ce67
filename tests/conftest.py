# SPDX-License-Identifier: Apache-2.0
"""What every test shares: GPU tests that cannot run are reported by name as not run."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch, translate
from pathlib import Path

import hypothesis
import pytest

from tests.support.sweeps import SWEEPS

ROOT = Path(__file__).parent

# Nothing that is imported or collected is garbage: to look through all of it again and again is a sixth of the time that it takes.
gc.disable()

# Rank processes of the tests share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes depends on what else runs: many tests have the lowest priority.
hypothesis.settings.register_profile("phalanx", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("phalanx")

# A shell that starts us in the background has us ignore Ctrl-C, and so would the processes that tests press it on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """A command that runs inside a test configures the loggers of its process; the next test has them as they were."""
    loggers = [logging.getLogger(name) for name in ("phalanx", "uvicorn", "asyncio", "py.warnings")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        if logger.level != level:  # to set it empties the caches of all loggers
            logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """What code under test changes for the children of its process: with other variables, no later process of a test is a fork."""
    before = dict(os.environ)
    yield
    for name in (before.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(scope="session")
def python_template() -> Iterator[None]:
    from tests.support import forked_python

    yield
    forked_python.stop_template()


@pytest.fixture(scope="module")
def forked_python(python_template: None) -> Iterator[None]:
    """For modules that start many processes: those of Python are forks. `pytestmark = pytest.mark.usefixtures("forked_python")`"""
    from tests.support import forked_python

    with forked_python.forked_python():
        yield


@pytest.fixture
def new_interpreters(forked_python: None) -> Iterator[None]:
    """For a test of such a module that is about the start of an interpreter, or what is imported in it."""
    from tests.support import forked_python

    with forked_python.new_interpreters():
        yield


@pytest.fixture
def attention_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the kernels of attention."""
    from tests.support.worker_graphs import put_references

    put_references(monkeypatch)


def gpu_count() -> int:
    """Those that a process started here may use. By nvidia-smi: a machine may have torch alone."""
    from phalanx.errors import OptionError
    from phalanx.hardware.nvml import Gpu
    from phalanx.hardware.visible import choose

    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    here = re.findall(r"^GPU (\d+): (.*) \(UUID: (\S+)\)", listed.stdout, re.MULTILINE)
    gpus = [Gpu(int(index), uuid, name, 0, 0, 0) for index, name, uuid in here]
    try:
        return len(choose(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
    except OptionError:
        return 0


SLOW_FILES = (
    "acceptance/test_ray_hosts.py", "serve/test_app_schemathesis.py", "acceptance/test_tokens.py", "acceptance/test_kubelet.py",
    "serve/test_app_worst_bodies.py", "kernels/attention/test_prefill.py", "acceptance/test_paths.py",
    "kernels/attention/test_decode.py", "acceptance/test_tokens_experts.py", "health/test_checks_host.py",
    "acceptance/test_everything.py", "serve/test_llm.py", "tune/test_cli.py", "comm/test_twoshot.py",
    "kernels/gemm/test_block_gemm.py", "acceptance/test_tokens_deepseek.py", "serve/test_app_ranks.py",
    "kernels/sampling/test_filter_thresholds.py", "kernels/moe/test_grouped_gemm.py", "worker/test_cuda_graphs_stages.py",
    "comm/test_oneshot.py", "kernels/moe/test_biased_gemm.py", "worker/test_memory_profile_variants.py",
    "worker/test_cuda_graphs_mixed.py", "kernels/attention/test_latent_decode.py", "acceptance/test_experts.py",
    "acceptance/test_tokens_gpt_oss.py", "health/test_failed_start.py", "kernels/ops/test_silu_and_mul.py",
    "serve/test_app_surroundings.py", "serve/structured_output/test_compiler.py", "bench/prediction/test_calibrate.py",
    "acceptance/test_two_hosts.py", "serve/test_allocator.py", "serve/test_app_reasoning.py", "tune/test_runner.py",
    "worker/test_worker.py", "worker/test_token_return.py", "tune/test_html_report.py", "acceptance/test_documents.py",
    "kernels/gemm/test_gemv_fused.py", "serve/test_app_overload.py", "executor/test_node.py", "acceptance/test_hostile_host.py",
)  # fmt: skip
"""The longest files, the longest first: a file runs on one worker, and one that began last would leave the others idle."""
BACKGROUND = (
    "kernels/[!c]*", "models/*", "tables/*", "bench/prediction/test_simulate.py", "comm/sequence_parallel/*",
    "comm/test_oneshot.py", "comm/test_twoshot.py", "worker/test_memory_profile_variants.py", "worker/test_cuda_graphs*.py",
    "tune/test_html_report.py",
    "tune/test_plots.py", "deploy/test_k8s_schemas.py", "acceptance/test_fp8_error.py",
)  # fmt: skip
"""Files whose tests only compute, without a limit of time: see `scripts/run_tests.py`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-sweeps", action="store_true", help="leave out the tests of tests/support/sweeps.py")
    parser.addoption("--lane", choices=("foreground", "background"), help="run the tests of one lane, see scripts/run_tests.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    lane = config.getoption("--lane")
    if lane is None or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT).as_posix() if collection_path.is_relative_to(ROOT) else ""
    return True if any(fnmatch(name, pattern) for pattern in BACKGROUND) != (lane == "background") else None


_SWEEPS = re.compile("|".join(map(translate, SWEEPS)))


def is_sweep(nodeid: str) -> bool:
    name = nodeid.removeprefix("tests/")
    return bool(_SWEEPS.match(name) or _SWEEPS.match(name.partition("::")[0]))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--without-sweeps"):
        sweeps = [item for item in items if is_sweep(item.nodeid)]
        config.hook.pytest_deselected(items=sweeps)
        items[:] = [item for item in items if not is_sweep(item.nodeid)]
    first = {ROOT / name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
    wanting = {1: [], 2: [], 4: []}
    for item in items:
        for count in wanting:
            if item.get_closest_marker(f"gpu{count}"):
                wanting[count].append(item)
    have = gpu_count() if any(wanting.values()) else 0
    for count, gpu_items in wanting.items():
        for item in gpu_items:
            if have < count:
                item.add_marker(pytest.mark.skip(reason=f"not run: needs {count} GPU(s), this machine has {have}"))
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="not run: needs root for network namespaces"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What of the tests that need GPUs ran, in a line for each number of GPUs."""
    for count in (1, 2, 4):
        outcomes = {
            outcome: sum(f"gpu{count}" in getattr(report, "keywords", ()) for report in terminalreporter.stats.get(outcome, ()))
            for outcome in ("passed", "failed", "error", "skipped")
        }
        if sum(outcomes.values()) > outcomes["skipped"]:
            ran = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items() if number)
            terminalreporter.write_line(f"tests that need {count} GPU(s): {ran}, on {gpu_count()} GPU(s)")
