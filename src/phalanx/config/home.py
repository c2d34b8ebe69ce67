# SPDX-License-Identifier: Apache-2.0
"""The home folder of this user, where caches are kept: of a user whom nobody has given one, too, as in a pod with any uid."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from phalanx.log import get_logger

logger = get_logger(__name__)

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where Python and torch look for the name of the user before they ask for the entry of its number."""


def without_home(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether neither HOME nor an entry of the users' list names a home folder: `~` cannot be expanded then."""
    return not environ.get("HOME") and not _entry()


def temporary_home() -> Path:
    """The folder in place of a home: of this user alone, and lost with the container."""
    return Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"


def ensure_home(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give this process and its children a home folder, and a user's name, where the host has none for this user: torch, Triton and
    the Hub's client need both. The log says so."""
    if not _entry() and not any(environ.get(name) for name in NAMES):
        environ["USER"] = f"uid-{os.getuid()}"
    if not without_home(environ):
        if not environ.get("HOME"):
            environ.pop("HOME", None)  # an empty one is a home of "": caches at the root
        return
    folder = temporary_home()
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    environ["HOME"] = str(folder)
    logger.warning("user %d has no home folder: %s is used; set HOME to keep downloads and kernels", os.getuid(), folder)


def cache_folder(name: str) -> Path:
    """~/.cache/phalanx/NAME, of this user."""
    ensure_home()
    return Path("~/.cache/phalanx").expanduser() / name


def _entry() -> bool:
    try:
        return bool(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return False
