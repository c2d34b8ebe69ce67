# SPDX-License-Identifier: Apache-2.0
"""Flags of vLLM, SGLang and TensorRT-LLM, and what they are here: hints of errors, and the tables of docs/coming_from.md.

A flag that has the name of an option of the same meaning is in `SAME`, and needs no hint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple


class Counterpart(NamedTuple):
    """ours: the option that means the same, "no_..." for one that is switched off; "" where there is none. note: how it differs, or
    why there is none."""

    ours: str = ""
    note: str = ""


_ARGUMENT = Counterpart(note="the model is the first argument")
_FRACTION = Counterpart("kv_cache_free_gpu_memory_fraction", "of the memory that weights and graphs leave, not of the GPU")
_QUANTIZED = Counterpart("dtype", "fp8 or int4 quantize while loading; quantized checkpoints need no option")
_GROUPS = Counterpart("expert_parallel_size", "the number of groups with data-parallel attention")
_EXPERTS = Counterpart("moe_expert_parallel_size", "tensor_parallel_size for whole experts on each rank")
_EAGER = Counterpart("no_cuda_graphs")
_REPLICAS = Counterpart("replicas", "for data-parallel attention over experts: expert_parallel_size")
_LORA = Counterpart("max_loras", "above 0")
_OFFLOAD = Counterpart(note="weights are not offloaded to host memory; for cached prefixes: --kv_host_memory")
_HOST_MEMORY = Counterpart("kv_host_memory", "in bytes, of a host; or auto")
_SPLIT_SERVERS = Counterpart(note="prefill and decode run on the same ranks; separate servers are not supported")
_MULTIMODAL = Counterpart(note="models read and write text only")
_CONTEXT_PARALLEL = Counterpart(note="prompts are not divided; for a cache of latents: --decode_context_parallel_size")
_NO_CODE = Counterpart(note="no code of a checkpoint or a user is run")
_HUB_FOLDER = Counterpart(note="set HF_HOME")
_ONE_GRAMMAR = Counterpart(note="there is one back end of structured output, llguidance")
_ATTENTION = Counterpart(note="the back end of attention is chosen by model and GPU")
_ARRIVAL = Counterpart(note="requests run in order of arrival")
_TLS = Counterpart(note="the server has no TLS; put a proxy in front")
_COMPILE = Counterpart(note="models are not compiled; kernels and graphs are part of the engine")
_OVERLAP = Counterpart(note="not needed: the next step is always scheduled while one runs")
_METRICS = Counterpart(note="not needed: /metrics is always there")
_SERVER_PROCESS = Counterpart(note="one server process; bodies over 64 KiB are read by others")

VLLM = {
    "model": _ARGUMENT,
    "max-num-seqs": Counterpart("max_batch_size"),
    "max-model-len": Counterpart("max_seq_len"),
    "max-num-batched-tokens": Counterpart("max_num_tokens"),
    "gpu-memory-utilization": _FRACTION,
    "kv-cache-memory-bytes": Counterpart("kv_cache_bytes"),
    "block-size": Counterpart("kv_block_size"),
    "quantization": _QUANTIZED,
    "data-parallel-size": _REPLICAS,
    "enable-expert-parallel": _EXPERTS,
    "enable-eplb": Counterpart("rebalance_experts_every", "in seconds"),
    "num-redundant-experts": Counterpart("redundant_experts"),
    "all2all-backend": Counterpart("expert_exchange"),
    "enforce-eager": _EAGER,
    "disable-custom-all-reduce": Counterpart("allreduce_strategy", "NCCL"),
    "distributed-executor-backend": Counterpart("launcher", "local or ray"),
    "allowed-origins": Counterpart("cors_origins", "separated by commas"),
    "enable-auto-tool-choice": Counterpart(note="not needed: calls are parsed where the chat template has tools"),
    "enable-prompt-tokens-details": Counterpart(note="not needed: usage always has cached_tokens"),
    "async-scheduling": _OVERLAP,
    "disable-log-stats": _METRICS,
    "enable-log-requests": Counterpart("log_requests"),
    "disable-log-requests": Counterpart(note="not needed: requests are logged with --log_requests alone"),
    "enable-request-id-headers": Counterpart(note="not needed: X-Request-Id is always read and sent"),
    "uvicorn-log-level": Counterpart("log_level"),
    "override-generation-config": Counterpart(note="fields of requests override generation_config.json"),
    "guided-decoding-backend": _ONE_GRAMMAR,
    "structured-outputs-config": _ONE_GRAMMAR,
    "attention-backend": _ATTENTION,
    "compilation-config": _COMPILE,
    "max-logprobs": Counterpart(note="20 alternatives at most"),
    "scheduling-policy": _ARRIVAL,
    "api-server-count": _SERVER_PROCESS,
    "download-dir": _HUB_FOLDER,
    "hf-token": Counterpart(note="set HF_TOKEN"),
    "trust-remote-code": _NO_CODE,
    "tokenizer-mode": Counterpart(note="one reader of tokenizers, of tokenizer.json"),
    "ssl-keyfile": _TLS,
    "ssl-certfile": _TLS,
    "enable-lora": _LORA,
    "swap-space": _OFFLOAD,
    "cpu-offload-gb": _OFFLOAD,
    "kv-offloading-size": _HOST_MEMORY,
    "kv-transfer-config": _SPLIT_SERVERS,
    "prefill-context-parallel-size": _CONTEXT_PARALLEL,
    "limit-mm-per-prompt": _MULTIMODAL,
    "mm-processor-kwargs": _MULTIMODAL,
}
SGLANG = {
    "model-path": _ARGUMENT,
    "tokenizer-path": Counterpart("tokenizer"),
    "context-length": Counterpart("max_seq_len"),
    "max-running-requests": Counterpart("max_batch_size"),
    "max-queued-requests": Counterpart("max_num_queued_reqs"),
    "mem-fraction-static": _FRACTION,
    "max-total-tokens": Counterpart("kv_cache_bytes", "in bytes per rank"),
    "chunked-prefill-size": Counterpart("max_num_tokens", "per step, decode included"),
    "max-prefill-tokens": Counterpart("max_num_tokens", "per step, decode included"),
    "page-size": Counterpart("kv_block_size"),
    "quantization": _QUANTIZED,
    "tp": Counterpart("tensor_parallel_size"),
    "dp": _REPLICAS,
    "dp-size": _REPLICAS,
    "data-parallel-size": _REPLICAS,
    "enable-dp-attention": _GROUPS,
    "ep": _EXPERTS,
    "enable-eplb": Counterpart("rebalance_experts_every", "in seconds"),
    "ep-num-redundant-experts": Counterpart("redundant_experts"),
    "moe-a2a-backend": Counterpart("expert_exchange"),
    "dist-init-addr": Counterpart("master_addr", "without the port: master_port"),
    "dist-timeout": Counterpart("start_timeout"),
    "watchdog-timeout": Counterpart("step_timeout"),
    "random-seed": Counterpart("seed"),
    "sampling-defaults": Counterpart("generation_config", "model is auto, openai is none"),
    "disable-radix-cache": Counterpart("no_enable_prefix_caching"),
    "disable-cuda-graph": _EAGER,
    "disable-custom-all-reduce": Counterpart("allreduce_strategy", "NCCL"),
    "enable-deterministic-inference": Counterpart("deterministic", "16 bit and FP8"),
    "enable-metrics": _METRICS,
    "log-requests-level": Counterpart("log_requests", "content is never logged"),
    "enable-trace": Counterpart("otlp_traces_endpoint"),
    "enable-memory-saver": Counterpart("enable_sleep_mode", "then POST /sleep, /wake_up and /weights/update"),
    "disable-overlap-schedule": _OVERLAP,
    "stream-interval": Counterpart(note="not needed: tokens that a client has not read yet come as one event"),
    "load-balance-method": Counterpart(note="a request goes to the replica that has the least work for it"),
    "grammar-backend": _ONE_GRAMMAR,
    "enable-torch-compile": _COMPILE,
    "schedule-policy": _ARRIVAL,
    "schedule-conservativeness": _ARRIVAL,
    "download-dir": _HUB_FOLDER,
    "trust-remote-code": _NO_CODE,
    "ssl-keyfile": _TLS,
    "ssl-certfile": _TLS,
    "enable-lora": _LORA,
    "lora-paths": Counterpart("lora_modules", "NAME=FOLDER"),
    "max-loras-per-batch": Counterpart("max_loras", "those without an adapter do not count"),
    "enable-hierarchical-cache": _HOST_MEMORY,
    "cpu-offload-gb": _OFFLOAD,
    "disaggregation-mode": _SPLIT_SERVERS,
    "attention-context-parallel-size": _CONTEXT_PARALLEL,
    "enable-multimodal": _MULTIMODAL,
}
TENSORRT_LLM = {
    "free_gpu_memory_fraction": Counterpart("kv_cache_free_gpu_memory_fraction"),
    "tool_parser": Counterpart("tool_call_parser"),
    "extra_llm_api_options": Counterpart("config", "its keys are the options of this page"),
    "max_input_len": Counterpart("max_seq_len", "prompt and output"),
    "enable_attention_dp": _GROUPS,
    "tokens_per_block": Counterpart("kv_block_size"),
    "enable_block_reuse": Counterpart("enable_prefix_caching"),
    "max_queue_size": Counterpart("max_num_queued_reqs"),
    "cuda_graph_config": Counterpart("cuda_graphs", "sizes are chosen"),
    "quant_config": _QUANTIZED,
    "gpus_per_node": Counterpart("nnodes", "each host runs the same number of ranks"),
    "disable_overlap_scheduler": _OVERLAP,
    "backend": Counterpart(note="there is one engine"),
    "attn_backend": _ATTENTION,
    "guided_decoding_backend": _ONE_GRAMMAR,
    "num_postprocess_workers": _SERVER_PROCESS,
    "max_beam_width": Counterpart(note="beam search is not supported"),
    "custom_tokenizer": _NO_CODE,
    "custom_module_dirs": _NO_CODE,
    "trust_remote_code": _NO_CODE,
    "lora_config": _LORA,
    "enable_lora": _LORA,
    "host_cache_size": _HOST_MEMORY,
    "server_role": _SPLIT_SERVERS,
    "metadata_server_config_file": _SPLIT_SERVERS,
    "disagg_cluster_uri": _SPLIT_SERVERS,
    "context_parallel_size": _CONTEXT_PARALLEL,
    "cp_size": _CONTEXT_PARALLEL,
    "moe_cluster_parallel_size": Counterpart(note="an expert is split over ranks, not over clusters"),
    "media_io_kwargs": _MULTIMODAL,
}
ENGINES = {"vLLM": VLLM, "SGLang": SGLANG, "TensorRT-LLM": TENSORRT_LLM}

_ALL = (
    "host", "port", "dtype", "revision", "chat_template", "reasoning_parser", "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip
SAME = {
    "vLLM": (
        *_ALL, "tokenizer", "served_model_name", "api_key", "tool_call_parser", "kv_cache_dtype", "load_format", "seed",
        "enable_prefix_caching", "enable_chunked_prefill", "generation_config", "speculative_config", "skip_tokenizer_init",
        "nnodes", "node_rank", "master_addr", "master_port", "otlp_traces_endpoint", "enable_sleep_mode", "max_loras",
        "max_lora_rank", "lora_modules", "decode_context_parallel_size",
    ),
    "SGLang": (
        *_ALL, "served_model_name", "api_key", "tool_call_parser", "kv_cache_dtype", "load_format", "skip_tokenizer_init",
        "tp_size", "pp_size", "nnodes", "node_rank", "log_level", "log_requests", "otlp_traces_endpoint", "max_lora_rank",
    ),
    "TensorRT-LLM": (
        *_ALL, "tokenizer", "tp_size", "pp_size", "moe_expert_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len",
        "kv_cache_free_gpu_memory_fraction", "enable_chunked_prefill", "allreduce_strategy", "config", "log_level",
        "otlp_traces_endpoint",
    ),
}  # fmt: skip
"""Flags with the name and the meaning of an option here, its short name included."""

_SAMPLING = {
    "max_new_tokens": ("SGLang", "max_tokens"),
    "num_return_sequences": ("transformers", "n"),
}
"""Fields of requests: other name -> whose it is, and ours."""


def hint(name: str, known: Collection[str], spell: Callable[[str], str]) -> str:
    """What another engine's name for an option is here; "" for a name of none, or where its counterpart is not in `known`.

    name: with underscores. spell: how an option is written where the error appears, for example with "--"."""
    is_flag = spell("").startswith("--")
    for engine, flags in ENGINES.items():
        for flag, (ours, note) in flags.items():
            if flag.replace("-", "_") != name:
                continue
            theirs = f"{engine}'s {f'--{flag}' if is_flag else name}"
            if not ours:
                return f"{theirs}: {note}"
            option = ours.removeprefix("no_")
            if option in known:
                own = spell(ours) if is_flag or ours == option else f"{spell(option)} set to false"
                return f"{theirs} is {own} here" + (f" ({note})" if note else "")
    engine, ours = _SAMPLING.get(name, ("", ""))
    return f"{engine}'s {name} is {spell(ours)} here" if engine and ours in known else ""
