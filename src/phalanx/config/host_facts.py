# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all hosts of one engine: options, versions, checkpoint. Nothing heavy is imported to know it."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path

from phalanx.config.cluster_token import SECRET_OPTIONS
from phalanx.config.locate import checkpoint_digest, locate
from phalanx.config.options import EngineOptions
from phalanx.version import __version__

PER_HOST = {
    "node_rank", "model", "tokenizer", "kernel_cache_dir", "launcher", "master_addr_timeout", "start_timeout", *SECRET_OPTIONS,
}  # fmt: skip
"""Options that may differ between hosts: the model, which is compared by its digest, and how long a host waits for the others."""

_DISTRIBUTIONS = ("torch", "triton", "flashinfer-python")
"""What decides how ranks compute."""


def host_facts(options: EngineOptions, folder: Path) -> dict[str, str]:
    """Name -> value, for concrete options and the model's folder on this host."""
    weights, config = options.load_format != "dummy", options.speculation
    facts = {**option_facts(options), "checkpoint": checkpoint_digest(folder, weights=weights)}
    if config is not None and config.model is not None:
        facts["draft checkpoint"] = checkpoint_digest(locate(config.model, config.revision), weights=weights)
    return facts


def option_facts(options: EngineOptions) -> dict[str, str]:
    """Name -> value, of concrete options and versions."""
    values = options.model_dump(mode="json", exclude=PER_HOST)
    return {
        **{f"option {name}": json.dumps(value) for name, value in values.items()},
        "phalanx version": __version__, "Python version": platform.python_version(),
        **{f"{name} version": _version(name) for name in _DISTRIBUTIONS},
    }  # fmt: skip


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def differences(expected: dict[str, str], facts: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The facts that are not equal, by name in alphabetical order: (expected, actual); "nothing" for one that is absent."""
    pairs = {name: (expected.get(name, "nothing"), facts.get(name, "nothing")) for name in sorted({*expected, *facts})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
