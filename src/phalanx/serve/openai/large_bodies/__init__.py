# SPDX-License-Identifier: Apache-2.0
"""Bodies beyond some kilobytes, which processes of their own read: a parser holds the interpreter lock, and streams would wait."""
