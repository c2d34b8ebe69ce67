# SPDX-License-Identifier: Apache-2.0
"""torch's dtypes for the names of `config.dtypes`, and the other way round."""

from __future__ import annotations

import torch

from phalanx.config.dtypes import DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.long_name) for name, dtype in DTYPES.items()}
"""Name -> torch dtype."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch dtype -> name."""
