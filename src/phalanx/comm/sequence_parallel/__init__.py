# SPDX-License-Identifier: Apache-2.0
"""Rows that have an owner among the ranks of a group: who owns which, and the all-reduce that leaves them so."""

from phalanx.comm.rows.ownership import OwnedRows, gathered, own_rows, same_owners, whole

__all__ = ["OwnedRows", "gathered", "own_rows", "same_owners", "whole"]
