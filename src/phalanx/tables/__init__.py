# SPDX-License-Identifier: Apache-2.0
"""Tables of all-reduce measurements: messages, strategies, tables by ranges, and the seed for what was not measured. No torch
here."""

from phalanx.tables.admit import admit
from phalanx.tables.message import Fusion, Message
from phalanx.tables.seed import Seed
from phalanx.tables.shipped import advice, find, table_for
from phalanx.tables.strategy import Choice, Strategy
from phalanx.tables.table import Entry, Table

__all__ = [
    "Choice",
    "Entry",
    "Fusion",
    "Message",
    "Seed",
    "Strategy",
    "Table",
    "admit",
    "advice",
    "find",
    "table_for",
]
