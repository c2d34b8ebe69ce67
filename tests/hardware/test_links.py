# SPDX-License-Identifier: Apache-2.0
"""NVLink by nvidia-smi's matrix; nothing is said of GPUs that nobody knows."""

from __future__ import annotations

from phalanx.hardware.links import linked_in, nvlink_everywhere

MATRIX = """
     GPU0    GPU1    GPU2    GPU3
 GPU0    X    OK    OK    NS
 GPU1    OK    X    OK    NS
 GPU2    OK    OK    X    NS
 GPU3    NS    NS    NS    X

Legend:

  X    = Self
  OK   = Status Ok
""".splitlines()


def test_matrix():
    assert linked_in(MATRIX, [0, 1])
    assert linked_in(MATRIX, [2, 0, 1])
    assert not linked_in(MATRIX, [0, 1, 2, 3])
    assert not linked_in(MATRIX, [0, 4])
    assert not linked_in([], [0, 1])


def test_unknown_gpus():
    assert not nvlink_everywhere(["GPU-0", "1"])
