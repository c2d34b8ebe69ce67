# SPDX-License-Identifier: Apache-2.0
"""What the user asks of a benchmark: `TuneOptions`, from which the flags of `phalanx allreduce bench` and `tune` are derived."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from phalanx.errors import OptionError

_MIB = 2**20
_CPU_MAX_MIB = 4.0


class TuneOptions(BaseModel):
    """What to measure, how, and what happens to earlier results. Lists are comma-separated text; None is the default of each.

    Units: time in seconds, sizes in MiB. Frozen; an unknown name is an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: str | None = Field(None, description="Numbers of tokens, such as 1,16,256. Default: the default grid 1..16384.")
    hidden: str | None = Field(None, description="Hidden sizes, such as 4096,8192. Default: the default grid 128..8192.")
    fusions: str | None = Field(None, description="Names of fusions, separated by commas. Default: all.")
    strategies: str | None = Field(
        None,
        description="Strategies, separated by commas: NCCL (or GLOO), ONESHOT, TWOSHOT, RS_NORM_AG, GEMM_RS, AUTO. Default: all "
        "but AUTO. With GEMM_RS, layers with their GEMM are measured by each strategy.",
    )
    dtype: str = Field("bf16", description="bf16, fp16 or fp32.")
    enable_auto: bool = Field(False, description="Also measure AUTO: the choice of the table that this machine has.")
    save_csv_dir: Path = Field(Path("data"), description="Folder for the CSVs and for everything made from them.")
    device: str = Field("auto", description="auto, cuda or cpu.")
    max_mib: float | None = Field(None, description="Skip tensors of more MiB per rank. Default: no limit; 4 on CPU.")
    calls: int = Field(50, ge=1, description="Calls in one sample.")
    replays: int = Field(9, ge=1, description="Samples of each candidate.")
    deadline: float = Field(
        60.0, ge=0.1, description="Seconds for one candidate, compilation included; a candidate that takes longer is skipped."
    )
    start_timeout: float = Field(180.0, ge=1, description="Seconds within which all ranks must have started.")
    time_limit: float | None = Field(None, description="Seconds for one TP size; after that, the results so far are written.")
    restart: bool = Field(False, description="Drop the earlier results of this TP size in the folder, and measure all again.")
    remeasure: str | None = Field(
        None, description="Strategies to measure again, such as NCCL, within the grid given; other results stay."
    )
    commit: str | None = Field(None, description="Commit id to record when the sources are not a git checkout.")

    def max_bytes(self, device: str) -> int | None:
        """The largest tensor per rank in bytes; None: no limit. Raises OptionError for a limit that is not a positive number."""
        mib = _CPU_MAX_MIB if self.max_mib is None and device == "cpu" else self.max_mib
        if mib is not None and not 0 < mib < math.inf:
            raise OptionError(f"--max_mib {mib:g} is not a size", next="give a number of MiB above 0, or leave it out")
        return None if mib is None else int(mib * _MIB)
