# SPDX-License-Identifier: Apache-2.0
"""A cluster of a Deployment or a LeaderWorkerSet, as small as it can be: what runs is its manifest, container by container.

Each pod has a network namespace on one bridge, and a record in a DNS server. Threads do for it what the kubelet does: probes on
their schedule, the hook before the end, SIGTERM, and SIGKILL at the end of the grace. `Group` does what the controller of
LeaderWorkerSets does with restartPolicy RecreateGroupOnPodRestart. Network policies are not enforced.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.support import namespaces
from tests.support.pod_container import Container

SET = "leaderworkerset.sigs.k8s.io"
FASTER = 10
"""Probes run so many times as often as the manifest says; their timeouts and failures are the manifest's."""
PROPAGATION_SECONDS = 1.5
"""From the begin of a pod's end until no client is sent to it any more."""


class Dns(threading.Thread):
    """Answers queries of type A from `records`; any other name does not exist."""

    def __init__(self, address: str) -> None:
        super().__init__(name="dns", daemon=True)
        self.records: dict[str, str] = {}
        self.refused: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))

    def run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                query, client = self._socket.recvfrom(512)
                if not query:  # shut down
                    return
                with contextlib.suppress(IndexError, struct.error, UnicodeDecodeError):  # no query
                    self._socket.sendto(self.answer(query), client)

    def answer(self, query: bytes) -> bytes:
        labels, place = [], 12
        while length := query[place]:
            labels.append(query[place + 1 : place + 1 + length].decode())
            place += 1 + length
        question, kind = query[12 : place + 5], struct.unpack(">H", query[place + 1 : place + 3])[0]
        name = ".".join(labels).lower()
        address = self.records.get(name)
        if address is None:
            self.refused.append(name)
        answers = int(address is not None and kind == 1)
        flags = 0x8580 if address is not None else 0x8583  # an authoritative answer; 3: no such name
        header = query[:2] + struct.pack(">5H", flags, 1, answers, 0, 0)
        record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(address or "0.0.0.0")
        return header + question + record * answers

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is not connected; the thread wakes up all the same
            self._socket.shutdown(socket.SHUT_RDWR)
        self.join(5)
        self._socket.close()


class Pod:
    """One pod. Its thread ends when its container has ended."""

    def __init__(self, cluster: Cluster, template: Mapping[str, Any], name: str, variables: Mapping[str, str]) -> None:
        self.name, self._spec = name, template["spec"]
        self.namespace, self.address = cluster.network(name)
        self.started = self.ready = self.ending = False
        self._unreachable_from = float("inf")
        self.events: list[str] = []
        self._one = self._spec["containers"][0]
        self._ports = {port["name"]: port["containerPort"] for port in self._one["ports"]}
        self.container = Container(
            self._spec, cluster.folder / f"{name}-{self.address}", namespace=self.namespace, name=name, address=self.address,
            nameserver=cluster.address, variables=variables, secrets=cluster.secrets,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self._ports['http']}"

    @property
    def reachable(self) -> bool:
        """Whether a Service sends requests to it: while it is ready, and some time beyond the begin of its end."""
        return self.ready and time.monotonic() < self._unreachable_from

    @property
    def restarted(self) -> bool:
        """Whether the container ended although nobody had asked for it, as a probe's failure makes it."""
        return self.container.status is not None and not self.ending

    def probe(self, kind: str) -> bool:
        spec = self._one[kind]
        action = spec["httpGet"]
        url = f"http://{self.address}:{self._ports[action['port']]}{action['path']}"
        try:
            with httpx.Client(trust_env=False, verify=False) as client:  # plain HTTP, and a connection for each probe
                return client.get(url, timeout=spec["timeoutSeconds"]).status_code < 400
        except httpx.TransportError:
            return False

    def _watch(self) -> None:
        """All probes, one after the other when they are due."""
        failures = dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), 0)
        due = dict.fromkeys(failures, 0.0)
        while self.container.status is None:
            kinds = ["readinessProbe", "livenessProbe"] if self.started else ["startupProbe"]
            for kind in kinds:
                if time.monotonic() < due[kind] or (self.ending and kind != "readinessProbe"):
                    continue
                due[kind] = time.monotonic() + self._one[kind]["periodSeconds"] / FASTER
                failures[kind] = 0 if self.probe(kind) else failures[kind] + 1
                self._act(kind, failures[kind])
            time.sleep(0.05)
        self.ready = False

    def _act(self, kind: str, failures: int) -> None:
        spent = failures >= self._one[kind]["failureThreshold"]
        if kind == "startupProbe" and not failures:
            self.started = True
            self.events.append("started")
        elif kind == "readinessProbe":
            ready = not failures or (self.ready and not spent)
            if ready != self.ready:
                self.events.append("ready" if ready else "not ready")
            self.ready = ready
        elif spent:
            self.events.append(f"{kind} failed")
            self.container.signal(signal.SIGTERM)
            if self.container.wait(0.5) is None:  # the manifest's grace is longer; a frozen process takes no SIGTERM in either
                self.container.signal(signal.SIGKILL)

    def delete(self) -> threading.Thread:
        """End it as the kubelet does; the thread ends when the pod has."""
        self.ending = True
        self._unreachable_from = time.monotonic() + PROPAGATION_SECONDS
        self.events.append("deleted")
        thread = threading.Thread(target=self._end, name=f"end of {self.name}", daemon=True)
        thread.start()
        return thread

    def _end(self) -> None:
        begin = time.monotonic()
        if self.container.wait(self._one["lifecycle"]["preStop"]["sleep"]["seconds"]) is None:
            self.events.append("SIGTERM")
            self.container.signal(signal.SIGTERM)
            grace = self._spec["terminationGracePeriodSeconds"]
            if self.container.wait(max(0.0, begin + grace - time.monotonic())) is None:
                self.events.append("SIGKILL")
                self.container.signal(signal.SIGKILL)
                self.container.wait(10)
        self.events.append(f"ended with {self.container.status}")

    def kill(self) -> None:
        """At once, for the end of a test."""
        self.ending = True
        self.container.signal(signal.SIGKILL)
        self.container.wait(10)
        self._thread.join(10)


class Group:
    """The pods of one server: a leader and its followers, which are all made anew when a container of one restarts; one pod of a
    Deployment."""

    def __init__(self, cluster: Cluster, workload: Mapping[str, Any], index: int, *, late: float = 0.0) -> None:
        """late: seconds until the leader's name resolves, counted from the begin of its pods."""
        self._cluster, self._workload, self.index = cluster, workload, index
        self.generations = 0
        self.pods: list[Pod] = []
        self._start(late)

    def _start(self, late: float) -> None:
        self.generations += 1
        name = self._workload["metadata"]["name"]
        if self._workload["kind"] == "Deployment":
            self.pods = [Pod(self._cluster, self._workload["spec"]["template"], f"{name}-{self.index}", {})]
            return
        spec = self._workload["spec"]["leaderWorkerTemplate"]
        assert self._workload["spec"]["startupPolicy"] == "LeaderCreated", "followers would wait for ever"
        assert spec["restartPolicy"] == "RecreateGroupOnPodRestart"
        leader = f"{name}-{self.index}"
        host = f"{leader}.{name}.default"
        self.pods = []
        for worker in range(spec["size"]):
            variables = {
                "LWS_LEADER_ADDRESS": host, "LWS_GROUP_SIZE": str(spec["size"]), "LWS_WORKER_INDEX": str(worker),
            }  # fmt: skip
            template = spec["workerTemplate" if worker else "leaderTemplate"]
            self.pods.append(Pod(self._cluster, template, f"{leader}-{worker}" if worker else leader, variables))
        record = f"{host}.svc.cluster.local"
        self._cluster.dns.records.pop(record, None)
        address = self.pods[0].address
        # The controller publishes names before pods are ready.
        timer = threading.Timer(late, lambda: self._cluster.dns.records.__setitem__(record, address))
        timer.daemon = True
        timer.start()

    @property
    def leader(self) -> Pod:
        return self.pods[0]

    @property
    def ready(self) -> bool:
        return all(pod.ready for pod in self.pods)

    def delete(self) -> None:
        """End all pods together, and wait for it."""
        for thread in [pod.delete() for pod in self.pods]:
            thread.join()

    def reconcile(self) -> bool:
        """Make the group anew where a container has restarted; whether it did."""
        if not any(pod.restarted for pod in self.pods):
            return False
        self.delete()
        self._start(0.0)
        return True


def has_bridges() -> bool:
    """Whether the kernel can make the bridge of a cluster."""
    name = f"pb{os.getpid()}"[:15]
    status = subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=False, capture_output=True).returncode
    subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)
    return status == 0


class Cluster:
    """The network of the pods, their DNS server, and what the manifest names."""

    def __init__(self, folder: Path, secrets: Mapping[str, Mapping[str, str]]) -> None:
        namespaces.sweep()
        network = namespaces.free_network()
        self.folder, self.secrets, self._network = folder, secrets, network
        self.address = f"{network}.254"
        self._numbers = itertools.count(1)
        self._prefix = f"{namespaces.NAMESPACE}{os.getpid()}-{network.replace('.', '-')}"
        self._namespaces = [f"{self._prefix}-bridge"]
        self._node = f"{namespaces.LINK}{os.getpid()}"[:15]
        self._ip("netns", "add", self._namespaces[0])
        self._ip("-n", self._namespaces[0], "link", "add", "bridge0", "type", "bridge")
        self._ip("-n", self._namespaces[0], "link", "set", "bridge0", "up")
        self._ip("link", "add", self._node, "type", "veth", "peer", "name", "node", "netns", self._namespaces[0])
        self._ip("-n", self._namespaces[0], "link", "set", "node", "master", "bridge0", "up")
        self._ip("address", "add", f"{self.address}/24", "dev", self._node)
        self._ip("link", "set", self._node, "up")
        self.dns = Dns(self.address)
        self.dns.start()
        self.groups: list[Group] = []

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def network(self, name: str) -> tuple[str, str]:
        """A new network namespace on the bridge; returns its name and the address in it."""
        number = next(self._numbers)
        namespace, address = f"{self._prefix}-{number}", f"{self._network}.{number}"
        self._ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        self._ip(
            "link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", f"pod{number}", "netns", self._namespaces[0]
        )
        self._ip("-n", self._namespaces[0], "link", "set", f"pod{number}", "master", "bridge0", "up")
        self._ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            self._ip("-n", namespace, "link", "set", link, "up")
        return namespace, address

    def start(self, workload: Mapping[str, Any], index: int, *, late: float = 0.0) -> Group:
        group = Group(self, workload, index, late=late)
        self.groups.append(group)
        return group

    def endpoints(self) -> list[str]:
        """URLs of the leaders to which the Service sends requests at this moment."""
        return [group.leader.url for group in self.groups if group.leader.reachable]

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:g} s\n{self.report()}")
            time.sleep(0.1)

    def report(self) -> str:
        pods = [pod for group in self.groups for pod in group.pods]
        return "\n".join(f"== {pod.name} {pod.events}\n{pod.container.log.read_text()[-3000:]}" for pod in pods)

    def close(self) -> None:
        for group in self.groups:
            for pod in group.pods:
                pod.kill()
        self.dns.close()
        subprocess.run(["ip", "link", "delete", self._node], check=False, capture_output=True)
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


@contextlib.contextmanager
def cluster(folder: Path, secrets: Mapping[str, Mapping[str, str]]) -> Iterator[Cluster]:
    """On addresses that this machine uses for nothing else."""
    one = Cluster(folder, secrets)
    try:
        yield one
    finally:
        one.close()
