# SPDX-License-Identifier: Apache-2.0
"""Work that may be hostile or large runs in forks of a process, within limits that the kernel sets."""
