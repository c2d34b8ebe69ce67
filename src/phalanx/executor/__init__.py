# SPDX-License-Identifier: Apache-2.0
"""Who computes it: starts, watches and stops the ranks, and carries steps to them and results back. No torch."""
