# SPDX-License-Identifier: Apache-2.0
"""The doctor starts an engine to check its answers, only where it is told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx import cli
from phalanx.bench import offline
from phalanx.errors import SelfCheckFailed, WeightError
from phalanx.health.check import Need
from tests.support.health_subject import only, subject


@pytest.mark.usefixtures("forked_python")
def test_an_engine_is_started_and_its_answers_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ["--device", "cpu", "--max_seq_len", "256", "--kv_cache_bytes", "4000000", "--tp_size", "2"]
    assert cli.main(["doctor", "demo", "--quality", "--check", "same_answers", *flags]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "note same_answers: KL " in page
    assert "top-1 " in page
    assert len(list((tmp_path / ".cache/phalanx/self_check").iterdir())) == 1


def test_what_fails_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: Any) -> list[str]:
        raise SelfCheckFailed("this machine does not give the answers", why=f"moved by {options.model}", next="tune again")

    monkeypatch.setattr(offline, "self_check_lines", fail)
    examined = subject("demo")
    examined.quality = True
    finding = only("same_answers", examined)
    assert (finding.level, finding.cure) == ("error", "tune again")
    assert finding.summary == "this machine does not give the answers; moved by demo", "the cure is told once"

    def end(options: Any) -> list[str]:
        raise WeightError("the file is damaged", next="download it again")

    monkeypatch.setattr(offline, "self_check_lines", end)
    finding = only("same_answers", examined)
    assert (finding.level, finding.cure) == ("error", "download it again")
    assert finding.summary == "no answer was checked, since the engine did not start: the file is damaged"
    dummy = subject("demo", load_format="dummy")
    dummy.quality = True
    assert only("same_answers", dummy).level == "skipped"


def test_nothing_is_started_without_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert subject("demo").lacks(Need.QUALITY)
    assert cli.main(["doctor", "demo", "--check", "same_answers"]) == 0
    assert "1 skipped" in capsys.readouterr().out
    assert cli.main(["doctor", "--quality"]) == 2
    assert "--quality names no model" in capsys.readouterr().err
