# SPDX-License-Identifier: Apache-2.0
"""GEMMs of activations and weights. Dispatchers, which import no Triton: `linear` (16 and 32 bit), `scaled_mm` (FP8 with scales by
row), `block_gemm` (FP8 with scales by block), `gemv_fused` (one token, together with the op behind the GEMM)."""
