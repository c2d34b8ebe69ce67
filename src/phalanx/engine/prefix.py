# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: KV blocks found again by their content.

The key of a full block is a hash of its parent's key and its own token ids, so equal keys mean equal prefixes. The first block's
parent is a root: requests with other salts or adapters have other roots, and share no block. A block can be
shared once the step that computes it has been submitted; nobody waits for the result. Every rank runs steps in the order of their
numbers, so a later step that reads the block runs after the one that writes it. Only full blocks are shared, and a shared block is
never written again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from phalanx.engine.blocks import BlockPool

_ROOT = b"phalanx kv block"
_SALTED = b"phalanx kv salt "
_ADAPTED, _ADAPTED_SALTED = b"phalanx kv adapter ", b"phalanx kv adapter salt "
_ID_BYTES = array("q").itemsize


def root_key(salt: str = "", adapter: bytes = b"") -> bytes:
    """The parent of the first block. No salt and no adapter makes it the key of a block, or the root of the other: each kind begins
    with another text. adapter: the digest of its content, so that a name may come to stand for another one."""
    if adapter:
        return _key(_ADAPTED_SALTED + adapter, salt.encode()) if salt else _key(_ADAPTED, adapter)
    return _key(_SALTED, salt.encode()) if salt else _ROOT


def _key(parent: bytes, content: bytes) -> bytes:
    """16 bytes (BLAKE2b) over the parent's key and the block's token ids: no prompt can be crafted to hit the block of another."""
    return hashlib.blake2b(parent + content, digest_size=16).digest()


def extend_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, count: int, *, root: bytes = _ROOT) -> None:
    """Append to `keys` until it holds those of the first `count` blocks of `token_ids`, which fill them. root: see `root_key`."""
    first = len(keys)
    if first >= count:
        return
    # A long prompt has thousands of blocks, and tokens of other requests wait meanwhile: its ids become bytes at once.
    data = array("q", token_ids[first * block_size : count * block_size]).tobytes()
    size, parent = block_size * _ID_BYTES, keys[-1] if keys else root
    for start in range(0, len(data), size):
        parent = _key(parent, data[start : start + size])
        keys.append(parent)


def group_key(key: bytes, group: int) -> bytes:
    """The key of a block that has the same tokens for another group of layers."""
    return key + bytes((group,)) if group else key


def longest_hit(pool: BlockPool, keys: Sequence[bytes], block_size: int, windows: Sequence[int | None]) -> list[int]:
    """The blocks of the longest prefix that the pool still has, as `Request.blocks` has them; no reference is added. What is in
    host memory has the entry of its slot there.

    `keys`: of the full blocks that may be reused. windows: of each group. Where one has a window, a prefix of n blocks is usable if
    the blocks that the next token looks back to are there: positions n * block_size - window and later. The entries before these
    are -1.
    """
    end = len(keys)
    blocks: dict[int, list[int]] = {}
    for group, window in enumerate(windows):
        if window is None:
            blocks[group] = _leading(pool, keys[:end], group)
            end = len(blocks[group])
    windowed = {group: window for group, window in enumerate(windows) if window is not None}
    if windowed:
        end, runs = _longest_windowed(pool, keys[:end], block_size, windowed)
        blocks |= {group: [-1] * (end - len(run)) + run[::-1] for group, run in runs.items()}
    if len(windows) == 1:
        return blocks[0][:end]
    return [blocks[group][index] for index in range(end) for group in range(len(windows))]


def _leading(pool: BlockPool, keys: Sequence[bytes], group: int) -> list[int]:
    """The blocks of the first keys, up to one that is not there."""
    blocks: list[int] = []
    for key in keys:
        block = pool.find(group_key(key, group))
        if block is None:
            break
        blocks.append(block)
    return blocks


def _longest_windowed(
    pool: BlockPool, keys: Sequence[bytes], block_size: int, windows: dict[int, int]
) -> tuple[int, dict[int, list[int]]]:  # fmt: skip
    """How many blocks, and of each group those of its window: of end-1, end-2, ..."""
    end = len(keys)  # the candidate: blocks 0 .. end-1, of which those in the windows must be there
    runs: dict[int, list[int]] = {group: [] for group in windows}
    missing = dict(windows)  # groups whose windows are not complete
    for index in range(len(keys) - 1, -1, -1):
        for group, window in list(missing.items()):
            block = pool.find(group_key(keys[index], group))
            if block is None:
                end, missing = index, dict(windows)
                runs = {group: [] for group in windows}
                break
            runs[group].append(block)
            if index <= max(0, end * block_size - window) // block_size:
                del missing[group]
        if not missing:
            return end, runs
    return 0, {group: [] for group in windows}
