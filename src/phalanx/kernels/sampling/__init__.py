# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens: `sampling` has every op; the Triton kernels are in the other files."""
