# SPDX-License-Identifier: Apache-2.0
"""What is computed: layers, the explicit batch, one model family per file."""
