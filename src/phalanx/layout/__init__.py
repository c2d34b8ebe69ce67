# SPDX-License-Identifier: Apache-2.0
"""What runs: ranks and their axes, shards, bytes, graphs, and what each model family is made of. No torch here."""

from phalanx.layout.layout import Layout, MeshCoordinate, stages

__all__ = ["Layout", "MeshCoordinate", "stages"]
