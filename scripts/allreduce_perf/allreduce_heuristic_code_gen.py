#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Measure (unless --data_dir names CSVs), decide, and write gen_heuristic_code/generated_lookup_table.cpp.

Takes the flags of TensorRT-LLM's tool of this name, and writes the same files and folders. Without --data_dir it measures all TP
sizes that the machine can form; CSVs and C++ then go to --save_csv_dir. `phalanx allreduce` does the same and more, step by step.

To add a strategy, a size or a fusion (in TensorRT-LLM: the class `Constants` and its `strategy_name_to_enum`), edit `Strategy` in
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
from phalanx.tune.options import TuneOptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, help="folder with benchmark.tp*.sm*.csv; without it, measure first")
    parser.add_argument("--sm_version", type=int, help="read only the files of this SM version; default: all")
    parser.add_argument(
        "--save_csv_dir", type=Path, default=Path("data"), help="folder for the CSVs of a benchmark (default: data)"
    )
    parser.add_argument("--enable_auto", action="store_true", help="also measure AUTO")
    arguments = parser.parse_args()
    log.configure("allreduce")
    try:
        commands.require_packages()
        folder = arguments.data_dir
        if folder is None:
            folder = arguments.save_csv_dir
            commands.measure("all", TuneOptions(save_csv_dir=folder, enable_auto=arguments.enable_auto), None)
        commands.codegen(folder, sm_version=arguments.sm_version)
    except PhalanxError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    print(f"Generated C++ lookup table, written to: {folder / LOOKUP}")
    print((folder / LOOKUP).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
