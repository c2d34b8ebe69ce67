# SPDX-License-Identifier: Apache-2.0
"""When it is computed: requests, scheduler, KV blocks, and the loop that drives the ranks. Token ids only."""
