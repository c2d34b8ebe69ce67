# SPDX-License-Identifier: Apache-2.0
"""A figure names its machine, its versions, its commit and its command, and no folder of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

from phalanx.hardware import provenance
from phalanx.version import __version__


def test_the_nested_form_names_the_machine_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    outside = tmp_path.parent / "elsewhere" / "model"
    flags = [str(outside), "--json", str(tmp_path / "out" / "a.json"), f"--plot={tmp_path}/b.png", "--tp_size", "4"]
    monkeypatch.setattr(sys, "argv", ["bin/phalanx", "bench", "latency", *flags])
    about = provenance.collect().as_json()
    assert about["command"] == "phalanx bench latency model --json out/a.json --plot=b.png --tp_size 4"
    assert about["machine"]["cores"] >= 1
    assert about["versions"]["phalanx"] == __version__
    assert about["versions"]["torch"]
    assert str(tmp_path) not in json.dumps(about)


def test_the_flat_form_holds_text_only():
    facts = provenance.machine_facts({"torch": "2.11.0+cu130"})
    assert facts["torch"] == "2.11.0+cu130"
    assert " x " in facts["cpu"] or facts["cpu"]
    assert "driver" not in facts
    assert "cpu" not in provenance.machine_facts({"torch": "2.11.0+cu130", "gpu": "NVIDIA H200", "gpus": "4"})
    run = provenance.collect("abc").run_facts()
    assert run["date"].endswith(" UTC")
    assert all(isinstance(text, str) and text for text in (facts | run).values())


def test_a_commit_is_recorded_where_git_does_not_know_the_sources(monkeypatch):
    monkeypatch.setattr(provenance, "_checkout", lambda: "")
    assert provenance.collect("abc").run_facts()["commit"] == "abc"
    assert "commit" not in provenance.collect().run_facts()
    assert provenance.collect().as_json()["commit"] == "unknown"
    monkeypatch.setattr(provenance, "_checkout", lambda: "123456789abc with changes")
    assert provenance.collect("abc").as_json()["commit"] == "123456789abc with changes"


def test_a_module_and_a_script_are_shown_as_they_were_started(tmp_path):
    code = "from phalanx.hardware import provenance\nprint(provenance.collect().command)\n"
    (tmp_path / "tool.py").write_text(code, encoding="utf-8")
    commands = {"python -m tool --size 4": ["-m", "tool", "--size", "4"], "python tool.py": [str(tmp_path / "tool.py")]}
    for shown, words in commands.items():
        ran = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == shown
