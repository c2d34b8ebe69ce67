# SPDX-License-Identifier: Apache-2.0
"""What tells, before a guide is followed, that a grammar would not keep its promise: `patterns`, `one_of`, `endless`."""
