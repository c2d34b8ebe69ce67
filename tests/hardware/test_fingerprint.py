# SPDX-License-Identifier: Apache-2.0
"""A fingerprint names a machine, and reads its own name."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError
from phalanx.hardware.fingerprint import LINKS, Fingerprint, link_class


@pytest.mark.parametrize("link", LINKS)
def test_text_round_trips(link):
    fingerprint = Fingerprint(90, link, 4)
    assert Fingerprint.parse(str(fingerprint)) == fingerprint


@pytest.mark.parametrize("text", ["", "sm90", "sm90.nvlink", "sm90.carrier_pigeon.tp2", "sm90.nvlink.tp0", "sm90.nvlink.tp2.json"])
def test_what_is_no_fingerprint(text):
    with pytest.raises(OptionError):
        Fingerprint.parse(text)


def test_link_class():
    assert link_class(device="cpu") == "shm"
    assert link_class(device="cpu", hosts=2) == "nodes"
    assert link_class(device="cuda", hosts=2, peer_access=True, nvlink=True) == "nodes"
    assert link_class(device="cuda") == "pcie"
    assert link_class(device="cuda", peer_access=True) == "pcie_p2p"
    assert link_class(device="cuda", peer_access=True, nvlink=True) == "nvlink"
    assert link_class(device="cuda", peer_access=True, nvlink=True, multicast=True) == "nvlink_multicast"
    assert not Fingerprint(90, "pcie", 2).peers_reach
    assert Fingerprint(0, "shm", 2).peers_reach
