# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from phalanx.config.dotted_path import launcher_class
from phalanx.config.options import EngineOptions
from phalanx.deploy.ray_launcher import RayLauncher
from phalanx.errors import OptionError
from phalanx.executor.launcher import LocalLauncher


def named(launcher: str) -> object:
    return launcher_class(EngineOptions(model="x", launcher=launcher))


def test_a_launcher_has_a_short_name_or_a_dotted_path():
    assert named("auto") is named("local") is LocalLauncher
    assert named("ray") is named("phalanx.deploy.ray_launcher:RayLauncher") is RayLauncher
    with pytest.raises(OptionError, match="launcher='slurm' is no dotted path"):
        named("slurm")
