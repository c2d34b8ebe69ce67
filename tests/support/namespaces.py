# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces with their own addresses, and links between them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

# Asked of a host again and again until it is ready: an HTTP library would take ten times as long to import.
GET = """
import socket, sys
address, port, path = sys.argv[1:]
with socket.create_connection((address, int(port)), 5) as connection:
    connection.sendall(f"GET {path} HTTP/1.1\\r\\nHost: {address}\\r\\nConnection: close\\r\\n\\r\\n".encode())
    answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
head, _, body = answer.partition("\\r\\n\\r\\n")
print(head.split()[1], body)
"""


@dataclass(frozen=True)
class Namespaces:
    """names: of the namespaces; addresses: of the hosts, towards each other."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def command(self, host: int, *words: str) -> list[str]:
        """What runs `words` on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def get(self, host: int, port: int, path: str) -> tuple[int, str]:
        """(status, body) of the answer of a host to a GET, asked on that host; 0 and why, where none comes."""
        words = self.command(host, sys.executable, "-I", "-S", "-c", GET, self.addresses[host], str(port), path)
        answer = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
        status, _, body = answer.stdout.partition(" ")
        return (int(status), body) if answer.returncode == 0 else (0, answer.stderr)

    def cut(self) -> None:
        """Both ends fall silent: packets vanish, no reset is sent."""
        for host in (0, 1):
            subprocess.run(self.command(host, "ip", "link", "set", f"ph{host}", "down"), check=True)

    def join(self) -> None:
        """The link carries packets again."""
        for host in (0, 1):
            subprocess.run(self.command(host, "ip", "link", "set", f"ph{host}", "up"), check=True)

    def drop_connections(self, host: int, *, but: int) -> bool:
        """A firewall that drops the connections which `host` of two begins, except those to port `but`: the packets of a connection
        that the other one begins pass, in both directions. False where this kernel has no filters of this kind."""
        # Classic BPF on what leaves: of IPv4 and TCP, a packet with SYN and without ACK to another port is dropped (2).
        program = (
            "12,40 0 0 12,21 0 9 2048,48 0 0 23,21 0 7 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 3 2,72 0 0 16,"
            f"21 1 0 {but},6 0 0 2,6 0 0 0"
        )
        link = ("dev", f"ph{host}")
        qdisc = self.command(host, "tc", "qdisc", "add", *link, "clsact")
        filter_ = self.command(host, "tc", "filter", "add", *link, "egress", "bpf", "direct-action", "bytecode", program)
        return all(subprocess.run(words, capture_output=True, check=False).returncode == 0 for words in (qdisc, filter_))

    def listening(self, host: int) -> list[str]:
        """The TCP addresses at which something listens on a host, as the kernel writes them."""
        command = self.command(host, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        tables = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [words[1] for line in tables.splitlines() if (words := line.split())[3] == "0A"]

    def processes(self, host: int) -> list[psutil.Process]:
        return _processes(self.names[host])


def _processes(namespace: str) -> list[psutil.Process]:
    """Those in a namespace. Raises CalledProcessError where there is none of this name."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout.split()
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _remove(namespace: str) -> None:
    """Remove a namespace, and end the processes in it."""
    with contextlib.suppress(subprocess.CalledProcessError):
        for process in _processes(namespace):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def idle_percent(groups: Sequence[Sequence[psutil.Process]], seconds: float, below: float) -> list[float]:
    """What each group of processes takes of a core, in percent, over some seconds. Where their sum is not under `below`, the least
    of three such times: what other tests run beside these processes empties their caches, and each of their short wakes then takes
    up to twice as long (3 percent alone, 5.3 once on a busy machine)."""

    def used() -> list[float]:
        return [sum(sum(process.cpu_times()[:2]) for process in group) for group in groups]

    measured: list[list[float]] = []
    while len(measured) < 3 and not any(sum(percents) < below for percents in measured):
        before = used()
        time.sleep(seconds)
        measured.append([100 * (now - then) / seconds for now, then in zip(used(), before, strict=True)])
    return min(measured, key=sum)


NAMESPACE, LINK = "phalanx", "pk"
"""How the names of a run's namespaces, and of its links on this machine itself, begin; the id of its process follows."""
_OWNER = re.compile(rf"(?:{NAMESPACE}(\d+)-|{LINK}(\d+)$)")


def sweep() -> list[str]:
    """Remove what runs that were killed have left: their namespaces with the processes in them, and their links on this machine.
    Returns the names of what is removed. What belongs to a process that lives stays."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout.splitlines()
    namespaces = [line.split()[0] for line in listed if line.strip() and _abandoned(line.split()[0])]
    shown = subprocess.run(["ip", "-o", "link", "show"], check=False, capture_output=True, text=True).stdout.splitlines()
    links = [name for line in shown if _abandoned(name := line.split()[1].rstrip(":").partition("@")[0])]
    for name in namespaces:
        _remove(name)
    for link in links:  # it may have gone with its other end
        subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True)
    return [*namespaces, *links]


def _abandoned(name: str) -> bool:
    owner = _OWNER.match(name)
    return owner is not None and not psutil.pid_exists(int(owner[1] or owner[2]))


def free_network() -> str:
    """The first three numbers of 256 addresses which this machine has no way to: "10.213.5". Two processes begin to look at
    different ones. Raises RuntimeError where all are taken."""
    shown = subprocess.run(["ip", "-4", "-o", "address", "show"], check=True, capture_output=True, text=True).stdout
    routes = subprocess.run(["ip", "-4", "route", "show", "table", "all"], check=True, capture_output=True, text=True).stdout
    taken = set(re.findall(r"\b10\.213\.\d+(?=\.)", shown + routes))
    for number in range(254):
        network = f"10.213.{(os.getpid() + number) % 254 + 1}"
        if network not in taken:
            return network
    raise RuntimeError("each of 254 networks is in use; remove the links of earlier runs: ip link")


@contextlib.contextmanager
def two_namespaces(network: str) -> Iterator[Namespaces]:
    """network: the first three numbers of the addresses: "10.213.7". They are in the namespaces alone."""
    with _namespaces(network, 2) as hosts:
        _ip("link", "add", "ph0", "netns", hosts.names[0], "type", "veth", "peer", "name", "ph1", "netns", hosts.names[1])
        _set_up(hosts)
        yield hosts


@contextlib.contextmanager
def namespaces_on_a_switch(network: str, count: int) -> Iterator[Namespaces]:
    """`count` hosts that all reach each other, as on one switch; network: as for `two_namespaces`."""
    with _namespaces(network, count, extra=1) as spaces:
        hosts, switch = Namespaces(spaces.names[:count], spaces.addresses[:count]), spaces.names[count]
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host, name in enumerate(hosts.names):
            _ip("link", "add", f"ph{host}", "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "switch", "up")
        _set_up(hosts)
        yield hosts


@contextlib.contextmanager
def _namespaces(network: str, count: int, extra: int = 0) -> Iterator[Namespaces]:
    """Without links. `extra` further ones have no address in use."""
    letters = network.replace(".", "-")
    sweep()
    names = tuple(f"{NAMESPACE}{os.getpid()}-{letters}{chr(ord('a') + host)}" for host in range(count + extra))
    hosts = Namespaces(names, tuple(f"{network}.{host + 1}" for host in range(count + extra)))
    try:
        for name in names:
            _ip("netns", "add", name)
        yield hosts
    finally:
        for name in names:
            _remove(name)


def _set_up(hosts: Namespaces) -> None:
    for host, name in enumerate(hosts.names):
        _ip("-n", name, "address", "add", f"{hosts.addresses[host]}/24", "dev", f"ph{host}")
        _ip("-n", name, "link", "set", f"ph{host}", "up")
        _ip("-n", name, "link", "set", "lo", "up")
