# SPDX-License-Identifier: Apache-2.0
"""`RankExecutor`: one process per rank, on this host and on others. Every failure ends it in bounded time.

Every rank gets every step and reports every step. After a failure the ranks are killed first, and the error is raised then: a rank
that waits in a collective for a dead peer hears nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import shutil
import socket as sockets
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from phalanx.config.cluster_token import SECRET_OPTIONS, read_cluster_token
from phalanx.config.host_facts import host_facts
from phalanx.config.locate import locate
from phalanx.config.model import ModelShape
from phalanx.config.options import EngineOptions
from phalanx.engine.limits import depth_of
from phalanx.engine.messages import RankFacts, RankStats, Step, StepResult, WorkResult
from phalanx.engine.watch_clock import WatchClock
from phalanx.errors import EngineClosed, OptionError, PhalanxError, RankStalled, StepDiverged
from phalanx.executor import failure, protocol, stuck
from phalanx.executor.adapter_reads import AdapterReads
from phalanx.executor.cluster_keys import ClusterKeys
from phalanx.executor.failure import Evidence, FailureReport
from phalanx.executor.heartbeat import NODE_TIMEOUT, HeartbeatMonitor
from phalanx.executor.inflight import InFlightSteps, OldestStep
from phalanx.executor.late_names import wait_for_name
from phalanx.executor.launcher import ClusterLauncher, HostRanks, RankHandle, host_ranks, load_launcher
from phalanx.executor.peer_authentication import PeerAuthenticator
from phalanx.executor.rank_store import RankStore
from phalanx.executor.startup import StartupCoordinator
from phalanx.executor.stuck import RankState
from phalanx.hardware.probe import address_towards
from phalanx.layout.adapter import AdapterFile
from phalanx.layout.layout import Layout
from phalanx.layout.rank_progress import unpack
from phalanx.log import get_logger

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
ROOT_CAUSE_SECONDS = 1.0
"""How long a report that is not the root cause waits for one that is."""
LIMITS_SECONDS = 0.05
"""How often the limits of time are looked at, which are of seconds: there may be a thousand steps in one."""
STILL_SECONDS = 2.0
"""For how long ranks must tell that they are at the same place before a step that is late counts as stuck: on a machine that is
busy beyond all measure they still move."""
PROOF_SECONDS = 5.0
"""After which a step without a limit of its own is examined: ranks that called different collectives never end it."""
SHUTDOWN_GRACE_SECONDS = 3.0
"""How long ranks may take to end when they are asked to, before they are killed."""


class RankExecutor:
    """The `Executor` of rank processes; see `engine.executor.Executor` for the contract of each method."""

    def __init__(self, options: EngineOptions, *, returns_tokens: bool = False) -> None:
        """returns_tokens: the last stage of a pipeline returns tokens to the first. For GPUs of one host: over gloo the first stage
        would wait for each step that samples."""
        self._layout = Layout.of(options)
        self.returns_tokens = returns_tokens and self._layout.pp > 1
        self._launcher = load_launcher(options)
        self._joins = range(1, options.nnodes)  # the hosts that join this engine, each with a `Node`
        self._host = host_ranks(options, 0)  # what the launcher starts
        if isinstance(self._launcher, ClusterLauncher):
            self._joins, self._host = range(options.nnodes), HostRanks(0, range(self._layout.world))
            options = options.model_copy(update={"master_addr": self._launcher.engine_address()})
        self._options = options
        self._launcher.require_devices(self._host)
        launches_all = not self._launcher.on_this_host and len(self._joins) in (0, options.nnodes)
        self._cluster_token = read_cluster_token(options, required=not launches_all)
        if launches_all and self._cluster_token is None and not options.insecure_cluster:
            self._cluster_token = secrets.token_hex(32)  # every rank and node gets it from the launcher
        self._facts: dict[str, str] = {}
        self.depth = depth_of(self._layout.pp, returns_tokens=self.returns_tokens)
        self._socket: zmq.Socket[bytes] | None = None  # while ranks run, or start
        self._peers: PeerAuthenticator | None = None  # of connections over TCP
        self._handles: Mapping[int, RankHandle] = {}
        self._nodes: set[int] = set()
        self._store = RankStore()
        self._chain = protocol.Chain()
        self._watch = WatchClock()
        self._in_flight = InFlightSteps(self._layout)
        self._adapter_reads = AdapterReads(self._layout.world)
        self._heartbeats = HeartbeatMonitor(options.stall_timeout)
        self._startup = StartupCoordinator(
            self._layout.world, self._joins, time.monotonic(), options.kv_host_memory,
            block_size=options.block_size, cache_on_host=options.device == "cpu",
        )  # fmt: skip
        self._reports: list[FailureReport] = []
        self._bytes: dict[int, dict[str, int]] = {}
        self._allreduce: dict[str, int] = {}
        self._ran: dict[str, int] = {}
        self._gauges: dict[int, dict[str, float]] = {}
        self._experts: dict[int, bytes] = {}
        self._works: dict[int, dict[int, WorkResult]] = {}  # of steps in flight, by rank
        self._failed: PhalanxError | None = None
        self._last_node_heartbeat = self._examine_at = self._limits_due = 0.0

    @classmethod
    def from_options(cls, options: EngineOptions, shape: ModelShape, settings: dict[str, Any]) -> RankExecutor:  # noqa: ARG003
        return cls(options, returns_tokens=options.device == "cuda" and options.nnodes == 1)

    # ---- starting ----------------------------------------------------------------------------------------------------

    def start(self) -> tuple[list[RankFacts], int]:
        try:
            self._launch()
            deadline = time.monotonic() + self._options.start_timeout
            while not self._startup.complete:
                self._wait(min(0.5, self._startup.log_progress(time.monotonic())))
                self._check()
                for ranks, message in self._startup.next_messages():
                    self._send_to_ranks(ranks, message)
                if not self._startup.complete and time.monotonic() > deadline:
                    raise self._fail(self._startup.timeout_error(self._options.start_timeout, self._heartbeats.where))
        except BaseException as error:
            self._end(error if isinstance(error, PhalanxError) else EngineClosed("start-up was interrupted"))
            raise
        self._heartbeats.all_started(self._watch.look())
        facts = self._startup.rank_facts()
        self._bytes |= {each.rank: dict(each.bytes) for each in facts}
        return facts, self._startup.num_blocks

    def _launch(self) -> None:
        """Listen, and start this host's ranks. Ranks of this host connect through a private folder that is gone once all have
        connected, so engines never collide and nothing stays behind; ranks of other hosts use one TCP port of host 0."""
        options = self._options
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            router.setsockopt(option, 0)
        router.setsockopt(zmq.IPV6, 1)
        router.setsockopt(zmq.MAXMSGSIZE, protocol.max_frame_to_engine(options.max_num_tokens or 1 << 17, options.max_batch_size))
        self._startup.folder = Path(tempfile.mkdtemp(prefix="phalanx-"))
        address = f"ipc://{self._startup.folder}/ranks"
        try:
            router.bind(address)
        except zmq.ZMQError:  # the path is too long for a socket
            shutil.rmtree(self._startup.folder, ignore_errors=True)
            self._startup.folder = Path(tempfile.mkdtemp(prefix="phalanx-", dir="/tmp"))
            address = f"ipc://{self._startup.folder}/ranks"
            router.bind(address)
        peer = LOOPBACK
        if options.nnodes > 1 or not self._launcher.on_this_host:
            self._authenticate(router)
            wait_for_name(options.master_addr, options.master_addr_timeout)
            bind_tcp(router, options.master_addr, options.master_port)
            peer = options.master_addr
            if self._joins:
                self._facts = host_facts(options, locate(options.model, options.revision))
                log.info("waiting for %d nodes at %s:%d", len(self._joins), options.master_addr, options.master_port)
            if not self._launcher.on_this_host:
                address = f"tcp://{bracketed(options.master_addr)}:{options.master_port}"
        self._handles = self._launcher.start(self._host, {
            "engine": address, "peer": peer,
            "cluster_token": self._cluster_token if address.startswith("tcp:") else None,
            "options": options.model_dump(mode="json", exclude=SECRET_OPTIONS), "returns_tokens": self.returns_tokens,
        })  # fmt: skip

    def _authenticate(self, router: zmq.Socket[bytes]) -> None:
        """From now on, every peer that connects over TCP proves that it has the cluster token."""
        ranks = range(self._layout.world)
        names = [protocol.node_identity(node) for node in self._joins]
        identities = protocol.rank_identity, protocol.heartbeat_identity, protocol.store_identity
        names += [identity(rank) for rank in ranks for identity in identities]
        keys = None if self._cluster_token is None else ClusterKeys(self._cluster_token)
        if keys is None:
            log.warning("insecure_cluster: whoever reaches the ports of this host can join the engine, read prompts and end it")
        self._peers = PeerAuthenticator(keys, names)
        self._peers.listen(self._context, router)

    # ---- running -----------------------------------------------------------------------------------------------------

    def submit(self, step: Step) -> None:
        self._require_open()
        frames = self._chain.seal(step)
        limit = self._options.step_timeout if math.isinf(step.limit) else step.limit
        self._in_flight.submitted(step.number, self._chain.digest, self._watch.look(), moves=bool(step.before), limit=limit)
        for rank in range(self._layout.world):
            self._send(protocol.rank_identity(rank), *frames)

    def collect(self) -> list[StepResult]:
        """Waits only after a failure: a moment, for a report of its root cause."""
        self._require_open()
        self._check()
        results = self._in_flight.completed()
        for result in results if self._works else ():
            result.works = self._works.pop(result.number, {})
        return results

    def read_adapter(self, key: int, file: AdapterFile) -> None:
        self._require_open()
        self._adapter_reads.begin(key)
        message = protocol.ReadAdapter(key, file.folder, file.digest, list(file.parts))
        self._send_to_ranks(range(self._layout.world), message)

    def drop_adapter(self, key: int) -> None:
        self._require_open()
        self._send_to_ranks(range(self._layout.world), protocol.DropAdapter(key))

    def adapters_read(self) -> list[tuple[int, PhalanxError | None]]:
        return self._adapter_reads.completed()

    def waitables(self) -> list[Any]:
        return [] if self._socket is None else [self._socket, self._launcher.fileno()]

    def stats(self) -> RankStats:
        return RankStats(self._bytes, self._allreduce, self._ran, self._gauges, self._experts)

    def shutdown(self) -> None:
        self._end(None)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Receive all that has come, and check every limit. After a failure, end everything and raise its root cause."""
        self._receive_all()
        if self._reports:
            raise self._await_root_cause()
        now = self._watch.look()
        if now < self._limits_due:
            return
        self._limits_due = now + LIMITS_SECONDS
        if self._nodes and now - self._last_node_heartbeat >= protocol.HEARTBEAT_SECONDS:
            self._last_node_heartbeat = now
            self._send_to_nodes(protocol.EngineHeartbeat())
        silent = self._first_silent(now)
        if silent is not None:
            raise self._fail(silent)
        oldest = self._in_flight.oldest(now)
        if oldest is not None and (stalled := self._stuck(oldest, now)) is not None:
            raise self._fail(stalled)

    def _receive_all(self) -> None:
        assert self._socket is not None
        while True:
            try:
                # Frames tell from which connection they came; bytes are cheaper.
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._peers is None)
            except zmq.Again:
                break
            message = self._message(frames)
            if message is None:
                continue
            try:
                self._receive(message)
            except PhalanxError as error:
                self._reports.append(FailureReport(Evidence.CAUSE, error))
        try:
            for ended in self._launcher.ended():
                self._exited(ended.rank, ended.code, ended.where)
        except PhalanxError as error:
            self._reports.append(FailureReport(Evidence.CAUSE, error))

    def _message(self, frames: Sequence[Any]) -> protocol.RankToEngine | None:
        """The message in these frames; None where it is none, or another process than its sender sent it."""
        identity: bytes | None
        if self._peers is None:
            identity, payload = frames[0], frames[-1]
        else:
            identity, payload = self._peers.sender(frames), frames[-1].buffer
            if identity is None:
                return None
        try:
            message = protocol.decode_rank_message(payload)
        except msgspec.DecodeError:
            self._drop(identity, "no rank sends such a message")
            return None
        if protocol.sender_identity(message) != identity or not self._own_place(message):
            self._drop(identity, f"it sent {type(message).__name__} of another process")
            return None
        return message

    def _own_place(self, message: protocol.RankToEngine) -> bool:
        """Whether the further numbers in a message fit its sender, which is known."""
        match message:
            case protocol.RankExit():
                return self._is_on(message.node, message.rank)
            case protocol.Hello():
                return self._may_be_on(message.node, message.rank)
            case protocol.RankReady():
                return message.facts.rank == message.rank and self._may_be_on(message.facts.node, message.rank)
            case _:
                return True

    def _may_be_on(self, node: int, rank: int) -> bool:
        """A launcher that does not start ranks on this host chooses their hosts itself."""
        chosen = rank in self._handles and not self._launcher.on_this_host
        return chosen or self._is_on(node, rank)

    def _is_on(self, node: int, rank: int) -> bool:
        return 0 <= node < self._options.nnodes and rank in host_ranks(self._options, node).ranks

    def _drop(self, identity: bytes, why: str) -> None:
        if self._peers is not None:
            self._peers.dropped(identity.decode(errors="replace"), why)
        else:
            log.warning("a message of %.40r was dropped: %s", identity, why)

    def _receive(self, message: protocol.RankToEngine) -> None:
        now = self._watch.look()
        match message:
            case protocol.StepDone():
                self._in_flight.record(message, now)
                if self._in_flight.differing(message.number, message.rank) and (error := self._skipped(message.number, now)):
                    raise error
            case protocol.WorkDone():
                self._works.setdefault(message.number, {})[message.rank] = message.result
            case protocol.AdapterRead():
                self._adapter_reads.record(message)
            case protocol.RankHeartbeat():
                self._heartbeats.rank_heartbeat(message.rank, now, message.place)
                self._startup.heartbeat_received(message.rank)
                if message.bytes:
                    self._bytes[message.rank] = message.bytes
                if message.gauges:
                    self._gauges[message.rank] = message.gauges
                if message.experts:
                    self._experts[message.rank] = message.experts
                if message.rank == 0:
                    self._allreduce, self._ran = message.allreduce, message.ran
            case protocol.Hello():
                self._heartbeats.register(message.rank, f"pid {message.pid}, node {message.node}")
                self._startup.rank_connected(message)
            case protocol.StoreRequest():
                self._startup.store_request_received(message.rank)
                self._store_request(message)
            case protocol.RankError():
                self._heartbeats.rank_heartbeat(message.rank, now, message.place)
                self._reports.append(failure.from_rank_error(message))
            case protocol.NodeHello():
                log.info("node %d has joined from %s", message.node, message.address)
                self._nodes.add(message.node)
                self._heartbeats.node_heartbeat(message.node, now, address=message.address)
                failure.require_equal_hosts(self._facts, message)
                self._startup.node_joined(message.node)
            case protocol.NodeHeartbeat():
                self._heartbeats.node_heartbeat(message.node, now)
            case protocol.RankExit():
                self._exited(message.rank, message.code, self._heartbeats.where(message.rank))
            case _:
                self._startup.receive(message, now)

    def _store_request(self, message: protocol.StoreRequest) -> None:
        try:
            replies = self._store.receive(message)
        except ValueError as error:
            self._drop(protocol.store_identity(message.rank), f"no rank makes such a request: {error}")
            return
        for rank, reply in replies:
            self._send(protocol.store_identity(rank), protocol.encode(reply))

    def _exited(self, rank: int, code: int, where: str) -> None:
        self._reports.append(failure.from_exit(rank, code, where=where, doing=self._heartbeats.doing(rank)))

    def _wait(self, seconds: float) -> None:
        poller = zmq.Poller()
        for waitable in self.waitables():
            poller.register(waitable, zmq.POLLIN)
        poller.poll(math.ceil(seconds * 1000))

    # ---- ending ------------------------------------------------------------------------------------------------------

    def _await_root_cause(self) -> PhalanxError:
        """End with the root cause. While every report is only a consequence, wait a moment for a better one; with several nodes,
        until a lost node would be noticed."""
        patience = ROOT_CAUSE_SECONDS + (NODE_TIMEOUT if self._nodes else 0.0)
        deadline = time.monotonic() + patience
        while True:
            best = failure.root_cause(self._reports)
            assert best is not None
            left = deadline - time.monotonic()
            # A process of this host that ended without an error has none to send; the end of one on another host is reported by its
            # node.
            ended_silently = best.evidence == Evidence.ENDED and left < patience - ROOT_CAUSE_SECONDS
            if best.evidence >= Evidence.CAUSE or left <= 0 or ended_silently:
                now = self._watch.look()
                oldest = self._in_flight.oldest(now) if best.evidence == Evidence.CONSEQUENCE else None  # a peer is gone
                return self._fail((oldest and self._skipped(oldest.number, now)) or best.error)
            self._wait(min(left, 0.1))
            self._receive_all()
            silent = self._first_silent(self._watch.look())
            if silent is not None:
                return self._fail(silent)

    def _first_silent(self, now: float) -> PhalanxError | None:
        if self._peers is not None and self._peers.closed():
            self._heartbeats.connection_closed(now)
        return self._heartbeats.first_silent(now)

    def _stuck(self, oldest: OldestStep, now: float) -> RankStalled | None:
        """The error for a step that does not end; None while it may."""
        overtime = oldest.seconds > oldest.limit
        if not overtime and (oldest.seconds < PROOF_SECONDS or now < self._examine_at):
            return None
        self._examine_at = now + 1.0
        still = self._heartbeats.stand_still(now - oldest.seconds, now, seconds=STILL_SECONDS, silent=stuck.SILENT_SECONDS)
        if not still and oldest.seconds < self._options.step_timeout:
            return None
        states = self._states(oldest.number, now)
        # A rank of a GPU that has not queued all of its step may compile a kernel.
        queues = self._options.device != "cpu" and any(states[rank].is_queueing(oldest.number) for rank in oldest.ranks)
        if queues and oldest.seconds < self._options.step_timeout:
            return None
        culprit = stuck.find(oldest.number, states, self._layout)
        if not (overtime or culprit.proven):
            return None
        # Each rank writes the stacks of its threads to its log, which show where it waits.
        for rank in oldest.ranks:
            if rank in self._handles:
                self._handles[rank].dump_stacks()
        time.sleep(0.3)
        limit = "step_timeout" if oldest.limit == self._options.step_timeout else "by what such a step takes here"
        return RankStalled(
            culprit.failure, held=culprit.evidence,
            why=f"step {oldest.number} has taken {oldest.seconds:.0f} s, and may take {oldest.limit:.0f} s ({limit})",
            next="see the stacks of the ranks of node 0 in the log; check the GPUs, links and hosts of those named",
        )  # fmt: skip

    def _skipped(self, number: int, now: float) -> StepDiverged | None:
        """The error for ranks that call different collectives in a step; None where they do not."""
        culprit = stuck.skipped(number, self._states(number, now), self._layout)
        if culprit is None:
            return None
        why = "ranks run the same code on the same step: a bug, or memory that is at fault"
        return StepDiverged(culprit.failure, held=culprit.evidence, why=why, next="report this with the log")

    def _states(self, number: int, now: float) -> dict[int, RankState]:
        """What is known of every rank while step `number` does not end."""
        states = {}
        for rank in range(self._layout.world):
            heard, calls = self._heartbeats.last(rank), self._in_flight.calls(number, rank)
            place = heard.place
            finished = place.finished if calls is None else max(place.finished, number)
            if calls is None and place.begun == number:
                calls = place.calls
            recorded = calls is not None and (self._options.device == "cpu" or place.on_device)
            states[rank] = RankState(
                rank, heard.where, max(place.begun, finished), finished, place.layer, place.inside, place.queued,
                unpack(calls or b"") if recorded else None, 0.0 if heard.last is None else now - heard.last,
                unpack(self._in_flight.usual_calls.get(rank, b"")), place.on_device,
            )  # fmt: skip
        return states

    def _fail(self, error: PhalanxError) -> PhalanxError:
        self._end(error)
        return error

    def _require_open(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._socket is None:
            raise EngineClosed("the ranks are not running")

    def _end(self, error: PhalanxError | None) -> None:
        """End everything: at once after an error, else with a moment for ranks to end by themselves."""
        if self._socket is None:
            return
        message = protocol.Stop(None if error is None else error.to_wire())
        self._send_to_nodes(message)
        if error is None:
            self._send_to_ranks(range(self._layout.world), message)
        else:
            self._failed = error
        self._launcher.stop(SHUTDOWN_GRACE_SECONDS if error is None else 0.0)
        self._socket.close(linger=1000 if self._nodes else 0)
        self._socket = None
        self._context.term()
        self._startup.remove_folder()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _send(self, identity: bytes, *frames: bytes) -> None:
        assert self._socket is not None
        with contextlib.suppress(zmq.ZMQError):  # the connection is gone: the launcher and the heartbeats tell more
            self._socket.send_multipart([identity, *frames])

    def _send_to_ranks(self, ranks: Iterable[int], message: protocol.EngineToRank) -> None:
        for rank in ranks:
            self._send(protocol.rank_identity(rank), protocol.encode(message))

    def _send_to_nodes(self, message: protocol.EngineToRank) -> None:
        for node in self._nodes:
            self._send(protocol.node_identity(node), protocol.encode(message))


def bind_tcp(router: zmq.Socket[bytes], address: str, port: int) -> None:
    """Listen at `address` alone if it is this host's own, else (a name in front of this host) at this host's address on the
    interface from which `address` is reached. Only where there is none, listen at all addresses. The log says so.

    Raises OptionError when the name is unknown or the port is taken.
    """
    try:
        own_address = sockets.getaddrinfo(address, port, type=sockets.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise OptionError(
            f"master_addr={address!r} cannot be resolved", why=str(error), next="give host 0's name or address"
        ) from None
    try:
        try:
            router.bind(f"tcp://{bracketed(str(own_address))}:{port}")
        except zmq.ZMQError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            _bind_behind(router, address, port)
    except zmq.ZMQError as error:
        raise OptionError(
            f"master_port={port} on {address} cannot be used", why=str(error),
            next="give another master_port",
        ) from None  # fmt: skip


def _bind_behind(router: zmq.Socket[bytes], address: str, port: int) -> None:
    """`address` is not one of this host."""
    with contextlib.suppress(OSError, zmq.ZMQError):
        own_address = address_towards(address)
        router.bind(f"tcp://{bracketed(own_address)}:{port}")
        log.warning("master_addr=%s is not an address of this host: listening at %s:%d", address, own_address, port)
        return
    log.warning("master_addr=%s is not an address of this host: listening at ALL addresses of this host, port %d", address, port)
    router.bind(f"tcp://*:{port}")


def bracketed(host_address: str) -> str:
    """An IPv6 address as URLs want it."""
    return f"[{host_address}]" if ":" in host_address else host_address
