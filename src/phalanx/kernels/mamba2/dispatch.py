# SPDX-License-Identifier: Apache-2.0
"""`mamba2`: by Triton kernels on GPUs, by `reference` elsewhere."""

from __future__ import annotations

from torch import Tensor

from phalanx.config.mamba import Mamba2
from phalanx.kernels.capabilities import has_triton
from phalanx.kernels.gated_delta.reference import StateRows
from phalanx.kernels.mamba2 import reference
from phalanx.kernels.mamba2.reference import MambaStates, MambaWeights


def mamba2(
    mixed: Tensor, sizes: Mamba2, weights: MambaWeights, states: MambaStates, rows: StateRows, pending: Tensor | None = None
) -> Tensor:  # fmt: skip
    """See `reference.mamba2`. On a GPU nothing is read by the host: the launches may be captured, and replayed with other slots,
    starts and lengths."""
    if mixed.is_cuda and has_triton():
        return launched(mixed, sizes, weights, states, rows, pending)
    return reference.mamba2(mixed, sizes, weights, states, rows, pending)


def launched(
    mixed: Tensor, sizes: Mamba2, weights: MambaWeights, states: MambaStates, rows: StateRows, pending: Tensor | None = None
) -> Tensor:  # fmt: skip
    """The same by the kernels, on a GPU or in Triton's interpreter. Tokens of no row have no output."""
    from phalanx.kernels.gated_delta.causal_conv import causal_conv
    from phalanx.kernels.mamba2.scan import scan

    z, inputs, groups, steps = reference.split(mixed, sizes)
    inner = sizes.inner
    if pending is not None:
        from phalanx.kernels.mamba2.verified import with_drafts

        return with_drafts(inputs, groups, z, steps, sizes, weights, states, rows, pending)
    x = causal_conv(inputs, weights.conv[:inner], states.conv, rows, weights.conv_bias[:inner])
    both = causal_conv(groups, weights.conv[inner:], states.group_conv, rows, weights.conv_bias[inner:])
    return scan(x, both, z, steps, sizes, weights, states.state, rows)
