# SPDX-License-Identifier: Apache-2.0
"""The network that proposes drafts, by the method: a language model, an EAGLE-3 head, or the target's own module of multi-token
prediction. What it is made of, and whether it suits the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.config.quantization import on_load
from phalanx.config.speculation import SpeculativeConfig
from phalanx.errors import OptionError
from phalanx.layout.cache import Cache, in_group, request_bytes
from phalanx.layout.eagle3 import Eagle3
from phalanx.layout.families import WeightTensor, layer_cache, layer_tensors, outer_tensors
from phalanx.layout.layout import Layout, require_suits
from phalanx.layout.mtp import Mtp
from phalanx.layout.weights import tensor_bytes


@dataclass(frozen=True)
class DraftLm:
    """A language model of the target's vocabulary. Every network has these fields. reads_target: it shares the target's embedding.
    inner_layers: the layers of the target before which it reads the residual stream; see `Eagle3`."""

    shape: ModelShape
    reads_target = False
    inner_layers: tuple[int, ...] = ()

    @property
    def layers(self) -> range:
        """Of `shape`, that it has."""
        return range(self.shape.num_layers)

    def tensors(self) -> Iterator[WeightTensor]:
        """Those that it reads of a checkpoint."""
        return chain(outer_tensors(self.shape), *(layer_tensors(self.shape, layer) for layer in self.layers))


DraftNetwork = DraftLm | Eagle3 | Mtp
ShapeOf = Callable[[str, str | None], ModelShape]
"""(model, revision) -> shape."""


def draft_folder(config: SpeculativeConfig) -> Path:
    """The checkpoint of the network, where it has one of its own."""
    assert config.model is not None
    return locate(config.model, config.revision, option="speculative_config: model")


def draft_network(options: EngineOptions, target: ModelShape, *, quiet: bool = True) -> DraftNetwork | None:
    """The network; None where drafts need none. Raises OptionError, ModelError or LayoutError where it does not suit the target, or
    the layout."""
    config = options.speculation
    network = None if config is None else network_for(config, target, quiet=quiet)
    if config is None or network is None:
        return None
    require_suits(Layout(tp=options.tensor_parallel_size), network.shape)
    return network


def network_for(
    config: SpeculativeConfig, target: ModelShape, *, quiet: bool = True, shape_of: ShapeOf | None = None
) -> DraftNetwork | None:
    """As `draft_network`, for any layout. shape_of: reads the shape of a draft model; None: of its folder, which is fetched."""
    if not config.keeps_kv:
        return None
    network: DraftNetwork
    if config.method == "mtp":
        network = Mtp.of(target)
    elif config.method == "eagle3":
        network = Eagle3.from_folder(draft_folder(config), target, quiet=quiet)
    else:
        assert config.model is not None
        read = shape_of or (lambda _model, _revision: ModelShape.from_folder(draft_folder(config), quiet=quiet))
        network = DraftLm(read(config.model, config.revision))
    shape = network.shape
    if shape.vocab_size != target.vocab_size:
        raise OptionError(
            f"{_named(config)} has another vocabulary than the target",
            held=f"vocab_size is {shape.vocab_size} there, and {target.vocab_size} here",
            why="a draft is a token id, and must mean the same to both", next="use a draft model of the same family of models",
        )  # fmt: skip
    if request_bytes(network_caches(network, shape.dtype)):
        raise OptionError(
            f"{_named(config)} cannot be a draft model", held=f"it is a {shape.architecture}",
            why="some layers keep a state of each request, which a rejected draft would have changed", next="use another one",
        )  # fmt: skip
    return network


def _named(config: SpeculativeConfig) -> str:
    return f"speculative_config: {config.model or config.method}"


def network_bytes(network: DraftNetwork, dtype: str, tp: int) -> int:
    """Bytes of its weights on one of tp ranks. It is quantized where its checkpoint is, and not on load."""
    layout, stored = Layout(tp=tp), "bf16" if on_load(dtype) else dtype
    return sum(tensor_bytes(network.shape, tensor, stored, layout) for tensor in network.tensors())


def network_caches(network: DraftNetwork, kv: str, tp: int = 1) -> list[Cache]:
    """What each of its layers keeps between steps, on each of tp ranks. kv: the dtype of keys and values.

    Beside the target's layers they are in its group 0, which keeps the most tokens."""
    return [in_group(layer_cache(network.shape, layer, kv, tp), 0) for layer in network.layers]
