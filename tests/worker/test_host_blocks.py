# SPDX-License-Identifier: Apache-2.0
"""KV blocks of a rank on their way to host memory and back: every byte of every tensor returns, and copies are in order."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest
import torch

from phalanx.engine.messages import BlockCopy, StepBatch
from phalanx.errors import CapacityError, EngineError
from phalanx.layout import memory
from phalanx.layout.cache import Cache, CacheTensor, in_group, request_bytes
from phalanx.layout.memory import block_bytes, staging_bytes, state_staging_bytes
from phalanx.models.cache import LayerCache, empty_caches
from phalanx.worker import host_blocks
from phalanx.worker.host_blocks import HostBlockStore, staging, state_staging

CPU = torch.device("cpu")
BLOCKS, SIZE, SLOTS = 12, 4, 7
STATE = CacheTensor("conv", (3, 5), "fp32", per="request")
LATENT = CacheTensor("latent", (9,), "fp8")
DECLARED: dict[str, list[Cache]] = {
    "keys and values": [(CacheTensor("key", (2, 8), "bf16"), CacheTensor("value", (2, 8), "bf16"))] * 3,
    "int8 with scales": [
        (
            CacheTensor("key", (2, 8), "int8"), CacheTensor("value", (2, 8), "int8"),
            CacheTensor("token_scales", (2, 2), "bf16", token_dim=1),
        ),
    ] * 2,
    "fp8": [(CacheTensor("key", (1, 8), "fp8"), CacheTensor("value", (1, 8), "fp8"))],
    "latent of an odd width, beside a state": [(LATENT,), (STATE,), (LATENT,)],
    "groups that share tensors": [
        in_group((CacheTensor("key", (2, 8), "fp32", window=window),), group) for group, window in ((0, None), (1, 8), (0, None))
    ],
}  # fmt: skip


def make(declared: list[Cache], device: torch.device, slots: int = SLOTS) -> tuple[list[LayerCache], HostBlockStore]:
    caches = empty_caches(declared, BLOCKS, SIZE, device, slots=2)
    return caches, HostBlockStore(caches, slots, staging(block_bytes(declared, SIZE), device))


def tensors_of(caches: Sequence[LayerCache]) -> list[torch.Tensor]:
    return [cache[name] for cache in caches for name in cache.tensors if name not in cache.states]


def write(caches: Sequence[LayerCache], block: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for tensor in tensors_of(caches):
        row = tensor[block].flatten().view(torch.uint8)
        row.copy_(torch.randint(0, 255, row.shape, generator=chance, dtype=torch.uint8).to(row.device))


def digest(caches: Sequence[LayerCache], block: int) -> bytes:
    parts = [tensor[block].contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors_of(caches)]
    return hashlib.sha256(b"".join(parts)).digest()


def drive(declared: list[Cache], device: torch.device, steps: int = 60, corrupt: int | None = None) -> int:
    """Random copies of random steps, each of which overwrites blocks that it has saved and blocks that it has loaded are compared
    with what was saved. Returns how many were. corrupt: after which step a byte of each slot is changed."""
    chance = random.Random(1)
    caches, host = make(declared, device)
    contents: dict[int, tuple[int, bytes]] = {}
    for block in range(BLOCKS):
        write(caches, block, block)
    compared = 0
    for step in range(steps):
        sources, targets = chance.sample(range(BLOCKS), 4), chance.sample(range(BLOCKS), 3)
        read = chance.sample(sorted(contents), min(3, len(contents)))
        written = [slot for slot in chance.sample(range(SLOTS), 4) if slot not in read]
        saved = [BlockCopy(block, slot, step + 1) for block, slot in zip(sources, written, strict=False)]
        contents |= {copy.slot: (step + 1, digest(caches, copy.block)) for copy in saved}
        loaded = [BlockCopy(block, slot, contents[slot][0]) for block, slot in zip(targets, read, strict=False)]
        host.copy(StepBatch(saved=saved, loaded=loaded))
        for copy in loaded:
            assert digest(caches, copy.block) == contents[copy.slot][1], f"step {step}: slot {copy.slot} has another content"
            compared += 1
        for block in sources[:2]:
            write(caches, block, 100 + BLOCKS * step + block)
        if step == corrupt:
            host.slots.view(torch.uint8)[:, -1] += 1
    return compared


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks fill a buffer: a step takes several, in turn."""
    monkeypatch.setattr(memory, "STAGING_BYTES", 1)


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_every_byte_of_a_block_comes_back(declared: list[Cache], small_staging: None) -> None:
    assert drive(declared, CPU) > 100


@pytest.mark.parametrize("block", [1000, 40 << 20])
def test_the_planner_counts_the_buffers_that_ranks_make(block: int) -> None:
    assert staging(block, torch.device("meta")).nbytes == staging_bytes(block) >= 4 * block


def test_a_corrupt_slot_is_seen() -> None:
    with pytest.raises(AssertionError, match="has another content"):
        drive(DECLARED["keys and values"], CPU, corrupt=30)


def test_slots_are_of_blocks_of_all_tensors_and_states_stay() -> None:
    declared = DECLARED["latent of an odd width, beside a state"]
    caches, host = make(declared, CPU)
    assert host.slots.nbytes == SLOTS * block_bytes(declared, SIZE) == SLOTS * 2 * 9 * SIZE
    caches[1]["conv"].fill_(7.0)
    host.copy(StepBatch(saved=[BlockCopy(0, 0, 1)]))
    host.copy(StepBatch(loaded=[BlockCopy(1, 0, 1)]))
    assert (caches[1]["conv"] == 7.0).all()


STATES: list[Cache] = [(STATE, CacheTensor("state", (2, 3, 4), "fp32", per="request")), (LATENT,), (STATE,)]


def drive_states(device: torch.device) -> None:
    """States of slots 0 .. 5 there and back, three in one step: more than the buffers take."""
    caches = empty_caches(STATES, BLOCKS, SIZE, device, slots=6)
    host = HostBlockStore(caches, 4, state_staging(request_bytes(STATES), device), states=True)
    assert host.slots.nbytes == 4 * request_bytes(STATES)
    tensors = [cache[name] for cache in caches for name in cache.states]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 1000 * number)
    before, latent = [tensor.clone() for tensor in tensors], caches[1]["latent"].clone()
    host.save([BlockCopy(slot, 3 - slot, 1) for slot in (0, 2, 3)])
    for tensor in tensors:
        tensor.zero_()
    host.load([BlockCopy(slot, 3 - other, 1) for slot, other in ((5, 0), (0, 2), (4, 3))])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[5, 0, 4]], old[[0, 2, 3]])
        assert not tensor[[1, 2, 3]].any(), "the others are as they were"
    assert torch.equal(caches[1]["latent"].view(torch.uint8), latent.view(torch.uint8))


def test_every_byte_of_a_state_comes_back() -> None:
    drive_states(CPU)


@pytest.mark.gpu1
def test_every_byte_of_a_state_comes_back_on_a_gpu() -> None:
    drive_states(torch.device("cuda"))


def test_the_planner_counts_the_buffers_of_states_that_ranks_make() -> None:
    assert state_staging(1000, torch.device("meta")).nbytes == state_staging_bytes(1000) == 4000


def test_a_write_that_the_slot_does_not_have_is_never_read() -> None:
    _, host = make(DECLARED["fp8"], CPU)
    host.copy(StepBatch(saved=[BlockCopy(0, 3, 5)]))
    with pytest.raises(EngineError, match="was to get write 4 of slot 3") as raised:
        host.copy(StepBatch(loaded=[BlockCopy(1, 3, 4)]))
    assert "has write 5" in raised.value.held


def test_memory_that_cannot_be_had_or_pinned_is_an_error_that_names_it() -> None:
    with pytest.raises(CapacityError, match="bytes of host memory for KV blocks cannot be had") as raised:
        host_blocks.host_memory(1 << 60, None)
    assert "kv_host_memory" in raised.value.next
    with pytest.raises(CapacityError, match=r"^64 bytes of host memory") as raised:
        host_blocks.host_memory(64, lambda address, size: 2 if address and size == 64 else 0)
    assert "cannot pin it (error 2)" in raised.value.why


@pytest.mark.gpu1
@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_every_byte_comes_back_on_a_gpu(declared: list[Cache], small_staging: None) -> None:
    assert drive(declared, torch.device("cuda", 0)) > 100


@pytest.mark.gpu1
def test_copies_are_in_order_with_steps_that_are_still_queued() -> None:
    """The host is far ahead of the device: a block is overwritten right behind its copy out, and read behind its copy back."""
    device = torch.device("cuda", 0)
    declared: list[Cache] = [(CacheTensor("key", (8, 128), "bf16"),)] * 4
    caches, host = make(declared, device)
    busy = torch.randn(4096, 4096, device=device)
    sums = []
    for step in range(50):
        busy = (busy @ busy).clamp(-1, 1)
        for tensor in tensors_of(caches):
            tensor[0] = step
        host.copy(StepBatch(saved=[BlockCopy(0, step % SLOTS, step + 1)]))
        for tensor in tensors_of(caches):
            tensor[0] = -1
        host.copy(StepBatch(loaded=[BlockCopy(1, step % SLOTS, step + 1)]))
        sums.append(torch.stack([tensor[1].float().mean() for tensor in tensors_of(caches)]).mean())
    assert [round(value.item()) for value in sums] == list(range(50))
