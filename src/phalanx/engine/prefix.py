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


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """16 bytes (BLAKE2b) over the parent's key and the block's token ids: no prompt can be crafted to hit the block of another."""
    return _key(parent, array("q", token_ids).tobytes())


def _key(parent: bytes, content: bytes) -> bytes:
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


def longest_hit(pool: BlockPool, keys: Sequence[bytes], block_size: int, window: int | None) -> list[int]:
    """The blocks of the longest prefix that the pool still has, one entry per block; no reference is added.

    `keys`: of the full blocks that may be reused. With a window, a prefix of n blocks is usable if the blocks that the next token
    looks back to are there: positions n * block_size - window and later. The entries before these are -1.
    """
    if window is None:
        blocks: list[int] = []
        for key in keys:
            block = pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks
    return _longest_windowed_hit(pool, keys, block_size, window)


def _longest_windowed_hit(pool: BlockPool, keys: Sequence[bytes], block_size: int, window: int) -> list[int]:
    end = len(keys)  # the candidate: blocks 0 .. end-1, of which those in the window must be there
    run: list[int] = []  # the blocks of end-1, end-2, ...
    for index in range(len(keys) - 1, -1, -1):
        block = pool.find(keys[index])
        if block is None:
            end, run = index, []
            continue
        run.append(block)
        if index <= max(0, end * block_size - window) // block_size:
            return [-1] * index + run[::-1]
    return []
