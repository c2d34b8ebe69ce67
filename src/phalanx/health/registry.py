# SPDX-License-Identifier: Apache-2.0
"""Every check of the modules in `phalanx.health.checks`, by name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from phalanx.errors import OptionError
from phalanx.health import checks
from phalanx.health.check import Check, registered


@cache
def every() -> tuple[Check, ...]:
    """All checks in the order of their names."""
    for entry in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{entry.name}")
    return tuple(registered[name] for name in sorted(registered))


def named(name: str) -> Check:
    """Raises OptionError with the known names."""
    every()
    if name not in registered:
        raise OptionError(f"check {name!r} is unknown", next=f"known: {', '.join(sorted(registered))}")
    return registered[name]
