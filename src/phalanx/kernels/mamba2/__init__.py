# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv 2405.21060) with its convolution, over states that requests keep between steps."""
