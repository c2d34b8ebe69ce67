# SPDX-License-Identifier: Apache-2.0
"""How linear layers hold their weights and multiply with them: each file has a `LinearMethod`, and `choose` picks a layer's."""
