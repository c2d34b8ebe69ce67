# SPDX-License-Identifier: Apache-2.0
"""Docs say what is: every option stands on its page, the tour names functions that exist, links lead somewhere."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT

TOUR = ROOT / "docs" / "tour.md"
NAME = re.compile(r"`((?:[a-z_]+/)*[a-z_]+)\.py:([A-Za-z_][\w.]*)`")


def test_options_page_is_what_the_models_say():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "options_page.py", "--check"], check=False)
    assert done.returncode == 0, "run: python scripts/options_page.py"


def test_tour_names_functions_that_exist():
    names = NAME.findall(TOUR.read_text(encoding="utf-8"))
    assert len(names) >= 25, "the tour names functions as `room/file.py:function`"
    for file, dotted in names:
        found = importlib.import_module("phalanx." + file.replace("/", "."))
        for part in dotted.split("."):
            assert hasattr(found, part), f"docs/tour.md names {file}.py:{dotted}, which does not exist"
            found = getattr(found, part)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_leads_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("make demo") < text.index("make test") < text.index("\n## ")
