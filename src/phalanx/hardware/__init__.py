# SPDX-License-Identifier: Apache-2.0
"""What the machine is: GPUs, memory and cores as probed, and the fingerprint under which measurements are kept. No torch here."""

from phalanx.hardware.fingerprint import Fingerprint, link_class
from phalanx.hardware.probe import Gpu, Machine, detect_machine

__all__ = ["Machine", "Gpu", "detect_machine", "Fingerprint", "link_class"]
