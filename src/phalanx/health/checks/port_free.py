# SPDX-License-Identifier: Apache-2.0
"""Whether the ports on which this host is to listen are free."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    options = subject.options
    assert options is not None
    ports = {"--port": (subject.serving.host, subject.serving.port)} if options.node_rank == 0 else {}
    if options.nnodes > 1 and options.node_rank == 0:
        ports |= {"--master_port": ("0.0.0.0", options.master_port)}
    findings = [_taken(subject, name, *place) for name, place in ports.items() if place[1]]
    return [finding for finding in findings if finding] or [ok("the ports to listen on are free")]


def _taken(subject: Subject, name: str, address: str, port: int) -> Finding | None:
    failure = subject.host.can_bind(address, port)
    if failure is None:
        return None
    listener = subject.host.listener(port)
    other = f"phalanx serve ... {name} {port + 10}"
    if listener is None:
        return error(
            f"{name} {port} of {address} cannot be listened on: {failure.strerror or failure}",
            "choose another address or port",
            other,
        )
    if listener.orphan:
        summary = f"{name} {port} is taken by {listener.command} (pid {listener.pid}), an orphan of an engine that has ended"
        return error(summary, "end it", f"kill -9 {listener.pid}", pid=listener.pid)
    holder = listener.command if listener.pid is None else f"{listener.command} (pid {listener.pid})"
    commands = [other] if listener.pid is None else [f"kill {listener.pid}", other]
    return error(f"{name} {port} is taken by {holder}", "end it, or choose another port", *commands, pid=listener.pid)


CHECK = Check(
    name="port_free",
    what="the ports of the options",
    why="a server that still runs, or a process that outlived it, has the port: 'address already in use'",
    cure="end the process that has the port, or choose another",
    threads=("https://github.com/vllm-project/vllm/issues/8447", "https://github.com/vllm-project/vllm/issues/34643"),
    examine=examine,
    needs=(Need.MODEL,),
    symptoms=(r"[Aa]ddress already in use", r"EADDRINUSE", r"\bport\b"),
)
