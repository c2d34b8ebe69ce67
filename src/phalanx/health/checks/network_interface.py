# SPDX-License-Identifier: Apache-2.0
"""Whether the interfaces that variables name exist and lead to other hosts."""

from __future__ import annotations

import ipaddress

from phalanx.health.check import Check, Finding, error, ok
from phalanx.health.subject import Subject

VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali")


def examine(subject: Subject) -> list[Finding]:
    findings = [
        finding for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") for finding in _examine_variable(subject, variable)
    ]
    return findings or [ok("no variable names a missing or unsuitable interface")]


def _examine_variable(subject: Subject, variable: str) -> list[Finding]:
    text = subject.host.environment.get(variable, "")
    several_hosts = subject.options is not None and subject.options.nnodes > 1
    interfaces = subject.host.interfaces()
    usable = [name for name in interfaces if _leads_out(subject, name, interfaces)]
    cure = f"name one of: {', '.join(usable) or 'none of this host leads to others'}"
    command = f"export {variable}={usable[0]}" if usable else f"unset {variable}"
    if text.startswith("^") and variable.startswith("GLOO"):
        return [error(f"{variable}={text} is no interface: gloo takes one name, and no list of exclusions", cure, command)]
    if not text or text.startswith("^"):
        return []
    exact, names = text.startswith("="), [name for name in text.lstrip("=").split(",") if name]
    if variable.startswith("GLOO"):
        exact = True
    for name in names:
        matching = [each for each in interfaces if each == name or (not exact and each.startswith(name))]
        if not matching:
            return [error(f"{variable}={text} names {name}, and this host has {', '.join(interfaces)}", cure, command)]
        down = [each for each in matching if not subject.host.interface_is_up(each)]
        if len(down) == len(matching):
            return [error(f"{variable}={text} names {name}, which is down", cure, f"ip link set {matching[0]} up", command)]
        if several_hosts and not any(_leads_out(subject, each, interfaces) for each in matching):
            return [error(f"{variable}={text} names {name}, which other hosts do not reach", cure, command)]
    return []


def _leads_out(subject: Subject, name: str, interfaces: dict[str, list[str]]) -> bool:
    if name.startswith(VIRTUAL) or not subject.host.interface_is_up(name):
        return False
    return any(not ipaddress.ip_address(address).is_loopback for address in interfaces[name])


CHECK = Check(
    name="network_interface",
    what="GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    why="a name of another machine's interface, or docker0, ends a start in a hang or in 'no socket interface found'",
    cure="name an interface that leads to the other hosts, or unset the variable",
    threads=(
        "https://github.com/vllm-project/vllm/issues/7074",
        "https://github.com/gpustack/gpustack/issues/2125",
        "https://github.com/sgl-project/sglang/issues/3226",
    ),
    examine=examine,
    symptoms=(r"[Ss]ocket interface", r"gloo", r"Unable to find address", r"no interface", r"connectFullMesh"),
)
