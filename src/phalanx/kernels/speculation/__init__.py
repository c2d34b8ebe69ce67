# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding between two forwards: `drafts` has every op."""
