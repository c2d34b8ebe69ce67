# SPDX-License-Identifier: Apache-2.0
"""The machine: GPUs, memory and cores as probed, the fingerprint under which measurements are kept, and the provenance of figures.
No torch here.
"""

from phalanx.hardware.fingerprint import Fingerprint, link_class
from phalanx.hardware.nvml import Gpu
from phalanx.hardware.probe import Machine, detect_machine, usable_machine

__all__ = ["Machine", "Gpu", "detect_machine", "usable_machine", "Fingerprint", "link_class"]
