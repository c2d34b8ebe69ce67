# SPDX-License-Identifier: Apache-2.0
"""From names to what a plan is made of: a model (known offline, a folder, a config.json, or the Hub's config.json), a machine."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.config.locate import DEMO, refuse_gguf
from phalanx.config.mistral_format import PARAMS, as_config
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError, ModelNotFound, OptionError
from phalanx.hardware import catalogue, probe
from phalanx.hardware.nvml import Gpu
from phalanx.layout.families import known
from phalanx.layout.families.registry import names, short_names
from phalanx.planner.calibration import installed, measured_machine
from phalanx.planner.cost import MachineModel, coefficients_for

LINK_CLASSES = {"nvlink": "nvlink", "pcie": "pcie_p2p"}
"""What `--link` names -> link class. Without peer access PCIe is slower still; a plan takes it to be there."""
MOST_GPUS = 4096
"""Of a machine: a search of all its layouts takes half a minute with experts, and grows with the square of the GPUs."""


def shape_for(model: str, revision: str | None = None) -> ModelShape:
    """The shape of a model. Known models need no network, and of a Hub id only config.json is fetched.

    Raises ModelNotFound, ModelError or UnsupportedArchitecture.
    """
    config = known(model)
    if config is not None:
        return ModelShape.from_config(config, file=f"config.json of {model}")
    path = DEMO if model == "demo" else Path(model).expanduser()
    refuse_gguf(path, f"model {model!r}")
    if path.is_dir():
        return ModelShape.from_folder(path)
    if path.is_file():
        return ModelShape.from_config(_read(path), file=str(path))
    return ModelShape.from_config(_of_hub(model, revision), file=f"config.json of {model}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read", why=str(error)) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}", why="config.json must hold an object")
    return as_config(config, str(path)) if path.name == PARAMS else config


def _of_hub(model: str, revision: str | None) -> Mapping[str, Any]:
    import huggingface_hub

    try:  # not by hf_hub_download, which tries for 25 s where there is no network
        folder = huggingface_hub.snapshot_download(model, revision=revision, allow_patterns="config.json", library_name="phalanx")
        return _read(Path(folder, "config.json"))
    except ModelError:
        raise
    except Exception as error:  # the Hub's client raises its own errors, the HTTP client's, and OSError
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        near = difflib.get_close_matches(model.lower(), short_names(), n=3)
        similar = f"; similar names that need no network: {', '.join(near)}" if near else ""
        raise ModelNotFound(
            f"model {model!r} cannot be planned for",
            held=f"it is no folder, no file and none of the {len(names())} models that need no network{similar}",
            why=f"the Hub gave no config.json of it: {why}",
            next="check the name, or give the folder of a checkpoint or its config.json; docs/models.md lists the models",
        ) from None  # fmt: skip


def _gpus_here() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs of this host, and why others or all of them cannot be used. Raises OptionError."""
    try:
        machine = probe.usable_machine()
    except OptionError as error:
        next = "mend that, or name a GPU to plan for: --gpu"
        raise OptionError(error.failure, held=error.held, why=error.why, next=next) from None
    return machine.gpus, machine.unusable


def machine_for(
    gpu: str | None = None, *, gpus_per_node: int | None = None, nodes: int = 1, link: str | None = None, network: str | None = None
) -> tuple[MachineModel, str]:
    """The machine that is named, else the one at hand, else 8 x H100; and how it was found.

    link: "nvlink" or "pcie", in place of the catalogue's; network: between nodes, ib-ndr unless named. Raises OptionError.
    """
    gpus, unusable = ((), "") if gpu is not None else _gpus_here()
    here = catalogue.at_hand(gpus)
    if gpu is None and gpus and here is None:
        raise OptionError(
            f"the GPUs of this host cannot be planned for: {', '.join(sorted({each.name for each in gpus}))}",
            next=f"name one of the catalogue: --gpu {', '.join(catalogue.names())}",
        )  # fmt: skip
    name = gpu or here or "H100"
    measured = measured_machine(name) if name.lower() not in [each.lower() for each in catalogue.names()] else None
    spec = measured or catalogue.gpu(name)
    why = (
        "named"
        if gpu
        else "; ".join(filter(None, [f"{len(gpus)} found here", unusable]))
        if here
        else f"{unusable or 'no GPU here'}: --gpu names another"
    )
    if link is not None and LINK_CLASSES.get(link) is None:
        raise OptionError(f"link {link!r} is unknown", next=f"known: {', '.join(LINK_CLASSES)}")
    if nodes < 1 or (gpus_per_node is not None and gpus_per_node < 1):
        raise OptionError(
            f"{nodes} nodes of {spec.gpus_per_node if gpus_per_node is None else gpus_per_node} GPUs hold no rank",
            next="give at least 1 of each",
        )  # fmt: skip
    if link is not None and LINK_CLASSES[link] != spec.link:
        if link == "nvlink":
            raise OptionError(f"{spec.name} has no NVLink between all GPUs of a node", held=f"its link is {spec.link}")
        spec = replace(spec, link=LINK_CLASSES[link], link_bandwidth=spec.pcie_bandwidth)
    if here is not None:  # a part of a GPU, or one with less memory than its like
        driver = catalogue.driver_bytes(spec.name)
        spec = replace(spec, memory_bytes=min(spec.memory_bytes, *(each.total_memory - driver for each in gpus)))
    calibration = installed(spec.name)
    coefficients, label = coefficients_for(spec)
    if calibration is not None:
        coefficients, label = calibration, "measured"
    between = catalogue.network(network or "ib-ndr")
    count = (len(gpus) or spec.gpus_per_node) if gpus_per_node is None else gpus_per_node
    if count * nodes > MOST_GPUS:
        raise OptionError(f"{nodes} nodes of {count} GPUs are too many", next=f"give at most {MOST_GPUS} GPUs in all")
    return MachineModel(spec, spec.link, count, nodes, between if nodes > 1 else None, coefficients, label), why
