# SPDX-License-Identifier: Apache-2.0
"""Tables by fingerprint: first those that were tuned on this host, then those of the package."""

from __future__ import annotations

import math
from pathlib import Path

import phalanx.tables.seed as seeds
from phalanx.config.home import cache_folder
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import Seed
from phalanx.tables.strategy import INCUMBENT
from phalanx.tables.table import Table
from phalanx.tables.table_file import load

_SHIPPED = Path(__file__).parent / "data"


def user_folder() -> Path:
    """The folder where `phalanx allreduce tune` installs tables on this host."""
    return cache_folder("tables")


def file_name(fingerprint: Fingerprint) -> str:
    return f"{fingerprint}.json"


def _folders(folder: Path | None) -> tuple[Path, ...]:
    return (user_folder() if folder is None else folder, _SHIPPED)


def find(fingerprint: Fingerprint, folder: Path | None = None) -> Table | None:
    """The table of this machine, or None. folder: instead of user_folder(). Raises TableError for a faulty file."""
    for own in _folders(folder):
        path = own / file_name(fingerprint)
        if path.is_file():
            return load(path)
    return None


def table_for(fingerprint: Fingerprint, folder: Path | None = None) -> Table:
    """The machine's table. For a machine that was never measured, a table without sections, so that the seed answers everywhere."""
    return find(fingerprint, folder) or Table(fingerprint, (), seed_for(fingerprint, folder))


def relatives(fingerprint: Fingerprint, folder: Path | None = None) -> list[Table]:
    """Tables of the same kind of machine with other numbers of ranks, the nearest number first."""
    tables: dict[int, Table] = {}
    for own in _folders(folder):
        for path in sorted(own.glob(f"sm{fingerprint.sm}.{fingerprint.link}.tp*.json")):
            table = load(path)
            if table.fingerprint.world != fingerprint.world:
                tables.setdefault(table.fingerprint.world, table)
    return [tables[world] for world in sorted(tables, key=lambda w: abs(math.log(w / fingerprint.world)))]


def seed_for(fingerprint: Fingerprint, folder: Path | None = None) -> Seed:
    """The seed of a machine that was never measured: the scaled seed of its nearest relative, else the seed of its class."""
    near = relatives(fingerprint, folder)
    if not near:
        return seeds.default(fingerprint)
    world = near[0].fingerprint.world
    return near[0].seed.scaled(world, fingerprint.world, f"scaled from {near[0].fingerprint}")


def advice(fingerprint: Fingerprint, folder: Path | None = None) -> str:
    """One line for a start on a machine without a table: what decides, how to tune, and the expected gain. "" where a table
    exists."""
    if find(fingerprint, folder) is not None:
        return ""
    device = "" if fingerprint.on_gpu else " --device cpu"
    how = f"`phalanx allreduce tune --tp_size {fingerprint.world}{device}` measures this machine in a few minutes"
    near = [table for table in relatives(fingerprint, folder) if table.sections]
    if near:
        gain = f"on {near[0].fingerprint} the tuned choice is {mean_gain(near[0]):.1f}x as fast as NCCL (mean over cells)"
    else:
        seed = seed_for(fingerprint, folder)
        choice, us = seed.choose("bf16", Fusion.RESIDUAL_RMS_NORM, 1, 8192)
        plain = seed.models[Fusion.RESIDUAL_RMS_NORM][INCUMBENT].us(1, 8192 * 2)
        name = INCUMBENT.name(fingerprint.sm)
        gain = f"at 1 x 8192 with the norm the seed expects {us:.0f} us of {choice.name(fingerprint.sm)}, {plain:.0f} us of {name}"
    origin = seed_for(fingerprint, folder).origin
    return f"no all-reduce table for {fingerprint}: the seed decides ({origin}); {how}; {gain}"


def mean_gain(table: Table) -> float:
    """Geometric mean of the gains of all spans over NCCL."""
    sections = [section for section in table.sections if section.caller is not Caller.GEMM]
    gains = [span.gain for section in sections for row in section.hidden_ranges for span in row.spans if span.gain]
    return math.exp(sum(map(math.log, gains)) / len(gains)) if gains else 1.0
