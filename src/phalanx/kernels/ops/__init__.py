# SPDX-License-Identifier: Apache-2.0
"""The ops between GEMMs: norms, activations, RoPE and KV cache, embedding, quantization. `dispatch` picks the code for a device."""
