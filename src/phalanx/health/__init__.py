# SPDX-License-Identifier: Apache-2.0
"""Is it well: the topology of a machine, the monitor of servers, and the doctor with one file per check.

A server is reached over HTTP only, so that the doctor works when the server does not start. NVML is only read. No torch here,
except in the process that measures pairs of devices.
"""

from phalanx.health.check import Check, Finding, Level
from phalanx.health.doctor import Report, examine
from phalanx.health.subject import Subject

__all__ = ["Check", "Finding", "Level", "Report", "Subject", "examine"]
