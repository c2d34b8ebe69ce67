# SPDX-License-Identifier: Apache-2.0
"""The process that copies between devices: reads {"count", "device", "quick"} from stdin, and writes one line of JSON for each
direction.

A direction is verified before it is timed: bytes of a pattern that differs at every word are copied, and compared on the host.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from phalanx.health.pairs import Measured, line_of

SAMPLES = 5
SMALL_COPIES = 100


def main() -> None:
    task = json.loads(sys.stdin.read())
    count, kind = int(task["count"]), str(task["device"])
    megabytes = 64 if task["quick"] else 256
    for source in range(count):
        for target in range(count):
            if source != target:
                print(line_of(direction(kind, source, target, megabytes << 20)), flush=True)


def direction(kind: str, source: int, target: int, count: int) -> Measured:
    """Verify and time copies of `count` bytes from one device to another."""
    devices = [torch.device(kind, place) if kind == "cuda" else torch.device(kind) for place in (source, target)]
    words = torch.arange(count // 4, dtype=torch.int32)
    pattern = (words * 2654435761 + 12345 * source + target).to(torch.int32)
    sent = pattern.to(devices[0], copy=True)
    received = torch.zeros(count // 4, dtype=torch.int32, device=devices[1])
    received.copy_(sent)
    wrong = int((received.cpu() != pattern).sum())
    failure = f"{wrong} of {len(pattern)} words differ" if wrong else ""
    repeats = 4
    rate = count * repeats / statistics.median(_seconds(devices, lambda: received.copy_(sent), repeats) for _ in range(SAMPLES))
    small_sent, small_received = sent[:1], received[:1]
    latency = statistics.median(
        _seconds(devices, lambda: small_received.copy_(small_sent), SMALL_COPIES) / SMALL_COPIES for _ in range(SAMPLES)
    )
    return Measured(source, target, rate, latency, not wrong, failure)


def _seconds(devices: list[torch.device], act: Callable[[], object], repeats: int) -> float:
    """Of `repeats` calls: by events of the source's stream on GPUs, by the clock elsewhere."""
    if devices[0].type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            act()
        return time.perf_counter() - begin
    with torch.cuda.device(devices[0]):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            act()
        end.record()
    for device in devices:
        torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1000


if __name__ == "__main__":
    main()
