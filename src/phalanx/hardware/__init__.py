# SPDX-License-Identifier: Apache-2.0
"""What the machine is: GPUs, memory and cores as probed, and the fingerprint under which measurements are kept. No torch here."""

from phalanx.hardware.fingerprint import Fingerprint, link_class
from phalanx.hardware.probe import Gpu, Machine, look

__all__ = ["Machine", "Gpu", "look", "Fingerprint", "link_class"]
