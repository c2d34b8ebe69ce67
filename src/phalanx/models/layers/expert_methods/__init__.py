# SPDX-License-Identifier: Apache-2.0
"""How the weights of a layer's experts are held and multiplied."""
