# SPDX-License-Identifier: Apache-2.0
"""How GPUs agree. `Group` is the seam; the back ends load inside their factories."""

from phalanx.comm.group import Group, ResidualRmsNorm, Solo

__all__ = ["Group", "ResidualRmsNorm", "Solo"]
