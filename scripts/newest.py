# SPDX-License-Identifier: Apache-2.0
"""The newest release of every dependency, against the tests of what touches them.

    python scripts/newest.py [ARGUMENTS OF PYTEST]

It makes an environment of its own in build/newest, without the upper bounds of pyproject.toml (torch and triton keep theirs, since
figures are measured with them). It prints each dependency whose version differs from the environment that runs this. Then it runs
the tests of the code that uses private parts or formats of other packages. A new release that passes may have its bound raised.

Installing takes minutes and needs the network. CI does not run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "newest"
EXTRAS = ("tune", "ray", "dev")
BOUND_TO_FIGURES = ("torch", "triton")
TESTS = (
    "tests/serve/connections", "tests/serve/openai", "tests/serve/structured_output", "tests/serve/output_parsing",
    "tests/serve/test_tokenizer.py", "tests/serve/test_chat_template.py", "tests/deploy", "tests/config", "tests/models",
    "tests/tune", "tests/test_cli.py", "tests/test_metrics.py",
)  # fmt: skip


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, the project's own extras left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != project["name"]]


def without_upper_bound(requirement: Requirement) -> str:
    """The same requirement with its lower bounds only."""
    if canonicalize_name(requirement.name) not in BOUND_TO_FIGURES:
        kept = (str(part) for part in requirement.specifier if part.operator in (">=", ">", "!="))
        requirement.specifier = SpecifierSet(",".join(kept))
    return str(requirement)


def versions(python: Path | str) -> dict[str, str]:
    command = [python, "-m", "pip", "--disable-pip-version-check", "list", "--format=json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {canonicalize_name(package["name"]): package["version"] for package in json.loads(listed)}


def main(arguments: list[str]) -> int:
    requirements = declared()
    bounds = {canonicalize_name(requirement.name): requirement.specifier for requirement in requirements}
    if not (ENVIRONMENT / "bin" / "python").exists():
        venv.create(ENVIRONMENT, with_pip=True)
    python = ENVIRONMENT / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--progress-bar", "off"]
    print("== newest: installing the newest of each dependency in build/newest (minutes)", flush=True)
    newest = [without_upper_bound(requirement) for requirement in requirements]
    subprocess.run([*pip, "--upgrade", "--upgrade-strategy", "eager", *newest], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    here, there = versions(sys.executable), versions(python)
    for name in sorted(name for name in there if here.get(name) != there[name]):
        beyond = name in bounds and not bounds[name].contains(there[name], prereleases=True)
        print(
            f"   {name}: {here.get(name, 'not installed')} here, {there[name]} newest{', beyond its upper bound' if beyond else ''}"
        )
    environment = os.environ | {"PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    tests = [python, "-m", "pytest", "-q", "-n", "2", *(arguments or TESTS)]
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
