# SPDX-License-Identifier: Apache-2.0
"""Concrete options for a model on this machine: the same on every host, since the ranks compare them."""

from __future__ import annotations

from phalanx.config.launchers import launcher_class
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.resolve import ResolvedOptions, resolve
from phalanx.hardware.probe import detect_machine
from phalanx.plan.layout import Layout, require_suits


def resolve_options(options: EngineOptions) -> tuple[ModelShape, ResolvedOptions]:
    """The model's shape, and the options with neither "auto" nor None left in them.

    Raises OptionError, LayoutError or ModelError for options that cannot work.
    """
    shape = ModelShape.from_folder(locate(options.model, options.revision))
    resolved = resolve(options, shape, _gpus(options))
    require_suits(Layout.of(options), shape)
    return shape, resolved


def _gpus(options: EngineOptions) -> int:
    """GPUs of a host of ranks: this one, unless the launcher finds the hosts (see `executor.launcher.ClusterLauncher`)."""
    gpus_per_host = getattr(launcher_class(options), "gpus_per_host", None)
    return len(detect_machine().gpus) if gpus_per_host is None else int(gpus_per_host(options))
