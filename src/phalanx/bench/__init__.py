# SPDX-License-Identifier: Apache-2.0
"""How well it runs: workloads by name, latency, throughput, load over HTTP, scaling, and how far each is from the roof."""
