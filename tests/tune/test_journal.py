# SPDX-License-Identifier: Apache-2.0
"""A journal survives its writer, whatever byte it died at."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError, TableError
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.journal import Journal, journal_path
from phalanx.tune.sweep import Task
from tests.tune.made_up import NVLINK2

HEAD = {"fingerprint": str(NVLINK2), "torch": "2.11"}
ONE = Task("bf16", Fusion.NONE, 1, 128, Choice(Strategy.NCCL))
TWO = Task("bf16", Fusion.NONE, 1, 128, Choice(Strategy.ONESHOT))


def written(path) -> bytes:
    journal = Journal(path, HEAD)
    journal.done(ONE, [1.5, 2.0])
    journal.skip(TWO, "it hangs")
    journal.close()
    return path.read_bytes()


def test_resumes_after_any_cut(tmp_path):
    path = journal_path(tmp_path, NVLINK2)
    data = written(path)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(0, len(data) + 1, 7):
        path.write_bytes(data[:cut])
        journal = Journal(path, HEAD)
        whole = sum(end <= cut for end in ends)
        assert journal.resumed == max(whole - 1, 0)
        journal.done(ONE, [3.0])
        journal.close()
        again = Journal(path, HEAD)
        assert again.samples[ONE] == [3.0]
        again.close()


def test_what_was_there_is_there_again(tmp_path):
    path = tmp_path / "j"
    written(path)
    journal = Journal(path, HEAD)
    assert journal.samples == {ONE: [1.5, 2.0]}
    assert journal.skips == {TWO: "it hangs"}
    journal.finish()
    assert not path.exists()


def test_another_runs_journal_is_refused_unless_dropped(tmp_path):
    path = tmp_path / "j"
    written(path)
    with pytest.raises(OptionError, match=r"differs in torch.*--restart"):
        Journal(path, HEAD | {"torch": "2.12"})
    journal = Journal(path, HEAD | {"torch": "2.12"}, restart=True)
    assert journal.resumed == 0
    journal.close()


def test_no_journal(tmp_path):
    path = tmp_path / "j"
    path.write_text('{"head": {}}\nnonsense\n', encoding="utf-8")
    with pytest.raises(TableError, match="line 2"):
        Journal(path, {})
