# SPDX-License-Identifier: Apache-2.0
"""What tests of the attention kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

SCALES = (0.25, 0.03)


def sinks_of(heads: int, dtype: torch.dtype, center: float | None) -> Tensor | None:
    """A sink of each head, about as large as the scores about `center`; None for none."""
    return None if center is None else (torch.randn(heads, generator=torch.Generator().manual_seed(9)) * 2 + center).to(dtype)
