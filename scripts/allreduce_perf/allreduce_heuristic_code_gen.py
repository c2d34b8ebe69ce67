#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Benchmark (unless --data_dir names CSVs), decide, and write gen_heuristic_code/generated_lookup_table.cpp.

The flags, files and folders of TensorRT-LLM's tool of this name. Without --data_dir it measures all TP sizes that the machine can
form; CSVs and C++ then go to --save_csv_dir. `phalanx allreduce` does the same and more, in separate steps.

To add a strategy, a size or a fusion (there: the class `Constants` and its `strategy_name_to_enum`): `Strategy` in
src/phalanx/tables/strategy.py and the axes in src/phalanx/tables/grid.py; everything else follows from them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from phalanx import log
from phalanx.errors import PhalanxError
from phalanx.tune import commands
from phalanx.tune.codegen import LOOKUP


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, help="a folder with benchmark.tp*.sm*.csv; without it, measure first")
    parser.add_argument("--sm_version", type=int, help="only this SM version's files; otherwise all that are there")
    parser.add_argument("--save_csv_dir", type=Path, default=Path("data"), help="where a benchmark's CSVs go (default: data)")
    parser.add_argument("--enable_auto", action="store_true", help="measure AUTO, too")
    asked = parser.parse_args()
    log.configure("allreduce")
    try:
        folder = asked.data_dir
        if folder is None:
            folder = asked.save_csv_dir
            commands.bench("all", commands.Asked(folder=folder, auto=asked.enable_auto), None)
        commands.codegen(folder, sm_version=asked.sm_version)
    except PhalanxError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    print(f"Generated C++ lookup table, written to: {folder / LOOKUP}")
    print((folder / LOOKUP).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
