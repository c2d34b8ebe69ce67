# SPDX-License-Identifier: Apache-2.0
"""The limits of this process's control groups, in both versions: the smallest of its group and of its ancestors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

HONOURED = {
    "memory.max", "memory.high", "memory.limit_in_bytes", "cpu.max", "cpu.cfs_quota_us", "pids.max",
}  # fmt: skip
"""Files of limits that this module reads. (Sets of cores, `cpuset.*`, are in the affinity of the process.)"""
HARMLESS = {
    "memory.swap.*": "ranks do not swap", "memory.zswap.*": "ranks do not swap", "memory.memsw.*": "ranks do not swap",
    "memory.soft_limit_in_bytes": "counts only where the host lacks memory", "memory.kmem.*": "the kernel's own, within the limit",
    "hugetlb.*": "no huge page is asked for", "io.*": "a slower load", "blkio.*": "a slower load",
    "misc.*": "keys of encrypted guests", "cpu.rt_*": "no thread is real-time", "cpu.uclamp.*": "a hint of clocks",
    "cpu.max.burst": "raises a quota", "cgroup.max.*": "no groups are made",
}  # fmt: skip
"""Files of limits that change nothing here, as patterns, with the reason."""
LIMIT = re.compile(r".+\.(max|high|\w*limit_in_bytes|\w*quota_us|\w*runtime_us|max\.\w+)")
"""How a file of a limit is named."""
UNLIMITED = 1 << 60
"""cgroups 1 write a number near 2^63 where there is no limit."""


class Limit(NamedTuple):
    """Bytes, cores or tasks, and the folder of the group that sets them. own: it is the process's own group, and no ancestor."""

    amount: float
    group: Path
    own: bool

    def __str__(self) -> str:
        return "the control group" if self.own else f"the control group {self.group.name}, above this one,"


@dataclass(frozen=True)
class GroupLimits:
    """None: no limit. free_memory: bytes that every group of the chain still has; inactive pages of files count as free, since the
    kernel reclaims them. unread: limits that are set and not honoured here, in words."""

    memory: Limit | None
    free_memory: int | None
    cores: Limit | None
    tasks: Limit | None
    unread: tuple[str, ...] = ()


def read_limits(root: Path = Path("/")) -> GroupLimits:
    """root: where /proc and /sys are mounted."""
    groups = chains(root)
    unread = [*_others(groups)]

    def smallest(read: Callable[[Path], float | None], *controllers: str) -> Limit | None:
        limits = []
        for chain in (groups.get(name, []) for name in controllers):
            for folder in chain:
                try:
                    amount = read(folder)
                except (OSError, ValueError) as error:
                    unread.append(f"a limit of {folder} cannot be read: {error}")
                    continue
                if amount is not None:
                    limits.append(Limit(amount, folder, folder == chain[0]))
        return min(limits, key=lambda limit: limit.amount, default=None)

    return GroupLimits(
        smallest(_memory, "", "memory"), _bytes(smallest(_free_memory, "", "memory")), smallest(_cores, "", "cpu"),
        smallest(lambda folder: _number(folder / "pids.max"), "", "pids"), tuple(dict.fromkeys(unread)),
    )  # fmt: skip


def chains(root: Path = Path("/")) -> dict[str, list[Path]]:
    """Controller -> the folders of this process's group and of its ancestors, its own first. "" is the tree of cgroups 2."""
    paths = {controller: path for controllers, path in _own_paths(root) for controller in controllers}
    mounts = _mounts(root)
    result: dict[str, list[Path]] = {}
    for controller in {*paths, *mounts}:
        for top, point in mounts.get(controller, [(PurePosixPath("/"), root / f"sys/fs/cgroup/{controller}")]):
            path = PurePosixPath(paths.get(controller, "/"))
            inside = path.relative_to(top) if path.is_relative_to(top) else PurePosixPath()
            inside = PurePosixPath() if ".." in inside.parts else inside  # a group outside of this namespace
            chain = [point / each for each in (inside, *inside.parents)]
            chain = [folder for folder in chain if folder.is_dir()]
            if len(chain) > len(result.get(controller, [])):
                result[controller] = chain
    return result


def _own_paths(root: Path) -> Iterator[tuple[list[str], str]]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        yield controllers.split(","), path


def _mounts(root: Path) -> dict[str, list[tuple[PurePosixPath, Path]]]:
    """Controller -> (the group that is mounted, where)."""
    mounts: dict[str, list[tuple[PurePosixPath, Path]]] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        if not kind.startswith("cgroup"):
            continue
        top, point = mount.split()[3:5]
        options = [""] if kind.startswith("cgroup2 ") else kind.split()[-1].split(",")
        for controller in options:
            mounts.setdefault(controller, []).append((PurePosixPath(top), root / point.lstrip("/")))
    if not mounts:
        mounts[""] = [(PurePosixPath("/"), root / "sys/fs/cgroup")]
    return mounts


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _text(file: Path) -> str | None:
    """None where there is no such file. Raises OSError where it cannot be read."""
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None


def _number(file: Path) -> int | None:
    """None for no limit. Raises OSError and ValueError."""
    text = _text(file)
    if text in (None, "max", "-1"):
        return None
    try:
        number = int(str(text))
    except ValueError:
        raise ValueError(f"{file.name} holds {text!r}") from None
    return number if 0 <= number < UNLIMITED else None


def _memory(folder: Path) -> int | None:
    """memory.high, too: a group beyond it is slowed down to a standstill. cgroups 1 tell the smallest of the whole chain, beyond a
    namespace too."""
    limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    chain = _statistics(folder).get("hierarchical_memory_limit", UNLIMITED)
    return min((limit for limit in (*limits, chain) if limit is not None and limit < UNLIMITED), default=None)


def _free_memory(folder: Path) -> int | None:
    limit = _memory(folder)
    used = [_number(folder / name) for name in ("memory.current", "memory.usage_in_bytes")]
    if limit is None or not any(each is not None for each in used):
        return limit
    facts = _statistics(folder)
    return max(limit - max(each or 0 for each in used) + facts.get("total_inactive_file", facts.get("inactive_file", 0)), 0)


def _statistics(folder: Path) -> dict[str, int]:
    entries = [line.split() for line in (_text(folder / "memory.stat") or "").splitlines()]
    return {name: int(value) for name, value in entries}


def _cores(folder: Path) -> float | None:
    text = _text(folder / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us = _number(folder / "cpu.cfs_quota_us")
    return None if quota_us is None else quota_us / (_number(folder / "cpu.cfs_period_us") or 100_000)


def _bytes(limit: Limit | None) -> int | None:
    return None if limit is None else int(limit.amount)


def _others(groups: dict[str, list[Path]]) -> Iterator[str]:
    """GroupLimits that are set, and stand in neither table."""
    for chain in groups.values():
        for folder in chain:
            for file in sorted(folder.iterdir()):
                known = file.name in HONOURED or any(fnmatch(file.name, pattern) for pattern in HARMLESS)
                if known or not LIMIT.fullmatch(file.name) or file.name.startswith("cpuset."):
                    continue
                try:
                    text = (_text(file) or "max").split()
                except OSError:
                    continue
                values = [part.rpartition("=")[2] for part in text if "=" in part] or text
                if not {*values} <= {"max", "-1"}:
                    yield f"{file} is {' '.join(text)}, a limit that is not looked at"
