# SPDX-License-Identifier: Apache-2.0
"""A journal survives its writer, whatever byte it died at."""

from __future__ import annotations

import pytest

from phalanx.errors import OptionError, TableError
from phalanx.tables.message import Fusion
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tune.journal import Journal, journal_path
from phalanx.tune.sweep import Task
from tests.support.tune_benchmarks import NVLINK2

HEAD = {"fingerprint": str(NVLINK2), "torch": "2.11"}
ONE = Task("bf16", Fusion.NONE, 1, 128, Choice(Strategy.NCCL))
TWO = Task("bf16", Fusion.NONE, 1, 128, Choice(Strategy.ONESHOT))


def written(path) -> bytes:
    journal = Journal(path, HEAD)
    journal.record(ONE, [1.5, 2.0])
    journal.skip(TWO, "it hangs")
    journal.close()
    return path.read_bytes()


def test_resumes_after_any_cut(tmp_path):
    path = journal_path(tmp_path, NVLINK2.world, NVLINK2.sm)
    data = written(path)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(0, len(data) + 1, 7):
        path.write_bytes(data[:cut])
        journal = Journal(path, HEAD)
        complete = sum(end <= cut for end in ends)
        assert journal.resumed == max(complete - 1, 0)
        journal.record(ONE, [3.0])
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
    journal.remove()
    assert not path.exists()


def test_another_runs_journal_is_refused_unless_dropped(tmp_path):
    path = tmp_path / "j"
    written(path)
    with pytest.raises(OptionError, match=r"differs in torch \(2\.11, not 2\.12\); give --restart"):
        Journal(path, HEAD | {"torch": "2.12"})
    journal = Journal(path, HEAD | {"torch": "2.12"}, restart=True)
    assert journal.resumed == 0
    journal.close()


def test_no_journal(tmp_path):
    path = tmp_path / "j"
    path.write_text('{"head": {}}\nnonsense\n', encoding="utf-8")
    with pytest.raises(TableError, match="line 2"):
        Journal(path, {})


def test_what_is_measured_again_stands_until_then_and_is_not_asked_for_twice(tmp_path):
    path = tmp_path / "j"
    written(path)
    journal = Journal(path, HEAD)
    assert journal.remeasure([ONE, TWO]) == 2
    assert journal.samples == {ONE: [1.5, 2.0]}
    journal.record(TWO, [4.0])
    assert (journal.pending, journal.skips) == ({ONE}, {})
    journal.close()
    journal = Journal(path, HEAD)
    assert journal.remeasure([ONE, TWO]) == 0
    assert (journal.pending, journal.samples, journal.skips) == ({ONE}, {ONE: [1.5, 2.0], TWO: [4.0]}, {})
    journal.skip(ONE, "it hangs now")
    journal.close()
    journal = Journal(path, HEAD)
    assert (journal.pending, journal.samples, journal.skips) == (set(), {TWO: [4.0]}, {ONE: "it hangs now"})
    assert journal.remeasure([ONE]) == 1  # all that were marked are measured: this is another day
    journal.close()


def test_what_a_head_does_not_tell_is_no_difference(tmp_path):
    path = tmp_path / "j"
    written(path)
    for head in ({"driver": "580", **HEAD}, {"fingerprint": str(NVLINK2)}):
        journal = Journal(path, head)
        assert journal.resumed == 2
        journal.close()
    for head in ({**HEAD, "fingerprint": "sm90.pcie.tp2"}, {**HEAD, "torch": "2.12"}):
        with pytest.raises(OptionError, match=r"differs in (fingerprint|torch)"):
            Journal(path, head)


def test_sessions_are_kept(tmp_path):
    path = tmp_path / "j"
    written(path)
    for commit in ("one", "two"):
        journal = Journal(path, HEAD)
        journal.begin_session({"date": "today", "commit": commit})
        journal.close()
    journal = Journal(path, HEAD)
    assert [session["commit"] for session in journal.sessions] == ["one", "two"]
    assert journal.resumed == 2
    journal.close()
