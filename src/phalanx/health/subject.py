# SPDX-License-Identifier: Apache-2.0
"""What the doctor examines: a host, its GPUs, and where they are named a model with options, servers, and other hosts' reports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.config.locate import DEMO
from phalanx.config.model import ModelShape, config_file
from phalanx.config.options import EngineOptions
from phalanx.config.serving import QUEUED_BATCHES, ServeOptions
from phalanx.errors import PhalanxError
from phalanx.health import devices
from phalanx.health.check import Need
from phalanx.health.devices import Device, Devices
from phalanx.health.host import Host
from phalanx.health.servers import Server


@dataclass
class Subject:
    """Facts for checks. `nvml` None means the real one. Facts that take time are read once, when the first check asks for them."""

    host: Host = field(default_factory=Host)
    nvml: Any = None
    options: EngineOptions | None = None
    serving: ServeOptions = field(default_factory=lambda: ServeOptions.of())
    config: Mapping[str, Any] | None = None
    servers: tuple[Server, ...] = ()
    peers: tuple[Mapping[str, Any], ...] = ()
    quality: bool = False
    """Whether an engine is started, to check its answers."""
    measured: Any = None
    """Results of `pairs.measure`, where a check or a test has them already."""

    @cached_property
    def devices(self) -> Devices:
        environment = self.host.environment
        return devices.read(
            self.nvml, environment.get("CUDA_VISIBLE_DEVICES"), environment.get("CUDA_DEVICE_ORDER"), self.host.root
        )

    @property
    def folder(self) -> Path | None:
        """The model's folder where it is on this host already; a Hub id is looked up in the cache and never downloaded."""
        if self.options is None:
            return None
        if self.options.model == "demo":
            return DEMO
        path = Path(self.options.model).expanduser()
        return path if path.is_dir() else self.snapshot

    @cached_property
    def snapshot(self) -> Path | None:
        """Of a Hub id: the folder in the cache that a start without a network takes: of `revision`, a branch, tag or commit."""
        assert self.options is not None
        folder = self.hub_cache / f"models--{self.options.model.replace('/', '--')}"
        revision = self.options.revision or "main"
        try:
            commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except OSError:
            commit = revision
        snapshot = folder / "snapshots" / commit
        return snapshot if config_file(snapshot).exists() else None

    @property
    def hub_cache(self) -> Path:
        """Where huggingface_hub keeps models, by the variables that it reads."""
        environment = self.host.environment
        home = environment.get("HF_HOME", os.path.join(environment.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
        hub = os.path.join(os.path.expanduser(home), "hub")
        folder = environment.get("HF_HUB_CACHE", environment.get("HUGGINGFACE_HUB_CACHE", hub))
        return Path(os.path.expanduser(folder)).absolute()

    @cached_property
    def shape(self) -> ModelShape | PhalanxError | None:
        """The model's shape, the error with which reading it fails, or None where nothing of it is on this host."""
        try:
            if self.config is not None:
                return ModelShape.from_config(self.config)
            return None if self.folder is None else ModelShape.from_folder(self.folder)
        except PhalanxError as error:
            return error

    @property
    def model_shape(self) -> ModelShape | None:
        return self.shape if isinstance(self.shape, ModelShape) else None

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks run on GPUs, as far as the options and the host decide it."""
        device = self.options.device if self.options is not None else "auto"
        return device == "cuda" or (device == "auto" and (bool(self.devices.gpus) or self.devices.refused))

    @property
    def ranks_here(self) -> int:
        """Ranks of this host: by the options where they are named, else one for each GPU."""
        if self.options is not None:
            return max(self.options.world_size // self.options.nnodes, 1)
        return max(len(self.devices.gpus), 1)

    @property
    def gpus_in_use(self) -> tuple[Device, ...]:
        """The GPUs that the ranks of this host take: the first ones."""
        return self.devices.gpus[: self.ranks_here] if self.options is not None else self.devices.gpus

    @property
    def streams(self) -> int:
        """Requests that the server may have open: the batch and the queue."""
        batch = self.options.max_batch_size if self.options is not None else EngineOptions.of(model="demo").max_batch_size
        queued = self.serving.max_num_queued_reqs
        return batch + (QUEUED_BATCHES * batch if queued is None else queued)

    def lacks(self, need: Need) -> bool:
        """Whether a condition of a check is not met."""
        match need:
            case Need.GPU:
                return not self.devices.gpus
            case Need.PAIR:
                return len(self.devices.gpus) < 2
            case Need.MODEL:
                return self.options is None
            case Need.SERVER:
                return not self.servers
            case Need.HOSTS:
                return self.options is None or self.options.nnodes < 2
            case Need.QUALITY:
                return not self.quality
            case Need.PEERS:
                return not self.peers
