# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache: the protocol (`backend`), the choice (`select`) and one back end per file."""
