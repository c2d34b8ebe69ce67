# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism inside an all-reduce: reduce-scatter, norm on each rank's own rows, all-gather; the residual stays
sharded."""

from phalanx.comm.sequence_parallel.sharded_residual import ShardedResidual, gather_rows, rank_rows, same_sharding, unshard

__all__ = ["ShardedResidual", "gather_rows", "rank_rows", "same_sharding", "unshard"]
