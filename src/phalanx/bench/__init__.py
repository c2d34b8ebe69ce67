# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of a whole engine: workloads by name, latency, throughput, load over HTTP and scaling, each beside its roofline."""
