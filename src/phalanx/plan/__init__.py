# SPDX-License-Identifier: Apache-2.0
"""Layouts, shards and bytes of a model on a machine. No torch here."""

from phalanx.plan.layout import Layout, MeshCoordinate, stages

__all__ = ["Layout", "MeshCoordinate", "stages"]
