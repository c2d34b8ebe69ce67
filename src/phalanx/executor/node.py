# SPDX-License-Identifier: Apache-2.0
"""`Node`: another host's end. It starts its ranks, reports their death to the engine, and ends them when the engine is gone.

Either side notices a cut link by the other's silence: no reset comes through it. A killed engine is noticed at once, by the reset.
"""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.comm import launch
from phalanx.config.options import EngineOptions
from phalanx.errors import NodeLost, PhalanxError
from phalanx.executor import launcher, protocol
from phalanx.executor.heartbeat import NODE_TIMEOUT
from phalanx.executor.rank_executor import GOODBYE_SECONDS, bracketed
from phalanx.hardware.probe import address_towards
from phalanx.log import get_logger
from phalanx.worker.channel import PULSE_SECONDS, dealer

log = get_logger(__name__)

_BLIND = 5.0  # as in vigil: who did not look for so long stood still itself


class Node:
    """Hosts the ranks of `options.node_rank`. `local_rank`: which share of the host's GPUs is this process's."""

    def __init__(self, options: EngineOptions, local_rank: int = 0) -> None:
        self._options = options
        self._host = launcher.host_of(options, options.node_rank, local_rank=local_rank)
        launcher.require_devices(self._host, options.device)
        self._engine = f"tcp://{bracketed(options.master_addr)}:{options.master_port}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context, self._engine, protocol.node_name(self._host.node))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watch = launch.Watch()
        self._children: dict[int, launch.Child] = {}
        self._heard: float | None = None
        self._looked = self._began = self._told = time.monotonic()

    def run(self) -> int:
        """Until the engine ends: 0 when it was asked to, 1 when something went wrong (said in the log)."""
        grace = 0.0
        try:
            self._children = launcher.start(
                self._host, self._options, engine=self._engine, peer=self._options.master_addr,
                store_port=self._options.master_port + 1,
            )  # fmt: skip
            for child in self._children.values():
                self._watch.add(child)
            self._send(protocol.NodeHello(self._host.node, address_towards(self._options.master_addr)))
            log.info("node %d: ranks %s for the engine at %s", self._host.node, list(self._host.ranks), self._engine)
            self._stand_by()
            grace = GOODBYE_SECONDS
        except PhalanxError as error:
            log.error("node %d ends: %s", self._host.node, error)
            return 1
        finally:
            if grace:
                launch.wait(self._children.values(), grace)
            launch.stop(self._children.values(), grace=0)
            self._watch.close()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=200)
            self._context.term()
        return 0

    def _stand_by(self) -> None:
        """Return when the engine ends as asked; raise what it ends with, or NodeLost when it is gone."""
        poller = zmq.Poller()
        for waitable in (self._socket, self._monitor, self._watch.fileno()):
            poller.register(waitable, zmq.POLLIN)
        while True:
            poller.poll(500)
            while self._socket.poll(0):
                message = protocol.decode_from_engine(self._socket.recv())
                self._heard = time.monotonic()
                if isinstance(message, protocol.Stop):
                    if message.error is not None:
                        raise PhalanxError.from_wire(message.error)
                    return
            self._tell()
            self._judge()

    def _tell(self) -> None:
        """Who of mine has ended, and that I live."""
        for ended in self._watch.ended():
            rank = next(rank for rank, child in self._children.items() if child is ended.child)
            log.warning("rank %d %s", rank, ended.words)
            self._send(protocol.RankExit(self._host.node, rank, ended.code))
        if time.monotonic() - self._told >= PULSE_SECONDS:
            self._told = time.monotonic()
            self._send(protocol.NodeHeartbeat(self._host.node))

    def _judge(self) -> None:
        """Raise NodeLost when the engine does not answer."""
        now = time.monotonic()
        blind, self._looked = now - self._looked > _BLIND, now
        where = f"the engine at {self._engine} (node 0)"
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            if self._heard is not None:
                raise NodeLost(f"{where} is gone", why="its process ended or its host reset the connection")
        if self._heard is None:
            limit = self._options.start_timeout
            if now - self._began > limit:
                raise NodeLost(
                    f"{where} has not answered for {limit:g} s", why="it was not started, or cannot be reached",
                    next="start node 0 with the same options; check master_addr, master_port and the firewall",
                )  # fmt: skip
            return
        if blind:
            self._heard = now
        if now - self._heard > NODE_TIMEOUT:
            raise NodeLost(
                f"{where} has been silent for {now - self._heard:.0f} s", held=f"the limit is {NODE_TIMEOUT:g} s",
                why="its process stands still or the link to it is cut",
            )  # fmt: skip

    def _send(self, message: protocol.RankToEngine) -> None:
        self._socket.send(protocol.encode(message))
