# SPDX-License-Identifier: Apache-2.0
"""Adapters in a model's layers: logits equal those of the merged model, for every family, over tensor-parallel ranks and stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import EngineError, ModelError, WeightError
from phalanx.hardware import probe
from phalanx.hardware.cgroup import GroupLimits
from phalanx.kernels.adapters.rows import AdapterBatch, AdapterRows
from phalanx.layout.adapter import AdapterFile, read_adapter, slot_bytes, takes_adapters
from phalanx.layout.families import layer_tensors
from phalanx.layout.layout import Layout
from phalanx.models.adapters import HostFactors, HostMemory, ModelAdapters
from phalanx.models.layers.linear_methods import adapted
from phalanx.models.layers.linear_methods.adapted import Adapted
from tests.support.adapters import SEVEN, merge, write_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.int4_checkpoints import FORMS, rewrite
from tests.support.models_formation import Formation

IDS = torch.tensor([5, 17, 200, 8, 99, 41, 7])
PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")
NEMOTRON = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
MAMBA = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear")
DELTA = ("in_proj_qkvz", "in_proj_ba", "out_proj", *SEVEN)
FAMILIES = {
    "llama": SEVEN, "qwen2": SEVEN, "qwen3": SEVEN, "granite": SEVEN, "cohere": SEVEN, "olmo2": SEVEN, "phi3": PHI3,
    "gemma4": SEVEN, "gemma4_moe": SEVEN, "gemma4_e": SEVEN, "gpt_oss": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": LATENT, "qwen3_next": DELTA, "granite_hybrid": MAMBA,
}  # fmt: skip
"""Each with what layers of the others do not have: biases, norms of heads and behind blocks, multipliers, parallel blocks, rows in
another order, fused tensors, experts beside shared ones, latents, gates, keys for values."""


class Adapting(Formation):
    """A formation with slots for adapters."""

    def __init__(self, folder: Path, *, slots: int = 2, max_rank: int = 8, **options: object) -> None:
        super().__init__(folder, adapters=AdapterBatch(slots, max_rank), **options)
        self.adapters = [[ModelAdapters(model, model.context.adapters) for model in stage] for stage in self.models]

    def place(self, slot: int, folder: Path) -> None:
        file = read_adapter(folder, self.shape, max_rank=8)
        for stage in self.adapters:
            for rank in stage:
                rank.place(slot, read(rank, file))

    def logits(self, sequence: int, slots: list[int] | None = None) -> torch.Tensor:
        """Of IDS; slots: of each token's adapter."""
        for rank in (rank for stage in self.adapters for rank in stage):
            rank.begin(None if slots is None else np.array(slots))
        return self.step([(sequence, IDS)])[0]


def read(rank: ModelAdapters, file: AdapterFile) -> HostFactors:
    return rank.read(file.folder, file.digest, file.parts)


def without(folder: Path, text: str) -> Path:
    """Leave out tensors with this text in their names."""
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if text not in name}, file)
    return folder


@pytest.mark.parametrize(
    ("family", "tp", "pp"), [*((family, ranks, ranks) for family in FAMILIES for ranks in (1, 2)), ("llama", 4, 1)]
)
def test_logits_equal_those_of_the_merged_model(tmp_path, family, tp, pp):
    base = write_checkpoint(tmp_path / "base", family, num_hidden_layers=3)
    adapter = write_adapter(tmp_path / "adapter", base, modules=FAMILIES[family], r=5)
    without(adapter, ".experts")  # they are refused
    formation, size = Adapting(base, tp=tp, pp=pp), len(IDS)
    formation.place(1, adapter)
    plain, merged = Formation(base, tp=tp, pp=pp), Formation(merge(base, adapter, tmp_path / "merged"), tp=tp, pp=pp)
    wanted, plainly = merged.step([(0, IDS)])[0], plain.step([(0, IDS)])[0]
    assert (wanted - plainly).abs().max() > 0.1
    torch.testing.assert_close(formation.logits(0, [1] * size), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(formation.logits(1), plainly), "without adapters nothing else is computed"
    assert torch.equal(formation.logits(2, [-1] * size), plainly)


@pytest.mark.parametrize("form", ["awq", "gptq desc_act (T3)"])
def test_a_base_in_four_bits(tmp_path, form):
    """In act order, too, where the layer's inputs have another order than the adapter's."""
    plain = write_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=3)
    (tmp_path / "quantized").mkdir()
    base, meant = rewrite(plain, tmp_path / "quantized", FORMS[form])
    adapter = write_adapter(tmp_path / "adapter", meant, r=5)
    formation, merged = Adapting(base, tp=2), Formation(merge(meant, adapter, tmp_path / "merged"), tp=2)
    formation.place(1, adapter)
    wanted = merged.step([(0, IDS)])[0]
    torch.testing.assert_close(formation.logits(0, [1] * len(IDS)), wanted, rtol=1e-3, atol=1e-3)
    assert (wanted - formation.logits(1)).abs().max() > 0.1


@pytest.mark.parametrize("module", SEVEN)
def test_each_module_alone_changes_the_output_as_if_it_were_merged(tmp_path, module):
    base = write_checkpoint(tmp_path / "base", "llama", num_attention_heads=12, num_key_value_heads=3)
    adapter = write_adapter(tmp_path / "adapter", base, modules=[module], size=1.0)
    formation, merged = Adapting(base, tp=2), Formation(merge(base, adapter, tmp_path / "merged"), tp=2)
    formation.place(0, adapter)
    wanted, without = merged.step([(0, IDS)])[0], formation.logits(0)
    assert (wanted - without).abs().max() > 0.01
    torch.testing.assert_close(formation.logits(1, [0] * len(IDS)), wanted, rtol=1e-4, atol=1e-4)


def test_a_stage_may_have_none_of_an_adapters_layers(tmp_path):
    """It had an adapter of all layers in the slot before."""
    base = write_checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    adapter = without(write_adapter(tmp_path / "adapter", base, seed=1), "layers.1.")
    formation, merged = Adapting(base, pp=2), Formation(merge(base, adapter, tmp_path / "merged"), pp=2)
    for folder in (write_adapter(tmp_path / "all", base), adapter):
        formation.place(0, folder)
    wanted = merged.step([(0, IDS)])[0]
    torch.testing.assert_close(formation.logits(0, [0] * len(IDS)), wanted, rtol=1e-4, atol=1e-4)


def test_nothing_of_an_adapter_stays_in_the_slot_of_the_next(tmp_path):
    """The next one has a lower rank, and fewer modules."""
    base = write_checkpoint(tmp_path / "base", "llama")
    first = write_adapter(tmp_path / "first", base, r=8)
    second = write_adapter(tmp_path / "second", base, modules=["q_proj", "down_proj"], r=2, seed=1)
    formation, size = Adapting(base), len(IDS)
    for folder in (first, second):
        formation.place(0, folder)
    wanted = Formation(merge(base, second, tmp_path / "merged")).step([(0, IDS)])[0]
    torch.testing.assert_close(formation.logits(0, [0] * size), wanted, rtol=1e-4, atol=1e-4)
    assert float(formation.models[0][0].layers[0].mlp.gate_up_proj.method.factors.a.abs().sum()) == 0


def test_an_adapter_that_changes_between_two_reads_is_refused(tmp_path):
    base = write_checkpoint(tmp_path / "base", "llama")
    folder, formation = write_adapter(tmp_path / "adapter", base), Adapting(base)
    (rank,), file = formation.adapters[0], read_adapter(tmp_path / "adapter", formation.shape, max_rank=8)
    write_adapter(folder, base, seed=1)
    with pytest.raises(WeightError, match="has changed while it was read"):
        read(rank, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path, value):
    base = write_checkpoint(tmp_path / "base", "llama")
    write_adapter(tmp_path / "adapter", base)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "layers.1.mlp.up_proj.lora_A" in name)
    tensors[name][1, 2] = value
    save_file(tensors, weights)
    formation = Adapting(base)
    with pytest.raises(WeightError, match=f"{name} in .* holds a value that is not finite"):
        read(formation.adapters[0][0], read_adapter(tmp_path / "adapter", formation.shape, max_rank=8))


def test_a_slot_that_there_is_not_is_an_error(tmp_path):
    base = write_checkpoint(tmp_path / "base", "llama")
    (rank,), folder = (formation := Adapting(base)).adapters[0], write_adapter(tmp_path / "adapter", base)
    with pytest.raises(EngineError, match="placed into slot 2; there are 2"):
        rank.place(2, read(rank, read_adapter(folder, formation.shape, max_rank=8)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_declared_modules_and_bytes_are_those_of_the_layers(tmp_path, family):
    """The engine checks adapters, and the planner counts bytes, by the declarations alone."""
    formation = Adapting(write_checkpoint(tmp_path / "base", family, num_hidden_layers=3), tp=2, pp=2, slots=3)
    shape = formation.shape
    tensors = [tensor for layer in range(shape.num_layers) for tensor in filter(takes_adapters, layer_tensors(shape, layer))]
    layers = [each for stage in formation.models for each in stage[0].modules() if isinstance(each, Adapted)]
    assert {tensor.name for tensor in tensors} == {f"{name}.weight" for layer in layers for name in layer.names}
    wanted = [3 * bytes for bytes in slot_bytes(shape, "fp32", Layout(pp=2, tp=2), 8)]
    assert [stage[0].nbytes for stage in formation.adapters] == wanted


def test_a_layer_that_takes_activations_in_fp8_is_refused(tmp_path):
    from phalanx.config.quantization import on_load

    base = write_checkpoint(tmp_path / "base", "llama", hidden_size=64, intermediate_size=128)
    with pytest.raises(ModelError, match=r"max_loras=2 does not work with this checkpoint; model.layers.0.self_attn.q_proj takes"):
        Adapting(base, quantization=on_load("fp8"), fp8_gemm=True)


def test_a_layer_that_sees_one_token_of_a_batch_of_more_has_no_delta_from_the_gemv(tmp_path, monkeypatch):
    """It may be another token than the adapter's."""
    formation = Adapting(write_checkpoint(tmp_path / "base", "llama", num_hidden_layers=1))
    layer = next(each for each in formation.models[0][0].modules() if isinstance(each, Adapted))
    monkeypatch.setattr(Adapted, "fuses", lambda *_: True)
    monkeypatch.setattr(adapted, "linear_with_delta", lambda args, out: args.x)
    x = torch.ones(1, layer.in_features)
    for tokens, fused in ((1, True), (2, False)):
        layer.adapters.rows = AdapterRows.of(np.zeros(tokens, dtype=np.int64), torch.device("cpu"))
        assert (layer._gemv(x, None) is not None) == fused


def test_a_host_without_memory_refuses_another_adapter(monkeypatch):
    """Of a container that is smaller than its host."""
    memory = HostMemory(torch.device("cpu"))
    free = HostMemory.SPARE + HostMemory.BLOCK
    monkeypatch.setattr(probe, "read_limits", lambda: GroupLimits(None, free, None, None))
    assert memory.take(torch.Size([8]), torch.float32).shape == (8,)
    with pytest.raises(WeightError, match=r"no memory for another adapter; 285,212,672 bytes are free, and 268,435,456 stay so"):
        memory.take(torch.Size([HostMemory.BLOCK]), torch.float32)
    assert memory.take(torch.Size([8]), torch.float32).shape == (8,), "what is there goes on"
