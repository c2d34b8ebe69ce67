# SPDX-License-Identifier: Apache-2.0
"""Ours beside the peers in one run: `torchrun --nproc-per-node N -m benchmarks.comm.peers --out DIR`.

NCCL, torch's symmetric-memory collectives, FlashInfer's fused all-reduce (one-shot and two-shot, launched programmatically), and
ours: AUTO by the machine's table, and each strategy. A sample is 50 calls in one CUDA graph on fixed tensors; a figure is the
median of 9 replays, the maximum over ranks; each candidate is compared with the oracle before it is timed. A peer that is not
installed leaves its rows out, with the reason.

Writes peers.tp{N}.sm{V}.csv and .json; `peers.py --show CSV ...` prints CSVs as Markdown.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.comm.allreduce import TOKENS, measure
from phalanx.comm.group import Group, ResidualRmsNorm, finish
from phalanx.comm.torch_group import TorchGroup
from phalanx.comm.tuned_group import tuned
from phalanx.kernels import reference
from phalanx.tables.message import Fusion

FUSIONS = (Fusion.NONE, Fusion.RESIDUAL_RMS_NORM, Fusion.RESIDUAL_RMS_NORM_QUANT_FP8)
COLUMNS = ("world_size", "dtype", "size", "num_tokens", "hidden_size", "implementation", "fusion", "time (us)")
OURS, AUTO = "Phalanx", "Phalanx AUTO"
EPS, SCALE = 1e-5, 0.02
ONE_SHOT_BYTES, LONGEST_ONE_SHOT = 8 << 20, 32 << 20
"""Torch's and FlashInfer's one-shots are not asked for longer messages."""
Row = tuple[int, str, int, int, int, str, str, float]


@dataclass(frozen=True)
class Candidate:
    """call: what is timed, on fixed tensors. once: the same work on the cell's own input, its first output to be compared."""

    implementation: str
    call: Callable[[], object]
    once: Callable[[], Tensor]


@dataclass(frozen=True)
class Cell:
    """One rank's tensors of a size and fusion. expected: the oracle's first output, quantized values times their scale."""

    fusion: Fusion
    x: Tensor
    norm: ResidualRmsNorm | None
    expected: Tensor

    def differs(self, output: Tensor) -> str | None:
        """Why this output is wrong. Peers add up in orders and widths of their own: so only what no rounding explains is wrong."""
        scaled = output.float() * (SCALE if output.dtype == torch.float8_e4m3fn else 1.0)
        allowed = 0.1 + (0.13 if output.dtype == torch.float8_e4m3fn else 0.02) * self.expected.abs()
        bad = ~((scaled.reshape(self.expected.shape) - self.expected).abs() <= allowed)
        return f"{int(bad.sum())} of {bad.numel()} values are wrong" if bool(bad.any()) else None


def cell(fusion: Fusion, tokens: int, hidden: int, group: dist.ProcessGroup, device: torch.device) -> Cell:
    torch.manual_seed(group.rank())
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group)
    total = reference.all_reduce(parts)
    if fusion is Fusion.NONE:
        return Cell(fusion, x, None, total.float())
    torch.manual_seed(99)
    residual = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    scale = torch.full((1,), SCALE, device=device)[0] if fusion.quant == "fp8" else None
    norm = reference.residual_rms_norm_quant(total, residual, weight, EPS)[0]
    return Cell(fusion, x, ResidualRmsNorm(residual, weight, EPS, fusion.quant, scale), norm.float())  # type: ignore[arg-type]


def ours(cell: Cell, groups: dict[str, Group]) -> Iterator[Candidate]:
    """groups: by the strategy that each runs. AUTO may run NCCL, which sums in place."""
    local = cell.x.clone()

    def fused(group: Group, x: Tensor) -> Tensor:
        return group.all_reduce(x) if cell.norm is None else group.all_reduce(x, cell.norm)[0]

    def unfused(group: Group, x: Tensor) -> Tensor:
        assert cell.norm is not None
        return finish(group.all_reduce(x), cell.norm)[0]

    for name, group in groups.items():
        yield Candidate(f"{OURS} {name}", partial(fused, group, local), partial(fused, group, cell.x.clone()))
        if cell.norm is not None and name != "AUTO":
            yield Candidate(f"{OURS} {name}+UNFUSED", partial(unfused, group, local), partial(unfused, group, cell.x.clone()))


def of_torch(cell: Cell, group: dist.ProcessGroup, buffer: Tensor) -> Iterator[Candidate]:
    """NCCL, and torch's symmetric-memory collectives; a fusion follows as our kernel. What sums in place is timed on zeros."""
    zeros, name = torch.zeros_like(cell.x), group.group_name
    symmetric = buffer[: cell.x.numel()].view_as(cell.x)

    def after(total: Tensor) -> Tensor:
        return total if cell.norm is None else finish(total, cell.norm)[0]

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return after(x)

    def one_shot() -> Tensor:
        return after(torch.ops.symm_mem.one_shot_all_reduce(symmetric, "sum", name))

    def two_shot() -> Tensor:
        return after(torch.ops.symm_mem.two_shot_all_reduce_(symmetric, "sum", name))

    def filled(run: Callable[[], Tensor]) -> Tensor:
        """With this cell's input in the symmetric buffer, where zeros lie afterwards."""
        output = cell.x
        for value in (cell.x, zeros):
            _meet(group)
            symmetric.copy_(value)
            _meet(group)
            output = run().clone() if value is cell.x else output
        return output

    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    behind = "" if cell.norm is None else " + our norm"
    yield Candidate(f"NCCL {version}{behind}", partial(nccl, zeros), lambda: nccl(cell.x.clone()))
    torches = f"torch {'.'.join(torch.__version__.split('.')[:2])} symm_mem"
    if cell.x.nbytes <= ONE_SHOT_BYTES:
        yield Candidate(f"{torches} one_shot{behind}", one_shot, partial(filled, one_shot))
    yield Candidate(f"{torches} two_shot{behind}", two_shot, partial(filled, two_shot))


def _meet(group: dist.ProcessGroup) -> None:
    torch.cuda.synchronize()
    dist.barrier(group)
    torch.cuda.synchronize()


class FlashInfer:
    """FlashInfer's fused all-reduce over its own workspace. Raises ImportError, OSError or RuntimeError where it cannot run."""

    def __init__(self, group: dist.ProcessGroup, tokens: int, hidden: int) -> None:
        import flashinfer
        from flashinfer import comm

        self._comm, self.version = comm, flashinfer.__version__
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm", world_size=group.size(), rank=group.rank(), max_token_num=tokens, hidden_dim=hidden,
            dtype=torch.bfloat16, group=group,
        )  # fmt: skip

    def candidates(self, cell: Cell, world: int) -> Iterator[Candidate]:
        """Launched so that the next kernel may enter when this one ends, or (early) when it begins."""
        shots = ["one-shot"] if cell.x.nbytes <= LONGEST_ONE_SHOT else []
        for shot in (*shots, *(["two-shot"] if cell.x.shape[0] > world else [])):  # which asks for more rows than ranks
            for early in (False, True):
                call = self._call(cell, shot == "one-shot", early)
                yield Candidate(f"FlashInfer {self.version} {shot} PDL{' early' if early else ''}", call, call)

    def _call(self, cell: Cell, one_shot: bool, early: bool) -> Callable[[], Tensor]:
        patterns, x, norm = self._comm.AllReduceFusionPattern, cell.x, cell.norm
        fixed: dict[str, Any] = {
            "launch_with_pdl": True, "trigger_completion_at_end": not early, "use_oneshot": one_shot, "output": torch.empty_like(x),
        }  # fmt: skip
        out = "output"
        if norm is None:
            pattern = patterns.kAllReduce
        else:
            fixed |= {"residual_in": norm.residual, "residual_out": torch.empty_like(x), "rms_gamma": norm.weight}
            fixed |= {"rms_eps": norm.eps}
            out = "norm_out" if norm.quant == "none" else "quant_out"
            fixed[out] = torch.empty_like(x, dtype=x.dtype if norm.quant == "none" else torch.float8_e4m3fn)
            pattern = patterns.kARResidualRMSNorm if norm.quant == "none" else patterns.kARResidualRMSNormFP8Quant
            if norm.scale is not None:
                fixed["scale_factor"] = norm.scale.reshape(1)

        def call() -> Tensor:
            self._comm.allreduce_fusion(input=x, workspace=self._workspace, pattern=pattern, **fixed)
            output: Tensor = fixed[out]
            return output

        return call


class Run:
    """One rank's part: what it has measured, and what it left out and why."""

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> None:
        self.options, self.group, self.device = options, group, device
        self.rows: list[Row] = []
        self.absent: dict[str, str] = {}

    def all(self) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory  # of torch's collectives, timed here

        longest = max(self.options.tokens) * self.options.hidden
        base = TorchGroup(self.group, self.device)
        names = ("AUTO", "ONESHOT", "TWOSHOT")
        groups = {name: tuned(base, message_bytes=2 * longest, strategy=name) for name in names}
        buffer = symmetric_memory.empty(longest, dtype=torch.bfloat16, device=self.device)
        symmetric_memory.rendezvous(buffer, self.group.group_name)
        self.sweep(lambda at: (*of_torch(at, self.group, buffer), *ours(at, groups)))
        self.write(facts=True)
        theirs, why = self.flashinfer()
        if theirs is None:
            self.absent["FlashInfer"] = why
        else:  # last: where its kernels fail, the others' figures are there
            self.sweep(lambda at: theirs.candidates(at, self.group.size()))

    def flashinfer(self) -> tuple[FlashInfer | None, str]:
        peer, why = None, ""
        try:
            import flashinfer.comm  # noqa: F401 (the workspace is made by all ranks or by none)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if self.anywhere(bool(why)):
            return None, why or "another rank cannot import it"
        try:
            peer = FlashInfer(self.group, max(self.options.tokens), self.options.hidden)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return (None, why or "another rank cannot set it up") if self.anywhere(bool(why)) else (peer, "")

    def anywhere(self, bad: bool) -> bool:
        """Whether any rank says so."""
        flag = torch.tensor(int(bad), device=self.device)
        dist.all_reduce(flag, group=self.group)
        return bool(flag.item())

    def sweep(self, candidates: Callable[[Cell], Any]) -> None:
        for tokens in self.options.tokens:
            for fusion in FUSIONS:
                at = cell(fusion, tokens, self.options.hidden, self.group, self.device)
                for candidate in candidates(at):
                    self.one(candidate, at)
                self.write()

    def one(self, candidate: Candidate, at: Cell) -> None:
        tokens, hidden = at.x.shape
        try:
            wrong = at.differs(candidate.once())
        except (RuntimeError, ValueError, AssertionError) as error:
            wrong = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if self.anywhere(wrong is not None):
            self.absent[f"{candidate.implementation}, {at.fusion.name}, {tokens} tokens"] = wrong or "wrong on another rank"
            return
        us = round(measure(candidate.call, self.group), 2)
        self.rows.append(
            (self.group.size(), "bfloat16", at.x.nbytes, tokens, hidden, candidate.implementation, at.fusion.name, us)
        )  # fmt: skip

    def write(self, *, facts: bool = False) -> None:
        """All that there is so far; facts: of the machine and of what was left out, too."""
        if self.group.rank():
            return
        major, minor = torch.cuda.get_device_capability(self.device)
        stem, folder = f"peers.tp{self.group.size()}.sm{10 * major + minor}", Path(self.options.out)
        path = folder / f"{stem}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *self.rows])
        if facts:
            method = (
                "50 calls in one CUDA graph on fixed tensors, median of 9 replays, maximum over ranks; compared with the oracle"
            )
            harness.write(stem, {"method": method, "left out": self.absent, "rows": len(self.rows)}, folder)


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [
            (int(r["world_size"]), r["dtype"], int(r["size"]), int(r["num_tokens"]), int(r["hidden_size"]), r["implementation"],
             r["fusion"], float(r["time (us)"]))
            for r in csv.DictReader(file)
        ]  # fmt: skip


def markdown(rows: list[Row]) -> list[str]:
    """A table for each TP size and fusion: AUTO, our fastest, the fastest of each family of peers, and AUTO / best peer."""
    lines = []
    for world, fusion in dict.fromkeys((row[0], row[6]) for row in rows):
        rows_of_table = [row for row in rows if (row[0], row[6]) == (world, fusion)]
        families = sorted({row[5].split()[0] for row in rows_of_table} - {OURS})
        lines += [f"### TP {world}, {fusion}", ""]
        lines.append(f"| tokens | KiB | **AUTO** | our fastest | {' | '.join(families)} | AUTO / best peer |")
        lines.append("|" + "---|" * (5 + len(families)))
        for tokens in sorted({row[3] for row in rows_of_table}):
            at = {row[5]: row[7] for row in rows_of_table if row[3] == tokens}
            lines.append(_line(tokens, next(row[2] for row in rows_of_table if row[3] == tokens), at, families))
        lines.append("")
    return lines


def _line(tokens: int, size: int, at: dict[str, float], families: list[str]) -> str:
    """at: microseconds by implementation."""
    us_of_ours = {name.removeprefix(f"{OURS} "): us for name, us in at.items() if name.startswith(OURS)}
    best = {family: min(((us, name) for name, us in at.items() if name.split()[0] == family), default=None) for family in families}
    cells = [
        "" if fastest_peer is None else f"{fastest_peer[0]:.2f} {' '.join(fastest_peer[1].split()[2:])}".strip()
        for fastest_peer in best.values()
    ]
    peers = [fastest_peer[0] for fastest_peer in best.values() if fastest_peer is not None]
    auto = us_of_ours.pop("AUTO", None)
    fastest = min(((us, name) for name, us in us_of_ours.items()), default=None)
    ratio = "" if auto is None or not peers else f"{auto / min(peers):.2f}" + (" miss" if auto > 1.02 * min(peers) else "")
    own = "" if fastest is None else f"{fastest[0]:.2f} {fastest[1]}"
    return f"| {tokens} | {size // 1024} | **{'' if auto is None else f'{auto:.2f}'}** | {own} | {' | '.join(cells)} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(harness.RESULTS), help="the folder of the CSV and its JSON")
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=list(TOKENS))
    parser.add_argument("--show", nargs="+", type=Path, help="print these CSVs instead of measuring")
    options = parser.parse_args()
    if options.show:
        print("\n".join(markdown([row for path in options.show for row in read(path)])))
        return
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    assert dist.group.WORLD is not None
    run = Run(options, dist.group.WORLD, device)
    run.all()
    run.write(facts=True)
    if rank == 0:
        print("\n".join(markdown(run.rows)), json.dumps({"left out": run.absent}, indent=1), sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
