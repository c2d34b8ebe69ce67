# SPDX-License-Identifier: Apache-2.0
"""One collective call: its operation, its size, and the fusion that follows the sum."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from phalanx.config.dtypes import DTYPES
from phalanx.errors import OptionError


class Fusion(IntEnum):
    """The operations that follow the sum. Numbers below 64 are TensorRT-LLM's and never change.

    The FP8 members quantize with a static scale; their TOKEN_SCALE variants (number + 64) compute one scale per token.
    Outputs: NONE [sum]; RESIDUAL_RMS_NORM [norm, residual]; QUANT_* [quantized, (scales,) residual]; OUT_QUANT_* the norm first.
    """

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = 5
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8 = 6
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4 = 7
    RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE = 68
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE = 70

    @classmethod
    def named(cls, name: str) -> Fusion:
        """The member with this name. Raises OptionError that lists the names."""
        try:
            return cls[name]
        except KeyError:
            raise OptionError(f"fusion {name!r} is unknown", next=f"known: {', '.join(cls.__members__)}") from None

    @classmethod
    def of(cls, quant: str, *, token_scale: bool, keep_norm: bool) -> Fusion:
        """The fusion of a `ResidualRmsNorm` with these fields. token_scale: fp8 without a static scale."""
        out = "OUT_" if keep_norm else ""
        if quant == "none":
            return cls.RESIDUAL_RMS_NORM
        suffix = "_TOKEN_SCALE" if quant == "fp8" and token_scale else ""
        return cls[f"RESIDUAL_RMS_NORM_{out}QUANT_{quant.upper()}{suffix}"]

    @property
    def quant(self) -> str:
        """ "none", "fp8" or "nvfp4"."""
        return "fp8" if "FP8" in self.name else "nvfp4" if "NVFP4" in self.name else "none"

    @property
    def keeps_norm(self) -> bool:
        return "OUT_QUANT" in self.name

    @property
    def token_scale(self) -> bool:
        return self.name.endswith("TOKEN_SCALE")

    @property
    def shards(self) -> bool:
        """Whether sequence parallelism has it: a norm, unquantized, in FP8 or both."""
        return self.quant != "nvfp4" and self is not Fusion.NONE


# Where a fusion was not measured, the nearest one that sends the same bytes answers for it. (TensorRT-LLM's table also holds
# OUT_QUANT in the place of QUANT.)
_STANDS_IN = {
    Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8: (Fusion.RESIDUAL_RMS_NORM_QUANT_FP8,),
    Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4: (Fusion.RESIDUAL_RMS_NORM_QUANT_NVFP4,),
    Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE: (Fusion.RESIDUAL_RMS_NORM_QUANT_FP8,),
    Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE: (
        Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE,
        Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8,
        Fusion.RESIDUAL_RMS_NORM_QUANT_FP8,
    ),
}
# Sequence parallelism sends a norm that is kept beside its quantization in 16 bit alone, as one that is not quantized at all.
_STANDS_IN_SHARDED = _STANDS_IN | {
    Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8: (
        Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE,
        Fusion.RESIDUAL_RMS_NORM,
        Fusion.RESIDUAL_RMS_NORM_QUANT_FP8,
    ),
    Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8_TOKEN_SCALE: (
        Fusion.RESIDUAL_RMS_NORM_OUT_QUANT_FP8,
        Fusion.RESIDUAL_RMS_NORM,
        Fusion.RESIDUAL_RMS_NORM_QUANT_FP8_TOKEN_SCALE,
        Fusion.RESIDUAL_RMS_NORM_QUANT_FP8,
    ),
}


class Caller(IntEnum):
    """What the caller of an all-reduce allows. Each allows all that those before it do.

    REPLICATED: every rank gets the whole residual, as behind a layer with a bias and at the end of a pipeline stage. SHARDED: the
    new residual may stay sharded over the ranks, as between the layers of a decoder. GEMM: and the sum is of a GEMM's output, which
    the GEMM can write straight into the memory of other ranks: a row-parallel linear layer.
    """

    REPLICATED = 0
    SHARDED = 1
    GEMM = 2

    @property
    def label(self) -> str:
        """As in a table's file."""
        return self.name.lower()

    @property
    def less(self) -> Caller:
        """The caller that allows one thing less; of REPLICATED, itself."""
        return Caller(max(self - 1, 0))

    def stand_ins(self, fusion: Fusion) -> tuple[Fusion, ...]:
        """The fusions whose measurements answer for `fusion` where it was not measured for this caller, the nearest first."""
        return (_STANDS_IN if self is Caller.REPLICATED else _STANDS_IN_SHARDED).get(fusion, ())


@dataclass(frozen=True, slots=True)
class Message:
    """One call: op ("all_reduce"), fusion, dtype (bf16, fp16, fp32), a tensor [tokens, hidden] per rank, the ranks, and what the
    caller allows."""

    op: str
    fusion: Fusion
    dtype: str
    tokens: int
    hidden: int
    world: int
    caller: Caller = Caller.REPLICATED

    @property
    def bytes(self) -> int:
        """Of one rank's tensor."""
        return self.tokens * self.hidden * DTYPES[self.dtype].itemsize
