# SPDX-License-Identifier: Apache-2.0
"""`gated_delta` and `sigmoid_mul`: by Triton kernels on GPUs, by `reference` elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.config.gated_delta import GatedDelta
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.gated_delta import reference
from phalanx.kernels.gated_delta.reference import CHUNK, DeltaWeights, StateRows


def gated_delta(
    mixed: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, conv: Tensor, state: Tensor, rows: StateRows,
    pending: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.gated_delta`. On a GPU nothing is read by the host: the launches may be captured, and replayed with other
    slots, starts and lengths."""
    if mixed.is_cuda and has_triton():
        return launched(mixed, ba, heads, weights, conv, state, rows, pending)
    return reference.gated_delta(mixed, ba, heads, weights, conv, state, rows, pending)


def launched(
    mixed: Tensor, ba: Tensor, heads: GatedDelta, weights: DeltaWeights, conv: Tensor, state: Tensor, rows: StateRows,
    pending: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same by the kernels, on a GPU or in Triton's interpreter. Tokens of no row have no output."""
    from phalanx.kernels.gated_delta.causal_conv import causal_conv, conv_prefill
    from phalanx.kernels.gated_delta.chunked import delta_prefill
    from phalanx.kernels.gated_delta.recurrent import delta_decode

    qkv, z = torch.split(mixed, [sum(heads.sections), heads.sections[2]], dim=1)
    out = mixed.new_empty((len(mixed), heads.value_heads * heads.value_dim))
    if pending is not None:
        from phalanx.kernels.gated_delta.verified import flush, verify

        convolved = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        arguments = qkv, z, ba, heads, weights, conv, state, pending, rows, convolved, out
        if rows.decodes:
            verify(*arguments)
        if rows.chunks:
            flush(*arguments)
            conv_prefill(qkv, weights.conv, conv, convolved, rows)
            delta_prefill(convolved, z, ba, heads, weights, state, rows, out)
        return out
    convolved = causal_conv(qkv, weights.conv, conv, rows)
    if rows.decodes:
        delta_decode(convolved, z, ba, heads, weights, state, rows, out)
    if rows.chunks:
        delta_prefill(convolved, z, ba, heads, weights, state, rows, out)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.sigmoid_mul`."""
    if x.is_cuda and x.is_contiguous() and gate.stride(-1) == 1 and has_triton():
        from phalanx.kernels.gated_delta.output_gate import sigmoid_mul as kernel

        return kernel(x, gate)
    return reference.sigmoid_mul(x, gate)


def count_chunks(starts: list[int], decodes: int) -> int:
    """Of the rows behind the decode rows. starts: of all rows."""
    return sum(-(-(end - begin) // CHUNK) for begin, end in zip(starts[decodes:-1], starts[decodes + 1 :], strict=True))


def max_chunks(tokens: int, rows: int) -> int:
    """The most chunks of any so many rows that have so many tokens together, or fewer."""
    return min(tokens, tokens // CHUNK + rows) if rows else 0
