# SPDX-License-Identifier: Apache-2.0
"""How tables are made: sweep, measure, verify, decide, generate, draw. Each arrow is a file, and each stage reruns alone."""
