# SPDX-License-Identifier: Apache-2.0
"""Whether the GPUs of one layout are alike."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, ok, size, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    gpus = subject.gpus_in_use
    if len(gpus) < 2:
        return ok("one GPU is used")
    kinds = sorted({gpu.name for gpu in gpus})
    memory = {gpu.index: gpu.total for gpu in gpus}
    if len(kinds) > 1:
        named = ", ".join(f"GPU {gpu.index} {gpu.name}" for gpu in gpus)
        return warning(
            f"the ranks run on different GPUs: {named}",
            "use GPUs of one kind: every rank waits for the slowest, and has the memory of the smallest",
            f"export CUDA_VISIBLE_DEVICES={','.join(str(gpu.index) for gpu in gpus if gpu.name == gpus[0].name)}",
        )
    if max(memory.values()) - min(memory.values()) > max(memory.values()) // 50:
        named = ", ".join(f"GPU {index} {size(total)}" for index, total in memory.items())
        return warning(
            f"GPUs of one kind differ in memory: {named}",
            "look at MIG, ECC and the driver's reserve on each",
            "nvidia-smi -q -d MEMORY,ECC",
        )
    clocks = {gpu.index: gpu.max_sm_clock for gpu in gpus if gpu.max_sm_clock}
    if len(set(clocks.values())) > 1:
        named = ", ".join(f"GPU {index} {clock} MHz" for index, clock in clocks.items())
        return warning(
            f"GPUs of one kind differ in their highest clock: {named}", "set the same clocks on all", "nvidia-smi -q -d CLOCK"
        )
    return ok(f"{len(gpus)} x {kinds[0]}")


CHECK = Check(
    name="gpu_mixed",
    what="names, memory and clocks of the GPUs of one layout",
    why="tensor parallelism runs at the speed of the slowest GPU",
    cure="use GPUs of one kind",
    threads=("https://github.com/sgl-project/sglang/issues/4233", "https://github.com/vllm-project/vllm/issues/9157"),
    examine=examine,
    needs=(Need.PAIR,),
)
