# SPDX-License-Identifier: Apache-2.0
"""Outputs in the pages docs/topology.md and docs/troubleshooting.md are made here, on machines whose NVML is a recording.

HEALTH_TEST_WRITE_PAGES=1 writes them; else each must be what the code prints.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from phalanx.errors import EngineError
from phalanx.health import doctor, failed_start, topology
from phalanx.health.host import ResourceLimit
from phalanx.health.pairs import Measured, Measurements
from phalanx.health.registry import every, named
from phalanx.health.servers import visit
from tests.support.health_nvml import machine, struct
from tests.support.health_subject import metrics_text, served, subject

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"(<!-- output: (\w+) -->\n```text\n)(.*?)(```\n)", re.DOTALL)
PAGES = ("topology.md", "troubleshooting.md")
HOST = {"name": "node-0", "cores": 32, "memory": 256 << 30, "numa": {"0": "0-31"}, "shm": 16 << 30}
NETWORK = [
    {"name": "eth0", "kind": "ethernet", "rate": "25000 Mbit/s", "state": "up", "addresses": "10.0.0.7"},
    {"name": "mlx5_0", "kind": "RDMA", "rate": "400 Gb/sec (4X NDR)", "state": "active", "addresses": ""},
]


def printed(renderable) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A host with an RDMA device."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    return folder


def topo(examined, measurements=None) -> str:
    page = topology.survey(examined, measurements)
    return printed(topology.show(dataclasses.replace(page, host=HOST, network=NETWORK)))


def examined_by(names, examined) -> str:
    report = dataclasses.replace(doctor.examine(examined, [named(name) for name in names]), seconds=0.4)
    out = io.StringIO()
    doctor.show(report, Console(file=out, width=120))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def topo_h200(root) -> str:
    pairs = (Measured(0, 1, 393.4e9, 8.7e-6, True), Measured(1, 0, 391.2e9, 8.9e-6, True))
    return topo(subject("llama-3-70b", nvml=machine(2), root=root), Measurements(pairs))


def topo_pcie(root) -> str:
    pairs = (Measured(0, 1, 24.1e9, 14.2e-6, True), Measured(1, 0, 24.3e9, 14.0e-6, True))
    return topo(
        subject("llama-3-8b", nvml=machine(2, name="NVIDIA L40S", nvlink=False, switch=False), root=root), Measurements(pairs)
    )


def out_of_memory(root) -> str:
    nvml = machine(4, name="NVIDIA H100 80GB HBM3", memory=85_520_809_984)
    return examined_by(["memory_budget"], subject("llama-3-70b", nvml=nvml))


def uneven(root) -> str:
    nvml = machine(2).change("nvmlDeviceGetEnforcedPowerLimit", 500_000, gpu=1).change("nvmlDeviceGetNvLinkState", 0, 17, gpu=1)
    return examined_by(["nvlink_links", "power_limit", "ecc", "fabric"], subject(nvml=nvml))


def failed(root) -> str:
    nvml = machine(1).change("nvmlDeviceGetMemoryInfo", struct(total=150_754_820_096, used=136_754_820_096, free=14_000_000_000))
    error = EngineError("rank 0 failed: OutOfMemoryError: CUDA out of memory", next="its traceback is in the log")
    examined = subject("llama-3-8b", nvml=nvml)
    findings = [finding for finding in failed_start.find(str(error), examined) if "needed on GPU" in finding.summary]
    return f"phalanx: {failed_start.with_findings(error, findings)}\n"


def failed_on_cpu(root) -> str:
    failure = "rank 0 failed: RuntimeError: DefaultCPUAllocator: can't allocate memory"
    error = EngineError(failure, next="its traceback is in the log")
    examined = subject("llama-3-8b", device="cpu", kv_cache_bytes=16 << 30)
    limits = {"as": ResourceLimit(48 << 30, None)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(examined.host), "limit", lambda host, name: limits.get(name, ResourceLimit(None, None)))
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=256 << 30))
        findings = failed_start.find(str(error), examined)
    return f"phalanx: {failed_start.with_findings(error, findings)}\n"


def uneven_memory(root) -> str:
    ranks = {rank: {"weights": size, "kv": size, "capacity": 141 << 30} for rank, size in enumerate((60 << 30, 27 << 30))}
    with served(metrics_text(rank_bytes=ranks)) as url:
        examined = subject()
        examined.servers = (visit(url, interval=0.01),)
        return examined_by(["server_balance"], examined).replace(url, "http://host:8000")


def checks(root) -> str:
    return "".join(f"{check.name:18} {check.what}\n" for check in every())


OUTPUTS = {
    make.__name__: make for make in (topo_h200, topo_pcie, out_of_memory, uneven, failed, failed_on_cpu, uneven_memory, checks)
}


@pytest.mark.parametrize("page", PAGES)
def test_outputs_are_what_the_code_prints(page, root):
    file = DOCS / page
    text = file.read_text(encoding="utf-8")
    names = [name for _, name, _, _ in BLOCK.findall(text)]
    assert names, f"{page} has no output"
    drawn = BLOCK.sub(lambda match: match[1] + OUTPUTS[match[2]](root) + match[4], text)
    if "HEALTH_TEST_WRITE_PAGES" in os.environ:
        file.write_text(drawn, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == drawn


def test_every_output_is_shown_somewhere():
    shown = {name for page in PAGES for _, name, _, _ in BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))}
    assert shown == OUTPUTS.keys()


def test_every_check_is_in_the_page():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for check in every():
        assert re.search(rf"^{check.name} ", text, flags=re.MULTILINE), check.name
