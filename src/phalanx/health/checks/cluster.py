# SPDX-License-Identifier: Apache-2.0
"""Several hosts: the master, equal software and clocks, and Ray."""

from __future__ import annotations

import datetime
import re

from phalanx.hardware.probe import address_towards
from phalanx.health import doctor
from phalanx.health.check import Finding, Need, check, error, ok, skipped, warning
from phalanx.health.subject import Subject


@check(
    why="a name that resolves differently on each host, or to a loopback, makes hosts wait for each other",
    cure="name an address of host 0 that each host reaches",
    threads=("vllm-project/vllm/issues/8447", "sgl-project/sglang/issues/3226"),
    needs=(Need.HOSTS,),
    symptoms=(r"master_addr", r"has not joined", r"Name or service not known", r"No route to host", r"does not answer"),
)
def master_address(subject: Subject) -> Finding:
    """--master_addr, where there are several hosts"""
    assert subject.options is not None
    if subject.options.launcher == "ray":
        return skipped("Ray places the ranks: the launcher finds this host's address")
    name, rank = subject.options.master_addr, subject.options.node_rank
    try:
        addresses = subject.host.resolve(name)
    except OSError as failure:
        return error(
            f"master_addr={name} does not resolve: {failure.strerror or failure}", "name host 0's address", f"getent hosts {name}"
        )
    own = subject.host.own_addresses()
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        cure = "name an address of host 0 that the other hosts reach"
        return error(f"master_addr={name} is this host's loopback, and nnodes={subject.options.nnodes}", cure, "ip -brief address")
    if rank == 0 and not own & set(addresses):
        return warning(
            f"master_addr={name} ({', '.join(addresses)}) is no address of this host, which is node 0",
            "name an address of this host, unless a service stands in front of it",
            "ip -brief address",
        )
    if rank > 0 and own & set(addresses):
        return error(
            f"master_addr={name} is this host's own address, and this is node {rank}", "name host 0's address", "ip -brief address"
        )
    try:
        route = address_towards(name)
    except OSError as failure:
        return error(
            f"no route leads to master_addr={name}: {failure.strerror or failure}",
            "check the network",
            f"ip route get {addresses[0]}",
        )
    return ok(f"master_addr={name} is reached from {route}")


@check(
    why="a firewall that drops packets looks like a start that hangs",
    cure="open master_port of host 0",
    threads=("vllm-project/vllm/issues/8447",),
    needs=(Need.HOSTS,),
    symptoms=(r"has not joined", r"Connection refused", r"timed out", r"NodeLost"),
)
def master_ports(subject: Subject) -> Finding:
    """the port of host 0, from another host"""
    options = subject.options
    assert options is not None
    if options.node_rank == 0:
        return skipped("this is node 0, which listens itself: port_free examines its ports")
    failure = subject.host.connect(options.master_addr, options.master_port)
    if failure is None:
        return ok(f"port {options.master_port} of {options.master_addr} answers")
    blocked = isinstance(failure, TimeoutError)
    cure = (
        f"open port {options.master_port} of host 0 for this host" if blocked else "start node 0 first, with the same master_port"
    )
    command = (
        f"iptables -I INPUT -p tcp --dport {options.master_port} -j ACCEPT"
        if blocked
        else f"nc -zv {options.master_addr} {options.master_port}"
    )
    reason = "no answer, as behind a firewall" if blocked else failure.strerror or str(failure)
    return error(f"port {options.master_port} of {options.master_addr} does not answer: {reason}", cure, command)


OWN_FACTS = {"name", "time"}


@check(
    why="ranks that run different code or options hang in a collective, or disagree on shapes",
    cure="make them equal",
    threads=("vllm-project/vllm/issues/7074", "vllm-project/vllm/issues/12670"),
    needs=(Need.PEERS,),
    symptoms=(r"agree", r"diverge", r"differs", r"versions? differ"),
)
def same_software(subject: Subject) -> list[Finding]:
    """versions, options and variables of other hosts (--peer FILE, written there by `phalanx doctor --json FILE`)"""
    own = doctor.about(subject)
    findings = []
    for peer in subject.peers:
        other = peer["host"]
        for field in sorted((own.keys() | other.keys()) - OWN_FACTS):
            findings += _compare(field, own.get(field), other.get(field), other.get("name", "the other host"))
    return findings or [ok(f"{len(subject.peers)} other hosts have the same versions, options and variables")]


def _compare(field: str, own: object, other: object, name: str) -> list[Finding]:
    if own == other:
        return []
    if isinstance(own, dict) and isinstance(other, dict):
        pairs = {key: (own.get(key), other.get(key)) for key in sorted(own.keys() | other.keys()) if own.get(key) != other.get(key)}
        return [_differs(f"{field}.{key}", here, there, name) for key, (here, there) in pairs.items()]
    return [_differs(field, own, other, name)]


def _differs(field: str, here: object, there: object, name: str) -> Finding:
    summary = f"{field} differs: {here if here is not None else 'unset'} here, {there if there is not None else 'unset'} on {name}"
    package = field.removeprefix("packages.")
    command = f"pip install {package}=={here}" if field.startswith("packages.") and here else f"# make {field} equal on both hosts"
    level = warning if field in ("python", "driver") else error
    return level(summary, "make it equal on all hosts", command, field=field, here=here, there=there)


CLOCK_SECONDS = 5.0
"""The HTTP Date header counts whole seconds, and a report of a peer is some seconds old: only more is a fault."""
REPORT_AGE_SECONDS = 600.0


@check(
    why="certificates and tokens seem expired, and logs of several hosts cannot be put in order",
    cure="run an NTP client on each host",
    threads=("huggingface/huggingface_hub/issues/4128", "https://chrony-project.org/documentation.html"),
    symptoms=(r"certificate", r"not yet valid", r"RequestTimeTooSkewed"),
)
def clock(subject: Subject) -> Finding:
    """the clocks of servers and of other hosts"""
    skews = {server.url: server.skew for server in subject.servers if server.skew is not None}
    now = datetime.datetime.now(datetime.UTC)
    for peer in subject.peers:
        ahead = (datetime.datetime.fromisoformat(peer["host"]["time"]) - now).total_seconds()
        if ahead > 0 or ahead < -REPORT_AGE_SECONDS * 144:  # an older report says nothing of the clock, unless it is of the future
            skews[peer["host"]["name"]] = max(ahead, 0.0)
    wrong = {name: skew for name, skew in skews.items() if abs(skew) > CLOCK_SECONDS}
    if wrong:
        named = ", ".join(f"{name} is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}" for name, skew in wrong.items())
        return warning(f"clocks differ: {named}", "synchronize the clocks by NTP", "timedatectl set-ntp true", skews=wrong)
    return (
        ok(f"{len(skews)} clocks agree with this one") if skews else skipped("no other clock to compare with: no URL and no peer")
    )


@check(
    why="a placement group that no node can satisfy waits for ever, and nobody says what is missing",
    cure="start the missing nodes",
    threads=("vllm-project/vllm/issues/7815", "vllm-project/vllm/issues/13909", "vllm-project/vllm/issues/12670"),
    symptoms=(r"[Pp]lacement group", r"[Rr]ay"),
)
def ray_cluster(subject: Subject) -> Finding:
    """`ray status`, where RAY_ADDRESS is set"""
    if not subject.host.environment.get("RAY_ADDRESS"):
        return skipped("RAY_ADDRESS is not set")
    address = subject.host.environment["RAY_ADDRESS"]
    text = subject.host.run(["ray", "status", f"--address={address}"])
    if text is None:
        return error(f"the Ray cluster at {address} does not answer", "start its head", "ray start --head --port=6379")
    active = len(re.findall(r"^\s*\d+ node_", text, flags=re.MULTILINE))
    usage = re.search(r"([\d.]+)/([\d.]+) GPU", text)
    free = float(usage[2]) - float(usage[1]) if usage else 0.0
    pending = re.findall(r"^\s*(\{.*\}.*(?:pending|demand).*)$", text, flags=re.MULTILINE)
    options = subject.options
    need = options.world_size if options is not None and subject.on_gpu else 0
    facts = {"nodes": active, "free_gpus": free, "need": need}
    if options is not None and active < options.nnodes:
        cure = "start Ray on the missing hosts"
        return error(
            f"the Ray cluster has {active} nodes, and num_workers={options.nnodes}", cure, f"ray start --address={address}", **facts
        )
    if free < need:
        return error(
            f"the Ray cluster has {free:g} free GPUs, and {need} ranks need one each",
            "end other jobs, or add nodes",
            "ray status",
            **facts,
        )
    if pending:
        return warning(
            f"Ray has unmet demands: {pending[0].strip()}", "end the job that waits, or add the resource", "ray status", **facts
        )
    return ok(f"the Ray cluster has {active} nodes and {free:g} free GPUs", **facts)
