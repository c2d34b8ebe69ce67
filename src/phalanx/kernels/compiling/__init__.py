# SPDX-License-Identifier: Apache-2.0
"""Compilation of Triton kernels: `ahead` of their first launch in several processes; the `record` of those that a start needs; and
`compile_time`, its seconds."""
