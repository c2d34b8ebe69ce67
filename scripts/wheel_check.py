# SPDX-License-Identifier: Apache-2.0
"""The built wheel serves: build it, install it into a clean environment, and serve the demo model from there.

    python scripts/wheel_check.py

The environment is a new venv that holds the wheel and nothing of this checkout. Torch and the other dependencies are not installed
again, which would take minutes: a .pth file adds the site-packages of the Python that runs this. The editable installation of
phalanx in there is a .pth file itself, and Python reads .pth files in a venv's own site-packages only. So the wheel is the only
phalanx that can be imported; the check fails unless it is. Everything runs in a folder outside of the checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHERE = "import phalanx, importlib.metadata as m; print(phalanx.__file__, m.version('phalanx'))"


def build(out: Path) -> Path:
    """The wheel, in `out`. In isolation, hatchling would be downloaded; where it is installed already, it is used."""
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["build-backend"]
    here = subprocess.run([sys.executable, "-c", f"import {backend}"], capture_output=True, check=False).returncode == 0
    isolation = ["--no-build-isolation"] if here else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", *isolation]
    subprocess.run([*pip, "--wheel-dir", out, ROOT], check=True)
    (wheel,) = out.glob("phalanx-*.whl")
    return wheel


def missing(wheel: Path) -> list[str]:
    """Files below src/phalanx that git tracks and the wheel lacks."""
    listed = subprocess.run(["git", "ls-files", "src/phalanx"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
    names = [name.removeprefix("src/") for name in listed.splitlines() if (ROOT / name).exists()]
    return [name for name in names if name not in members]


def install(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment with the wheel in it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(_output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    target = ["--target", site, "--no-deps", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *target, wheel], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def _output(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="phalanx-wheel-") as temporary:
        folder = Path(temporary)
        print("== the wheel", flush=True)
        wheel = build(folder / "dist")
        if lacking := missing(wheel):
            sys.exit(f"{wheel.name} lacks {len(lacking)} files, the first is {lacking[0]}")
        python = install(wheel, folder / "venv")
        where, version = _output(python, "-c", WHERE, cwd=folder).split()
        if not Path(where).is_relative_to(folder):
            sys.exit(f"{where} is imported, not the wheel that was installed in {folder}")
        print(f"   {wheel.name}: phalanx {version}, {wheel.stat().st_size} bytes, in a new environment", flush=True)
        return _served(python, folder)


def _served(python: Path, folder: Path) -> int:
    """`make demo`'s script, by the new environment's Python: it serves the demo model with `python -m phalanx` and asks it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([python, "-P", ROOT / "scripts" / "demo.py"], cwd=folder, env=environment, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
