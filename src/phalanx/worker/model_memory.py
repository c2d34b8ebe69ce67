# SPDX-License-Identifier: Apache-2.0
"""`ModelMemory`: what a rank does for a change of the model between two steps: it gives the memory of weights and KV cache back,
takes it again, and reads other weights into it.

A change is made by one work, and made final or undone by `EndChange`, once all ranks have told whether they could make it. Tensors
keep their storages, which become empty and are filled again: views of them stay good. Memory of a GPU may have another address
afterwards, so that graphs are captured again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.engine.messages import CheckWeights, EndChange, GiveMemory, ReadWeights, TakeMemory, WorkResult
from phalanx.errors import CapacityError, ModelError, ModelNotFound, PhalanxError
from phalanx.hardware.probe import free_host_memory
from phalanx.layout.expert_placement import default_placement
from phalanx.log import get_logger
from phalanx.models import weights
from phalanx.models.decoder import Decoder
from phalanx.models.layers.kv_store import KvStore
from phalanx.models.layers.linear_methods.int4 import Int4Linear
from phalanx.worker.expert_load import ExpertLoad
from phalanx.worker.model_runner import ModelRunner

logger = get_logger(__name__)

OF_REQUESTS = frozenset({"eos_token_ids", "sampling_defaults", "dtype", "mtp_layers"})
"""Fields of a `ModelShape` that say nothing of how the model's weights are read and multiplied."""


@dataclass
class _Memory:
    """A storage and its size, and its bytes in the host's memory, where they are kept."""

    storage: torch.UntypedStorage
    size: int
    copy: Tensor | None = None

    def save(self) -> None:
        if self.copy is None:
            self.copy = torch.empty(self.size, dtype=torch.uint8)
            self.copy.copy_(self._bytes())

    def free(self) -> None:
        self.storage.resize_(0)

    def take(self) -> None:
        if not self.storage.size():
            self.storage.resize_(self.size)

    def restore(self) -> None:
        assert self.copy is not None
        self.take()
        self._bytes().copy_(self.copy)

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


def _memories(tensors: Iterable[Tensor]) -> dict[int, _Memory]:
    """The storages of these tensors, by their addresses."""
    memories: dict[int, _Memory] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size():
            memories.setdefault(storage.data_ptr(), _Memory(storage, storage.size()))
    return memories


class ModelMemory:
    """Of one rank; used from its main thread, between steps.

    folder: of the weights. load: reads those of a folder. shape_of: what the folder's model would be here.
    more: modules with weights of other checkpoints (a network that drafts), which are never discarded.
    bytes_of: the rank's bytes by kind, which change. local_ranks: that share the host's memory.
    """

    def __init__(
        self, model: Decoder, runner: ModelRunner, folder: Path, load: Callable[[Path], None],
        shape_of: Callable[[Path], ModelShape], *, bytes_of: dict[str, int], local_ranks: int = 1,
        expert_load: ExpertLoad | None = None, more: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        self._model, self._runner, self._folder, self._load, self._shape_of = model, runner, folder, load, shape_of
        self._bytes_of, self._local_ranks, self._expert_load = bytes_of, local_ranks, expert_load
        weights_of_model = _memories(model.parameters())
        others = _memories(tensor for module in (model, *more) for tensor in (*module.parameters(), *module.buffers()))
        self._weights = list(weights_of_model.values())
        self._kept = [memory for address, memory in others.items() if address not in weights_of_model]
        self._caches = list(_memories(t for cache in runner.all_caches for t in cache.tensors.values()).values())
        self._full = {kind: bytes_of[kind] for kind in ("weights", "kv", "state") if kind in bytes_of}
        self._awake = {"weights": True, "kv": True}
        self._stale_graphs = False
        """Graphs have gone, or have other constants: they are captured again once the model is awake."""
        self._finish: Callable[[], None] = _nothing
        self._undo: Callable[[], None] = _nothing

    @torch.inference_mode()
    def apply(self, work: CheckWeights | ReadWeights | GiveMemory | TakeMemory | EndChange) -> WorkResult:
        """Do a work. An error is part of the result: nothing has changed then. Raises what keeps an `EndChange` from its end."""
        match work:
            case CheckWeights():
                return self._attempt(lambda: self._check(work.folder))
            case ReadWeights():
                return self._attempt(lambda: self._read(work.folder))
            case GiveMemory():
                return self._attempt(lambda: self._give(keep=work.keep))
            case TakeMemory():
                return self._attempt(lambda: self._take(of_weights=work.weights, of_cache=work.kv_cache))
            case EndChange():
                act, self._finish, self._undo = self._finish if work.final else self._undo, _nothing, _nothing
                act()
                self._settle()
                return WorkResult()

    def _attempt(self, act: Callable[[], int | None]) -> WorkResult:
        """Prepare a change, which leaves in `_finish` and `_undo` what ends it. Returns the bytes that it frees."""
        self._finish = self._undo = _nothing
        try:
            return WorkResult(freed=act() or 0)
        except (PhalanxError, OSError, RuntimeError, MemoryError) as error:
            self._undo()
            self._finish = self._undo = _nothing
            wrapped = error if isinstance(error, PhalanxError) else ModelError("the change of the model failed", why=repr(error))
            return WorkResult(wrapped.to_wire())

    # ---- the works ---------------------------------------------------------------------------------------------------

    def _check(self, name: str) -> None:
        """Raise ModelError for a folder whose model is another one, WeightError for one that lacks weights."""
        folder = _folder_of(name)
        shape, own = self._shape_of(folder), self._model.shape
        names = [each.name for each in fields(own) if each.name not in OF_REQUESTS]
        if differing := [name for name in names if getattr(shape, name) != getattr(own, name)]:
            first = differing[0]
            raise ModelError(
                f"{folder} is another model: {first} is {getattr(shape, first)!r}", held=f"this one has {getattr(own, first)!r}",
                why="" if len(differing) == 1 else f"{', '.join(differing[1:])} differ, too",
                next="give a checkpoint of the same architecture, sizes and quantization, or start another server",
            )  # fmt: skip
        if any(isinstance(module, Int4Linear) and module.order is not None for module in self._model.modules()):
            raise ModelError(
                "weights whose columns are in act order cannot be replaced in a running engine",
                why="another checkpoint has another order, which the sizes of tensors depend on", next="start anew with it",
            )  # fmt: skip
        # Empty storages have no slices: then a missing tensor is found when it is to be read.
        (weights.require_complete if self._awake["weights"] else weights.files_of)(self._model, folder)

    def _read(self, name: str) -> int:
        folder, was_awake = _folder_of(name), self._awake["weights"]
        scales = [(store, store.read_scales) for store in self._model.modules() if isinstance(store, KvStore)]
        placements = {number: layer.placement for number, layer in self._model.moe_layers.items() if layer.physical is not None}

        def undo() -> None:
            for store, scale in scales:
                store.read_scales = scale
            for number, placement in placements.items():
                self._place(number, placement)
            for memory in self._weights if was_awake else ():
                if memory.copy is not None:
                    memory.restore()
                    memory.copy = None
            for memory in self._weights + self._kept if not was_awake else ():
                memory.free()

        def finish() -> None:
            for memory in self._weights + self._kept:
                memory.copy = None
            self._folder, self._awake["weights"] = folder, True
            self._stale_graphs |= any(store.read_scales != scale for store, scale in scales)

        self._undo, self._finish = undo, finish
        if was_awake:
            self._require_host_memory(sum(memory.size for memory in self._weights))
            for memory in self._weights:
                memory.save()
        for memory in self._weights:
            memory.take()
        for memory in self._kept if not was_awake else ():
            memory.restore()
        self._load_from(folder)
        return 0 if was_awake else -sum(memory.size for memory in self._weights + self._kept)

    def _give(self, *, keep: bool) -> int:
        weights_here, kv_here = self._awake["weights"], self._awake["kv"]
        wanted = [*self._kept, *(self._weights if keep else ())] if weights_here else []
        before = [memory for memory in wanted if memory.copy is None]

        def undo() -> None:
            for memory in before:
                memory.copy = None

        def finish() -> None:
            if self._runner.graphs is not None:
                self._runner.graphs.reset()
                self._stale_graphs = True
            for memory in self._weights + self._kept + self._caches:
                memory.free()
            if not keep:
                for memory in self._weights:
                    memory.copy = None
            self._awake = {"weights": False, "kv": False}

        self._undo, self._finish = undo, finish
        if self._model.context.device.type == "cuda":  # elsewhere it moves within one memory
            self._require_host_memory(sum(memory.size for memory in before))
        for memory in before:
            memory.save()
        freed = [*(self._weights + self._kept if weights_here else ()), *(self._caches if kv_here else ())]
        return sum(memory.size for memory in freed)

    def _take(self, *, of_weights: bool, of_cache: bool) -> int:
        of_weights, of_cache = of_weights and not self._awake["weights"], of_cache and not self._awake["kv"]
        memories: list[_Memory] = [*(self._weights + self._kept if of_weights else ()), *(self._caches if of_cache else ())]

        def undo() -> None:
            for memory in memories:
                memory.free()

        def finish() -> None:
            if of_weights:
                for memory in self._weights + self._kept:
                    memory.copy = None
            self._awake = {"weights": self._awake["weights"] or of_weights, "kv": self._awake["kv"] or of_cache}

        self._undo, self._finish = undo, finish
        for memory in memories:
            memory.take()
        if of_weights:
            for memory in self._weights + self._kept:
                if memory.copy is not None:
                    memory.restore()
            if self._weights and self._weights[0].copy is None:
                self._load_from(self._folder)
        if of_cache:
            for cache in self._runner.all_caches:
                for tensor in cache.tensors.values():
                    tensor.zero_()
        return -sum(memory.size for memory in memories)

    # ---- parts of them -----------------------------------------------------------------------------------------------

    def _load_from(self, folder: Path) -> None:
        """Read weights. Experts come to their first places."""
        for number, layer in self._model.moe_layers.items():
            if layer.physical is not None:
                context = layer.context
                self._place(number, default_placement(layer.config.count, context.moe_ep, context.redundant_experts))
        self._load(folder)

    def _place(self, number: int, placement: tuple[int, ...]) -> None:
        layers = self._model.moe_layers
        layers[number].place(placement)
        if self._expert_load is not None:
            self._expert_load.experts_moved(list(layers).index(number), layers[number].local_experts)

    def _settle(self) -> None:
        """After the end of a change: free memory goes back to the device, graphs are captured where they have gone."""
        gc.collect()
        if self._model.context.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._stale_graphs and all(self._awake.values()):
            self._stale_graphs = False
            self._runner.capture_again()
        for kind, size in self._full.items():
            self._bytes_of[kind] = size if self._awake["weights" if kind == "weights" else "kv"] else 0
        on_host = sum(memory.size for memory in self._weights + self._kept if memory.copy is not None)
        self._bytes_of["weights on host"] = on_host
        if not on_host:
            del self._bytes_of["weights on host"]

    def _require_host_memory(self, size: int) -> None:
        needed, available = size * self._local_ranks, free_host_memory()
        if needed > available:
            raise CapacityError(
                f"{needed:,} bytes of weights of {self._local_ranks} ranks do not fit into the host's memory",
                held=f"{available:,} bytes are available", why="weights are kept there until the change has succeeded",
                next="sleep at level 2, which discards them; new weights can be read then",
            )  # fmt: skip


def _folder_of(name: str) -> Path:
    """A folder of this host: nothing is downloaded while requests wait. Raises ModelNotFound."""
    if name != "demo" and not Path(name).expanduser().is_dir():
        raise ModelNotFound(f"{name!r} is no folder on this host", next="give a folder with config.json and *.safetensors")
    return locate(name)


def _nothing() -> None: ...
