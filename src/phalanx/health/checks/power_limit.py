# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU's power limit is below its default, or differs from the others'."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    findings = []
    known = [gpu for gpu in subject.devices.gpus if gpu.power_limit is not None]
    for gpu in known:
        if gpu.power_default is not None and gpu.power_limit is not None and gpu.power_limit < gpu.power_default - 1:
            findings.append(
                warning(
                    f"GPU {gpu.index} may draw {gpu.power_limit:.0f} W, and its default is {gpu.power_default:.0f} W: long prompts"
                    " get slower",
                    "restore the default, unless the machine's cooling or supply needs the lower limit",
                    f"nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}",
                    limit=gpu.power_limit,
                    default=gpu.power_default,
                )
            )
    limits = {gpu.power_limit for gpu in known}
    if not findings and len(limits) > 1 and len({gpu.name for gpu in known}) == 1:
        named = ", ".join(f"GPU {gpu.index} {gpu.power_limit:.0f} W" for gpu in known)
        findings.append(
            warning(f"GPUs of one kind have different power limits: {named}", "set the same limit on all", "nvidia-smi -q -d POWER")
        )
    reached = [gpu for gpu in known if gpu.reasons and "power_cap" in gpu.reasons]
    if reached and not findings:
        return [ok(f"GPU {', '.join(str(gpu.index) for gpu in reached)} runs at its power limit, which is normal under load")]
    return findings or [ok("power limits are the defaults")]


CHECK = Check(
    name="power_limit",
    what="the power limit of each GPU against its default",
    why="a lowered limit makes steps 10 to 30 percent slower; the limit itself binds on H200 under load, which is normal",
    cure="restore the default limit",
    threads=("https://github.com/Azure/azurehpc/pull/595", "https://developer.nvidia.com/management-library-nvml"),
    examine=examine,
    needs=(Need.GPU,),
)
