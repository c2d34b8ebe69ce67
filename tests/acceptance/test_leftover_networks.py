# SPDX-License-Identifier: Apache-2.0
"""A run that was killed leaves network namespaces with processes in them, a link and its addresses: the next run removes them, and
uses no network that this machine has a way to. What a run that still goes on has stays as it is."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import kubelet, namespaces
from tests.support.serve_processes import python_path, until

pytestmark = [pytest.mark.root, pytest.mark.skipif(shutil.which("ip") is None, reason="not run: needs iproute2")]

# A cluster with the network of one pod, and a process in that; it stays until it is killed.
RUN = """
import pathlib, subprocess, sys, time
from tests.support.kubelet import Cluster
cluster = Cluster(pathlib.Path(sys.argv[1]), {})
namespace, address = cluster.network("pod")
process = subprocess.Popen(["ip", "netns", "exec", namespace, "sleep", "600"])
while pathlib.Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep":
    time.sleep(0.01)
print(namespace, address, process.pid, flush=True)
time.sleep(600)
"""


def names() -> str:
    return "".join(
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
        for words in (("netns", "list"), ("-o", "link", "show"))
    )


def test_what_a_killed_run_left_is_removed_and_a_running_ones_stays(tmp_path: Path) -> None:
    if not kubelet.has_bridges():
        pytest.skip("not run: this kernel has no bridges")
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": python_path(), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    ) as run:
        try:
            assert run.stdout is not None
            namespace, address, process = run.stdout.readline().split()
            network = address.rpartition(".")[0]
            assert namespaces.free_network() != network
            assert not [name for name in namespaces.sweep() if str(run.pid) in name], "the run goes on"
            assert namespace in names()
        finally:
            run.send_signal(signal.SIGKILL)
    assert namespace in names()
    assert f"pk{run.pid}" in names()
    assert psutil.pid_exists(int(process))
    removed = namespaces.sweep()
    assert {namespace, f"pk{run.pid}"} <= set(removed)
    assert f"phalanx{run.pid}-" not in names()
    assert f"pk{run.pid}" not in names()
    until(lambda: not psutil.pid_exists(int(process)) or psutil.Process(int(process)).status() == psutil.STATUS_ZOMBIE)
    routes = subprocess.run(["ip", "-4", "route", "show"], check=True, capture_output=True, text=True).stdout
    assert network not in routes


def test_a_network_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first = namespaces.free_network()
    shown = {"address": f"9: pk1    inet {first}.254/24 scope global pk1\n", "route": "default via 192.0.2.1 dev eth0\n"}

    def answer(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, stdout=shown["address" if "address" in words else "route"])

    monkeypatch.setattr(subprocess, "run", answer)
    assert namespaces.free_network() not in ("", first)
