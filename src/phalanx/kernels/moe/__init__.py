# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts layer on one GPU: routing, and the experts' GEMMs in one launch each. `dispatch` picks the code for a
device."""
