# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged KV cache on GPUs. `dispatch` picks launches; `decode` and `prefill` are the Triton kernels; `split_kv`
plans on the device which programs share a decode row; `heuristics` tiles from shapes alone."""
