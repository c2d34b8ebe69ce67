# SPDX-License-Identifier: Apache-2.0
"""The floating-point dtypes of activations, weights and messages: `DTYPES`. `kernels.dtypes` adds torch's dtypes."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.errors import OptionError


class Dtype(NamedTuple):
    """name: as in options and tables. long_name: as in torch and config.json. itemsize: bytes of one value."""

    name: str
    long_name: str
    itemsize: int


DTYPES = {dtype.name: dtype for dtype in (Dtype("bf16", "bfloat16", 2), Dtype("fp16", "float16", 2), Dtype("fp32", "float32", 4))}
"""By name. The order is that of the generated C++ tables."""

DTYPE_SPELLINGS = {
    **{dtype.name: dtype.name for dtype in DTYPES.values()},
    **{dtype.long_name: dtype.name for dtype in DTYPES.values()},
    "half": "fp16",
    "float": "fp32",
}
"""Any spelling -> name."""


def parse_dtype(spelling: str) -> str:
    """ "bf16", "fp16" or "fp32" for any of their spellings (also "bfloat16", "torch.bfloat16"). Raises OptionError."""
    try:
        return DTYPE_SPELLINGS[spelling.removeprefix("torch.")]
    except KeyError:
        raise OptionError(f"dtype {spelling!r} is unknown", next=f"use one of {', '.join(DTYPE_SPELLINGS)}") from None
