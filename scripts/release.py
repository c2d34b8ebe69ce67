# SPDX-License-Identifier: Apache-2.0
"""A release of the version in src/phalanx/version.py: a tag, and below dist/ the wheel, an image recipe and notes.

    make release

The recipe is the Dockerfile with the wheel beside it in the place of the sources: `docker build dist/v1.2.3`. Nothing is pushed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable

from wheel_check import ROOT, build

VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.M)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def recipe(dockerfile: str) -> str:
    """The Dockerfile without the stage that builds the wheel, which lies in the build's folder instead."""
    head, mark, rest = dockerfile.partition("# The wheel, from the sources.\n")
    stages = rest.split("\n\n")
    text, copies = re.subn(
        r"^COPY --from=wheel /wheels /wheels$", "COPY phalanx-*.whl /wheels/", "\n\n".join(stages[1:]), flags=re.M
    )
    if not mark or not stages[0].startswith("FROM") or copies != 1:
        sys.exit("the Dockerfile has no stage that builds the wheel and is copied from once: change scripts/release.py with it")
    return head + text


def notes(version: str, subjects: Iterable[str]) -> str:
    """What has changed, by the area that a subject of a commit names first."""
    areas: dict[str, list[str]] = defaultdict(list)
    for subject in subjects:
        area, colon, change = subject.partition(": ")
        areas[area if colon else "other"].append(change or subject)
    parts = [f"# Phalanx {version}", *(f"## {area}\n\n" + "\n".join(f"- {one}" for one in areas[area]) for area in sorted(areas))]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    (version,) = VERSION.findall((ROOT / "src/phalanx/version.py").read_text(encoding="utf-8"))
    tag = f"v{version}"
    if changed := git("status", "--porcelain"):
        sys.exit(f"the checkout has changes that are not committed:\n{changed}")
    if git("tag", "--list", tag):
        sys.exit(f"the tag {tag} exists: raise the version in src/phalanx/version.py")
    last = git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname").splitlines()
    subjects = (
        git("log", "--no-merges", "--reverse", "--format=%s", f"{last[0]}..HEAD").splitlines() if last else ["The first release."]
    )
    folder = ROOT / "dist" / tag
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(folder)
    if wheel.name.split("-")[1] != version:
        sys.exit(f"{wheel} is not of version {version}: empty {folder}")
    (folder / "Dockerfile").write_text(recipe((ROOT / "Dockerfile").read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copy(ROOT / "constraints.txt", folder)
    (folder / "NOTES.md").write_text(notes(version, subjects), encoding="utf-8")
    git("tag", "--annotate", tag, "--file", str(folder / "NOTES.md"), "--cleanup=verbatim")
    print(*(f"{path.relative_to(ROOT)}" for path in sorted(folder.iterdir())), f"tag {tag} (git push origin {tag})", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
