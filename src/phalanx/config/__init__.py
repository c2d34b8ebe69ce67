# SPDX-License-Identifier: Apache-2.0
"""What the user says. No torch here: the planner answers on a laptop in milliseconds."""

from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams

__all__ = ["EngineOptions", "SamplingParams", "StructuredOutputParams"]
