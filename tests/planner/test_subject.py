# SPDX-License-Identifier: Apache-2.0
"""Names lead to shapes and machines, without a network for what is known; what is unknown says what is."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from phalanx.errors import ModelError, ModelNotFound, OptionError
from phalanx.hardware import catalogue
from phalanx.hardware.nvml import Gpu
from phalanx.hardware.probe import Machine
from phalanx.layout.families import known
from phalanx.planner import subject


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Meta-Llama-3-70B",
        "meta-llama/Meta-Llama-3-405B",
        "mistralai/Mixtral-8x22B",
        "demo",
    ],
)
def test_the_guides_models_need_no_network(name, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the network was asked"))
    assert subject.shape_for(name).num_layers > 0


def test_a_file_and_a_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(known("llama-3-8b")))
    assert subject.shape_for(str(path)) == subject.shape_for(str(tmp_path)) == subject.shape_for("llama-3-8b")
    path.write_text("[]")
    with pytest.raises(ModelError, match="must hold an object"):
        subject.shape_for(str(path))


def test_gguf(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(ModelNotFound, match="is a GGUF file"):
        subject.shape_for(str(file))
    with pytest.raises(ModelNotFound, match="has GGUF files only"):
        subject.shape_for(str(tmp_path))


def test_an_unknown_model_names_similar_ones(monkeypatch):
    import huggingface_hub

    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=r"need no network: llama-3\.1-70b.*config.json of it: no network"):
        subject.shape_for("llama-3.1-71b")
    with pytest.raises(ModelNotFound, match=r"none of the [0-9]+ models that need no network;"):
        subject.shape_for("nobody/nothing")


def test_without_a_network_an_unknown_model_is_refused_at_once(monkeypatch, tmp_path):
    """By the Hub's own client, whose file download tries again for 25 s."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    begin = time.monotonic()
    with pytest.raises(ModelNotFound, match=r"the Hub gave no config\.json of it"):
        subject.shape_for("nobody/nothing")
    assert time.monotonic() - begin < 8


def test_the_machine_at_hand_and_the_named_one(monkeypatch, tmp_path):
    here = [Gpu(i, f"GPU-{i}", "NVIDIA H200", 90, 150 << 30, 150 << 30) for i in range(4)]
    monkeypatch.setattr(subject.probe, "detect_machine", lambda: Machine(tuple(here), 1, 1, 1))
    machine, why = subject.machine_for()
    assert (machine.gpu.name, machine.gpus_per_node, machine.nodes, why) == ("H200", 4, 1, "4 found here")
    assert machine.gpu.memory_bytes == catalogue.gpu("H200").memory_bytes  # NVML tells more: the smaller one counts
    here[1] = replace(here[1], total_memory=70 << 30)
    assert subject.machine_for()[0].gpu.memory_bytes == (70 << 30) - catalogue.driver_bytes("H200")
    machine, _ = subject.machine_for("h100", nodes=2)
    assert (machine.gpus, machine.network.name) == (16, "ib-ndr")
    monkeypatch.setattr(subject.probe, "detect_machine", lambda: Machine((), 1, 1, 1))
    assert "no GPU here" in subject.machine_for()[1]
    hidden = "CUDA_VISIBLE_DEVICES='' hides the 8 GPUs of this host"
    monkeypatch.setattr(subject.probe, "detect_machine", lambda: Machine((), 1, 1, 1, unusable=hidden))
    assert subject.machine_for()[1] == f"{hidden}: --gpu names another"
    lost = OptionError("no GPU of this host can be used", held="GPU 0 is lost")
    monkeypatch.setattr(subject.probe, "detect_machine", lambda: Machine((), 1, 1, 1, refusal=lost))
    with pytest.raises(OptionError, match="can be used; GPU 0 is lost; mend that, or name a GPU to plan for: --gpu"):
        subject.machine_for()
    assert subject.machine_for("h100")[0].gpu.name == "H100"


def test_names_as_nvml_and_in_either_case():
    assert subject.machine_for("NVIDIA H100 80GB HBM3")[0].gpu == catalogue.gpu("H100")
    assert subject.machine_for("NVIDIA A100-SXM4-80GB")[0].gpu == catalogue.gpu("A100-80")
    assert subject.machine_for("h200", network="IB-NDR", nodes=2)[0].network == catalogue.network("ib-ndr")
    assert subject.machine_for("h200", network="IB-NDR")[0].network is None
    with pytest.raises(OptionError, match="gpu 'NVIDIA Tesla X' is not in the catalogue"):
        subject.machine_for("NVIDIA Tesla X")


def test_links():
    slow, _ = subject.machine_for("A100-80", link="pcie")
    assert (slow.link, slow.gpu.link_bandwidth) == ("pcie_p2p", 32e9)
    for options in ({"link": "string"}, {"network": "token-ring", "nodes": 2}, {"network": "token-ring"}, {"nodes": 0}):
        with pytest.raises(OptionError):
            subject.machine_for("H100", **options)
    with pytest.raises(OptionError, match="no NVLink"):
        subject.machine_for("L4", link="nvlink")
