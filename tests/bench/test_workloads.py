# SPDX-License-Identifier: Apache-2.0
"""The same name is the same work."""

from __future__ import annotations

import pytest

from phalanx.bench import workloads
from phalanx.bench.workloads import Workload
from phalanx.errors import OptionError


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("decode-1", Workload("decode-1", "decode", 1, 128, 129, 2)),
        ("decode-64", Workload("decode-64", "decode", 64, 128, 129, 2)),
        ("decode-3x16x8", Workload("decode-3x16x8", "decode", 3, 16, 9, 2)),
        ("batch-512x1000x1000", Workload("batch-512x1000x1000", "batch", 512, 1000, 1000, 1)),
    ],
)
def test_names(name, workload):
    assert workloads.parse(name) == workload
    assert workloads.parse(name, workload.kind) == workload


def test_the_default_workloads_are_known():
    assert {workloads.parse(name).kind for name in workloads.KNOWN} == {"decode", "batch"}


@pytest.mark.parametrize("name", ["decode", "decode-0", "decode-1x2", "batch-512", "batch-1x0x1", "prefill-1", "decode-1 "])
def test_unknown_names_tell_the_known(name):
    with pytest.raises(OptionError, match=r"is unknown; use decode-1, .*batch-512x1000x1000"):
        workloads.parse(name)


def test_a_workload_of_the_other_kind():
    with pytest.raises(OptionError, match=r"is not a batch workload; use batch-512x1000x1000"):
        workloads.parse("decode-1", "batch")


def test_prompts_are_the_same_for_the_same_seed():
    workload = workloads.parse("decode-3x16x8")
    ids = workloads.prompts(workload, 50, 7)
    assert [len(prompt) for prompt in ids] == [16] * 3
    assert all(0 <= token < 50 for prompt in ids for token in prompt)
    assert ids == workloads.prompts(workload, 50, 7) != workloads.prompts(workload, 50, 8)
    assert len({tuple(prompt) for prompt in ids}) == 3


def test_mean_context():
    # Decode steps of 3 tokens after 10: the second token sees 11, the third 12.
    assert Workload("", "decode", 1, 10, 3, 1).mean_context == (11 + 12) / 2


def test_params_leave_no_choice():
    params = workloads.params(9)
    assert (params.max_tokens, params.greedy, params.ignore_eos, params.detokenize) == (9, True, True, False)
