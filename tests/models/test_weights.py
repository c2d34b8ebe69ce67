# SPDX-License-Identifier: Apache-2.0
"""Loading: each rank reads its own slices, and every way in which files and config.json can disagree is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from phalanx.comm.group import Group, Solo
from phalanx.comm.local import LocalWorld
from phalanx.config.families import FAMILIES
from phalanx.config.model import ModelShape
from phalanx.errors import LayoutError, WeightError
from phalanx.layout.families.registry import DECLARATIONS
from phalanx.models import registry, weights
from phalanx.models.checkpoint import INDEX, SINGLE
from phalanx.models.decoder import Decoder
from phalanx.models.slices import LayerContext
from tests.support.checkpoints import write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound"), "qwen2", num_attention_heads=12, num_key_value_heads=3)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def build(folder: Path, group: Group | None = None, layers: range | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    shape = ModelShape.from_folder(folder)
    return registry.build(shape, layers or range(shape.num_layers), LayerContext(group or Solo(), dtype, CPU))


def load(folder: Path) -> None:
    weights.load(build(folder), folder)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) leave out tensors of model.safetensors; "__" in a keyword stands for a dot."""
    tensors = load_file(folder / SINGLE)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def test_every_weight_is_filled_and_cast(sound: Path) -> None:
    model = build(sound, dtype=torch.bfloat16)
    for weight in model.parameters():
        weight.fill_(float("nan"))
    weights.load(model, sound)
    assert not any(weight.isnan().any() for weight in model.parameters())
    tensors = load_file(sound / SINGLE)
    layer = model.layers[1]
    assert torch.equal(layer.mlp.down_proj.method.weight, tensors["model.layers.1.mlp.down_proj.weight"].bfloat16())
    names = [f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.bias, torch.cat([tensors[name] for name in names]).bfloat16())


def test_ranks_hold_their_slices_and_report_only_those(sound: Path) -> None:
    """12 query heads over 4 ranks, 3 KV heads: rank 1 holds heads 3..5, which use KV heads 0 and 1."""
    tensors = load_file(sound / SINGLE)

    def act(group: Group) -> tuple[Decoder, list[tuple[int, int]]]:
        model, progress = build(sound, group, range(1, 2)), []
        weights.load(model, sound, progress=lambda done, total: progress.append((done, total)))
        return model, progress

    ranks = LocalWorld(4).run(act)
    model, progress = ranks[1]
    width = model.shape.head_dim
    query, key = tensors["model.layers.1.self_attn.q_proj.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
    qkv = model.layers[0].self_attn.qkv_proj
    assert [(part.name[-6:-5], part.rows.start // width, part.rows.stop // width) for part in qkv.parts] == [
        ("q", 3, 6), ("k", 0, 2), ("k", 1, 2), ("v", 0, 2), ("v", 1, 2),
    ]  # fmt: skip
    expected = torch.cat([query[3 * width : 6 * width], key[:width], key[width : 2 * width], key[width : 2 * width]])
    assert torch.equal(qkv.method.weight[: 6 * width], expected)
    assert torch.equal(model.layers[0].mlp.down_proj.method.weight, tensors["model.layers.1.mlp.down_proj.weight"][:, 20:40])
    assert torch.equal(model.layers[0].mlp.gate_up_proj.method.weight[20:], tensors["model.layers.1.mlp.up_proj.weight"][20:40])
    assert not [name for name, _ in model.named_parameters() if "embedding" in name]
    done, total = zip(*progress, strict=True)
    assert list(done) == sorted(done)
    assert done[-1] == total[0] == sum(part.target.nbytes for part in weights.slices(model))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert total[0] < total_bytes / 4
    assert model.lm_head is not None
    last = ranks[3][0].lm_head
    assert last is not None
    assert last.table.num_tokens == 0  # 384 rows are 6 x 64: over 4 ranks of 2 x 64 the last holds padding only
    assert not last.table.weight.any()


def test_shards_with_an_index(tmp_path: Path, sound: Path) -> None:
    sharded = write_checkpoint(tmp_path, "qwen2", num_attention_heads=12, num_key_value_heads=3, max_shard_size="100KB")
    assert (sharded / INDEX).exists()
    one, many = build(sound), build(sharded)
    weights.load(one, sound)
    weights.load(many, sharded)
    for left, right in zip(one.parameters(), many.parameters(), strict=True):
        assert torch.equal(left, right)
    (sharded / INDEX).unlink()
    weights.load(many, sharded)  # files without an index are looked into
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(WeightError, match="is missing"):
        load(sharded)


def values_of(folder: Path) -> list[torch.Tensor]:
    model = build(folder)
    weights.load(model, folder)
    return list(model.parameters())


def head_of(folder: Path) -> torch.Tensor:
    model = build(folder)
    weights.load(model, folder)
    assert model.lm_head is not None
    return model.lm_head.table.weight


def with_files_of(folder: Path, other: Path) -> None:
    """Beside the folder's weight files, those of the other."""
    for file in [*other.glob("*.safetensors"), *other.glob("*.index.json")]:
        shutil.copy(file, folder)


def shuffled(weight_map: dict[str, str], change: str) -> dict[str, str]:
    """The index after a change: each tensor in the next file, one in another, all in the last, or only some listed."""
    files = sorted(set(weight_map.values()))
    following = dict(zip(files, [*files[1:], files[0]], strict=True))
    if change == "rotated":
        return {name: following[file] for name, file in weight_map.items()}
    if change == "one moved":
        first = next(name for name, file in weight_map.items() if list(weight_map.values()).count(file) > 1)
        return {**weight_map, first: following[weight_map[first]]}
    kept = {file: next(name for name, place in weight_map.items() if place == file) for file in files}
    return {name: file for file, name in kept.items()}


@pytest.mark.parametrize("change", ["rotated", "one moved", "one of each file"])
def test_an_index_that_names_the_wrong_file_misleads_nobody(change: str, tmp_path: Path) -> None:
    """As in transformers, which takes of the index the names of the files."""
    sharded = write_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    expected = values_of(sharded)
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = shuffled(index["weight_map"], change)
    (sharded / INDEX).write_text(json.dumps(index))
    assert all(torch.equal(left, right) for left, right in zip(values_of(sharded), expected, strict=True))
    reference = transformers.AutoModelForCausalLM.from_pretrained(sharded)
    assert torch.equal(reference.lm_head.weight, head_of(sharded))


def test_an_index_with_a_tensor_that_no_file_has_is_named(tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightError, match=r"says that model\.layers\.0\.extra\.weight is in"):
        load(sharded)


def test_a_field_of_the_index_that_is_in_no_table_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sharded = write_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    index = json.loads((sharded / INDEX).read_text())
    (sharded / INDEX).write_text(json.dumps({**index, "vendor_offsets": {}}))
    load(sharded)
    assert ["vendor_offsets" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("first", ["shards", "whole"])
def test_a_whole_file_counts_before_an_index(first: str, tmp_path: Path) -> None:
    """As in transformers, whichever is the older, and also where the files of the index are gone."""
    single = write_checkpoint(tmp_path / "whole", "llama", seed=1)
    shards = write_checkpoint(tmp_path / "shards", "llama", seed=2, max_shard_size="60KB")
    folder, other = (shards, single) if first == "shards" else (single, shards)
    expected = values_of(single)
    with_files_of(folder, other)
    assert all(torch.equal(left, right) for left, right in zip(values_of(folder), expected, strict=True))
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    assert all(torch.equal(left, right) for left, right in zip(values_of(folder), expected, strict=True))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(reference.lm_head.weight, head_of(folder))


def test_tensors_of_the_base_class_have_no_prefix(tmp_path: Path) -> None:
    """`LlamaModel.save_pretrained` writes them so; without a head of its own, the model must be tied."""
    folder = write_checkpoint(tmp_path / "causal", "llama", tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_pretrained(folder).model.save_pretrained(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    assert "norm.weight" in load_file(tmp_path / "base" / SINGLE)
    assert all(torch.equal(left, right) for left, right in zip(values_of(tmp_path / "base"), values_of(folder), strict=True))
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(WeightError, match=r"lm_head\.weight is missing.*tie_word_embeddings=false"):
        load(tmp_path / "base")


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ("model.layers.7.mlp.up_proj.weight", "num_hidden_layers=2"),
        ("model.layers.0.mlp.up_proj.weight_packed", "belongs to a quantization"),
        ("model.layers.0.mlp.up_proj.bias", "has no bias"),
        ("lm_head.weight_scale", "the output head is in 16 or 32 bit, without scales"),
        ("model.layers.0.mlp.router.weight", "has no such tensor"),
    ],
)
def test_why_a_tensor_is_unknown(extra: str, why: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    save_file({**load_file(folder / SINGLE), extra: torch.zeros(2)}, folder / SINGLE, {"format": "pt"})
    with pytest.raises(WeightError, match=why) as caught:
        load(folder)
    assert extra in str(caught.value)


def test_an_unknown_tensor_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    tensors = {name.replace("model.", "transformer."): tensor for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    with pytest.raises(WeightError, match="holds transformer"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_named(value: float, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    load(folder)
    assert not caplog.messages
    tensors = load_file(folder / SINGLE)
    tensors[name].view(-1)[5] = value
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    load(folder)
    assert [f"hold values that are NaN or infinite, so that logits may be: {name}" in message for message in caplog.messages] == [
        True
    ]


def test_weights_beyond_the_range_of_the_dtype_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    tensors = load_file(folder / SINGLE)
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    weights.load(build(folder, dtype=torch.float16), folder)
    assert "infinite, so that logits may be: model.norm.weight" in caplog.text


def test_a_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(WeightError) as caught:
        load(sharded)
    assert gone.name in str(caught.value)
    assert INDEX in str(caught.value)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "notes.txt", ""])
def test_an_index_names_files_of_its_folder_only(name: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A path of the index could lead to any file of the host."""
    (folder / SINGLE).rename(folder.parent / "elsewhere.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(WeightError, match=r"no \*\.safetensors file of its folder") as caught:
        load(folder)
    assert "bytes" not in str(caught.value), "nothing is told of a file outside the checkpoint"


@pytest.mark.parametrize("text", ["{", '{"weight_map": 3}', "{}"])
def test_a_faulty_index_is_named(text: str, folder: Path) -> None:
    (folder / SINGLE).rename(folder / "weights.safetensors")
    (folder / INDEX).write_text(text)
    with pytest.raises(WeightError, match=INDEX):
        load(folder)


@pytest.mark.parametrize("kept", [0, 4, 200, 0.5, 0.999])
def test_a_truncated_file_is_named(kept: float, folder: Path) -> None:
    path = folder / SINGLE
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept >= 1 or kept == 0 else kept * len(content))])
    with pytest.raises(WeightError) as caught:
        load(folder)
    assert str(path) in str(caught.value)
    assert "truncated or damaged" in str(caught.value)


def test_a_folder_without_safetensors_says_what_it_holds(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model.bin.*safetensors only"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(WeightError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias is missing"):
        load(folder)


def test_an_unexpected_tensor_is_named_on_every_stage(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__o_proj__bias=torch.zeros(48))
    for layers in (range(1), range(1, 2)):
        with pytest.raises(WeightError, match=r"model\.layers\.0\.self_attn\.o_proj\.bias"):
            weights.load(build(folder, layers=layers), folder)


def test_buffers_that_config_json_implies_are_passed_over(folder: Path) -> None:
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(2))
    load(folder)


@pytest.mark.parametrize("change", ["another", "one value", "another shape"])
@pytest.mark.parametrize("layers", [range(2), range(1, 2)], ids=["all", "last stage"])
def test_a_stored_head_that_is_not_the_tied_embedding_is_named(change: str, layers: range, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    head = load_file(folder / SINGLE)["model.embed_tokens.weight"].clone()
    if change == "one value":
        head[383, 47] += 1.0
    rewrite(folder, lm_head__weight={"another": head + 1.0, "one value": head, "another shape": head[:380].clone()}[change])
    with pytest.raises(WeightError, match=r"lm_head\.weight"):
        weights.load(build(folder, layers=layers), folder)


def test_of_tied_weights_either_may_be_stored(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    expected = values_of(folder)
    rewrite(folder, model__embed_tokens__weight=None, lm_head__weight=load_file(folder / SINGLE)["model.embed_tokens.weight"])
    assert all(torch.equal(left, right) for left, right in zip(values_of(folder), expected, strict=True))


def test_a_tied_head_that_is_stored_all_the_same_is_passed_over(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(folder, lm_head__weight=load_file(folder / SINGLE)["model.embed_tokens.weight"])
    model = build(folder)
    weights.load(model, folder)
    assert model.lm_head is not None
    assert model.embed_tokens is not None
    assert model.lm_head.table is model.embed_tokens


def test_a_second_copy_in_another_format_is_passed_over(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / "consolidated.safetensors")
    (folder / SINGLE).rename(folder / "weights.safetensors")
    load(folder)
    shutil.copy(folder / "weights.safetensors", folder / "again.safetensors")
    with pytest.raises(WeightError, match=r"again\.safetensors and in weights\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({"hidden_size": 96, "num_attention_heads": 24}, ("[384, 48]", "[384, 96]")),
        ({"intermediate_size": 160}, ("[80, 48]", "[160, 48]")),
        ({"vocab_size": 320}, ("[384, 48]", "[320, 48]")),
        ({"num_key_value_heads": 6}, ("[12]", "[24]")),
    ],
)
def test_a_config_that_contradicts_the_weights_shows_both_shapes(
    changes: dict[str, Any], shapes: tuple[str, str], folder: Path
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(WeightError) as caught:
        load(folder)
    assert all(shape in str(caught.value) for shape in shapes), caught.value


@pytest.mark.parametrize(("layers", "pattern"), [(1, "model.layers.1."), (3, "model.layers.2.")])
def test_a_wrong_number_of_layers_is_named(layers: int, pattern: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": layers, "layer_types": None}))
    with pytest.raises(WeightError, match=pattern):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_integers_and_quantized_values_are_refused(dtype: torch.dtype, folder: Path) -> None:
    rewrite(folder, model__norm__weight=torch.ones(48).to(dtype))
    with pytest.raises(WeightError, match=r"model\.norm\.weight.*dtype"):
        load(folder)


def test_a_tp_size_that_does_not_divide_names_those_that_do(sound: Path) -> None:
    with pytest.raises(LayoutError, match=r"tensor_parallel_size=5.*num_attention_heads=12.*1, 2, 3, 4, 6, 12"):
        LocalWorld(5).run(lambda group: build(sound, group))
    with pytest.raises(LayoutError, match=r"tensor_parallel_size=3.*gate_proj.weight=80.*1, 2, 4, 5"):
        LocalWorld(3).run(lambda group: build(sound, group))


def test_dummy_weights_are_the_same_model_in_every_layout(sound: Path) -> None:
    def dummy_model(group: Group, seed: int = 5) -> Decoder:
        model = build(sound, group)
        progress: list[tuple[int, int]] = []
        weights.dummy(model, seed, lambda done, total: progress.append((done, total)))
        assert progress == sorted(progress)
        assert progress[-1] == (sum(part.target.nbytes for part in weights.slices(model)),) * 2
        return model

    first, again, other = dummy_model(Solo()), dummy_model(Solo()), dummy_model(Solo(), 6)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.layers[0].mlp.down_proj.method.weight, other.layers[0].mlp.down_proj.method.weight)
    assert not torch.equal(first.layers[0].mlp.down_proj.method.weight, first.layers[1].mlp.down_proj.method.weight)
    halves = LocalWorld(2).run(dummy_model)
    joined = torch.cat([half.layers[0].mlp.down_proj.method.weight for half in halves], dim=1)
    assert torch.equal(joined, first.layers[0].mlp.down_proj.method.weight)
    assert torch.equal(halves[0].layers[0].input_layernorm.weight, halves[1].layers[0].input_layernorm.weight)
    assert all(weight.isfinite().all() for weight in first.parameters())


def test_layers_outside_the_model_are_refused(sound: Path) -> None:
    shape = ModelShape.from_folder(sound)
    for layers in (range(0), range(3), range(-1, 1), range(0, 2, 2)):
        with pytest.raises(ValueError, match="is not a run"):
            registry.build(shape, layers, LayerContext(Solo(), torch.float32, CPU))


def test_what_has_a_model_or_a_declaration_of_its_own_is_read() -> None:
    assert {*registry.MODELS, *DECLARATIONS} <= set(FAMILIES)
