# SPDX-License-Identifier: Apache-2.0
"""Every figure of the catalogue has a source that says where and when; what was measured here agrees with it."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import OptionError
from phalanx.hardware import catalogue
from phalanx.hardware.fingerprint import LINKS
from phalanx.hardware.nvml import Gpu
from tests.architecture.sources import ROOT

USABLE = [name for name in catalogue.names() if not catalogue.missing(name)]


@pytest.mark.parametrize("name", USABLE)
def test_every_figure_has_its_source_and_date(name):
    spec = catalogue.gpu(name)
    assert set(catalogue.NEEDED) <= set(spec.sources)
    for source in spec.sources.values():
        assert len(source) > 20
        assert "read 20" in source
    assert spec.link in LINKS
    assert 16e9 < spec.memory_bytes < 400e9
    assert 0.2e12 < spec.memory_bandwidth < 10e12
    assert spec.fp8_flops is None or 1.9 < spec.fp8_flops / spec.bf16_flops < 2.1
    assert (spec.fp8_flops is None) == (spec.sm < 89)


def test_a_gpu_without_a_sourced_peak_is_refused_by_name():
    with pytest.raises(OptionError, match="H200-NVL cannot be planned for; no source was read for its bf16_flops"):
        catalogue.gpu("h200-nvl")


def test_memory_of_measured_gpus_is_what_cuda_reported():
    rows = json.loads((ROOT / "benchmarks/results/serving/scaling.json").read_text())["rows"]
    assert catalogue.gpu("H200").memory_bytes == rows[0]["engine"]["rank_bytes"]["0"]["capacity"]
    report = json.loads((ROOT / "benchmarks/results/h100/llama-3-8b_bf16.json").read_text())
    assert catalogue.gpu("H100").memory_bytes == report["engines"]["AUTO"]["rank_bytes"]["0"]["capacity"]


def test_a_driver_whose_part_is_unknown_takes_as_much_as_the_largest_known():
    known = [catalogue.driver_bytes(name) for name in ("H100", "H200")]
    assert catalogue.driver_bytes("L40S") == catalogue.DRIVER_BYTES >= max(known) > min(known) > 400e6


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIE"),
        ("NVIDIA A100-PCIE-40GB", "A100-40-PCIE"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA T4", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-ADA"),
        # Others, whose names have one of the catalogue as a part.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("NVIDIA H20-3e", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 NVL-24C", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 64GB HBM2", None),
    ],
)
def test_what_nvml_calls_it(product, name):
    assert catalogue.of_name(product) == name


def test_the_machine_at_hand():
    h200 = [Gpu(i, f"GPU-{i}", "NVIDIA H200", 90, 1, 1) for i in range(2)]
    assert catalogue.at_hand(h200) == "H200"
    assert catalogue.at_hand([*h200, Gpu(2, "GPU-2", "NVIDIA L4", 89, 1, 1)]) is None
    assert catalogue.at_hand([]) is None


def test_unknown_names_list_the_known_ones():
    with pytest.raises(OptionError, match="known: A100-40"):
        catalogue.gpu("V100")
    with pytest.raises(OptionError, match="gpu MI300X is not supported; its GPUs run ROCm"):
        catalogue.gpu("mi300x")
    with pytest.raises(OptionError, match="ib-ndr"):
        catalogue.network("token-ring")
    assert catalogue.network("ib-ndr").bandwidth == 50e9
