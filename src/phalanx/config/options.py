# SPDX-License-Identifier: Apache-2.0
"""What the user asks of an engine: `EngineOptions`. Frozen; an unknown name is an error that names the nearest one."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from phalanx.errors import OptionError, UnknownOption

_DTYPE_SPELLINGS = {
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
}  # fmt: skip


def _dtype_name(value: Any) -> Any:
    return _DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[Literal["auto", "fp32", "fp16", "bf16", "fp8"], BeforeValidator(_dtype_name)]


class EngineOptions(BaseModel):
    """Everything that decides how an engine runs. "auto" becomes concrete in `resolve`, with its reason.

    Units: memory in bytes, time in seconds, lengths in tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(min_length=1, description="A folder, a Hub id, or 'demo'.")
    tokenizer: str | None = Field(None, description="A folder or Hub id of another tokenizer; the model's own otherwise.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    dtype: Dtype = Field(
        "auto",
        description="Of weights and arithmetic: auto takes the checkpoint's, and fp32 on CPU. fp8: products in FP8, quantized as a "
        "16-bit checkpoint is read; what is between them as auto. A checkpoint in FP8 stays so whatever is said here.",
    )
    kv_cache_dtype: Literal["auto", "model", "fp8"] = Field(
        "auto", description="model: as the arithmetic; fp8: half of that; auto: fp8 where the checkpoint was made for it."
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="auto and safetensors read the checkpoint; dummy makes seeded random weights on the device."
    )
    skip_tokenizer_init: bool = Field(False, description="Token ids in and out only.")
    seed: int = Field(0, description="Of dummy weights, and of requests that bring none.")
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto takes GPUs where there are any.")

    plan: Literal["off", "auto"] = Field(
        "off", description="auto: the planner chooses tensor_parallel_size and pipeline_parallel_size for this host, and logs why."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that split every layer.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Stages of contiguous layers.")
    expert_parallel_size: int = Field(1, ge=1, description="Groups over which experts are split; only 1 is built so far.")
    moe_expert_parallel_size: int = Field(1, ge=1, description="Experts split inside the tensor-parallel group; only 1 so far.")
    nnodes: int = Field(1, ge=1, description="Hosts; the ranks are spread evenly over them.")
    node_rank: int = Field(0, ge=0, description="This host's number, 0 .. nnodes-1; 0 holds the engine.")
    master_addr: str = Field("127.0.0.1", description="Address of host 0, as every host reaches it.")
    master_port: int = Field(29400, ge=1, le=65535, description="First of the two ports that host 0 listens on for ranks.")

    max_batch_size: int = Field(256, ge=1, le=1 << 16, description="Requests that run at once, at most.")
    max_num_tokens: int | None = Field(None, ge=1, description="Tokens of one step, at most; None: 8192 on GPU, 2048 on CPU.")
    max_seq_len: int | None = Field(None, ge=2, description="Prompt and output of one request; None: the model's own limit.")
    kv_cache_free_gpu_memory_fraction: float = Field(
        0.9, gt=0.0, le=1.0, description="Of the GPU memory left after weights, graphs and workspaces, the KV cache's part."
    )
    kv_cache_bytes: int | None = Field(None, ge=1, description="KV bytes per rank, instead of the fraction; on CPU None: 1 GiB.")
    kv_block_size: int = Field(16, ge=1, le=256, description="Tokens in one KV block.")
    enable_prefix_caching: bool = Field(True, description="Share KV blocks between requests with equal beginnings.")
    enable_chunked_prefill: bool = Field(True, description="Split a long prompt over steps; otherwise it must fit one step.")

    allreduce_strategy: Literal["AUTO", "NCCL", "ONESHOT", "TWOSHOT"] = Field(
        "AUTO", description="AUTO asks the machine's table; a name forces one where it can run. On CPU, NCCL means gloo."
    )
    deterministic: bool = Field(False, description="Pin rank-order fp32 reductions (no NCCL sums).")
    cuda_graphs: bool = Field(True, description="Replay captured steps on GPU: decode steps, and small steps with prompts.")
    kernel_cache_dir: str | None = Field(
        None, min_length=1,
        description="Folder that keeps compiled kernels, made if missing; each host has its own. It wins over Triton's and "
        "FlashInfer's variables. None: the folders that these name, or under the user's home.",
    )  # fmt: skip
    stall_timeout: float = Field(20.0, gt=0, description="Seconds without a sign of life after which a rank is called stalled.")
    step_timeout: float = Field(300.0, gt=0, description="Seconds after which a step that no rank settles is an error.")
    start_timeout: float = Field(600.0, gt=0, description="Seconds that ranks may take to start.")

    @classmethod
    def of(cls, **asked: Any) -> EngineOptions:
        """Build from keywords. Raises UnknownOption naming the nearest known name, OptionError for a bad value."""
        refuse_unknown(asked, cls.model_fields, what="LLM option")
        try:
            return cls(**{name: str(value) if isinstance(value, Path) else value for name, value in asked.items()})
        except ValidationError as error:
            raise option_error(error) from None

    @property
    def world_size(self) -> int:
        """Ranks in all: pp x dp x tp, with dp = ep (design, "Layout of ranks")."""
        return self.pipeline_parallel_size * self.expert_parallel_size * self.tensor_parallel_size


def refuse_unknown(asked: dict[str, Any], known: Any, *, what: str) -> None:
    """Raise UnknownOption for the first name in `asked` that `known` does not hold, naming the nearest one."""
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
            raise UnknownOption(
                f"{what} {name!r} is unknown",
                next=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}",
            )


def option_error(error: ValidationError) -> OptionError:
    """The first complaint of pydantic in our words."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "options"
    return OptionError(f"{name}={first.get('input')!r} was asked for", why=first["msg"])
