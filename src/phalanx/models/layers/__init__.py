# SPDX-License-Identifier: Apache-2.0
"""The parts that models are made of, named for what they compute and how ranks split it."""
