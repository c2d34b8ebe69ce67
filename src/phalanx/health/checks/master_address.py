# SPDX-License-Identifier: Apache-2.0
"""Whether the address of host 0 is one of host 0, and reachable by a route from here."""

from __future__ import annotations

from phalanx.hardware.probe import address_towards
from phalanx.health.check import Check, Finding, Need, error, ok, skipped, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
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


CHECK = Check(
    name="master_address",
    what="--master_addr, where there are several hosts",
    why="a name that resolves differently on each host, or to a loopback, makes hosts wait for each other",
    cure="name an address of host 0 that each host reaches",
    threads=("https://github.com/vllm-project/vllm/issues/8447", "https://github.com/sgl-project/sglang/issues/3226"),
    examine=examine,
    needs=(Need.HOSTS,),
    symptoms=(r"master_addr", r"has not joined", r"Name or service not known", r"No route to host", r"does not answer"),
)
