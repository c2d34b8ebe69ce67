# SPDX-License-Identifier: Apache-2.0
"""Make a copy of this tree in which the ranks of several GPUs share one: a check of what they compute where there is but one GPU.

    python scripts/one_gpu.py COPY --gpus 4
    cd COPY && export PYTHONPATH=src:. TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 NCCL_SOCKET_IFNAME=lo
    python -m torch.distributed.run --nproc-per-node 2 -m tests.support.comm_sequence_parallel_rank wide
    python -m tests.gpu.compare_paths --texts 40,24,40,12 --layouts 2x1,2x2 --tiny_layouts 2x1 --beside 1 --out DIR
    python -m pytest -n 0 -m gpu2 tests/kernels/compiling/test_compile_time.py

Everything is real except the place of the ranks: kernels, symmetric memory, graphs, NCCL (over sockets, since each rank calls
itself a host of its own: NCCL 2.28 accepts a GPU for only one rank of a host). Ranks that wait for each other take turns on the
GPU, milliseconds each, so such a copy says nothing about speed. Its GPUs are reported as joined by NVLink, so that the ranks
behave as on such a machine. They share one memory: an engine there needs kv_cache_bytes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("src", "tests", "benchmarks", "scripts")


class Edit(NamedTuple):
    file: str
    old: str
    new: str


def edits(gpus: int) -> Iterator[Edit]:
    """Edits where a rank learns its GPU, and how many GPUs there are."""
    launcher = "src/phalanx/executor/launcher.py"
    yield Edit(launcher, '"device_index": ranks.first_device + index', '"device_index": 0')
    read = "    config = launch.read_config()\n"
    yield Edit("src/phalanx/worker/worker.py", read, read + '    os.environ["NCCL_HOSTID"] = f"rank{config[\'rank\']}"\n')
    yield Edit(
        "src/phalanx/hardware/probe.py", "return GpuChoice(chosen, unusable)", f"return GpuChoice(chosen * {gpus}, unusable)"
    )
    detect = "src/phalanx/comm/detect.py"
    yield Edit(detect, "reach = hosts == 1 and all(_reaches(each, uuids) for each in own)", "reach = hosts == 1")
    yield Edit(detect, "linked = reach and nvlink_everywhere(uuids)", "linked = reach")
    place = "    torch.cuda.set_device(rank)\n"
    for file in ("tests/support/comm_allreduce_rank.py", "tests/support/comm_sequence_parallel_rank.py"):
        yield Edit(file, place, '    os.environ["NCCL_HOSTID"] = f"rank{rank}"\n    torch.cuda.set_device(0)\n')
    yield Edit("tests/support/comm_allreduce_rank.py", 'torch.device("cuda", rank)', 'torch.device("cuda", 0)')
    yield Edit("tests/support/comm_gpu_ranks.py", "timeout=240", "timeout=900")
    yield Edit("tests/conftest.py", "return len(choose(gpus,", f"return {gpus} * len(choose(gpus,")
    compiling = "tests/kernels/compiling/test_compile_time.py"
    yield Edit(compiling, '"max_batch_size": 48,', '"max_batch_size": 48, "kv_cache_bytes": 1 << 30,')
    jobs = "benchmarks/engine/gpu_jobs.py"
    yield Edit(jobs, '"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))', '"CUDA_VISIBLE_DEVICES": "0"')
    yield Edit(jobs, "    if visible := os.environ", f"    return list(range({gpus}))\n    if visible := os.environ")


def make(copy: Path, gpus: int) -> None:
    """Raises SystemExit if the folder exists, or if a place to edit has changed since this was written."""
    if copy.exists():
        sys.exit(f"{copy} exists: name a new folder")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", copy)
    for file, old, new in edits(gpus):
        text = (copy / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            sys.exit(f"{file} has {text.count(old)} places like {old!r}, not one: adapt this script to the change")
        (copy / file).write_text(text.replace(old, new), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("copy", type=Path, help="a new folder")
    parser.add_argument("--gpus", type=int, default=4, help="number of GPUs that the one replaces")
    arguments = parser.parse_args()
    make(arguments.copy, arguments.gpus)
    print(f"{arguments.copy}: its ranks share GPU 0, which replaces {arguments.gpus}")


if __name__ == "__main__":
    main()
