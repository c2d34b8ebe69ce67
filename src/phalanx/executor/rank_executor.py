# SPDX-License-Identifier: Apache-2.0
"""`RankExecutor`: one process per rank, on this host and on others; bounded in time whatever happens to them.

Every rank gets every step and reports every step. Whatever goes wrong, the ranks are killed first and the error is raised
then: a rank that waits in a collective for a dead peer hears nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import signal
import socket as sockets
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from phalanx.comm import launch
from phalanx.config.options import EngineOptions
from phalanx.engine.messages import RankFacts, RankStats, Step, StepResult
from phalanx.errors import EngineClosed, OptionError, PhalanxError, RankStalled
from phalanx.executor import failure, launcher, protocol
from phalanx.executor.failure import Evidence, FailureReport
from phalanx.executor.heartbeat import NODE_TIMEOUT, HeartbeatMonitor
from phalanx.executor.inflight import InFlightSteps
from phalanx.executor.startup import StartupCoordinator
from phalanx.log import get_logger
from phalanx.plan.layout import Layout

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
BETTER_NEWS_SECONDS = 1.0
"""How long a report that is no cause waits for one that is."""
GOODBYE_SECONDS = 3.0
"""How long ranks may take to end when they are asked to, before they are killed."""


class RankExecutor:
    """The `Executor` of rank processes; see `engine.executor.Executor` for what each method promises."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._layout = Layout(options.pipeline_parallel_size, options.expert_parallel_size, options.tensor_parallel_size)
        self._host = launcher.host_of(options, 0)
        launcher.require_devices(self._host, options.device)
        self.depth = max(self._layout.pp, 2)
        self._socket: zmq.Socket[bytes] | None = None  # while ranks run, or start
        self._watch: launch.Watch | None = None
        self._lines: zmq.Socket[bytes] | None = None  # tells of closed lines to other nodes
        self._children: dict[int, launch.Child] = {}
        self._nodes: set[int] = set()
        self._chain = protocol.Chain()
        self._ledger = InFlightSteps(self._layout)
        self._vigil = HeartbeatMonitor(options.stall_timeout)
        self._muster = StartupCoordinator(self._layout.world, options.nnodes, time.monotonic())
        self._reports: list[FailureReport] = []
        self._bytes: dict[int, dict[str, int]] = {}
        self._allreduce: dict[str, int] = {}
        self._ran: dict[str, int] = {}
        self._failed: PhalanxError | None = None
        self._nodes_told = 0.0

    # ---- starting ----------------------------------------------------------------------------------------------------

    def start(self) -> tuple[list[RankFacts], int]:
        try:
            self._launch()
            deadline = time.monotonic() + self._options.start_timeout
            while not self._muster.complete:
                self._wait(min(0.5, self._muster.tell(time.monotonic())))
                self._look()
                for ranks, message in self._muster.orders():
                    self._tell(ranks, message)
                if not self._muster.complete and time.monotonic() > deadline:
                    raise self._fail(self._muster.late(self._options.start_timeout, self._vigil.where))
        except BaseException as error:
            self._end(error if isinstance(error, PhalanxError) else EngineClosed("start-up was interrupted"))
            raise
        facts = self._muster.facts()
        self._bytes |= {each.rank: dict(each.bytes) for each in facts}
        return facts, self._muster.num_blocks

    def _launch(self) -> None:
        """Listen, and start this host's ranks. One host talks over a private folder that is gone once all have connected, so
        that engines never collide and nothing stays behind; several talk over two ports of host 0."""
        options = self._options
        self._watch = launch.Watch()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            router.setsockopt(option, 0)
        router.setsockopt(zmq.IPV6, 1)
        self._muster.folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
        address = f"ipc://{self._muster.folder}/ranks"
        try:
            router.bind(address)
        except zmq.ZMQError:  # the path is too long for a socket
            shutil.rmtree(self._muster.folder, ignore_errors=True)
            self._muster.folder = Path(tempfile.mkdtemp(prefix="phalanx-", dir="/tmp"))
            address = f"ipc://{self._muster.folder}/ranks"
            router.bind(address)
        peer, store_port = LOOPBACK, 0
        if options.nnodes > 1:
            self._lines = router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            bind_tcp(router, options.master_addr, options.master_port)
            peer, store_port = options.master_addr, options.master_port + 1
            log.info("waiting for %d nodes at %s:%d", options.nnodes - 1, options.master_addr, options.master_port)
        self._children = launcher.start(self._host, options, engine=address, peer=peer, store_port=store_port)
        for child in self._children.values():
            self._watch.add(child)

    # ---- running -----------------------------------------------------------------------------------------------------

    def submit(self, step: Step) -> None:
        self._require_open()
        frames = self._chain.seal(step)
        self._ledger.sent(step.number, self._chain.digest, time.monotonic())
        for rank in range(self._layout.world):
            self._send(protocol.rank_name(rank), *frames)

    def collect(self) -> list[StepResult]:
        """Waits only once a rank is in trouble: a moment, for news of the cause."""
        self._require_open()
        self._look()
        return self._ledger.settled()

    def waitables(self) -> list[Any]:
        return [] if self._socket is None or self._watch is None else [self._socket, self._watch.fileno()]

    def stats(self) -> RankStats:
        return RankStats(self._bytes, self._allreduce, self._ran)

    def shutdown(self) -> None:
        self._end(None)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take in all that has come, and judge. Raises what went wrong, once everything is down."""
        self._take_in()
        if self._reports:
            raise self._settle_reports()
        now = time.monotonic()
        if self._nodes and now - self._nodes_told >= 1.0:
            self._nodes_told = now
            self._tell_nodes(protocol.EngineHeartbeat())
        while self._lines is not None and self._lines.poll(0):
            if recv_monitor_message(self._lines)["endpoint"].startswith(b"tcp:"):
                self._vigil.suspect(now)
        silent = self._vigil.silent(now)
        if silent is not None:
            raise self._fail(silent)
        overdue = self._ledger.overdue(now, self._options.step_timeout)
        if overdue is not None:
            raise self._fail(self._overdue(*overdue))

    def _take_in(self) -> None:
        assert self._socket is not None
        assert self._watch is not None
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = protocol.decode_to_engine(frames[-1])
            except msgspec.DecodeError:
                log.warning("a message that no rank sends was dropped")
                continue
            try:
                self._take(message)
            except PhalanxError as error:
                self._reports.append(FailureReport(Evidence.CAUSE, error))
        for ended in self._watch.ended():
            rank = next(rank for rank, child in self._children.items() if child is ended.child)
            self._exited(rank, ended.code, f"pid {ended.child.pid}, node 0")

    def _take(self, message: protocol.RankToEngine) -> None:
        now = time.monotonic()
        match message:
            case protocol.StepDone():
                self._ledger.done(message, now)
            case protocol.RankHeartbeat():
                self._vigil.heard(message.rank, now, begun=message.begun, finished=message.finished)
                self._muster.pulsed(message.rank)
                if message.bytes:
                    self._bytes[message.rank] = message.bytes
                if message.rank == 0:
                    self._allreduce, self._ran = message.allreduce, message.ran
            case protocol.Hello():
                self._vigil.know(message.rank, f"pid {message.pid}, node {message.node}")
                self._muster.hello(message)
            case protocol.RankError():
                self._reports.append(failure.from_rank(message))
            case protocol.NodeHello():
                log.info("node %d has joined from %s", message.node, message.address)
                self._nodes.add(message.node)
                self._vigil.heard_node(message.node, now, address=message.address)
                self._muster.joined(message.node)
            case protocol.NodeHeartbeat():
                self._vigil.heard_node(message.node, now)
            case protocol.RankExit():
                self._exited(message.rank, message.code, self._vigil.where(message.rank))
            case _:
                self._muster.take(message, now)

    def _exited(self, rank: int, code: int, where: str) -> None:
        self._reports.append(failure.from_exit(rank, code, where=where, doing=self._vigil.doing(rank)))

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        for waitable in self.waitables():
            poller.register(waitable, zmq.POLLIN)
        poller.poll(math.ceil(seconds * 1000))

    # ---- ending ------------------------------------------------------------------------------------------------------

    def _settle_reports(self) -> PhalanxError:
        """Wait a moment for the cause, if all that is known is a consequence: across nodes, until a lost one would be noticed."""
        patience = BETTER_NEWS_SECONDS + (NODE_TIMEOUT if self._nodes else 0.0)
        deadline = time.monotonic() + patience
        while True:
            best = failure.cause(self._reports)
            assert best is not None
            left = deadline - time.monotonic()
            # A process that ended without a word on this host has none to come; one on another host is reported by its node.
            if (
                best.weight >= Evidence.CAUSE
                or left <= 0
                or (best.weight == Evidence.ENDED and left < patience - BETTER_NEWS_SECONDS)
            ):
                return self._fail(best.error)
            self._wait(min(left, 0.1))
            self._take_in()
            lost = self._vigil.silent(time.monotonic())
            if lost is not None:
                return self._fail(lost)

    def _overdue(self, number: int, ranks: list[int]) -> RankStalled:
        # Each rank writes the stacks of its threads to its log: where does it wait?
        for rank in ranks:
            if rank in self._children:
                self._children[rank].signal(signal.SIGUSR1)
        time.sleep(0.3)
        named = ", ".join(f"rank {rank} ({self._vigil.where(rank)}; {self._vigil.doing(rank)})" for rank in ranks)
        return RankStalled(
            f"step {number} was sent {self._options.step_timeout:g} s ago", held=f"not run by {named}",
            why="they live but stand still; the stacks of those on node 0 are in the log",
            next="raise step_timeout if steps take so long",
        )  # fmt: skip

    def _fail(self, error: PhalanxError) -> PhalanxError:
        self._end(error)
        return error

    def _require_open(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._socket is None:
            raise EngineClosed("a step was submitted", held="the ranks are not running")

    def _end(self, error: PhalanxError | None) -> None:
        """Bring everything down: at once after an error, else with a moment for ranks to end by themselves."""
        if self._socket is None or self._watch is None:
            return
        order = protocol.Stop(None if error is None else error.to_wire())
        self._tell_nodes(order)
        if error is None:
            self._tell(range(self._layout.world), order)
            launch.wait(self._children.values(), GOODBYE_SECONDS)
        else:
            self._failed = error
        launch.stop(self._children.values(), grace=0)
        self._watch.close()
        if self._lines is not None:
            self._socket.disable_monitor()
            self._lines.close(linger=0)
        self._socket.close(linger=1000 if self._nodes else 0)
        self._socket = None
        self._context.term()
        self._muster.remove_folder()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send(self, name: bytes, *frames: bytes) -> None:
        assert self._socket is not None
        with contextlib.suppress(zmq.ZMQError):  # its line is gone: the watch and the vigil know more
            self._socket.send_multipart([name, *frames])

    def _tell(self, ranks: Any, message: protocol.EngineToRank) -> None:
        for rank in ranks:
            self._send(protocol.rank_name(rank), protocol.encode(message))

    def _tell_nodes(self, message: protocol.EngineToRank) -> None:
        for node in self._nodes:
            self._send(protocol.node_name(node), protocol.encode(message))


def bind_tcp(router: zmq.Socket[bytes], address: str, port: int) -> None:
    """Listen at `address` alone if it is this host's own, else (a name in front of this host) at all of its addresses.

    Raises OptionError when the name is unknown or the port is taken.
    """
    try:
        found = sockets.getaddrinfo(address, port, type=sockets.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise OptionError(f"master_addr={address!r} was asked for", why=str(error), next="give host 0's name or address") from None
    try:
        try:
            router.bind(f"tcp://{bracketed(str(found))}:{port}")
        except zmq.ZMQError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            router.bind(f"tcp://*:{port}")
    except zmq.ZMQError as error:
        raise OptionError(
            f"master_port={port} on {address} was asked for",
            why=str(error),
            next="give another master_port; it and the next must be free",
        ) from None


def bracketed(host_address: str) -> str:
    """An IPv6 address as URLs want it."""
    return f"[{host_address}]" if ":" in host_address else host_address
