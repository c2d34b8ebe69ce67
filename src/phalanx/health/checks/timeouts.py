# SPDX-License-Identifier: Apache-2.0
"""Whether the time limits fit each other and the size of the model."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, note, ok, warning
from phalanx.health.subject import Subject
from phalanx.plan.weight_tensors import layer_bytes

SLOW_DISK = 200e6
"""Bytes per second of a network disk, by which a load is bounded from above."""


def examine(subject: Subject) -> list[Finding]:
    options = subject.options
    assert options is not None
    findings = []
    if options.stall_timeout >= options.step_timeout:
        findings.append(
            warning(
                f"stall_timeout={options.stall_timeout:g} is not below step_timeout={options.step_timeout:g}: a step that hangs is"
                " reported late, and without its rank's name",
                "use a stall_timeout below step_timeout",
                f"phalanx serve ... --stall_timeout {options.step_timeout / 3:g}",
            )
        )
    shape = subject.model_shape
    if shape is not None and options.load_format != "dummy":
        layers, embedding, head = layer_bytes(shape, "fp8" if shape.quantization is not None else "bf16")
        total = sum(layers) + embedding + head
        seconds = total / SLOW_DISK
        if seconds > options.start_timeout:
            findings.append(
                note(
                    f"{total / 1e9:.0f} GB of weights take {seconds:.0f} s from a disk of {SLOW_DISK / 1e6:.0f} MB/s, and"
                    f" start_timeout is {options.start_timeout:g} s",
                    "raise it where the checkpoint lies on a network disk",
                    f"phalanx serve ... --start_timeout {2 * seconds:.0f}",
                )
            )
    return findings or [ok(f"a hang is named after {options.stall_timeout:g} s, and a start may take {options.start_timeout:g} s")]


CHECK = Check(
    name="timeouts",
    what="stall_timeout, step_timeout and start_timeout",
    why="survivors of a lost rank wait ten minutes in a collective where nothing ends it earlier",
    cure="keep stall_timeout well below step_timeout",
    threads=(
        "https://github.com/sgl-project/sglang/issues/3932",
        "https://github.com/sgl-project/sglang/issues/3784",
        "https://github.com/sgl-project/sglang/issues/10216",
    ),
    examine=examine,
    needs=(Need.MODEL,),
    symptoms=(r"s to start", r"start_timeout", r"step_timeout", r"stands still"),
)
