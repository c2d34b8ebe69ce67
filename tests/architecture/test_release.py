# SPDX-License-Identifier: Apache-2.0
"""One command makes a release: in a clone, so that no tag of this checkout is ran."""

from __future__ import annotations

import shutil
import subprocess
import sys

from phalanx.version import __version__
from tests.architecture.sources import ROOT


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def release(folder):
    command = [sys.executable, "scripts/release.py"]
    environment = {"PATH": "/usr/bin:/bin", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_tag_a_wheel_a_recipe_and_notes(tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-hardlinks", "--depth", "2", f"file://{ROOT}", str(clone))
    for name in ("scripts/release.py", "scripts/wheel_check.py", "Dockerfile", "constraints.txt", ".gitignore"):
        shutil.copy(ROOT / name, clone / name)
    git(clone, "add", "-A")
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "before")
    git(clone, "tag", "v0.0.9")
    git(clone, "commit", "--quiet", "--allow-empty", "-m", "engine: steps are shorter")
    (clone / "left").touch()
    assert "not committed" in release(clone).stderr
    (clone / "left").unlink()
    ran = release(clone)
    assert ran.returncode == 0, ran.stderr
    folder = clone / "dist" / f"v{__version__}"
    assert sorted(path.name for path in folder.iterdir()) == [
        "Dockerfile",
        "NOTES.md",
        "constraints.txt",
        f"phalanx-{__version__}-py3-none-any.whl",
    ]
    notes = f"# Phalanx {__version__}\n\n## engine\n\n- steps are shorter\n"
    assert (folder / "NOTES.md").read_text() == notes
    assert git(clone, "tag", "--list", "--format=%(contents)", f"v{__version__}").strip() == notes.strip()
    lines = (folder / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith(("FROM", "COPY"))] == [
        "FROM nvidia/cuda:13.0.1-devel-ubuntu24.04", "COPY phalanx-*.whl /wheels/", "COPY constraints.txt ./constraints.txt",
    ]  # fmt: skip
    assert 'ENTRYPOINT ["phalanx", "serve"]' in lines
    assert f"the tag v{__version__} exists" in release(clone).stderr
