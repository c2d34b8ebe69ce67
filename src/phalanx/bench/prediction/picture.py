# SPDX-License-Identifier: Apache-2.0
"""The picture of a simulation: how many requests are within which latency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.bench.report import json_path
from phalanx.errors import OptionError


def picture_path(file: str | None) -> Path | None:
    """The path of a picture; None for none. Call it before anything runs.

    Raises OptionError without matplotlib, for an unknown suffix, and where the picture cannot be written or would replace a file.
    """
    if file is None:
        return None
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise OptionError(f"the picture {file!r} cannot be drawn", why=str(error), next="install phalanx[tune]") from None
    path, kinds = Path(file), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise OptionError(f"the picture {file!r} has an unknown kind", next=f"known: {', '.join(sorted(kinds))}")
    return json_path(file, what="the picture")


def draw(report: dict[str, Any], file: str) -> None:
    """How many requests are within which latency, as a picture. Raises as `picture_path`."""
    path = picture_path(file)
    assert path is not None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=130, layout="constrained")
    for axes, name, bound in zip(
        figure.subplots(1, 2), ("ttft_ms", "tpot_ms"), (report["asked"]["slo_ttft_ms"], report["asked"]["slo_tpot_ms"]), strict=True
    ):
        ordered = sorted(report["samples"][name])
        axes.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], color="#2b6cb0")
        if bound is not None:
            axes.axvline(bound, color="#d9822b", linestyle="--")
        axes.set_xlabel(name.replace("_ms", ", ms").upper().replace("MS", "ms"))
        axes.set_ylabel("part of the requests")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['asked']['model']}, {report['asked']['trace']}, {report['asked']['replicas']} replicas", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
