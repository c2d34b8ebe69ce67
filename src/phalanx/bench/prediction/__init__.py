# SPDX-License-Identifier: Apache-2.0
"""What the planner says of an engine, and how right it is: simulation with the real scheduler, calibration, predicted against
measured."""
