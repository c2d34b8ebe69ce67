# SPDX-License-Identifier: Apache-2.0
"""The adapters of one rank's model: read into host memory by their parts for this rank (`read_factors`), placed into slots of its
layers (`ModelAdapters`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import EngineError, WeightError
from phalanx.hardware.probe import free_host_memory
from phalanx.kernels.adapters.rows import FEW_ROWS, AdapterBatch, AdapterRows
from phalanx.layout.adapter import WEIGHTS, AdapterPart, file_digest
from phalanx.models.checkpoint import opened
from phalanx.models.decoder import Decoder
from phalanx.models.layers.linear_methods.adapted import Adapted, LayerFactors

HostFactors = Sequence[LayerFactors | None]
"""Of each layer of the rank that can be adapted, in their order."""


class ModelAdapters:
    """The layers of one stage of a model that can be adapted, and the slots that they have. `batch`: what they share."""

    def __init__(self, model: Decoder, batch: AdapterBatch) -> None:
        self.batch, self._device = batch, model.context.device
        self._layers = [module for module in model.modules() if isinstance(module, Adapted)]
        self._declared = {name.removesuffix(".weight") for name in model.context.declared}
        self.nbytes = sum(layer.nbytes for layer in self._layers)

    def read(self, folder: str, digest: bytes, parts: Sequence[AdapterPart]) -> HostFactors:
        """This rank's part of an adapter, which the engine has checked. Page-locked where it goes to a GPU.

        Raises WeightError where the file cannot be read, is no longer the one that the engine has read, or holds a value that is
        not finite in the model's dtype.
        """
        by_layer = {part.layer: part for part in parts if part.layer in self._declared}
        if absent := set(by_layer) - {name for layer in self._layers for name in layer.names}:
            raise WeightError(f"{min(absent)} cannot be adapted on this rank", next="report this with the model's config.json")
        file = Path(folder) / WEIGHTS
        with opened(file) as reader:
            memory = HostMemory(self._device)
            factors = [self._of_layer(layer, by_layer, reader, file, memory) for layer in self._layers]
        if file_digest(folder, parts) != digest:
            raise WeightError(f"{file} has changed while it was read", next="load the adapter again")
        return factors

    @torch.inference_mode()
    def place(self, slot: int, factors: HostFactors) -> None:
        """Write an adapter into a slot of every layer, over all that another one left there, in the order of the device's queue.
        Raises EngineError for a slot that no engine would name."""
        if not 0 <= slot < self.batch.slots:
            raise EngineError(f"an adapter was to be placed into slot {slot}", held=f"there are {self.batch.slots}")
        for tensors in zip(*(layer.in_slot(slot) for layer in self._layers), strict=True):  # of one dtype, and so at once
            torch._foreach_zero_(tensors)
        layers = list(zip(self._layers, factors, strict=True))
        copies = [copy for layer, own in layers if own is not None for copy in layer.to_place(slot, own)]
        if copies:  # else the adapter is of other stages
            targets, values = zip(*copies, strict=True)
            torch._foreach_copy_(targets, values, non_blocking=True)
        for layer, own in layers:
            layer.placed(slot, own)

    def begin(self, slots: np.ndarray[Any, Any] | None) -> None:
        """A forward begins, or ends (None). slots [T]: of each token's adapter, -1 for none."""
        self.batch.rows = None if slots is None else AdapterRows.of(slots, self._device)

    @torch.inference_mode()
    def launch_kernels(self) -> None:
        """Launch every kernel of a step with adapters once, so that the first one does not wait for their compilation."""
        kinds = {(layer.in_features, layer.out_features, len(layer.names)): layer for layer in self._layers}
        for tokens in (1, FEW_ROWS + 1):
            self.begin(np.zeros(tokens, dtype=np.int64))
            for layer in kinds.values():
                layer.factors.ranks_cpu[0][0] = 1  # else nothing would be launched
                layer.multiply(torch.zeros(tokens, layer.in_features, dtype=layer.dtype, device=self._device))
                layer.factors.ranks_cpu[0][0] = 0
        self.begin(None)

    def _of_layer(
        self, layer: Adapted, by_layer: Mapping[str, AdapterPart], reader: Any, file: Path, memory: HostMemory
    ) -> LayerFactors | None:  # fmt: skip
        own = {number: by_layer[name] for number, name in enumerate(layer.names) if name in by_layer}
        if not own:
            return None
        columns = layer.parts[0].columns

        def placed(values: Tensor, name: str) -> Tensor:
            converted = memory.take(values.shape, layer.dtype).copy_(values)
            if not bool(torch.isfinite(converted).all()):
                raise WeightError(
                    f"{name} in {file} holds a value that is not finite in {layer.dtype}",
                    next="use another dtype, or train it again",
                )
            return converted

        a = {number: placed(reader.get_slice(part.a)[:, columns.start : columns.stop], part.a) for number, part in own.items()}
        b: list[Tensor | None] = []
        for number, run in layer.runs():
            part = own.get(number)
            if part is None:
                b.append(None)
                continue
            rows = slice(part.row + run.rows.start, part.row + run.rows.stop)
            b.append(placed(reader.get_slice(part.b)[rows].double() * part.scale, part.b))
        ranks = memory.take(torch.Size([len(layer.names)]), torch.int32).zero_()
        for number, values in a.items():
            ranks[number] = len(values)
        return LayerFactors(a, b, ranks)


class HostMemory:
    """Host memory for tensors that come one after the other, page-locked where they go to a GPU. It is taken in blocks, since to
    page-lock memory takes long, however little it is. The last SPARE bytes of a host, or of the container, stay free: what
    takes them ends processes."""

    BLOCK, UNIT, SPARE = 16 << 20, 64, 256 << 20

    def __init__(self, device: torch.device) -> None:
        self._pinned, self._block = device.type == "cuda", torch.empty(0, dtype=torch.uint8)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of its own, of whatever values. Raises WeightError where the host has no memory for it."""
        size = shape.numel() * dtype.itemsize
        room = -(-size // self.UNIT) * self.UNIT
        if room > len(self._block):
            free = free_host_memory()
            if free - max(room, self.BLOCK) < self.SPARE:
                raise WeightError(
                    "the host has no memory for another adapter", held=f"{free:,} bytes are free, and {self.SPARE:,} stay so",
                    next="unload adapters, or give the host more memory",
                )  # fmt: skip
            self._block = torch.empty(max(room, self.BLOCK), dtype=torch.uint8, pin_memory=self._pinned)
        taken, self._block = self._block[:size], self._block[room:]
        return taken.view(dtype).view(shape)
