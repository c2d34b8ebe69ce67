# SPDX-License-Identifier: Apache-2.0
"""A user without HOME and without an entry in the users' list: any uid of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.config import home

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """A process whose user has no entry, with a folder of temporary files of its own."""
    monkeypatch.setattr(home, "_entry", lambda: False)
    monkeypatch.setattr(home.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(home.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("variables", [{}, {"HOME": ""}])
def test_a_folder_of_this_user_alone(nobody, variables):
    home.ensure_home(variables)
    folder = Path(variables["HOME"])
    assert folder == nobody / f"phalanx-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert variables["USER"] == f"uid-{os.getuid()}"
    again = dict.fromkeys(("LOGNAME",), "me")
    home.ensure_home(again)
    assert again == {"LOGNAME": "me", "HOME": str(folder)}


@pytest.mark.parametrize("kind", ["a link", "of another user", "open to all", "a file"])
def test_a_folder_that_others_prepared_is_not_used(nobody, kind, monkeypatch):
    folder = nobody / f"phalanx-{os.getuid()}"
    if kind == "a link":
        (nobody / "elsewhere").mkdir()
        folder.symlink_to(nobody / "elsewhere")
    elif kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "open to all" else 0o700)
    if kind == "of another user":
        monkeypatch.setattr(home.os, "getuid", lambda: 4321)
        folder.rename(nobody / "phalanx-4321")
    variables: dict[str, str] = {}
    home.ensure_home(variables)
    assert Path(variables["HOME"]).name.startswith(f"phalanx-{home.os.getuid()}-")


def test_a_home_stays():
    variables = {"HOME": "/somewhere", "USER": "me"}
    home.ensure_home(variables)
    assert variables == {"HOME": "/somewhere", "USER": "me"}


@pytest.mark.root
@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("plan llama-3-8b --gpu H100 --gpus_per_node 1", 0), ("topo --no_measure", 0), ("doctor --check home_folder", 1),
        ("generate demo --prompt hi --max_tokens 2 --device cpu", 0), ("allreduce explain --tp_size 2 --device cpu", 0),
        ("deploy k8s demo --image phalanx:1", 0),
    ],
)  # fmt: skip
def test_every_verb_runs_for_a_user_without_home(tmp_path, line, status):
    """For real: this host's list of users is empty."""
    (tmp_path / "nsswitch.conf").write_text("passwd: files\n")
    words = " ".join([sys.executable, "-m", "phalanx", *line.split()])
    mounts = f"mount --bind /dev/null /etc/passwd; mount --bind {tmp_path}/nsswitch.conf /etc/nsswitch.conf"
    script = f"{mounts}; unset HOME USER LOGNAME; exec {words}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", script], capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == status, done.stderr + done.stdout
    assert f"user 0 has no home folder: {tmp_path}/phalanx-0 is used" in done.stderr
