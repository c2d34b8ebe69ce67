# SPDX-License-Identifier: Apache-2.0
"""Options, sampling parameters and the shape of a model. No torch: the planner runs on a laptop in milliseconds."""

from phalanx.config.options import EngineOptions
from phalanx.config.sampling_params import SamplingParams, StructuredOutputParams

__all__ = ["EngineOptions", "SamplingParams", "StructuredOutputParams"]
