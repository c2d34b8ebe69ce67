# SPDX-License-Identifier: Apache-2.0
"""The one-sided exchange of expert parallel: tokens go straight into the memory of the ranks that have their experts, and sums
straight back."""

from phalanx.comm.one_sided.exchange import OneSided, agreed_table, form, refusal

__all__ = ["OneSided", "agreed_table", "form", "refusal"]
