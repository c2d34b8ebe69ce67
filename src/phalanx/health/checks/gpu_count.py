# SPDX-License-Identifier: Apache-2.0
"""Whether this host has a GPU for each of its ranks."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, error, note, ok, skipped
from phalanx.health.subject import Subject


def examine(subject: Subject) -> Finding:
    options, devices = subject.options, subject.devices
    assert options is not None
    if options.device == "cpu" or not subject.on_gpu:
        return ok("the ranks run on CPU")
    if options.launcher == "ray":
        return skipped("Ray places the ranks: ray_cluster examines the GPUs of its hosts")
    visible, ranks = len(devices.gpus), subject.ranks_here
    if visible < ranks:
        variable = subject.host.environment.get("CUDA_VISIBLE_DEVICES")
        if variable is not None and devices.present >= ranks:
            summary = f"CUDA_VISIBLE_DEVICES={variable} leaves {visible} of {devices.present} GPUs, and {ranks} ranks need one each"
            return error(
                summary, "name as many as there are ranks", f"export CUDA_VISIBLE_DEVICES={','.join(map(str, range(ranks)))}"
            )
        nodes = -(-options.world_size // max(visible, 1))
        return error(
            f"{visible} GPUs are visible, and {ranks} ranks need one each",
            "use a smaller layout, or more hosts",
            f"phalanx serve {options.model} --tp_size {max(visible, 1)}",
            f"phalanx serve {options.model} ... --num_workers {nodes}",
            visible=visible,
            ranks=ranks,
        )
    if visible > ranks and options.nnodes == 1:
        return note(f"{ranks} of {visible} GPUs are used by this layout; the others stay idle", "", visible=visible, ranks=ranks)
    return ok(f"{visible} GPUs for {ranks} ranks")


CHECK = Check(
    name="gpu_count",
    what="visible GPUs against ranks",
    why="CUDA_VISIBLE_DEVICES of another job, or a container that was given fewer GPUs",
    cure="match layout and GPUs",
    threads=("https://github.com/vllm-project/vllm/issues/7211",),
    examine=examine,
    needs=(Need.MODEL,),
    symptoms=(r"GPUs? of one host", r"invalid device ordinal", r"CUDA_VISIBLE_DEVICES"),
)
