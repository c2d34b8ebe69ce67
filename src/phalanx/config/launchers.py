# SPDX-License-Identifier: Apache-2.0
"""The class that the option `launcher` names: a short name, or a dotted path."""

from __future__ import annotations

from typing import Any

from phalanx.config import dotted_path
from phalanx.config.options import EngineOptions

LAUNCHERS = {
    "local": "phalanx.executor.launcher:LocalLauncher",
    "ray": "phalanx.deploy.ray_launcher:RayLauncher",
}
"""Short name -> dotted path. The seam is `executor.launcher.Launcher`."""


def launcher_class(options: EngineOptions) -> Any:
    """What `options.launcher` names; "auto" is "local" here, since `config.sources.place_process` has replaced it where Ray is
    meant. Raises OptionError when it cannot be loaded."""
    name = "local" if options.launcher == "auto" else options.launcher
    return dotted_path.load(LAUNCHERS.get(name, name), option="launcher")
