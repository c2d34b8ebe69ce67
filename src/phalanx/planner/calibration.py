# SPDX-License-Identifier: Apache-2.0
"""Coefficients that `phalanx plan calibrate` measured on this host: one file for each GPU, beside the tables of all-reduces."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.config.home import cache_folder
from phalanx.errors import TableError
from phalanx.hardware.catalogue import GpuSpec
from phalanx.planner.coefficients import Coefficients
from phalanx.tables.table_file import write_whole


def folder() -> Path:
    return cache_folder("plan")


def path_of(gpu: str, where: Path | None = None) -> Path:
    """The file of a GPU, whose name is taken in either case."""
    path = (where or folder()) / f"{gpu}.json"
    if path.is_file() or not path.parent.is_dir():
        return path
    return next((each for each in path.parent.glob("*.json") if each.stem.lower() == gpu.lower()), path)


def installed(gpu: str, where: Path | None = None) -> Coefficients | None:
    """What was measured for a GPU on this host; None for nothing. Raises TableError for a faulty file."""
    path = path_of(gpu, where)
    if not path.is_file():
        return None
    try:
        return Coefficients.from_json(json.loads(path.read_text(encoding="utf-8"))["coefficients"])
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{path} is no calibration", why=f"{type(error).__name__}: {error}", next="calibrate again") from None


def measured_machine(gpu: str, where: Path | None = None) -> GpuSpec | None:
    """What a calibration found of a machine that the catalogue does not hold, such as "CPU"; None without one."""
    path = path_of(gpu, where)
    if not path.is_file():
        return None
    try:
        return GpuSpec(**json.loads(path.read_text(encoding="utf-8"))["gpu"])
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{path} is no calibration", why=f"{type(error).__name__}: {error}", next="calibrate again") from None


def install(gpu: str, coefficients: Coefficients, about: dict[str, Any], where: Path | None = None) -> Path:
    """Keep what was measured, with the points and the machine. Raises OSError."""
    path = path_of(gpu, where)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"coefficients": asdict(coefficients), **about}, indent=1) + "\n")
    return path
