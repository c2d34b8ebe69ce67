# SPDX-License-Identifier: Apache-2.0
"""The rank process: it runs the steps that the engine decides, on one device."""
