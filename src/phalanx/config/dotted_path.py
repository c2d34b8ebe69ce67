# SPDX-License-Identifier: Apache-2.0
"""An implementation named in the configuration: "package.module:Name". So a package finds what lies above it without an import.
The option `launcher` takes short names, too."""

from __future__ import annotations

import importlib
from typing import Any

from phalanx.config.options import EngineOptions
from phalanx.errors import OptionError

LAUNCHERS = {
    "local": "phalanx.executor.launcher:LocalLauncher",
    "ray": "phalanx.deploy.ray_launcher:RayLauncher",
}
"""Short name of a launcher -> dotted path. The seam is `executor.launcher.Launcher`."""


def load(path: str, *, option: str) -> Any:
    """The object called Name in package.module. Raises OptionError, naming `option`, when there is none."""
    module, colon, name = path.partition(":")
    hint = 'give "package.module:Name", of a module that this Python can import'
    if not (module and colon and name):
        raise OptionError(f"{option}={path!r} is no dotted path", next=hint)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{option}={path!r} cannot be loaded", why=str(error), next=hint) from error


def launcher_class(options: EngineOptions) -> Any:
    """What `options.launcher` names; "auto" is "local" here, since `config.sources.place_process` has replaced it where Ray is
    meant. Raises OptionError when it cannot be loaded."""
    name = "local" if options.launcher == "auto" else options.launcher
    return load(LAUNCHERS.get(name, name), option="launcher")
