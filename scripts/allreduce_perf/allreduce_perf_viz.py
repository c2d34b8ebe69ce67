#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Plot every CSV of a folder, fusion by fusion, into viz/{FUSION}/: times, fastest strategies, and differences from them.

Has the flag, files, folders and functions of TensorRT-LLM's tool of this name. Also writes one report with all plots,
viz/report.html.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.tune import commands
from phalanx.tune.plots import visualize_2d_best_strategy, visualize_2d_heatmap, visualize_strategy_difference_heatmaps

__all__ = ["visualize_2d_best_strategy", "visualize_2d_heatmap", "visualize_strategy_difference_heatmaps"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default=Path("data"), help="folder with benchmark.tp*.sm*.csv (default: data)")
    arguments = parser.parse_args()
    try:
        for path in commands.plot(arguments.data_dir):
            print(path)
    except PhalanxError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
