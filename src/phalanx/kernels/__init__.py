# SPDX-License-Identifier: Apache-2.0
"""How one GPU computes: one op per file; `reference` has every op again in plain torch.

The names here pick the kernel for the tensor's device; importing this room loads no Triton.
"""

from phalanx.kernels.reference import residual_rms_norm, rms_norm, rope, silu_mul, write_kv

__all__ = ["residual_rms_norm", "rms_norm", "rope", "silu_mul", "write_kv"]
