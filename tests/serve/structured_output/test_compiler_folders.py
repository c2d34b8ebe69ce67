# SPDX-License-Identifier: Apache-2.0
"""The folder of a server that was killed is removed by the next one; those of living servers and of others stay."""

from __future__ import annotations

import subprocess
import sys

from phalanx.serve.structured_output.compiler import sweep_folders

CODE = """
import sys, tempfile, time
from pathlib import Path
from phalanx.serve.structured_output import compiler
folder = Path(tempfile.mkdtemp(prefix="phalanx-grammars-", dir=sys.argv[1]))
lock_file = compiler._lock_folder(folder)
print(folder.name, flush=True)
time.sleep(60)
"""


def test_folder_of_a_killed_server(tmp_path):
    (tmp_path / "phalanx-grammars-older").mkdir()  # without a lock: of another version, or being made
    (tmp_path / "phalanx-grammars-link").symlink_to(tmp_path / "phalanx-grammars-older")
    with subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)], stdout=subprocess.PIPE, text=True) as server:
        folder = tmp_path / server.stdout.readline().strip()
        (folder / "grammar.json").write_text("{}")
        sweep_folders(tmp_path)
        assert (folder / "grammar.json").exists()
        server.kill()
    sweep_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["phalanx-grammars-link", "phalanx-grammars-older"]
