# SPDX-License-Identifier: Apache-2.0
"""What no file of the project says: paths of one machine, hosts of package registries, and words that are not the project's."""

from __future__ import annotations

import re
import subprocess

from tests.architecture.sources import ROOT

BANNED = {
    "an absolute path of a machine": re.compile(r"(?<![\w.}])/(?:work|root|home/\w+)/"),
    "a package registry's host": re.compile(r"pypi\.org|pythonhosted|registry\.npmjs|pytorch\.org/whl", re.I),
}


def test_no_banned_words():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")
    assert len(listed) > 20, "git lists no files: run from a checkout"
    for name in listed:
        path = ROOT / name
        if not name or not path.is_file() or path.suffix in {".safetensors", ".png"} or name == "tests/architecture/test_words.py":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for what, pattern in BANNED.items():
            found = pattern.search(text)
            assert not found, f"{name} names {what}: {found.group(0)}"
