# SPDX-License-Identifier: Apache-2.0
"""Whether a Ray cluster has the nodes and GPUs that the layout needs."""

from __future__ import annotations

import re

from phalanx.health.check import Check, Finding, error, ok, skipped, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    if "RAY_ADDRESS" not in subject.host.environment:
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


CHECK = Check(
    name="ray_cluster",
    what="`ray status`, where RAY_ADDRESS is set",
    why="a placement group that no node can satisfy waits for ever, and nobody says what is missing",
    cure="start the missing nodes",
    threads=(
        "https://github.com/vllm-project/vllm/issues/7815",
        "https://github.com/vllm-project/vllm/issues/13909",
        "https://github.com/vllm-project/vllm/issues/12670",
    ),
    examine=examine,
    symptoms=(r"[Pp]lacement group", r"[Rr]ay"),
)
