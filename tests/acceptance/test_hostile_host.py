# SPDX-License-Identifier: Apache-2.0
"""Two hosts of an engine and a third, hostile one, in namespaces. It attacks every port of both from before their start: junk,
older and weaker versions of the protocol, hundreds of connections that stand, frames forged under every name, and what the hosts
themselves sent while they started, played back. Nothing ends, nobody joins, no prompt is read, and memory stays flat.
PHALANX_HOSTILE_SECONDS: how long it attacks the engine once that serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.hostile_host import DOWNGRADES
from tests.support.namespaces import Namespaces, namespaces_on_a_switch
from tests.support.two_hosts import Hosts, one_host, text_of

pytestmark = [
    pytest.mark.usefixtures("forked_python"), pytest.mark.root,
    pytest.mark.skipif(shutil.which("ip") is None, reason="not run: needs iproute2"),
]  # fmt: skip

SECONDS = float(os.environ.pop("PHALANX_HOSTILE_SECONDS", "6"))  # a command would refuse an option that it does not know
PROMPT, TOKENS = "A secret of the hosts: the gate opens at dawn", 24
MAX_GROWTH = 48 << 20
"""Bytes by which a process may grow while it is attacked: what allocators keep."""
_LISTENING = "0A"  # in /proc/net/tcp
_LOOPBACKS = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def listening(spaces: Namespaces, host: int) -> list[tuple[str, int]]:
    """Where processes of this host listen for other hosts."""
    tables = "/proc/net/tcp", "/proc/net/tcp6"  # the engine's socket is one of IPv6, for addresses of either kind
    lines = subprocess.run(spaces.command(host, "cat", *tables), capture_output=True, text=True, check=False).stdout.splitlines()
    rows = [line.split() for line in lines if "local_address" not in line]
    places = [row[1].split(":") for row in rows if row[3] == _LISTENING and not row[1].endswith(":0000")]
    return [(spaces.addresses[host], int(port, 16)) for address, port in places if address not in _LOOPBACKS]


@contextlib.contextmanager
def attack(hosts: Hosts, folder: Path) -> Iterator[set[tuple[str, int]]]:
    """A host that knows at once which ports are open; and the recording that it plays back. Yields all ports that were open."""
    spaces, stopped, opened = hosts.spaces, threading.Event(), set[tuple[str, int]]()
    module = [sys.executable, "-m", "tests.support.hostile_host"]

    def look() -> None:
        while not stopped.wait(0.1):
            places = [place for host in (0, 1) for place in listening(spaces, host)]
            opened.update(places)
            (folder / "ports.part").write_text(json.dumps(places))
            (folder / "ports.part").rename(folder / "ports")

    thread = threading.Thread(target=look)
    thread.start()
    programs = [
        subprocess.Popen(spaces.command(0, *module, "tap", str(folder), "ph0")),
        subprocess.Popen(spaces.command(2, *module, "attack", str(folder), spaces.addresses[0])),
    ]
    try:
        yield opened
    finally:
        (folder / "stop").touch()
        stopped.set()
        thread.join()
        for program in programs:
            program.wait(30)


def memory(hosts: Hosts) -> dict[int, int]:
    """Bytes of each of our processes on both hosts, by its id; a client's is none of them."""
    sizes = {}
    for process in (process for host in (0, 1) for process in hosts.spaces.processes(host)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a client that is ending
            command = " ".join(process.cmdline())
            if command.startswith("phalanx ") or " -m phalanx serve " in command:  # a title, or a follower, which has none
                sizes[process.pid] = process.memory_info().rss
    return sizes


def generate(hosts: Hosts) -> str:
    events, _ = hosts.stream(TOKENS, PROMPT).communicate(timeout=60)
    assert events.strip().endswith("data: [DONE]"), events + hosts.log()
    return text_of(events).strip()


def test_a_hostile_host_ends_nothing_joins_nothing_and_reads_nothing(tmp_path):
    expected = one_host(PROMPT, TOKENS)
    logs, folder = tmp_path / "logs", tmp_path / "attack"
    logs.mkdir()
    folder.mkdir()
    with namespaces_on_a_switch("10.213.11", 3) as spaces, tempfile.TemporaryDirectory(prefix="hosts") as temporary:
        hosts = Hosts(spaces, logs, Path(temporary))
        with attack(hosts, folder) as opened, hosts.serving(tp=1) as servers:
            assert generate(hosts) in expected
            before, deadline = memory(hosts), time.monotonic() + SECONDS
            assert len(before) >= 5, "a server, an engine, a node and two ranks"
            while time.monotonic() < deadline:
                assert generate(hosts) in expected
                assert all(server.poll() is None for server in servers), hosts.log()
            after = memory(hosts)
            assert after.keys() == before.keys(), "no process ended, and none began"
            growth = {psutil.Process(pid).name(): after[pid] - before[pid] for pid in after}
            print(f"GROWTH {growth}")
            assert max(growth.values()) < MAX_GROWTH, growth
    fixed = {(address, port) for address, port in opened if port < 32768}
    documented = {(spaces.addresses[0], 29400), (spaces.addresses[0], 8000), (spaces.addresses[1], 8000)}
    assert fixed == documented, "and ports of gloo"
    log = hosts.log()
    assert log.count("has joined from") == 1
    assert f"node 1 has joined from {spaces.addresses[1]}" in log
    assert f"a peer at {spaces.addresses[2]} was refused" in log
    outcome = json.loads((folder / "attacks").read_text())
    counts, refused = outcome["counts"], outcome["refused"]
    print(f"ATTACKS {counts} REFUSED {refused} HELD {outcome['held']}")
    assert all(counts.get(kind, 0) >= 3 for kind in ("recorded", "number of a pair", "forger, connected")), counts
    assert "forger, let in" not in counts, counts
    assert all(refused.get(kind, 0) >= 3 for kind in DOWNGRADES), refused
    assert outcome["held"] > 200
    for data in map(bytes.fromhex, outcome["got"]):
        assert not data.startswith(b"MESSAGE "), data
        assert b"secret" not in data
        assert b"agreement" not in data
