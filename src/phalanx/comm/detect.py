# SPDX-License-Identifier: Apache-2.0
"""Which machine a group of ranks stands on: its `Fingerprint`, by which tables are kept and strategies are admitted."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx.comm.group import Group
from phalanx.comm.shared_memory import share_text
from phalanx.hardware.fingerprint import Fingerprint, link_class
from phalanx.hardware.links import nvlink_everywhere

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Gpu(NamedTuple):
    host: str
    uuid: str
    sm: int


def detect_fingerprint(device: torch.device, world: int, group: Group | None = None) -> Fingerprint:
    """The machine of `group`, of whose ranks `device` is this one's: collective, and the same on every rank. Without a group, what
    a group of the first `world` devices of this host would find."""
    if device.type == "cpu":
        hosts = 1 if group is None else len(set(share_text(group, _host(), device)))
        return Fingerprint(0, link_class(device="cpu", hosts=hosts), world)
    own = [torch.device("cuda", index) for index in range(world)] if group is None else [device]
    gpus = [_gpu(each) for each in own]
    if group is not None:
        gpus = [_parse(text) for text in share_text(group, " ".join(map(str, gpus[0])), device)]
    hosts, uuids = len({gpu.host for gpu in gpus}), [gpu.uuid for gpu in gpus]
    reach = hosts == 1 and all(_reaches(each, uuids) for each in own)
    linked = reach and nvlink_everywhere(uuids)
    if group is not None:
        verdicts = share_text(group, f"{int(reach)}{int(linked)}", device)
        reach, linked = (all(text[place] == "1" for text in verdicts) for place in range(2))
    link = link_class(device="cuda", hosts=hosts, peer_access=reach, nvlink=linked)
    return Fingerprint(min(gpu.sm for gpu in gpus), link, world)


def _gpu(device: torch.device) -> _Gpu:
    properties = torch.cuda.get_device_properties(device)
    return _Gpu(_host(), str(properties.uuid), int(f"{properties.major}{properties.minor}"))


def _parse(text: str) -> _Gpu:
    host, uuid, sm = text.rsplit(" ", 2)
    return _Gpu(host, uuid, int(sm))


def _host() -> str:
    """Differs between hosts, also between those of one name where the system tells one boot from another."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{boot} {socket.gethostname()}"


def _reaches(device: torch.device, uuids: Sequence[str]) -> bool:
    """Whether this GPU maps the memory of all these. A GPU that this process cannot see is judged by NVLink alone."""
    indices = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    own = device.index if device.index is not None else torch.cuda.current_device()
    peers = [indices[uuid] for uuid in uuids if uuid in indices and indices[uuid] != own]
    if len(peers) < len(uuids) - 1 and not nvlink_everywhere(uuids):
        return False
    return all(torch.cuda.can_device_access_peer(own, peer) for peer in peers)
