# SPDX-License-Identifier: Apache-2.0
"""A group whose all-reduce is the one that the machine's table names; all else is the group's below."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast, overload

import torch
from torch import Tensor

from phalanx.comm import nccl
from phalanx.comm.agreement import difference
from phalanx.comm.choose import Chooser, Rules, owned_from
from phalanx.comm.group import Group, ResidualRmsNorm, Spread, finish
from phalanx.comm.rows import OwnedRows, same_owners, whole
from phalanx.comm.rows.owners import OnGpus, Owners
from phalanx.comm.shared_memory import share_text
from phalanx.comm.torch_group import TorchGroup
from phalanx.hardware.fingerprint import Fingerprint, link_class
from phalanx.hardware.links import nvlink_everywhere
from phalanx.kernels.reference import Unscaled
from phalanx.log import get_logger
from phalanx.tables.message import Fusion
from phalanx.tables.shipped import advice, table_for
from phalanx.tables.strategy import Strategy
from phalanx.tables.table import Table

T = TypeVar("T")
_log = get_logger(__name__)
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NONE, _RMS = Fusion.NONE, Fusion.RESIDUAL_RMS_NORM


@dataclass(frozen=True)
class Runner:
    """One strategy's functions: the sum, the sum with its fusion in one kernel, and those for rows that have owners."""

    total: Callable[[Tensor | Unscaled], Tensor]
    norm: Callable[[Tensor | Unscaled, ResidualRmsNorm], tuple[Tensor, ...]]
    owners: Owners | None = None


class TunedGroup:
    """A `Group` whose `all_reduce` picks a strategy by size. `calls` counts them: "ONESHOT/RESIDUAL_RMS_NORM" -> how many (a call
    that is captured in a CUDA graph counts once, when it is captured; whoever replays the graph adds what it holds).

    `digest`: of the table that decides, or "seed". On GPUs, ranks issue the calls of one group in the same order, each after the
    one before it: on one stream, or on streams that events join.
    """

    def __init__(self, base: Group, chooser: Chooser, runners: Mapping[Strategy, Runner], digest: str) -> None:
        self.base, self.chooser, self.digest = base, chooser, digest
        self.rank, self.size = base.rank, base.size
        self.calls: dict[str, int] = {}
        self._runners = runners

    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: None = None) -> Tensor: ...
    @overload
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]: ...
    def all_reduce(self, x: Tensor | Unscaled, fusion: ResidualRmsNorm | None = None) -> Tensor | tuple[Tensor, ...]:
        values = Unscaled.parts(x)[0]
        dtype = _DTYPES.get(values.dtype)
        if dtype is None or values.numel() == 0 or values.dim() == 0:
            return self.base.all_reduce(x) if fusion is None else self.base.all_reduce(x, self._whole(fusion))
        hidden = values.shape[-1]
        kind = _NONE if fusion is None else _kind(fusion)
        alike = fusion is not None and values.dim() == 2 and fusion.weight.dtype == values.dtype == fusion.residual.dtype
        decision = self.chooser(values.numel() // hidden, hidden, dtype, kind, alike and fusion is not None and fusion.may_own)
        self._count(decision.name)
        runner = self._runners[decision.strategy]
        x = Unscaled(*map(_in_vectors, x)) if isinstance(x, Unscaled) else _in_vectors(x)
        if fusion is None:
            return runner.total(x)
        if decision.owned and runner.owners is not None:
            return runner.owners.all_reduce_norm(x, self._owned_by(fusion, runner.owners.at_once(values)))
        fusion = self._whole(fusion)
        if decision.fused and alike:
            return runner.norm(x, replace(fusion, residual=_in_vectors(fusion.residual)))
        return finish(runner.total(x), fusion)

    def spread(self, tokens: int, hidden: int, fusion: ResidualRmsNorm) -> Spread | None:
        residual = fusion.residual
        dtype = _DTYPES.get(residual.dtype)
        if dtype is None or not fusion.may_own or fusion.weight.dtype != residual.dtype:
            return None
        if isinstance(residual, OwnedRows) and not same_owners(tokens, residual.at_once, tokens):
            return None  # its owners would change, and where layers differ, change back in the next
        decision = self.chooser(tokens, hidden, dtype, _kind(fusion), may_own=True)
        owners = self._runners[decision.strategy].owners
        if not decision.owned or owners is None:
            return None
        pieces = owners.pieces(tokens, hidden, fusion)
        return None if pieces is None else Spread(pieces, partial(self._land, owners, fusion))

    def _land(self, owners: Owners, fusion: ResidualRmsNorm) -> tuple[Tensor, ...]:
        self._count(f"TWOSHOT+LANDED/{_kind(fusion).name}")
        return owners.landed_norm(replace(fusion, residual=_in_vectors(fusion.residual)))

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def _owned_by(self, fusion: ResidualRmsNorm, at_once: int) -> ResidualRmsNorm:
        """With a residual of owners by `at_once` rows, or a whole one."""
        residual = fusion.residual
        if isinstance(residual, OwnedRows) and not same_owners(residual.shape[0], residual.at_once, at_once):
            return self._whole(fusion)
        return replace(fusion, residual=_in_vectors(residual))

    def _whole(self, fusion: ResidualRmsNorm) -> ResidualRmsNorm:
        return replace(fusion, residual=whole(fusion.residual, self)) if isinstance(fusion.residual, OwnedRows) else fusion

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self.base.all_gather(x, dim)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return self.base.broadcast(x, source)

    def send(self, x: Tensor, to: int) -> None:
        self.base.send(x, to)

    def receive(self, x: Tensor, source: int) -> Tensor:
        return self.base.receive(x, source)

    def barrier(self) -> None:
        self.base.barrier()

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Any tensor will do: our strategies push straight from where the producer wrote, in stream order, and stage nothing. So
        it may be rewritten as soon as the stream has passed the all-reduce."""
        return torch.empty(*shape, dtype=dtype, device=device)


def _in_vectors(x: Tensor) -> Tensor:
    """x where kernels may read it in vectors of 16 bytes: contiguous, and starting on one, as all are whose rows have owners."""
    if isinstance(x, OwnedRows):
        return x
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _kind(fusion: ResidualRmsNorm) -> Fusion:
    if fusion.quant == "none":
        return _RMS
    return Fusion.of(fusion.quant, token_scale=fusion.scale is None, keep_norm=fusion.keep_norm)


def tuned(
    base: Group,
    *,
    message_bytes: int,
    strategy: str = "AUTO",
    deterministic: bool = False,
    timeout: float = 300.0,
    tables: Path | None = None,
) -> Group:
    """`base` with tuned all-reduces; collective over its ranks. A group of one, or one not over torch, is returned as it is.

    message_bytes: of one rank's longest message, max_num_tokens x hidden size x bytes of an element; it bounds the workspace (on a
    GPU `symmetric.workspace_bytes`, and `symmetric.landing_bytes` unless another strategy than TWOSHOT is forced). strategy: AUTO,
    NCCL, ONESHOT or TWOSHOT. timeout: seconds that a CPU rank may keep the others waiting. tables: where tuned tables lie, instead
    of the user's folder. Raises EngineError when ranks hold different tables.
    """
    if base.size == 1 or not isinstance(base, TorchGroup):
        return base
    fingerprint = _fingerprint(base)
    table = table_for(fingerprint, tables)
    digest = table.digest if table.sections else "seed"
    asked = {"allreduce_strategy": f"{strategy}, deterministic {deterministic}", "longest all-reduce": f"{message_bytes} bytes"}
    _compare(base, {"all-reduce table": table.digest, **asked})
    forced = None if strategy == "AUTO" else Strategy[strategy]
    first = owned_from(fingerprint)
    lands = forced in (None, Strategy.TWOSHOT) and first is not None
    runners, refused = _runners(base, fingerprint, message_bytes, timeout, lands=lands)
    owners = Strategy.TWOSHOT in runners and runners[Strategy.TWOSHOT].owners is not None
    rules = Rules(fingerprint, refused, table.lookup, forced, deterministic, first if owners else None)
    _announce(base, table, refused, tables)
    return TunedGroup(base, Chooser(rules), runners, digest)


def _announce(base: TorchGroup, table: Table, refused: Mapping[Strategy, str], tables: Path | None) -> None:
    if base.rank:
        return
    for strategy, reason in refused.items():
        _log.warning("%s is not used: %s", strategy.name, reason)
    line = advice(table.fingerprint, tables)
    if line:
        _log.info("%s", line)


def _fingerprint(base: TorchGroup) -> Fingerprint:
    """Of the machine that the group stands on; every rank comes to the same."""
    device = base.device
    host = f"{_boot()} {socket.gethostname()}"
    if device.type == "cpu":
        hosts = len(set(share_text(base, host, device)))
        return Fingerprint(0, link_class(device="cpu", hosts=hosts), base.size)
    properties = torch.cuda.get_device_properties(device)
    held = [
        text.rsplit(" ", 2) for text in share_text(base, f"{host} {properties.uuid} {properties.major}{properties.minor}", device)
    ]
    hosts, uuids = len({text[0] for text in held}), [text[1] for text in held]
    reach = hosts == 1 and _reaches(device, uuids)
    linked = reach and nvlink_everywhere(uuids)
    verdicts = share_text(base, f"{int(reach)}{int(linked)}", device)
    link = link_class(
        device="cuda", hosts=hosts, peer_access=all(v[0] == "1" for v in verdicts), nvlink=all(v[1] == "1" for v in verdicts)
    )
    return Fingerprint(min(int(text[2]) for text in held), link, base.size)


def _boot() -> str:
    """Differs between hosts; empty where the system does not say."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _reaches(device: torch.device, uuids: list[str]) -> bool:
    """Whether this rank's GPU maps the memory of all these. A GPU that this process cannot see is left to the link's own check."""
    seen = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    mine = device.index if device.index is not None else torch.cuda.current_device()
    others = [seen[uuid] for uuid in uuids if uuid in seen and seen[uuid] != mine]
    if len(others) < len(uuids) - 1 and not nvlink_everywhere(uuids):
        return False
    return all(torch.cuda.can_device_access_peer(mine, other) for other in others)


def _compare(base: TorchGroup, facts: dict[str, str]) -> None:
    texts = share_text(base, "\n".join(facts.values()), base.device)
    verdict = difference([dict(zip(facts, text.split("\n"), strict=True)) for text in texts])
    if verdict is not None:
        raise verdict


def _runners(
    base: TorchGroup, fingerprint: Fingerprint, message_bytes: int, timeout: float, *, lands: bool
) -> tuple[dict[Strategy, Runner], dict[Strategy, str]]:
    """What can run here, and why the rest cannot."""
    library = Runner(partial(nccl.all_reduce, group=base), partial(nccl.all_reduce_norm, group=base))
    runners = {Strategy.NCCL: library}
    if not fingerprint.peers_reach:
        return runners, {}  # tables.admit knows, and says why
    on_cpu = fingerprint.link == "shm"
    ours = _on_cpu(base, message_bytes, timeout) if on_cpu else _on_gpu(base, message_bytes, lands=lands)
    if isinstance(ours, str):
        return runners, dict.fromkeys((Strategy.ONESHOT, Strategy.TWOSHOT), ours)
    return runners | ours, {}


def _on_cpu(base: TorchGroup, message_bytes: int, timeout: float) -> dict[Strategy, Runner] | str:
    from phalanx.comm import shared_memory

    memory = shared_memory.form(base, message_bytes, timeout=timeout)
    if isinstance(memory, str):
        return memory
    return {
        Strategy.ONESHOT: Runner(memory.oneshot, memory.oneshot_norm),
        Strategy.TWOSHOT: Runner(memory.twoshot, memory.twoshot_norm),
    }


def _on_gpu(base: TorchGroup, message_bytes: int, *, lands: bool) -> dict[Strategy, Runner] | str:
    """lands: long products may be written to who owns their rows."""
    from phalanx.comm import oneshot, twoshot
    from phalanx.comm.symmetric import form_landing, form_workspace
    from phalanx.kernels.norms import triton_is_here

    if any(share_text(base, "" if triton_is_here() else "no", base.device)):
        return "Triton is not installed"
    space = _formed(base, partial(form_workspace, base.process_group, base.device, message_bytes))
    if isinstance(space, str):
        return space
    landing = _formed(base, partial(form_landing, base.process_group, base.device, message_bytes)) if lands else None
    if isinstance(landing, str):
        if base.rank == 0:
            _log.warning("products are handed over whole, rather than written to who owns their rows: %s", landing)
        landing = None
    return {
        Strategy.ONESHOT: Runner(partial(oneshot.all_reduce, workspace=space), partial(oneshot.all_reduce_norm, workspace=space)),
        Strategy.TWOSHOT: Runner(
            partial(twoshot.all_reduce, workspace=space), partial(twoshot.all_reduce_norm, workspace=space),
            OnGpus(space, landing),
        ),
    }  # fmt: skip


def _formed(base: TorchGroup, form: Callable[[], T]) -> T | str:
    """What `form` gives, or why it failed on one of the ranks."""
    made, why = None, ""
    try:
        made = form()
    except RuntimeError as error:
        why = f"symmetric memory: {str(error).splitlines()[0][:150]}"
    texts = share_text(base, why, base.device)
    if all(texts) and len(set(texts)) == 1:
        return texts[0]
    refused = [(rank, text) for rank, text in enumerate(texts) if text]
    return f"rank {refused[0][0]}: {refused[0][1]}" if refused else cast(T, made)
