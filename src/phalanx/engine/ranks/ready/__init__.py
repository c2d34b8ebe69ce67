# SPDX-License-Identifier: Apache-2.0
"""What a rank whose weights are there does before it is ready: compile what is missing, and measure what memory is left."""
