# SPDX-License-Identifier: Apache-2.0
"""Every check of `phalanx.health.checks`, by name: a file there is a check as soon as it stands there."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from phalanx.errors import OptionError
from phalanx.health import checks
from phalanx.health.check import Check


@cache
def every() -> tuple[Check, ...]:
    """All checks in the order of their names."""
    names = sorted(entry.name for entry in pkgutil.iter_modules(checks.__path__))
    return tuple(importlib.import_module(f"{checks.__name__}.{name}").CHECK for name in names)


def named(name: str) -> Check:
    """Raises OptionError with the known names."""
    for check in every():
        if check.name == name:
            return check
    raise OptionError(f"check {name!r} is unknown", next=f"known: {', '.join(check.name for check in every())}")
