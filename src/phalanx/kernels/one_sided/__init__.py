# SPDX-License-Identifier: Apache-2.0
"""The one-sided all-to-all of expert parallel in Triton: ranks write tokens, and later sums, straight into each other's memory."""
