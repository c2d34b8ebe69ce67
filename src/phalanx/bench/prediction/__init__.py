# SPDX-License-Identifier: Apache-2.0
"""`phalanx plan`, and how right the planner is: calibration, plans run here, predicted beside measured."""
