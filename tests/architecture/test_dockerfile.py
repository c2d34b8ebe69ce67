# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, as far as a machine without Docker can check it: syntax, sources, shell, environment, entry point."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from typing import Any, NamedTuple

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from phalanx.cli import every_verb
from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.config.sources import build_options, read_sources
from phalanx.deploy.compose import HEALTH_CHECK
from phalanx.deploy.pod import USER
from phalanx.deploy.serve_flags import CACHE, KERNELS
from tests.architecture.sources import ROOT

KNOWN = {"FROM", "WORKDIR", "COPY", "ARG", "RUN", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
UBUNTU_PYTHON = {"22.04": "3.10", "24.04": "3.12"}
"""Ubuntu's release -> its package python3."""


class Instruction(NamedTuple):
    name: str
    text: str


def instructions() -> list[Instruction]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip() and not line.startswith("#")]
    return [Instruction(*line.split(None, 1)) for line in lines]


def texts(name: str) -> list[str]:
    return [instruction.text for instruction in instructions() if instruction.name == name]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for text in texts("ENV") for pair in text.split())


def sent(path: str) -> bool:
    """Whether .dockerignore lets a path of the checkout into the build."""
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    allowed = True
    for line in lines:
        if fnmatch.fnmatch(path, line.lstrip("!").removeprefix("**/")):
            allowed = line.startswith("!")
    return allowed


def test_instructions_are_known_and_in_order():
    names = [instruction.name for instruction in instructions()]
    assert names[0] == "FROM"
    assert set(names) <= KNOWN
    assert names[-1] == "ENTRYPOINT"
    assert (ROOT / "Dockerfile").read_text(encoding="utf-8").startswith("# syntax=docker/dockerfile:1\n")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def copied_sources() -> set[str]:
    """What the stage of the wheel copies from the checkout."""
    words = [[word for word in text.split() if not word.startswith("--")] for text in texts("COPY") if "--from=" not in text]
    return {source for *sources, _ in words for source in sources}


def test_what_is_copied_is_there():
    stages = [text.partition(" AS ")[2] for text in texts("FROM")]
    for text in texts("COPY"):
        *sources, target = [word for word in text.split() if not word.startswith("--")]
        if stage := re.search(r"--from=(\S+)", text):
            assert stage[1] in stages
            run_words = [word for run in texts("RUN") for word in run.split()]
            assert all(source in run_words for source in sources), f"no RUN makes {sources}"
            continue
        for source in sources:
            assert (ROOT / source).exists(), f"COPY {source}"
            assert sent(source), f".dockerignore leaves out {source}"
        assert target.startswith("./")


def test_the_wheel_is_built_from_what_is_copied(tmp_path):
    """By the package's build back end, which needs no network, in a folder of only these files; it has all files of the package."""
    folder, wheels = tmp_path / "src", tmp_path / "wheels"
    folder.mkdir()
    for source in copied_sources():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, folder / source)
    assert project()["build-system"]["build-backend"] == "hatchling.build"
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("phalanx-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    files = {str(path.relative_to(folder / "src")) for path in (folder / "src" / "phalanx").rglob("*") if path.is_file()}
    assert {name for name in names if ".dist-info/" not in name} == files
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert (ROOT / project()["project"]["readme"]).read_text(encoding="utf-8").strip() in metadata


def test_constraints_are_the_measured_versions():
    """Each is that of most of the measurements on GPUs, and one that the package takes."""
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    counts: dict[str, Counter[str]] = {pin.name: Counter() for pin in pins}
    for file in (ROOT / "benchmarks" / "results").rglob("*.json"):
        versions = re.findall(r'"versions": \{([^}]*)\}', file.read_text(encoding="utf-8"))
        for record in (dict(re.findall(r'"([^"]+)": "([^"]+)"', text)) for text in versions):
            for name in counts if "nvidia-nccl-cu13" in record else ():
                counts[name][record.get(name, "")] += 1
    project_file = project()["project"]
    ranges = [Requirement(line) for line in (*project_file["dependencies"], *project_file["optional-dependencies"]["gpu"])]
    for pin in pins:
        (version,) = [specifier.version for specifier in pin.specifier]
        assert counts[pin.name].most_common(1)[0][0] == version, (pin.name, counts[pin.name])
        assert all(version in one.specifier for one in ranges if one.name == pin.name)
    assert {"torch", "triton", "flashinfer-python"} <= set(counts)
    assert "-c constraints.txt" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_image_runs_a_python_that_the_package_takes():
    build, runtime = texts("FROM")
    python, ubuntu = re.search(r"python:(\d+\.\d+)", build), re.search(r"-ubuntu(\d+\.\d+)$", runtime)
    assert python
    assert ubuntu
    required = SpecifierSet(project()["project"]["requires-python"])
    assert python[1] in required
    assert UBUNTU_PYTHON[ubuntu[1]] in required
    assert any("python3-venv" in run for run in texts("RUN")), "the distribution's Python is what the image runs"


def test_shell_and_pip_lines_are_sound():
    extras = project()["project"]["optional-dependencies"]
    pip = []
    for run in texts("RUN"):
        assert subprocess.run(["bash", "-n", "-c", run], capture_output=True, check=False).returncode == 0, run
        pip += [part.strip() for part in run.split("&&") if part.strip().startswith("pip ")]
    assert len(pip) == 2
    build, install = pip
    # scripts/wheel_check.py, a step of .ci/run, builds and installs a wheel in the same way.
    assert re.fullmatch(r"pip wheel --no-cache-dir --no-deps --wheel-dir /wheels \.", build)
    assert re.fullmatch(r'pip install --no-cache-dir -c constraints\.txt "\$\(ls /wheels/phalanx-\*\.whl\)\[\$EXTRAS\]"', install)
    (default,) = texts("ARG")
    assert default == "EXTRAS=gpu"
    assert {"gpu", "ray"} <= set(extras)


def test_it_runs_as_the_user_of_the_manifests_and_keeps_its_cache_in_the_volume():
    (user,) = texts("USER")
    assert user == f"{USER}:{USER}"
    (volume,) = texts("VOLUME")
    assert volume == CACHE
    assert any(f"mkdir {CACHE} && chown {user} {CACHE}" in run for run in texts("RUN"))
    values = environment()
    assert all(values[name].startswith(f"{volume}/") for name in ("HF_HOME", "PHALANX_KERNEL_CACHE_DIR"))
    assert values["PHALANX_KERNEL_CACHE_DIR"] == KERNELS
    assert values["HOME"] == "/tmp"


def test_entry_point_and_environment_are_what_phalanx_takes():
    (entry,), (port,), (health,) = texts("ENTRYPOINT"), texts("EXPOSE"), texts("HEALTHCHECK")
    program, verb = json.loads(entry)
    assert program == "phalanx"
    assert verb in typer.main.get_command(every_verb()).commands
    raw = read_sources({"model": "demo"}, environ=environment())
    serving = build_options(ServeOptions, raw)
    assert serving.host == "::"
    assert str(serving.port) == port
    assert build_options(EngineOptions, raw).kernel_cache_dir is not None
    assert json.loads(health.partition("CMD ")[2]) == HEALTH_CHECK
