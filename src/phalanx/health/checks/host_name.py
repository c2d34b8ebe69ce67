# SPDX-License-Identifier: Apache-2.0
"""Whether this host's name leads to an address by which other hosts reach it."""

from __future__ import annotations

import ipaddress

from phalanx.health.check import Check, Finding, Need, error, note, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    name = subject.host.name
    try:
        addresses = subject.host.resolve(name)
    except OSError as failure:
        return warning(
            f"the host name {name} does not resolve: {failure.strerror or failure}",
            "add it to /etc/hosts with this host's address",
            f'echo "{_address(subject) or "ADDRESS"} {name}" >> /etc/hosts',
        )
    loopback = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if loopback and len(loopback) == len(addresses):
        return _loopback(subject, name, loopback[0])
    return ok(f"{name} resolves to {', '.join(addresses)}")


def _loopback(subject: Subject, name: str, loopback: str) -> Finding:
    """Harmless to Phalanx itself, which binds gloo by its route to master_addr, unless the name is master_addr, or Ray is used."""
    options, address = subject.options, _address(subject) or "ADDRESS"
    summary = f"the host name {name} resolves to {loopback}, which no other host reaches"
    cure = "map the name to this host's address in /etc/hosts"
    command = f'sed -i "s/^127[0-9.]*\\s\\+{name}/{address} {name}/" /etc/hosts'
    if options is not None and options.master_addr == name:
        return error(f"{summary}; it is master_addr", cure, command, f"phalanx serve ... --master_addr {address}")
    if "RAY_ADDRESS" in subject.host.environment:
        return warning(
            f"{summary}, and Ray announces it", cure, command, f"export GLOO_SOCKET_IFNAME={_interface(subject) or 'eth0'}"
        )
    return note(f"{summary}; Phalanx binds to the interface of its route to master_addr instead", cure, command)


def _outward(subject: Subject) -> list[tuple[str, str]]:
    """(interface, address) of this host that other hosts may reach."""
    entries = [(name, address) for name, addresses in subject.host.interfaces().items() for address in addresses]
    return [
        (name, address)
        for name, address in entries
        if not ipaddress.ip_address(address).is_loopback and subject.host.interface_is_up(name)
    ]


def _address(subject: Subject) -> str | None:
    return next((address for _, address in _outward(subject)), None)


def _interface(subject: Subject) -> str | None:
    return next((name for name, _ in _outward(subject)), None)


CHECK = Check(
    name="host_name",
    what="what this host's name resolves to, where there are several hosts",
    why="gloo announces the address of the host name: 127.0.x.x makes other hosts connect to themselves (connectFullMesh failed)",
    cure="map the host name to an address that other hosts reach",
    threads=(
        "https://github.com/vllm-project/vllm/issues/5094",
        "https://github.com/vllm-project/vllm/issues/7074",
        "https://github.com/sgl-project/sglang/issues/868",
        "https://github.com/sgl-project/sglang/issues/3226",
    ),
    examine=examine,
    needs=(Need.HOSTS,),
    symptoms=(r"connectFullMesh", r"gloo", r"did not come up", r"has not joined"),
)
