# SPDX-License-Identifier: Apache-2.0
"""A record of the kernels that a start needs, in Triton's cache directory: `KernelRecord`. A later start of the same kind reads it,
and need not run its steps to learn which kernels they are.

    {Triton's cache directory}/phalanx-warmups/{digest of the facts}.json
    {"facts": {name: value}, "kernels": [folders in Triton's cache directory]}

A record that is wrong, or cannot be written, costs time and nothing else: a missing kernel is compiled at its first launch."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.log import get_logger

_log = get_logger(__name__)
FOLDER = "phalanx-warmups"
MAX_RECORDS = 256
"""More are not kept: of 32 kinds of starts with 8 ranks. A record of 500 kernels takes 30 KB."""
_SOURCES = Path(__file__).parents[2]
_NOT_RECORDED = "the kernels of this start are not recorded, so the next one runs all steps to learn them"
_GROUP = "__grp__"
"""How the file begins that Triton writes last into the folder of a kernel: the list of the others."""


def cache_folder(key: str) -> str:
    """The folder in Triton's cache directory where it keeps the kernel with this key."""
    return base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")


def all_in_cache(folders: Collection[str]) -> bool:
    """Whether Triton finds the kernels of all these folders in its cache."""
    from triton import knobs

    directory = knobs.cache.dir
    return not knobs.compilation.always_compile and all(_is_complete(os.path.join(directory, folder)) for folder in folders)


def _is_complete(folder: str) -> bool:
    try:
        return any(name.startswith(_GROUP) for name in os.listdir(folder))
    except OSError:
        return False


def sources_digest(root: Path = _SOURCES) -> str:
    """Digest of the names and contents of the Python files and tables below `root`: by default of the installed Phalanx, which
    takes 10 ms."""
    digest = hashlib.sha256()
    for folder, subfolders, files in os.walk(root):
        subfolders.sort()
        for name in sorted(files):
            if name.endswith((".py", ".json")):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    content = file.read()
                digest.update(f"{os.path.relpath(path, root)} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()


class KernelRecord:
    """The kernels of one rank in starts of one kind. facts: everything that decides which kernels these are, name -> value; a start
    with other facts has another record."""

    def __init__(self, facts: Mapping[str, str]) -> None:
        self.facts = dict(facts)

    @property
    def path(self) -> Path:
        """The file. Requires Triton."""
        from triton import knobs

        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()
        return Path(knobs.cache.dir, FOLDER, f"{digest[:32]}.json")

    def covers(self, folders: Collection[str] | None) -> bool:
        """Whether there is a record, all of its kernels are in Triton's cache, and these are among them; folders: see
        `cache_folder`, None if unknown."""
        path = self.path
        try:
            recorded = json.loads(path.read_text(encoding="utf-8"))["kernels"]
            covered = folders is not None and set(folders) <= set(recorded) and all_in_cache(recorded)
        except (OSError, ValueError, KeyError, TypeError):  # none, or not one of these
            return False
        with suppress(OSError):
            os.utime(path)  # those that no start has read for longest are removed first
        return covered

    def write(self, folders: Collection[str] | None) -> None:
        """Write the record of these kernels, in place of an earlier one, and remove the oldest records beyond MAX_RECORDS. Nothing
        is written if `folders` is unknown (None) or a kernel is not in the cache, as one that failed to compile; nor where writing
        fails. The log says why. Other processes may do the same at the same time."""
        if folders is None or not all_in_cache(folders):
            _log.info("%s: not all of them are in Triton's cache", _NOT_RECORDED)
            return
        path = self.path
        temporary = path.with_name(f"{path.stem}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"facts": self.facts, "kernels": sorted(set(folders))}), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            _log.info("%s: %s", _NOT_RECORDED, error)
            return
        _prune(path.parent)


def _prune(folder: Path) -> None:
    """Keep the newest MAX_RECORDS files. What killed processes have left of theirs grows old like the others."""
    ages: list[tuple[int, str]] = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):  # another process has removed it
                ages.append((entry.stat().st_mtime_ns, entry.path))
    for _, path in sorted(ages, reverse=True)[MAX_RECORDS:]:
        with suppress(OSError):
            os.unlink(path)
