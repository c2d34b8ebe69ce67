# SPDX-License-Identifier: Apache-2.0
"""A report is written completely or not at all."""

from __future__ import annotations

import json

import pytest

from phalanx.bench import report
from phalanx.errors import OptionError, PhalanxError


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(None, "not measured"), (0.774, "77%"), (0.0994, "9.9%"), (0.0996, "10%"), (0.003, "0.3%"), (1.06, "106%")],
)
def test_percent_text(fraction, text):
    assert report.percent_text(fraction) == text


def test_json_to_a_file_and_to_stdout(tmp_path, capsys):
    document, table = {"a": 1}, report.table("Title", ["name", "figure"], [["x", "1"]], "caption")
    report.publish(document, [table], str(tmp_path / "new" / "r.json"))
    assert json.loads((tmp_path / "new" / "r.json").read_text()) == document
    assert "Title" in capsys.readouterr().out
    report.publish(document, [table], "-")
    shown = capsys.readouterr()
    assert json.loads(shown.out) == document
    assert "caption" in shown.err


def test_a_path_is_tried_and_left_as_it_was(tmp_path):
    assert report.json_path(None) is report.json_path("-") is None
    assert report.json_path(str(tmp_path / "a" / "b" / "r.json")) == tmp_path / "a" / "b" / "r.json"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("extends", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/proc/r.json", "No such file or directory; name a file in a folder that can be written"),
        ("/proc/a/r.json", "No such file or directory; "),
        ("plain/r.json", "its folder is a file; "),
        ("n" * 250 + ".json", "File name too long"),
        ("new/", "that is a folder; name a file in it"),
        ("", "that is a folder; name a file in it"),
        ("folder", "that is a folder; name a file in it"),
        ("/dev/null", "that is not a regular file; name a new file"),
    ],
)
def test_a_path_that_cannot_be_written(name, message, extends, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("x")
    with pytest.raises(OptionError) as error:
        report.json_path(name, extends=extends)
    assert str(error.value).startswith(f"the report cannot be written to {name!r}; {message}")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "plain"]


def test_a_report_takes_no_other_files_place(tmp_path):
    file = tmp_path / "r.json"
    file.write_text("mine")
    with pytest.raises(OptionError, match="a file is there, and would be lost; name a new file"):
        report.json_path(str(file))
    assert report.json_path(str(file), extends=True) == file
    assert file.read_text() == "mine"


def test_what_cannot_be_written_is_shown(tmp_path, capsys):
    (tmp_path / "plain").write_text("x")
    table = report.table("Title", ["name", "figure"], [["x", "1"]])
    with pytest.raises(PhalanxError, match=r"plain/r.json'; its folder is a file; its JSON is on stdout instead") as error:
        report.publish({"a": 1}, [table], str(tmp_path / "plain" / "r.json"))
    assert not isinstance(error.value, OptionError)  # the options are right: exit status 1
    title, _, shown = capsys.readouterr().out.partition("{")
    assert "Title" in title
    assert json.loads("{" + shown) == {"a": 1}


def test_brackets_are_text(capsys):
    report.show("[rank0]: [/x] :boom:", report.table("[bold]T", ["c"], [["[/y]" + 40 * "."]], "[red]why[/z]"))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[rank0]: [/x] :boom:", "[bold]T", "[/y]", "[red]why[/z]"))
