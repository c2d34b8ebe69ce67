# SPDX-License-Identifier: Apache-2.0
"""config.json of released models: each is read with every field honoured or known to be harmless, and makes a model of a few
layers; or it is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import LLM, SamplingParams
from phalanx.comm.group import Solo
from phalanx.config.model import ModelShape
from phalanx.errors import ModelError
from phalanx.layout import weight_tensors
from phalanx.models import registry, weights
from phalanx.models.decoder import Decoder
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_tokenizer

RELEASED = json.loads((Path(__file__).parent / "released.json").read_text(encoding="utf-8"))["models"]
READ = {name: entry["config"] for name, entry in RELEASED.items() if "refused" not in entry}
LAYERS = 4
BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "attn_type_list", "no_rope_layers")
"""Fields with an entry for each layer."""


def cut(config: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    """The same model with its first layers only, and with these sizes."""
    inner = config.get("text_config")
    if inner is not None:
        return {**config, "text_config": cut(inner, **sizes)}
    by_layer: dict[str, Any] = {name: config[name][:LAYERS] for name in BY_LAYER if config.get(name)}
    if config.get("num_kv_shared_layers"):
        by_layer |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    return {**config, "num_hidden_layers": LAYERS, **by_layer, **sizes}


def built(config: dict[str, Any]) -> Decoder:
    """The first layers of a model, of which the whole file is read."""
    ModelShape.from_config(config)
    shape = ModelShape.from_config(cut(config))
    return registry.build(shape, range(LAYERS), LayerContext(Solo(), torch.bfloat16, torch.device("meta")))


@pytest.mark.parametrize("name", READ)
def test_every_field_is_known_and_the_first_layers_are_built(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = built(READ[name])
    assert "knows nothing of" not in caplog.text
    read = {part.name.rpartition(".")[0] for part in weights.slices(model)}
    assert read >= {name.rpartition(".")[0] for name in weight_tensors.tensors(model.shape)}


@pytest.mark.parametrize("name", [name for name in RELEASED if name not in READ])
def test_what_is_not_computed_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        built(RELEASED[name]["config"])
    assert RELEASED[name]["refused"] in str(caught.value)


SMALL = {"vocab_size": 384, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(("name", "sizes"), [
    ("MiniMaxAI/MiniMax-M2.7", EXPERTS), ("microsoft/phi-4", {}), ("openai/gpt-oss-20b", EXPERTS),
])  # fmt: skip
def test_dummy_weights_run(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """As `phalanx bench --load_format dummy` runs a model."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cut(READ[name], **SMALL, **sizes)))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(tmp_path, load_format="dummy", device="cpu", dtype="bf16", max_seq_len=32, tensor_parallel_size=2) as llm:
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
