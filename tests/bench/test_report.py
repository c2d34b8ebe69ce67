# SPDX-License-Identifier: Apache-2.0
"""Percentiles are exact, and a figure says where it comes from but no folder of this machine."""

from __future__ import annotations

import json
import math
import sys

import numpy
import pytest

from phalanx.bench import report


@pytest.mark.parametrize("percent", [0, 10, 50, 90, 95, 99, 100])
def test_percentiles_are_numpys(percent):
    values = [5.0, 1.0, 9.5, 2.0, 7.0, 3.25]
    assert report.percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), abs=1e-12)


def test_percentiles_of_little():
    assert math.isnan(report.percentile([], 50))
    assert report.percentile([4.0], 99) == 4.0
    assert report.percentile([1.0, 2.0], 50) == 1.5


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(None, "not measured"), (0.774, "77%"), (0.0994, "9.9%"), (0.0996, "10%"), (0.003, "0.3%"), (1.06, "106%")],
)
def test_percent_text(fraction, text):
    assert report.percent_text(fraction) == text


def test_about_names_the_machine_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    outside = tmp_path.parent / "elsewhere" / "model"
    flags = [str(outside), "--json", str(tmp_path / "out" / "a.json"), f"--plot={tmp_path}/b.png", "--tp_size", "4"]
    monkeypatch.setattr(sys, "argv", ["bin/phalanx", "bench", "latency", *flags])
    about = report.about()
    assert about["command"] == "phalanx bench latency model --json out/a.json --plot=b.png --tp_size 4"
    assert about["machine"]["cores"] >= 1
    assert about["versions"]["torch"]
    assert str(tmp_path) not in json.dumps(about)


def test_json_to_a_file_and_to_stdout(tmp_path, capsys):
    document, table = {"a": 1}, report.table("Title", ["name", "figure"], [["x", "1"]], "caption")
    report.give(document, [table], str(tmp_path / "new" / "r.json"))
    assert json.loads((tmp_path / "new" / "r.json").read_text()) == document
    assert "Title" in capsys.readouterr().out
    report.give(document, [table], "-")
    shown = capsys.readouterr()
    assert json.loads(shown.out) == document
    assert "caption" in shown.err
