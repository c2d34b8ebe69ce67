# SPDX-License-Identifier: Apache-2.0
"""One check per file. Each file has `CHECK`; `phalanx.health.registry` lists them. CONTRIBUTING says how to add one."""
