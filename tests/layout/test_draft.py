# SPDX-License-Identifier: Apache-2.0
"""A draft model that does not suit the target is refused, by name, before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.comm.group import Group
from phalanx.comm.local import LocalWorld
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.engine.resolve_options import resolve_options
from phalanx.errors import LayoutError, ModelNotFound, OptionError, PhalanxError
from phalanx.layout.cache import token_bytes
from phalanx.layout.draft import DraftLm, draft_network, network_bytes, network_caches
from phalanx.models import registry
from phalanx.models.slices import LayerContext
from phalanx.worker.speculation.build import build
from tests.support.checkpoints import write_checkpoint
from tests.support.eagle3_heads import DRAFTED, write_head


def options(target: Path, draft: Path | str, **more: Any) -> EngineOptions:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    return EngineOptions.of(model=str(target), speculative_config=config, device="cpu", **more)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_attention_heads=6, num_key_value_heads=6)


def test_the_shape_is_that_of_its_folder(target: Path, tmp_path: Path) -> None:
    draft = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    network = draft_network(options(target, draft), ModelShape.from_folder(target))
    assert network == DraftLm(ModelShape.from_folder(draft))
    assert draft_network(EngineOptions.of(model=str(target)), ModelShape.from_folder(target)) is None


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_are_those_of_what_is_built(tmp_path: Path, method: str, tp: int) -> None:
    """Weights but for the frequencies of RoPE, and the cache of a token, on each rank."""
    folder = write_checkpoint(tmp_path / "target", "glm4_moe", num_hidden_layers=7, num_nextn_predict_layers=1)
    draft = write_head(tmp_path / "draft") if method == "eagle3" else write_checkpoint(tmp_path / "draft", "qwen3")
    config = {"method": method, "num_speculative_tokens": 2, **({} if method == "mtp" else {"model": str(draft)})}
    engine_options = EngineOptions.of(
        model=str(folder), speculative_config=config, device="cpu", load_format="dummy", tensor_parallel_size=tp
    )
    shape = ModelShape.from_folder(folder)
    network = draft_network(engine_options, shape)
    assert network is not None

    def built(group: Group) -> tuple[int, int]:
        context = LayerContext(group, torch.float32, torch.device("cpu"))
        target = registry.build(shape, range(shape.num_layers), context)
        resolved = engine_options.model_copy(update={"max_num_tokens": 64, "max_seq_len": 64, "kv_cache_dtype": "model"})
        proposer, built_network = build(resolved, target, 64)
        assert proposer is not None
        assert built_network is not None
        tensors = [*built_network.parameters(), *built_network.buffers()]
        weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
        return weights, token_bytes(proposer.declared_caches())

    for weights, token in LocalWorld(tp).run(built):
        assert 0 <= weights - network_bytes(network, "fp32", tp) <= 4 * shape.head_dim + 8 * DRAFTED
        assert token == token_bytes(network_caches(network, "fp32", tp))


@pytest.mark.parametrize(
    ("traits", "sizes", "kind", "parts"),
    [
        ({"vocab_size": 400}, {}, OptionError, ["another vocabulary", "400", "384", "token id"]),
        ({}, {"tensor_parallel_size": 3}, LayoutError, ["tensor_parallel_size=3", "intermediate_size=80"]),
    ],
)  # fmt: skip
def test_one_that_does_not_suit_is_an_error(
    target: Path, tmp_path: Path, traits: dict[str, Any], sizes: dict[str, Any], kind: type[PhalanxError], parts: list[str]
) -> None:
    draft = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, **traits)
    with pytest.raises(kind) as error:
        resolve_options(options(target, draft, **sizes))
    for part in parts:
        assert part in str(error.value)


def test_one_that_is_nowhere_is_named_by_its_option(target: Path) -> None:
    with pytest.raises(ModelNotFound, match="speculative_config: model"):
        resolve_options(options(target, target / "nowhere"))
