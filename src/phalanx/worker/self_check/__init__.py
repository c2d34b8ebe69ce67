# SPDX-License-Identifier: Apache-2.0
"""The self check of a start: fixed prompts by this machine's kernels, graphs and collectives, and by the reference path."""

from phalanx.worker.self_check.check import check_answers

__all__ = ["check_answers"]
