# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured for every committed H200 row: `python -m benchmarks.plan.accuracy`.

Decode rows by the cost model, throughput rows and served traces by the engine's own scheduler on it (they are no part of the fit),
KV tokens by plan/footprint. The residuals of models and layouts that were left out of the fit come from the coefficients' file.
Exit status 1 where a gate is missed; the tests hold the same gates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.plan import history, served
from benchmarks.plan.priced import predicted
from benchmarks.plan.rows import Start, rows, shape_named, starts
from benchmarks.plan.throughput import UNGATED, batch_rows, simulated
from phalanx.hardware import catalogue
from phalanx.plan import coefficients as coefficients_file
from phalanx.plan import footprint, search
from phalanx.plan.memory import KvFormat

GATES = {
    "decode rows, mean": 0.04,
    "decode rows, worst": 0.1,
    "a model left out, mean": 0.06,
    "a layout left out, mean": 0.06,
    "throughput rows, mean": 0.04,
    "throughput rows, worst": 0.095,
    "throughput rows over 0.05, part": 0.18,
    "KV tokens below the least start": 0.01,
    "KV tokens of mixtures below the least start": 0.02,
    "KV tokens of H100 below the least start": 0.036,
    "KV tokens above a start": 0.0,
}
"""The goals, as parts of the measured figure; but for throughput rows (0.05 for each: 10 of 62 miss it) and KV tokens (never above:
one start gave 0.12 percent less; the 0.5 to 1 GB that a promise lies below a start are a larger part of what an H100 has left: 3.5
percent beside the weights of gpt-oss-120b)."""


KNOWN_TO = 0.1
"""The goal for a decode row, which cannot be held against a figure whose own samples differ by more. A figure is the difference of
two runs; where a slow host launches prompts, the shorter run varies by as much as ten decode steps take."""


@dataclass(frozen=True)
class Line:
    """One figure: what it is, predicted and measured."""

    what: str
    file: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def decodes() -> list[Line]:
    """Decode rows of present kernels, those that are held out of the fit among them, as far as they are known to the goal."""
    now = history.fitted()
    present = (row for row in rows() if row.kind == "decode" and not row.unlike and row.spread <= KNOWN_TO)
    return [Line(row.name, row.file, predicted(row, now), row.measured) for row in present]


def not_gated() -> list[tuple[Line, str]]:
    """Rows of older kernels, those that are not known to the goal, and throughput of models of one kind, each with the reason."""
    now, lines = history.fitted(), []
    for row in rows():
        unknown = f"its runs to the first token differ by {row.spread:.0%} of it" if row.spread > KNOWN_TO else ""
        if why := row.unlike or unknown or (UNGATED.get(row.model, "") if row.kind == "batch" else ""):
            guess = predicted(row, now) if row.kind == "decode" else simulated(row, now)
            lines.append((Line(row.name, row.file, guess, row.measured), why))
    return lines


def throughput(every: int = 1) -> list[Line]:
    """Each batch row through the scheduler, or one of `every`; equal rows once."""
    now = history.fitted()
    return [Line(row.name, row.file, simulated(row, now), row.measured) for row in batch_rows()[::every]]


def served_traces() -> list[Path]:
    """Results of benchmarks/plan/served.py: `served.GOALS` are their gates."""
    return sorted(harness.RESULTS.glob("plan_served_*.json"))


def kv_tokens() -> list[Line]:
    """Promised KV tokens beside those of every start."""
    return [Line(_start_name(start), start.file, promised(start), start.kv_tokens) for start in starts()]


def promised(start: Start) -> int:
    """KV tokens as the planner promises them, had the engine captured the graphs that it captured then."""
    kv = KvFormat(1 if start.kv_fp8 else 2)
    sizes = footprint.Sizes(start.dtype, kv, start.max_batch_size, start.max_num_tokens, search.BLOCK, start.fraction)
    total = catalogue.gpu(start.gpu).memory_bytes + history.bytes_of_more_graphs(start)
    return footprint.rank_memory(shape_named(start.model), start.split, total, sizes).kv_tokens


def _start_name(start: Start) -> str:
    kv = " kv8" if start.kv_fp8 else ""
    on = "" if start.gpu == "H200" else f" on {start.gpu}"
    return (
        f"{start.model} {start.dtype}{kv} tp{start.tp} pp{start.pp}{on} {start.max_batch_size} slots, {start.fraction:g}: KV tokens"
    )


def kv_shortfall(lines: Sequence[Line]) -> float:
    """How far the promise lies below the start that gave least, the worst over models and layouts. The same start differs by up to
    1.3 percent from one time to the next, so that no promise can be near all of them."""
    least: dict[str, Line] = {}
    for line in lines:
        name = line.what.partition(",")[0].rsplit(" ", 2)[0]
        if name not in least or line.error > least[name].error:
            least[name] = line
    return max(-line.error for line in least.values())


def _of_mixture(line: Line) -> bool:
    return line.what.startswith(("mixtral", "qwen3", "deepseek", "gpt-oss"))


def _on_h100(line: Line) -> bool:
    return " on H100 " in line.what


def figures(decode_lines: Sequence[Line], batch_lines: Sequence[Line], kv_lines: Sequence[Line]) -> dict[str, float]:
    """What `GATES` bound, but for the rows left out, which the coefficients' file holds."""
    residuals = coefficients_file.document()["machines"]["H200"]["residuals"]
    decode, batch = [abs(line.error) for line in decode_lines], [abs(line.error) for line in batch_lines]
    return {
        "decode rows, mean": sum(decode) / len(decode),
        "decode rows, worst": max(decode),
        "a model left out, mean": residuals["without its model"]["mean"],
        "a layout left out, mean": residuals["without its layout"]["mean"],
        "throughput rows, mean": sum(batch) / len(batch),
        "throughput rows, worst": max(batch),
        "throughput rows over 0.05, part": sum(each > 0.05 for each in batch) / len(batch),
        "KV tokens below the least start": kv_shortfall([each for each in kv_lines if not (_of_mixture(each) or _on_h100(each))]),
        "KV tokens of mixtures below the least start": kv_shortfall(
            [line for line in kv_lines if _of_mixture(line) and not _on_h100(line)]
        ),
        "KV tokens of H100 below the least start": kv_shortfall([line for line in kv_lines if _on_h100(line)]),
        "KV tokens above a start": max(0.0, *(line.error for line in kv_lines)),
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    decode_lines, batch_lines, kv_lines = decodes(), throughput(), kv_tokens()
    for title, lines, digits in (
        ("ms per token", decode_lines, 2),
        ("output tokens/s", batch_lines, 0),
        ("KV tokens", kv_lines, 0),
    ):
        print(f"\n{title:66}{'predicted':>11}{'measured':>11}{'error':>8}")
        for line in lines:
            print(f"{line.what:66}{line.predicted:11,.{digits}f}{line.measured:11,.{digits}f}{line.error:+8.1%}  {line.file}")
    for line, why in not_gated():
        print(f"{line.what:66}{line.predicted:11,.2f}{line.measured:11,.2f}{line.error:+8.1%}  not gated: {why}")
    missed = False
    for path in served_traces():
        document = served.again(path)
        print(
            f"\nserved against simulated, {path.name}: {document['asked']['model']}, {len(document['requests'].split())} requests"
        )
        served.show(document["figures"])
        missed |= served.missed(document["figures"])
    print()
    for name, value in figures(decode_lines, batch_lines, kv_lines).items():
        over = value > GATES[name]
        missed |= over
        print(f"{name:40}{value:8.4f}  gate {GATES[name]:g}{'  MISSED' if over else ''}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
