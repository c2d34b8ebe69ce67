# SPDX-License-Identifier: Apache-2.0
"""How tables are made: sweep, measure, verify, decide, generate, plot. Each stage reads files and runs alone."""
