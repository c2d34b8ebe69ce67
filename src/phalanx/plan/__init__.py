# SPDX-License-Identifier: Apache-2.0
"""How to use the machine: layouts, shards, bytes. No torch here."""

from phalanx.plan.layout import Layout, Place, stages

__all__ = ["Layout", "Place", "stages"]
