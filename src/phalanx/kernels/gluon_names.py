# SPDX-License-Identifier: Apache-2.0
"""What Triton's versions call differently in Gluon, the language that Triton calls experimental."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Waits for all threads of the warps that run this part of a program: `thread_barrier` in 3.6, `barrier` from 3.7 on."""
