# SPDX-License-Identifier: Apache-2.0
"""The options of an engine: `EngineOptions`. Frozen; an unknown name is an error that names the nearest one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from phalanx.config.dtypes import DTYPE_SPELLINGS
from phalanx.config.other_engines import hint
from phalanx.config.speculation import ELSEWHERE, SpeculativeConfig
from phalanx.errors import OptionError, UnknownOption


def _dtype_name(value: Any) -> Any:
    return DTYPE_SPELLINGS.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[Literal["auto", "fp32", "fp16", "bf16", "fp8", "int4"], BeforeValidator(_dtype_name)]


def _speculation_text(value: Any) -> Any:
    return None if value is None else SpeculativeConfig.of(value).canonical()


def _above_zero(value: float | str | None) -> float | str | None:
    if isinstance(value, float) and not 0 < value < math.inf:
        raise ValueError("Input should be a finite number greater than 0, or 'auto'")
    return value


def _bytes_or_auto(value: object) -> object:
    if value != "auto" and not str(value).isdecimal():
        raise ValueError("Input should be a number of bytes, or 'auto'")
    return value


class EngineOptions(BaseModel):
    """All options of an engine. `resolve` replaces "auto" and None by concrete values, each with its reason.

    Units: memory in bytes, time in seconds, lengths in tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    model: str = Field(min_length=1, description="The model: a local folder, a Hugging Face Hub id, or 'demo'.")
    tokenizer: str | None = Field(None, description="Folder or Hub id of the tokenizer. None: the model's own.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub. None: the default branch.")
    dtype: Dtype = Field(
        "auto",
        description="Compute dtype. auto: the checkpoint's (fp32 on CPU). fp8: quantize the linear layers of a 16-bit checkpoint "
        "to FP8 while loading, or copy those of a 4-bit one to FP8, but not experts; everything else as with auto. int4: quantize "
        "a 16-bit checkpoint to 4-bit integers, rounded to nearest in groups of 128, for trials: checkpoints that AWQ or GPTQ "
        "calibrated lose less. Other quantized checkpoints run as they are.",
    )
    kv_cache_dtype: Literal["auto", "model", "fp8", "int8"] = Field(
        "auto",
        description="Dtype of the KV cache. auto: FP8 if the checkpoint has KV scales, else model. model: the compute dtype. "
        "fp8: half the memory of 16 bit. int8: nearly that, and closer to 16 bit than FP8: each token's key and value has a scale "
        "for each head. Not for models with latent attention.",
    )
    quantize_activations: bool = Field(
        False,
        description="In steps of more than 128 tokens, multiply weights of 4-bit integers by activations in FP8, with a scale for "
        "each token, where the GPU has FP8 GEMMs; not those of experts. docs/quantization.md has the error. False: activations "
        "stay in 16 bit.",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="auto, safetensors: read the checkpoint. dummy: make seeded random weights on the device."
    )
    expert_traffic: float | None = Field(
        None,
        ge=0,
        description="Draw experts from a power law with this exponent instead of by the router's logits, which are computed "
        "all the same; 0 is uniform. For benchmarks, with load_format dummy. None: routers choose.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Where requests have their defaults from, such as temperature. auto: the checkpoint's generation_config.json. "
        "none: the defaults of the API.",
    )
    skip_tokenizer_init: bool = Field(False, description="Load no tokenizer: prompts and outputs are token ids only.")
    seed: int = Field(0, description="Seed of dummy weights, and of requests without a seed of their own.")
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="Device type. auto: GPUs if this host has any, else CPU.")

    plan: Literal["off", "auto"] = Field(
        "off",
        description="Who chooses the layout. auto: the planner sets tensor_parallel_size, pipeline_parallel_size, "
        "expert_parallel_size, moe_expert_parallel_size, decode_context_parallel_size and replicas for this host, and logs the "
        "reasons.",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Number of ranks that each layer is split over.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Number of pipeline stages; each holds consecutive layers.")
    expert_parallel_size: int = Field(
        1,
        ge=1,
        description="Number of groups of tensor_parallel_size ranks that a layer's experts are split over. Attention is "
        "data-parallel over them: each request runs on one group, and all of them exchange tokens for their experts.",
    )
    expert_exchange: Literal["AUTO", "ALL_GATHER", "ALL_TO_ALL", "ONE_SIDED"] = Field(
        "AUTO",
        description="How tokens reach the experts of other groups, with expert_parallel_size above 1. ALL_GATHER: all tokens go to "
        "all groups. ALL_TO_ALL: each token goes once to each group that has one of its experts; steps that run as CUDA graphs use "
        "ALL_GATHER. ONE_SIDED: the same, also in graphs, by writing into the memory of the other groups' ranks. Where that is not "
        "reached, and for more tokens than it holds: ALL_GATHER. AUTO: ALL_GATHER or ONE_SIDED, by the table of this machine.",
    )
    moe_expert_parallel_size: int = Field(
        1,
        ge=1,
        description="Number of expert-parallel groups inside the tensor-parallel group; must divide tensor_parallel_size and the "
        "number of experts. An expert is split over tensor_parallel_size / moe_expert_parallel_size ranks.",
    )
    redundant_experts: int = Field(
        0,
        ge=0,
        description="Extra copies per layer, given to the most loaded experts at each rebalance. A multiple of "
        "moe_expert_parallel_size; each costs the memory of one expert.",
    )
    rebalance_experts_every: float | None = Field(
        None,
        gt=0,
        description="Seconds between two rebalances of experts, under load. None: only when POST /experts/rebalance asks for one.",
    )
    decode_context_parallel_size: int = Field(
        1,
        ge=1,
        description="Number of tensor-parallel ranks over which the tokens of a cache of latents (DeepSeek) are divided; with 1 "
        "each rank holds all of them. It must divide tensor_parallel_size. The cache holds as many times more tokens; each layer "
        "exchanges the queries of decodes and their outputs, and gathers what prompts attend to.",
    )
    replicas: int = Field(
        1,
        ge=1,
        description="Number of engines behind one server or LLM, each with a copy of the model on GPUs of its own. A request goes "
        "to the engine that has the least work for it, cached prefixes included. If one fails, the others go on.",
    )
    nnodes: int = Field(1, ge=1, description="Number of hosts. Each runs the same number of ranks.")
    node_rank: int = Field(0, ge=0, description="Number of this host, from 0 to nnodes - 1. The engine runs on host 0.")
    master_addr: str = Field("127.0.0.1", description="Address of host 0, reachable from every host.")
    master_addr_timeout: float = Field(
        5.0,
        ge=0,
        description="Seconds for which a master_addr that does not resolve is tried again. Raise it where host names are published "
        "late, as in Kubernetes; manifests set it to start_timeout.",
    )
    master_port: int = Field(29400, ge=1, le=65535, description="Port on host 0 for the ranks and further hosts.")
    cluster_token: str | None = Field(
        None,
        repr=False,
        description="Secret of at least 16 bytes that all hosts share; it authenticates and encrypts what host 0 exchanges with "
        "the others. Required for nnodes > 1. Do not pass it as a flag on shared hosts: other users can see it in the process "
        "list. Use the file or the environment.",
    )
    cluster_token_file: str | None = Field(None, min_length=1, description="File that holds the cluster token.")
    insecure_cluster: bool = Field(
        False,
        description="Allow nnodes > 1 without a cluster token: anybody who reaches the ports of host 0 can join the "
        "engine and read prompts.",
    )

    launcher: str = Field(
        "auto",
        min_length=1,
        description="What starts the processes of the ranks. local: this host, and each further host by its own command. ray: the "
        "hosts of the Ray cluster that this host belongs to. auto: ray for nnodes > 1 on a host of a Ray cluster, unless node_rank "
        "or master_addr is set; else local. Or the dotted path of a class (package.module:Name).",
    )

    max_batch_size: int = Field(256, ge=1, le=1 << 16, description="Maximum number of requests that run at once.")
    max_num_tokens: int | None = Field(None, ge=1, description="Maximum number of tokens per step. None: 8192 on GPU, 2048 on CPU.")
    max_decode_gap_ms: Annotated[float | Literal["auto"] | None, AfterValidator(_above_zero)] = Field(
        None,
        description="Milliseconds between two tokens of a request, at most: prompts are cut so that no step takes longer beside "
        "decodes, as steps are measured here. auto: four times what the step would take without prompts. None: no bound.",
    )
    max_seq_len: int | None = Field(
        None, ge=2, description="Maximum length of one request, prompt and output, in tokens. None: the model's limit."
    )
    kv_cache_free_gpu_memory_fraction: float = Field(
        0.9,
        gt=0.0,
        le=1.0,
        description="Fraction of the GPU memory left after weights, CUDA graphs and workspaces that the KV cache uses.",
    )
    kv_cache_bytes: int | None = Field(
        None, ge=1, description="Bytes of KV cache per rank, instead of the fraction. None on CPU: 1 GiB."
    )
    kv_block_size: int = Field(
        16,
        ge=1,
        le=256,
        description="Tokens per KV cache block on a rank. With decode_context_parallel_size a block is as many times larger: each "
        "of these ranks has this many of its tokens.",
    )
    enable_prefix_caching: bool = Field(True, description="Share KV cache blocks between requests that begin with the same tokens.")
    kv_host_memory: Annotated[int | Literal["auto"], BeforeValidator(_bytes_or_auto)] = Field(
        0,
        description="Bytes of host memory, for all ranks and replicas of a host together, that keep cached prefixes when they "
        "leave the device. A later request that begins alike gets them back by copy instead of computing them. auto: half of what "
        "is free. 0: none. In models some of whose layers have a state for each request, it has a state for each 4,096 tokens.",
    )
    state_snapshots: int | None = Field(
        None,
        ge=0,
        description="Prefixes whose state is kept, in models some of whose layers have a state for each request (Qwen3-Next, "
        "Qwen3.5): a hit needs it. Each takes the memory of a request's state. 0: no hits in these models. None: half of "
        "max_batch_size.",
    )
    enable_chunked_prefill: bool = Field(
        True, description="Split long prompts over several steps. Without it, each prompt must fit into one step."
    )

    speculative_config: Annotated[str | None, BeforeValidator(_speculation_text)] = Field(
        None,
        description="Speculative decoding, as JSON with vLLM's field names. Drafts of the next tokens are verified in one step; "
        'output is the same as without. {"method": "ngram", "num_speculative_tokens": 4}: drafts are what followed the last tokens '
        'where they occurred before. {"method": "draft_model", "model": MODEL, ...}: those of a smaller model of the same '
        "vocabulary; eagle3, mtp: those of a head. None: no speculation.",
    )

    max_loras: int = Field(
        0,
        ge=0,
        le=256,
        description="LoRA adapters whose requests run at once. Each takes memory on every rank, for max_lora_rank. More may be "
        "loaded: they wait in host memory, and take the place of one that is not in use. 0: no adapter can be loaded.",
    )
    max_lora_rank: int = Field(16, ge=1, le=512, description="Largest rank of an adapter that can be loaded.")

    allreduce_strategy: Literal["AUTO", "NCCL", "ONESHOT", "TWOSHOT", "RS_NORM_AG", "GEMM_RS"] = Field(
        "AUTO",
        description="All-reduce strategy. AUTO: the fastest one by the tuning table of this machine. Any other: that one wherever "
        "it can run. RS_NORM_AG and GEMM_RS: sequence parallelism between layers, TWOSHOT elsewhere. On CPU, NCCL stands for gloo.",
    )
    deterministic: bool = Field(
        False,
        description="A request's logits are the same bits whatever else is in the batch, and however its prompt is cut. On GPU: "
        "GEMMs, attention and experts have one order of sums for any number of tokens, and all-reduces sum in the order of the "
        "ranks, never by NCCL; weights in 16 bit or FP8. On CPU: each token is computed alone; prompts take as long as decodes.",
    )
    self_check: bool = Field(
        False,
        description="Check the answers before the start ends: fixed prompts run by this machine's kernels, all-reduce table, CUDA "
        "graphs and layout, and by the reference path (eager, plain torch, NCCL) on the same weights. It takes seconds, and the "
        "log has one line. Where they differ beyond rounding the start fails, and names the part that moved the answers.",
    )
    cuda_graphs: bool = Field(True, description="Use CUDA graphs for decode steps, and for steps with prompts that gain. GPU only.")
    kernel_cache_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder for compiled kernels, one per host; it is created if missing and overrides Triton's and FlashInfer's "
        "environment variables. None: the folders that those variables name, else folders in the user's home.",
    )
    stall_timeout: float = Field(20.0, gt=0, description="Seconds without a heartbeat after which a rank counts as stalled.")
    step_timeout: float = Field(
        300.0,
        gt=0,
        description="Seconds after which a step without a result is an error, at most. Where the engine has measured such steps, "
        "it is ten times what they take, and 5 s at least.",
    )
    device_progress: bool = Field(
        False,
        description="Have kernels count the collectives that a GPU has come to, so that the error of a stuck rank names the last "
        "one, in CUDA graphs too. Without it the rank and the step are named. Ranks on CPU always tell. Off: what it costs on GPUs "
        "has not been measured.",
    )
    start_timeout: float = Field(600.0, gt=0, description="Seconds within which all ranks must have started.")

    @classmethod
    def of(cls, **values: Any) -> EngineOptions:
        """Build the options from keywords. Raises UnknownOption naming the nearest known name, or OptionError for a bad value."""
        refuse_unknown(values, cls.model_fields, what="LLM option")
        try:
            return cls(**{name: str(value) if isinstance(value, Path) else value for name, value in values.items()})
        except ValidationError as error:
            raise option_error(error) from None

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """What speculative_config says."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    @property
    def max_decode_gap(self) -> float | Literal["auto"] | None:
        """max_decode_gap_ms in seconds."""
        gap = self.max_decode_gap_ms
        return gap / 1000 if isinstance(gap, float) else gap

    @property
    def max_drafts(self) -> int:
        """Drafts that a row of a step verifies, at most."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def block_size(self) -> int:
        """Tokens of a KV block, on all ranks that divide them."""
        return self.kv_block_size * self.decode_context_parallel_size

    @property
    def index_batch_size(self) -> int:
        """Of max_batch_size, the requests that run at once on one dp index."""
        return -(-self.max_batch_size // self.expert_parallel_size)

    @property
    def index_snapshots(self) -> int:
        """Of state_snapshots, those of one dp index."""
        return -(-(self.state_snapshots or 0) // self.expert_parallel_size)

    @property
    def index_states(self) -> int:
        """Of one dp index: the states that layers keep, of its slots and then of prefixes."""
        return self.index_batch_size + self.index_snapshots

    @property
    def index_num_tokens(self) -> int | None:
        """Of max_num_tokens, the tokens per step of one dp index."""
        return None if self.max_num_tokens is None else -(-self.max_num_tokens // self.expert_parallel_size)

    @property
    def world_size(self) -> int:
        """Number of all ranks: pp x dp x tp, with dp = ep (docs/layouts.md)."""
        return self.pipeline_parallel_size * self.expert_parallel_size * self.tensor_parallel_size


def refuse_unknown(values: dict[str, Any], known: Any, *, what: str, spell: Callable[[str], str] = repr) -> None:
    """Raise UnknownOption for the first name in `values` that is not in `known`, naming the nearest one, or what another engine's
    name for it is here. spell: how a name is written where the error appears."""
    for name in values:
        if name not in known:
            raise UnknownOption(f"{what} {spell(name)} is unknown", next=_nearest(name, known, spell))


def _nearest(name: str, known: Any, spell: Callable[[str], str]) -> str:
    if name in ELSEWHERE and "speculative_config" in known:
        return f"use the field {ELSEWHERE[name]} of speculative_config"
    if elsewhere := hint(name, known, spell):
        return elsewhere
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {spell(near[0])}?" if near else f"known: {', '.join(sorted(known))}"


def option_error(error: ValidationError) -> OptionError:
    """The first error that pydantic found, as an OptionError."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "options"  # what follows is which member of a union refused it
    if name == "cluster_token":
        return OptionError("cluster_token is not valid", why="it must be a string")
    why = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be", 1)
    return OptionError(f"{name}={first.get('input')!r} is not valid", why=why)
