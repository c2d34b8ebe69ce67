# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pynvml
import pytest

from phalanx.hardware import links
from phalanx.hardware.links import nvlink_everywhere
from tests.support.health_nvml import RecordedNvml, machine

UUIDS = [f"GPU-0000000{index}-0000-0000-0000-000000000000" for index in range(4)]


def bridged() -> RecordedNvml:
    """Pairs 0-1 and 2-3 have bridges."""
    nvml = machine(4, switch=False, links=12)
    for a, b in ((0, 2), (0, 3), (1, 2), (1, 3)):
        nvml.change("nvmlDeviceGetP2PStatus", 5, {"gpu": b}, 2, gpu=a)
    return nvml


@pytest.mark.parametrize(
    ("indices", "linked"), [([0, 1], True), ([2, 3], True), ([0, 1, 2, 3], False), ([1, 2], False), ([0], True)]
)
def test_each_pair_counts(indices, linked):
    assert nvlink_everywhere([UUIDS[index].removeprefix("GPU-") for index in indices], bridged()) == linked


def test_what_nvml_does_not_say_is_no_nvlink_and_a_warning(caplog):
    assert not nvlink_everywhere(["GPU-0", "1"], machine(2))
    assert "GPUs are taken to have no NVLink: NVML does not say (NVMLError: Not Found)" in caplog.text
    assert not nvlink_everywhere(UUIDS[:2], RecordedNvml([]).fail(999, "Unknown Error"))
    assert "NVMLError: Unknown Error" in caplog.text


def test_the_numbers_are_those_of_nvml():
    assert (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK) == (links._NVLINK, links._OK)
