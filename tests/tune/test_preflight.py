# SPDX-License-Identifier: Apache-2.0
"""A benchmark that cannot be run is refused before anything is measured."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError
from phalanx.tune import preflight
from phalanx.tune.sweep import Sweep
from tests.support.tune_benchmarks import NVLINK2


def test_each_reason_once():
    skips = Sweep.from_text(NVLINK2, tokens="1,2048,4096", hidden="1004,8192", fusions="NONE", max_bytes=1 << 20).plan()[1]
    assert preflight.summarize_skips(skips) == [
        "bf16 NONE 2048x8192 NCCL and 11 more like it: 32.0 MiB is more than --max_mib 1",
        "bf16 NONE 1x1004 ONESHOT: ONESHOT moves 8 elements at a time, and hidden size 1004 is not a multiple of 8",
        "bf16 NONE 1x1004 TWOSHOT: TWOSHOT moves 8 elements at a time, and hidden size 1004 is not a multiple of 8",
    ]
    assert preflight.summarize_skips({}) == []


def test_a_folder_that_takes_no_files(tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match="file is a file; give a folder that can be written"):
            preflight.require_writable_folder(folder)
    with pytest.raises(OptionError, match="cannot be written; File name too long; give a folder"):
        preflight.require_writable_folder(tmp_path / ("x" * 300))
    preflight.require_writable_folder(tmp_path / "new" / "below")
    assert list((tmp_path / "new" / "below").iterdir()) == []
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
