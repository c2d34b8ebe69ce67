# SPDX-License-Identifier: Apache-2.0
"""A benchmark's ranks: their process, their candidates, and how they verify and time them. Here is torch; beside it is not."""
