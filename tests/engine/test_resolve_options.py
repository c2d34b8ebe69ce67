# SPDX-License-Identifier: Apache-2.0
"""The device of a start on hosts whose GPUs ail or are hidden; and what the layers of a model decide."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from phalanx.config.options import EngineOptions
from phalanx.engine.resolve_options import resolve_options
from phalanx.errors import LayoutError, OptionError
from phalanx.hardware import probe
from phalanx.hardware.nvml import list_gpus
from phalanx.layout.families import dense, registry
from tests.support.health_nvml import RecordedNvml, failing, machine
from tests.support.layout_hybrid import cache


def resolved(monkeypatch, host, visible=None, **options):
    listed = list_gpus(host)
    monkeypatch.setattr(probe, "list_gpus", lambda: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return resolve_options(EngineOptions.of(model="demo", **options))[1]


def test_seven_gpus_and_the_eighth_named(monkeypatch):
    host = failing("nvmlDeviceGetMemoryInfo", 15)
    assert resolved(monkeypatch, host).reasons["device"] == "cuda: this host has 7 GPUs"
    with pytest.raises(LayoutError, match=r"needs 8 GPUs on this host; it has 7 GPUs; GPU 3 .*fallen off the bus.*; each rank"):
        resolved(monkeypatch, host, pipeline_parallel_size=8)


@pytest.mark.parametrize(
    ("host", "visible", "words"),
    [
        (failing("nvmlDeviceGetMemoryInfo", 15, 0, 1), None, "no GPU of this host can be used; GPU 0"),
        (failing("nvmlDeviceGetHandleByIndex", 999, 0, 1), None, "no GPU of this host can be used; GPU 0"),
        (RecordedNvml([]).fail(999, "Unknown Error"), None, "the GPUs of this host cannot be reached; NVMLError: Unknown Error"),
        (RecordedNvml([]).fail(18, "mismatch"), None, "the GPUs of this host cannot be reached; NVMLError: mismatch; restart"),
        (machine(2), "MIG-1", "CUDA_VISIBLE_DEVICES=MIG-1 names 'MIG-1', which is no GPU of this host"),
        (machine(2), "2", "CUDA_VISIBLE_DEVICES=2 names '2', which is no GPU of this host"),
    ],
)
def test_auto_never_falls_to_the_cpu(monkeypatch, host, visible, words):
    with pytest.raises(OptionError) as error:
        resolved(monkeypatch, host, visible)
    assert str(error.value).startswith(words)
    assert resolved(monkeypatch, host, visible, device="cpu").options.device == "cpu"


@pytest.mark.parametrize(
    ("host", "visible", "reason"),
    [
        (machine(8), "", "CUDA_VISIBLE_DEVICES='' hides the 8 GPUs of this host"),
        (machine(8), "-1", "CUDA_VISIBLE_DEVICES='-1' hides the 8 GPUs of this host"),
        (RecordedNvml([]).fail(12, "Library Not Found"), None, "this host has no GPU"),
    ],
)
def test_the_cpu_and_why(monkeypatch, host, visible, reason):
    assert resolved(monkeypatch, host, visible).reasons["device"] == f"cpu: {reason}"
    with pytest.raises(OptionError) as error:
        resolved(monkeypatch, host, visible, device="cuda")
    assert f"device='cuda' needs a GPU; {reason}" in str(error.value)


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 77, "hidden_size": 28, "intermediate_size": 28, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def test_models_with_a_state_of_each_request(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(model=str(tmp_path), device="cpu", max_batch_size=9)
    declaration = registry.LayerDeclaration(dense.layer, cache)
    monkeypatch.setitem(registry.DECLARATIONS, "LlamaForCausalLM", declaration)
    _, chosen = resolve_options(options.model_copy(update={"kv_host_memory": 99}))
    assert (chosen.options.kv_host_memory, chosen.options.state_snapshots) == (99, 5)
    with pytest.raises(
        OptionError, match=r"kv_host_memory=99 does nothing; enable_prefix_caching is False: .* state_snapshots is 0"
    ):
        resolve_options(options.model_copy(update={"kv_host_memory": 99, "state_snapshots": 0}))
    uncut = {"enable_chunked_prefill": False, "max_num_tokens": 4096}
    _, chosen = resolve_options(options.model_copy(update=uncut))
    assert (chosen.options.enable_prefix_caching, chosen.options.state_snapshots) == (False, 0)
    with pytest.raises(
        OptionError, match=r"kv_host_memory=99 does nothing; enable_prefix_caching is False: .* prompts are not cut"
    ):
        resolve_options(options.model_copy(update={**uncut, "kv_host_memory": 99}))
    with pytest.raises(OptionError, match="state_snapshots=3 does nothing; enable_chunked_prefill is off"):
        resolve_options(options.model_copy(update={**uncut, "state_snapshots": 3}))
    _, chosen = resolve_options(options)
    assert (chosen.options.enable_prefix_caching, chosen.options.state_snapshots) == (True, 5)
    assert chosen.reasons["state_snapshots"] == "5: half of max_batch_size"
    _, chosen = resolve_options(options.model_copy(update={"state_snapshots": 3}))
    assert (chosen.options.state_snapshots, chosen.options.index_states) == (3, 12)
    assert chosen.options.model_copy(update={"expert_parallel_size": 2}).index_states == 5 + 2
    _, chosen = resolve_options(options.model_copy(update={"enable_prefix_caching": False}))
    assert (chosen.options.enable_prefix_caching, chosen.options.state_snapshots) == (False, 0)
    _, chosen = resolve_options(options.model_copy(update={"state_snapshots": 0}))
    assert (chosen.options.enable_prefix_caching, chosen.options.state_snapshots) == (False, 0)
    assert chosen.reasons["enable_prefix_caching"].startswith("False: some layers keep a state")
    drafts = EngineOptions(model=str(tmp_path), device="cpu", speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(OptionError, match=r"speculative_config does not work .*; some layers keep a state"):
        resolve_options(drafts)
    registry.layer_cache.cache_clear()
    takes_back = declaration._replace(cache=lambda *layer: (replace(each, revocable=True) for each in cache(*layer)))
    monkeypatch.setitem(registry.DECLARATIONS, "LlamaForCausalLM", takes_back)
    assert resolve_options(drafts)[1].options.speculation is not None
    registry.layer_cache.cache_clear()
    monkeypatch.undo()
    without = resolve_options(options)[1].options
    assert (without.enable_prefix_caching, without.state_snapshots) == (True, 0)
    with pytest.raises(OptionError, match=r"state_snapshots=1 does nothing with this model.*LlamaForCausalLM"):
        resolve_options(options.model_copy(update={"state_snapshots": 1}))


def test_host_memory_without_a_prefix_cache():
    options = EngineOptions.of(model="demo", device="cpu", kv_host_memory="auto", enable_prefix_caching=False)
    with pytest.raises(OptionError, match="kv_host_memory=auto does nothing; enable_prefix_caching is False; no block"):
        resolve_options(options)
    assert resolve_options(EngineOptions.of(model="demo", device="cpu", kv_host_memory=5))[1].options.kv_host_memory == 5
