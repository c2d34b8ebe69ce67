# SPDX-License-Identifier: Apache-2.0
"""The manifests of one node and of two are run: `phalanx deploy k8s` writes them, and a small kubelet (tests/support/kubelet.py)
runs their containers in network namespaces, as uid 65534 on a read-only root. The leader's name resolves late; probes, a killed
follower, a rolling update under load, a frozen server and one that never starts go as in a cluster."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from phalanx.cli import main
from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy import k8s
from phalanx.deploy.options import K8sOptions
from phalanx.deploy.serve_flags import ServeFlags
from tests.support import kubelet
from tests.support.pod_container import TOOLS

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
    *(pytest.mark.skipif(shutil.which(tool) is None, reason=f"not run: needs {tool}") for tool in TOOLS),
]

TOKEN = "the token of the pods of one group"
LATE_SECONDS = 2.0
START_SECONDS = 150
CLIENTS, TOKENS, LONG_TOKENS = 2, 40, 200


def workload() -> dict[str, Any]:
    """The LeaderWorkerSet of a small server on two nodes without GPUs."""
    engine = EngineOptions.of(
        model="demo", device="cpu", pipeline_parallel_size=2, nnodes=2, max_seq_len=512, kv_cache_bytes=1 << 26
    )  # fmt: skip
    flags = ServeFlags(engine, ServeOptions.of(shutdown_timeout=30.0))
    seconds = START_SECONDS * kubelet.FASTER  # a busy machine starts it late
    options = K8sOptions.of(image="phalanx:1", name="demo", startup_seconds=seconds)
    objects = list(yaml.safe_load_all(k8s.text(flags, options)))
    (one,) = [each for each in objects if each["kind"] == "LeaderWorkerSet"]
    return one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kubelet.Cluster]:
    if not kubelet.has_bridges():
        pytest.skip("not run: this kernel has no bridges")
    secrets = {"demo-cluster-token": {"cluster-token": TOKEN}}
    with kubelet.cluster(tmp_path_factory.mktemp("pods"), secrets) as one:
        yield one


@pytest.fixture(scope="module")
def group(cluster: kubelet.Cluster) -> kubelet.Group:
    return cluster.start(workload(), 0, late=LATE_SECONDS)


REFUSED = "503 []"


def completed(url: str, tokens: int) -> str:
    """The problem with a streamed answer; empty where it is whole."""
    body = {"model": "demo", "prompt": "Phalanx", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    except httpx.HTTPError as error:
        return repr(error)
    if answer.status_code != 200 or not lines or lines[-1] != "[DONE]":
        return f"{answer.status_code} {lines[-1:]}"
    count = json.loads(lines[-2])["usage"]["completion_tokens"]
    return "" if count == tokens else f"{count} tokens"


class Load:
    """Clients that ask again and again for `tokens` tokens, each time one of the servers that `endpoints` gives."""

    def __init__(self, endpoints: Callable[[], list[str]], tokens: int) -> None:
        self._endpoints, self._tokens, self._stop = endpoints, tokens, threading.Event()
        self.answers: list[tuple[str, str]] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(CLIENTS)]

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            urls = self._endpoints()
            if not urls:  # nothing accepts a request
                time.sleep(0.1)
                continue
            url = urls[(len(self.answers) + number) % len(urls)]
            self.answers.append((url, completed(url, self._tokens)))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def test_pods_wait_for_the_leaders_name_and_become_ready_by_their_probes(cluster, group):
    cluster.wait(lambda: all(pod.started for pod in group.pods), START_SECONDS, "the startup probes")
    cluster.wait(lambda: group.ready, 20, "the readiness probes")
    assert any(name.startswith("demo-0.demo.default") for name in cluster.dns.refused), "the name was there from the begin"
    logs = [pod.container.log.read_text() for pod in group.pods]
    assert all("demo-0.demo.default" in log for log in logs), "a host says which name it waits for"
    assert [pod.events for pod in group.pods] == [["started", "ready"]] * 2
    assert cluster.endpoints() == [group.leader.url]
    assert completed(group.leader.url, TOKENS) == ""
    assert httpx.get(f"{group.pods[1].url}/live", trust_env=False).status_code == 200


def test_processes_are_nobodys_on_a_read_only_root(group):
    for pod in group.pods:
        for process in pod.container.processes():
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"65534"}
            assert [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")] == [0, 0, 0]
            assert status["NoNewPrivs"] == "1"
        mounts = [line.split() for line in Path(f"/proc/{pod.container.first().pid}/mountinfo").read_text().splitlines()]
        writable = {words[4] for words in mounts if "rw" in words[5].split(",") and not words[4].startswith(("/proc", "/dev/"))}
        assert writable == {"/tmp", "/cache"}
        assert {words[4] for words in mounts} >= {"/", "/dev/shm", "/etc/phalanx/cluster-token"}


def test_a_killed_follower_restarts_its_group(cluster, group):
    group.pods[1].container.signal(signal.SIGKILL)
    killed = time.monotonic()
    cluster.wait(group.reconcile, 10, "the group made anew")
    assert time.monotonic() - killed < 60
    assert group.generations == 2
    cluster.wait(lambda: group.ready, START_SECONDS, "the group that was made anew")
    assert completed(group.leader.url, TOKENS) == ""


def test_a_rolling_update_loses_no_accepted_request(cluster, group):
    """Of clients of the Service, and of clients that go on asking the old server until its SIGTERM, so that it has work then."""
    assert group.ready, cluster.report()
    leader, follower = group.pods
    with Load(cluster.endpoints, TOKENS) as load:
        surge = cluster.start(workload(), 1)  # maxSurge 1: another server first
        cluster.wait(lambda: surge.ready, START_SECONDS, "the server of the update")
        before = len(load.answers)
        with Load(lambda: [] if "SIGTERM" in leader.events else [leader.url], LONG_TOKENS) as last:
            group.delete()
        cluster.wait(lambda: len(load.answers) > before + 2 * CLIENTS, 60, "answers of the other server")
    (running,) = re.findall(r"shutting down: (\d+) completions", leader.container.log.read_text())
    assert int(running) > 0, "nothing was running at SIGTERM"
    problems = [problem for _, problem in last.answers]
    assert problems.count("") >= int(running) - CLIENTS  # of which each client of the Service may have had one there
    assert set(problems) <= {"", REFUSED}, cluster.report()
    assert {problem for _, problem in load.answers} == {""}, cluster.report()
    assert {url for url, _ in load.answers} == {leader.url, surge.leader.url}
    assert [event for event in leader.events if event != "not ready"][-3:] == ["deleted", "SIGTERM", "ended with 0"]
    assert follower.events[-1] == "ended with 0"
    assert "SIGTERM" not in follower.events, "a follower ends when its leader has drained, and not before"


def test_a_frozen_server_fails_its_liveness_probe(cluster, group):
    leader = next(each.leader for each in cluster.groups if each.index == 1)
    assert leader.ready, cluster.report()
    with contextlib.suppress(ProcessLookupError):
        leader.container.signal(signal.SIGSTOP)
    cluster.wait(lambda: leader.restarted, 40, "the liveness probe")
    assert {"not ready", "livenessProbe failed"} <= set(leader.events), "a Service sends it nothing meanwhile"


def test_a_server_that_never_starts_fails_its_startup_probe(cluster):
    """A program without a port in the place of the server, and three failures in the place of the manifest's."""
    never = copy.deepcopy(workload())
    for name in ("leaderTemplate", "workerTemplate"):
        (container,) = never["spec"]["leaderWorkerTemplate"][name]["spec"]["containers"]
        container |= {"command": ["sleep"], "args": ["600"]}
        container["startupProbe"]["failureThreshold"] = 3
    pods = cluster.start(never, 2).pods
    cluster.wait(lambda: all(pod.restarted for pod in pods), 30, "the startup probes")
    assert [pod.events for pod in pods] == [["startupProbe failed"]] * 2, "no other probe begins before it has succeeded"


def test_a_deployment_serves_and_ends(cluster, capsys):
    """One node: the demo on two CPU ranks."""
    words = ["deploy", "k8s", "demo", "--image", "phalanx:1", "--tp_size", "2", "--max_batch_size", "256"]
    small = ["--device", "cpu", "--kv_cache_bytes", str(1 << 26), "--max_seq_len", "512"]
    assert main([*words, *small, "--name", "one-node", "--startup_seconds", str(START_SECONDS * kubelet.FASTER)]) == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    deployment = objects["Deployment"]
    assert objects["Service"]["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    group = cluster.start(deployment, 0)
    cluster.wait(lambda: group.ready, START_SECONDS, "the Deployment")
    assert group.leader.url in cluster.endpoints()
    assert completed(group.leader.url, TOKENS) == ""
    group.delete()
    events = [event for event in group.leader.events if event != "not ready"]  # as a probe may see it while it ends
    assert events[-2:] == ["SIGTERM", "ended with 0"]
