# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on a rank: the rows that verify drafts, and what proposes them."""
