# SPDX-License-Identifier: Apache-2.0
"""Whether ended engines left files in /dev/shm."""

from __future__ import annotations

import contextlib

import psutil

from phalanx.health.check import Check, Finding, ok, size, warning
from phalanx.health.subject import Subject

PREFIXES = ("phalanx-", "nccl-", "torch_", "sem.mp-", "psm_")
WORTH = 256 << 20


def examine(subject: Subject) -> Finding:
    folder = subject.host.path("/dev/shm")
    sizes = {}
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                if entry.is_file() and entry.name.startswith(PREFIXES):
                    sizes[entry.name] = entry.stat().st_blocks * 512
    if sum(sizes.values()) < WORTH:
        return ok(f"{len(sizes)} files of inference programs in /dev/shm, {size(sum(sizes.values()))}")
    unused = {name: count for name, count in sizes.items() if name not in _mapped()}
    total = sum(unused.values())
    if total < WORTH:
        return ok(f"{size(sum(sizes.values()))} of files in /dev/shm, and processes use them")
    names = sorted(unused, key=unused.__getitem__, reverse=True)[:5]
    return warning(
        f"/dev/shm holds {size(total)} in {len(unused)} files that no process uses: {', '.join(names)}",
        "remove them",
        "rm " + " ".join(f"/dev/shm/{name}" for name in names),
        bytes=total,
    )


def _mapped() -> set[str]:
    """Names of files in /dev/shm that some process has mapped or open, as far as this user may see."""
    names: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths = [entry.path for entry in process.memory_maps()] + [entry.path for entry in process.open_files()]
            names.update(path.rpartition("/")[2].removesuffix(" (deleted)") for path in paths if "/shm/" in path)
    return names


CHECK = Check(
    name="shm_leftovers",
    what="files of ended programs in /dev/shm",
    why="a killed process leaves its shared memory, which counts as used until a restart",
    cure="remove the files that no process maps",
    threads=("https://github.com/NVIDIA/nccl/issues/342", "https://github.com/vllm-project/vllm/issues/5458"),
    examine=examine,
    symptoms=(r"No space left", r"shared memory"),
)
