# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (arXiv 2412.06464) with its convolution, over states that requests keep between steps."""
