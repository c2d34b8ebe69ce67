# SPDX-License-Identifier: Apache-2.0
"""Checks by theme: each is a function with `@check`. `phalanx.health.registry` lists them. CONTRIBUTING says how to add one."""
