# SPDX-License-Identifier: Apache-2.0
"""What a check finds is kept by machine and version, so that an upgrade shows what it moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.worker.self_check import history
from phalanx.worker.self_check.compare import Agreement
from phalanx.worker.self_check.history import recorded

FACTS = {"machine": "cpu", "model": "Some Model", "layout": "tp 2"}
RESULT = Agreement(300, 1e-4, 0.99, "decode of 40 rows", 2e-4)


def test_the_line_says_what_the_version_before_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(version: str, kl: float, facts: dict[str, str] = FACTS) -> str:
        monkeypatch.setattr(history, "version_now", lambda: version)
        return recorded(replace(RESULT, kl=kl), 0.02, facts, folder=tmp_path)

    first = "KL 0.0001, top-1 99.0% of 300 positions; decode of 40 rows: KL 0.0002, at most 0.02"
    assert line("1.0", 1e-4) == first
    assert line("1.0", 1e-4) == first, "another start of the same version"
    assert line("1.1", 3e-4).endswith("; was KL 0.0001, top-1 99.0% by version 1.0")
    assert line("1.1", 5e-4).endswith("by version 1.0")
    assert line("1.2", 5e-4).endswith("; was KL 0.0005, top-1 99.0% by version 1.1")
    assert "was" not in line("1.2", 5e-4, {**FACTS, "layout": "tp 4"}), "another layout has a file of its own"
    assert len(list(tmp_path.iterdir())) == 2
    assert all(path.name.startswith("cpu-Some-Model.") for path in tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"versions": [1]}', '{"versions": [{"version": "1"}]}'])
def test_a_faulty_file_is_replaced_and_a_folder_without_room_is_no_error(content: str, tmp_path: Path) -> None:
    recorded(RESULT, 0.02, FACTS, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert "was" not in recorded(RESULT, 0.02, FACTS, folder=tmp_path)
    assert '"kl": 0.0001' in file.read_text()
    assert "was" not in recorded(RESULT, 0.02, FACTS, folder=file)
