# SPDX-License-Identifier: Apache-2.0
"""Whether this host reaches the port on which host 0 listens."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, ok, skipped
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
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


CHECK = Check(
    name="master_ports",
    what="the port of host 0, from another host",
    why="a firewall that drops packets looks like a start that hangs",
    cure="open master_port of host 0",
    threads=("https://github.com/vllm-project/vllm/issues/8447",),
    examine=examine,
    needs=(Need.HOSTS,),
    symptoms=(r"has not joined", r"Connection refused", r"timed out", r"NodeLost"),
)
