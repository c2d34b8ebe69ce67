# SPDX-License-Identifier: Apache-2.0
"""The one place that states the version, and what an installation of it may lack."""

__version__ = "0.1.0"


def install_extra(extra: str, package: str = "") -> str:
    """The command that installs the packages of an extra, or only the one named. (On a package index the name phalanx is another
    project's.)"""
    from importlib.metadata import requires

    needs = [text.partition(";") for text in requires("phalanx") or []]
    names = [name.strip() for name, _, marker in needs if f"{extra!r}" in marker and name.startswith(package)]
    return f"pip install {' '.join(map(repr, names))}"
