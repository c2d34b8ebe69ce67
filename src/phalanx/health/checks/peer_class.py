# SPDX-License-Identifier: Apache-2.0
"""Whether the GPUs that a layout splits tensors over have NVLink or peer access."""

from __future__ import annotations

from phalanx.health.check import Check, Finding, Need, note, ok, warning
from phalanx.health.subject import Subject


def examine(subject: Subject) -> list[Finding]:
    gpus = subject.gpus_in_use
    pairs = [(a, b, subject.devices.pair(a, b)) for a in gpus for b in gpus if a.index < b.index]
    if not pairs:
        return [ok("one GPU is used")]
    tp = subject.options.tensor_parallel_size if subject.options is not None else 1
    slow = [(a, b, pair) for a, b, pair in pairs if not pair.nvlink]
    if not slow:
        return [ok(f"all {len(pairs)} pairs have NVLink")]
    a, b, pair = slow[0]
    more = f", and {len(slow) - 1} other pairs" if len(slow) > 1 else ""
    named = f"GPU {a.index} and GPU {b.index} are joined over PCIe ({pair.kind}){more}"
    if not pair.peer_access:
        named = f"GPU {a.index} and GPU {b.index} have no peer access ({pair.p2p.get('read', 'unknown')}){more}"
    if tp > 1:
        options = subject.options
        assert options is not None
        cure = "use PP instead of TP over these, or GPUs that have NVLink; `phalanx topo MODEL` shows the price"
        return [
            warning(
                f"{named}, and TP {tp} sums tensors over them twice a layer",
                cure,
                f"phalanx serve {options.model} --tp_size 1 --pp_size {tp}",
            )
        ]
    return [note(f"{named}: prefer PP to TP over them", "`phalanx topo MODEL` shows the price of TP", "phalanx topo")]


CHECK = Check(
    name="peer_class",
    what="how the GPUs of a layout are joined",
    why="tensor parallelism over PCIe is slower than one GPU, and without peer access slower still",
    cure="use PP over PCIe, TP over NVLink",
    threads=(
        "https://github.com/vllm-project/vllm/issues/5484",
        "https://github.com/vllm-project/vllm/issues/732",
        "https://github.com/vllm-project/vllm/issues/4238",
        "https://github.com/turboderp-org/exllamav2/issues/734",
    ),
    examine=examine,
    needs=(Need.PAIR,),
    symptoms=(r"peer access", r"[Pp]2[Pp]", r"NCCL", r"did not come up"),
)
