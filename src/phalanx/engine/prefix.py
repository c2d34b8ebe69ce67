# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: KV blocks found again by what they hold.

The key of a full block is a hash of its parent's key and its own token ids, so that equal keys mean equal beginnings. A block
becomes shareable once the step that computes it has been submitted, not once it has been settled: every rank runs steps in the
order of their numbers, so a later step that reads the block runs after the one that writes it. Only full blocks are shared; a
shared block is never written again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from phalanx.engine.blocks import BlockPool

_ROOT = b"phalanx kv block"


def block_key(parent: bytes | None, token_ids: Sequence[int]) -> bytes:
    """16 bytes (BLAKE2b) over the parent's key and the block's token ids: nobody can craft a prompt that meets another's block."""
    return hashlib.blake2b((parent or _ROOT) + array("q", token_ids).tobytes(), digest_size=16).digest()


def extend_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, count: int) -> None:
    """Append to `keys` until it holds those of the first `count` blocks of `token_ids`, which fill them."""
    for index in range(len(keys), count):
        chunk = token_ids[index * block_size : (index + 1) * block_size]
        keys.append(block_key(keys[-1] if keys else None, chunk))


def longest_hit(pool: BlockPool, keys: Sequence[bytes], block_size: int, window: int | None) -> list[int]:
    """The blocks of the longest beginning that the pool still holds, one entry per block, not yet shared.

    `keys`: of the full blocks that may be reused. With a window, a beginning of n blocks is usable as soon as the blocks that
    the next token can look back to are there: positions n * block_size - window and later; the entries before are -1.
    """
    if window is None:
        found: list[int] = []
        for key in keys:
            block = pool.find(key)
            if block is None:
                break
            found.append(block)
        return found
    return _longest_windowed_hit(pool, keys, block_size, window)


def _longest_windowed_hit(pool: BlockPool, keys: Sequence[bytes], block_size: int, window: int) -> list[int]:
    end = len(keys)  # the candidate: blocks 0 .. end-1, of which first_needed .. end-1 must be there
    run: list[int] = []  # blocks found for end-1, end-2, ...
    for index in range(len(keys) - 1, -1, -1):
        block = pool.find(keys[index])
        if block is None:
            end, run = index, []
            continue
        run.append(block)
        if index <= max(0, end * block_size - window) // block_size:
            return [-1] * index + run[::-1]
    return []
