# SPDX-License-Identifier: Apache-2.0
"""Whether the power limit of a GPU slows long steps: the four GEMMs of a layer of Llama-3-70B in FP8 for 8,192 tokens, as one of
several ranks runs them, one layer behind another, and with pauses between layers:
`python -m benchmarks.kernels.power --out DIR`

us: of a layer's GEMMs alone, by events around them, median of the last half; while it runs, `nvidia-smi` reads the clock of the
multiprocessors, the power, and whether the power limit holds the clock down. With pauses, a GPU that is limited by its power runs
the GEMMs faster; one that is not takes as long for them as without.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.kernels.fp8_skinny import SHAPES
from phalanx.kernels import quantize_fp8
from phalanx.kernels.gemm.scaled_mm import scaled_mm
from phalanx.kernels.scaled_tensors import Quantized

TOKENS = 8192
SECONDS = 1.2
READ_MS = 20
SW_POWER_CAP = 0x4
BF16 = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--ranks", default="1,2,4")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"tokens": TOKENS, "ranks": {}}
    for ranks in map(int, arguments.ranks.split(",")):
        layer = gemms(ranks)
        busy = measured(layer, pause_ms=0.0)
        figures["ranks"][ranks] = rows = {"one behind another": busy}
        for share in (0.2, 0.4):  # of a layer's time, as its all-reduces may take
            rows[f"{share:.0%} pause"] = measured(layer, pause_ms=busy["us"] / 1e3 * share / (1 - share))
        for name, row in rows.items():
            print(f"{ranks} ranks, {name:<20} {row}", flush=True)
    harness.write("kernels_power", figures, arguments.out)


def gemms(ranks: int) -> Callable[[], None]:
    operands = []
    for out, inputs in SHAPES[f"tp{ranks}"].values():
        weight, scale = quantize_fp8(torch.randn(out, inputs, device="cuda", dtype=BF16))
        operands.append((Quantized(*quantize_fp8(torch.randn(TOKENS, inputs, device="cuda", dtype=BF16))), weight, scale.view(-1)))

    def layer() -> None:
        for x, weight, scale in operands:
            scaled_mm(x, weight, scale, dtype=BF16)

    return layer


def measured(layer: Callable[[], None], *, pause_ms: float) -> dict[str, Any]:
    for _ in range(3):
        layer()
    torch.cuda.synchronize()
    time.sleep(1.0)  # as cool as the others
    marks: list[Any] = []
    with tempfile.NamedTemporaryFile() as readings:
        fields = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
        monitor = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", str(READ_MS), "-i", "0"],
            stdout=readings,
        )
        begin = time.monotonic()
        while time.monotonic() - begin < SECONDS:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            layer()
            last.record()
            marks.append((first, last))
            if pause_ms:
                torch.cuda._sleep(int(pause_ms * 1.6e6))  # type: ignore[no-untyped-call] # cycles
            if len(marks) > 4:
                marks[-4][1].synchronize()
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        monitor.terminate()
        monitor.wait()
        lines = Path(readings.name).read_text().splitlines()
    return {
        "us": round(statistics.median(a.elapsed_time(b) * 1e3 for a, b in marks[len(marks) // 2 :]), 1),
        "first_us": round(statistics.median(a.elapsed_time(b) * 1e3 for a, b in marks[:8]), 1),
        "us_with_pause": round(took * 1e6 / len(marks), 1), **read(lines[len(lines) // 2 :]),
    }  # fmt: skip


def read(lines: list[str]) -> dict[str, Any]:
    samples = [line.split(", ") for line in lines if line.count(",") == 2 and "N/A" not in line]
    if not samples:
        return {"readings": 0}
    limited = sum(bool(int(why, 16) & SW_POWER_CAP) for _, _, why in samples)
    return {
        "sm_mhz": statistics.median(int(mhz) for mhz, _, _ in samples),
        "watt": statistics.median(float(watt) for _, watt, _ in samples),
        "held_by_power": round(limited / len(samples), 2),
        "readings": len(samples),
    }


if __name__ == "__main__":
    main()
