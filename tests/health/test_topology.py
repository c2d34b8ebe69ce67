# SPDX-License-Identifier: Apache-2.0
"""`phalanx topo`: the matrix, the advice with its figure, and the price for the model that is named."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from phalanx import cli
from phalanx.bench.shapes import SHAPES
from phalanx.config.model import ModelShape
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.health import topology
from phalanx.health.pairs import Measured, Measurements
from phalanx.layout import Layout
from phalanx.layout.weights import weight_bytes
from phalanx.tables.message import Fusion
from phalanx.tables.shipped import find
from tests.support.health_nvml import failing, machine
from tests.support.health_subject import findings, subject

MEASURED = Measurements((Measured(0, 1, 393.4e9, 8.7e-6, True), Measured(1, 0, 391.2e9, 8.9e-6, True)))
SHAPE_70B = ModelShape.from_config(SHAPES["llama-3-70b"])


def page(examined, measurements=None) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(topology.show(topology.survey(examined, measurements)))
    return out.getvalue()


def test_two_h200_over_nvlink():
    text = page(subject("llama-3-70b", nvml=machine(2), tensor_parallel_size=2), MEASURED)
    assert "18 of 18 up, generation 4" in text
    assert "478 GB/s" in text
    assert "NV18 393 GB/s 8.7 us" in text
    assert "Use TP over NVLink: every pair has it (391 GB/s measured in the slowest direction)." in text
    assert "TP 2 over nvlink costs" in text
    assert "need at least 2 GPUs of 140.4 GiB" in text


def test_price_is_that_of_the_shipped_table():
    price = topology.price_of(SHAPE_70B, 2, "nvlink", 90)
    table = find(Fingerprint(90, "nvlink", 2))
    _, us = table.seed.choose("bf16", Fusion.RESIDUAL_RMS_NORM, 1, 8192)
    assert price.calls == 160
    assert price.per_token_s == pytest.approx(160 * us * 1e-6)
    assert price.source == "measured: table of sm90.nvlink.tp2"
    estimate = topology.price_of(SHAPE_70B, 8, "pcie", 90)
    assert estimate.source.startswith("estimate: ")
    assert estimate.per_token_s > 5 * price.per_token_s


def test_pcie_says_pp():
    pcie = machine(2, nvlink=False, name="NVIDIA L40S", switch=False)
    text = page(subject("llama-3-8b", nvml=pcie))
    assert "Avoid TP, use PP: the GPUs are joined over PCIe (63 GB/s signalled)." in text
    assert "TP 2 over pcie_p2p costs" in text
    blocked = machine(2, nvlink=False).change("nvmlDeviceGetP2PStatus", 1)
    text = page(subject("llama-3-8b", nvml=blocked))
    assert "no peer access" in text
    assert "TP 2 over pcie costs" in text


def test_nvlink_pairs_with_pcie_between_them():
    nvml = machine(4, switch=False, links=12)
    for a, b in ((0, 2), (0, 3), (1, 2), (1, 3)):
        nvml.change("nvmlDeviceGetP2PStatus", 5, {"gpu": b}, 2, gpu=a).change("nvmlDeviceGetP2PStatus", 5, {"gpu": a}, 2, gpu=b)
    text = page(subject("llama-3-8b", nvml=nvml))
    assert "Use TP inside NVLink pairs (0-1, 2-3), and PP between them" in text
    assert "TP 2 over nvlink costs" in text
    assert "TP 4 over pcie_p2p costs" in text


def test_what_nvml_does_not_answer_is_no_zero():
    """P2P says NVLink, and no link answers: neither a rate nor a number of links."""
    silent = machine(2, nvlink=False).change("nvmlDeviceGetP2PStatus", 0).refuse("nvmlDeviceGetMaxPcieLinkGeneration")
    text = page(subject("llama-3-8b", nvml=silent))
    assert "Use TP over NVLink: every pair has it (NVML does not say its rate)." in text
    row = next(line for line in text.splitlines() if line.strip().startswith("GPU1"))
    assert row.split() == ["GPU1", "NV", "X"]
    assert next(line for line in text.splitlines() if "NVIDIA H200" in line).split()[5:7] == ["?", "?"]


def test_a_model_for_more_gpus_than_a_rack_has():
    text = page(subject("llama-3.1-405b", nvml=machine(2, memory=16 << 30)))
    assert "GB of weights need more than 32 GPUs of 16.0 GiB" in text


def test_a_checkpoint_in_4_bits_counts_as_it_is():
    """No copy in FP8 is made unless the engine's option says so."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    examined = subject("llama-3-70b", nvml=machine(2, memory=80 << 30), start_timeout=60)
    examined = replace(examined, config={**SHAPES["llama-3-70b"], "quantization_config": awq})
    (stored,) = weight_bytes(examined.model_shape, "bf16", Layout())
    assert stored < 0.3 * weight_bytes(SHAPE_70B, "bf16", Layout())[0]
    assert f"{stored / 1e9:.1f} GB of weights need at least 1 GPUs" in page(examined)
    assert any(f"{stored / 1e9:.0f} GB of weights take" in finding.summary for finding in findings("timeouts", examined))


def test_a_gpu_that_ails_is_named():
    text = page(subject(nvml=failing("nvmlDeviceGetMemoryInfo", 15)))
    assert "GPUs: GPU 3 (GPU-00000003-0000-0000-0000-000000000000, NVIDIA H200) cannot be used" in text


def test_damage_shows_in_the_matrix():
    damaged = Measurements((Measured(0, 1, 393e9, 9e-6, False, "1 of 9 words differ"), MEASURED.pairs[1]))
    assert "NV18 393 GB/s 9.0 us DAMAGED" in page(subject(nvml=machine(2)), damaged)


def test_without_gpus_it_is_useful():
    text = page(subject("llama-3-70b"))
    assert "cores" in text.splitlines()[0]
    assert "No GPU: CPU ranks share memory" in text
    assert "TP 2 over nvlink costs" in text
    assert "TP 2 over pcie_p2p costs" in text
    assert "lo" in text


def test_rdma_between_hosts(tmp_path):
    folder = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    folder.mkdir(parents=True)
    (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (folder / "state").write_text("4: ACTIVE\n")
    text = page(subject(root=tmp_path))
    row = next(line for line in text.splitlines() if "mlx5_0" in line)
    assert row.split() == ["mlx5_0", "RDMA", "400", "Gb/sec", "(4X", "NDR)", "active"]
    assert "Between hosts: mlx5_0 (RDMA); TP stays inside a host, PP goes between them." in text


def test_command(capsys):
    assert cli.main(["topo", "llama-3-8b", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == "llama-3-8b"
    assert {price["tp"] for price in document["prices"]} == {2, 4}
    assert document["advice"]
    assert cli.main(["topo"]) == 0
    assert "Between hosts" in capsys.readouterr().out


def test_document_of_gpus_is_json():
    document = json.loads(topology.dumps(topology.survey(subject("llama-3-70b", nvml=machine(2)), MEASURED)))
    assert len(document["gpus"]) == 2
    assert document["pairs"][0]["kind"] == "NV"
    assert document["measured"]["pairs"][0]["bytes_per_s"] == 393.4e9
