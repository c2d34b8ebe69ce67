# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU has memory errors that are not corrected."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, ok
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    findings = []
    for gpu in subject.devices.gpus:
        if gpu.remap_failed:
            findings.append(
                error(
                    f"GPU {gpu.index}: remapping a row of its memory failed",
                    "replace the GPU",
                    f"nvidia-smi -i {gpu.index} -q -d ROW_REMAPPER",
                )
            )
        elif gpu.remap_pending:
            findings.append(
                error(
                    f"GPU {gpu.index}: a row of its memory waits to be remapped",
                    "reset the GPU, with no process on it",
                    f"nvidia-smi -i {gpu.index} --gpu-reset",
                )
            )
        if gpu.ecc_uncorrected:
            findings.append(
                error(
                    f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded",
                    "reset the GPU; replace it where they return",
                    f"nvidia-smi -i {gpu.index} --gpu-reset",
                    count=gpu.ecc_uncorrected,
                )
            )
    return findings or [ok("no uncorrected memory error, and no row waits to be remapped")]


CHECK = Check(
    name="ecc",
    what="uncorrected memory errors and remapped rows",
    why="an uncorrected error ends the process that reads the row",
    cure="reset the GPU, or replace it",
    threads=("https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html",),
    examine=examine,
    needs=(Need.GPU,),
    symptoms=(r"uncorrectable", r"ECC", r"\bXid\b"),
)
