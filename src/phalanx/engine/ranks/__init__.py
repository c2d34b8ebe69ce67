# SPDX-License-Identifier: Apache-2.0
"""Rank processes: how the engine starts them, talks to them, and learns that one is in trouble."""
