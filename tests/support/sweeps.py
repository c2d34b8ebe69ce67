# SPDX-License-Identifier: Apache-2.0
"""The tests that `make test` leaves to `make test-all`: clusters, grids, fuzz, soaks and variants of kernels."""

from __future__ import annotations

SWEEPS = (
    # Clusters: several hosts in namespaces, Ray, Kubernetes. `test_node.py` and `test_rank_executor.py` start ranks.
    "acceptance/test_ray_hosts.py", "acceptance/test_two_hosts.py", "acceptance/test_kubelet.py", "acceptance/test_hostile_host.py",
    "acceptance/test_paths.py", "deploy/test_k8s_schemas.py", "deploy/test_ray_application.py",
    "executor/test_node.py::*stranger*", "executor/test_node.py::*another_cluster_token*", "executor/test_late_names.py",
    "executor/test_launcher_kernel_cache.py", "executor/test_launcher_busy_neighbours.py",
    # Tokens in every layout: one of tensor and of pipeline parallel size 2 stays.
    "acceptance/test_tokens.py::*-[!2]-?]", "acceptance/test_tokens.py::*-2-[!2]]",
    "acceptance/test_tokens_experts.py::*layout[!1]*", "acceptance/test_tokens_experts.py::*eight_ranks*",
    "acceptance/test_tokens_experts.py::*either_exchange*[!D]]",
    "acceptance/test_tokens_context_parallel.py::*[[]tp*", "acceptance/test_tokens_context_parallel.py::*module*",
    "acceptance/test_tokens_deepseek.py::*layout[!0]*", "acceptance/test_tokens_gpt_oss.py::*layout[!0]*",
    "acceptance/test_everything.py", "acceptance/test_experts.py::*rebalance*", "acceptance/test_fp8_error.py",
    "acceptance/test_host_memory_recurrent.py::*gated delta*", "acceptance/test_step_kernels.py",
    "acceptance/test_state_drift.py::*hundreds*",
    "worker/test_token_return.py", "worker/test_memory_profile_variants.py",
    "worker/test_cuda_graphs_stages.py::*too_large*", "worker/test_cuda_graphs_mixed.py::*[!2]]", "worker/test_cuda_graphs_dp.py",
    "worker/test_cuda_graphs_forced.py", "worker/speculation/test_verification.py::*ranks*",
    "worker/speculation/test_build.py::*[pe]p2]",
    "models/layers/test_expert_exchange.py::*random_routing*",
    "models/test_kv_scales.py::*plain-names*",
    # Fuzz, crowds and soaks of a server.
    "serve/test_app_schemathesis.py", "serve/test_app_fuzz.py", "serve/test_app_overload.py", "serve/test_app_soak.py",
    "serve/test_app_worst_bodies.py", "serve/test_app_structured_output.py::*behind_four*", "serve/test_app_clock.py",
    "serve/test_app_surroundings.py", "serve/test_allocator.py", "serve/structured_output/test_json_schema_fuzz.py",
    "serve/test_app_bodies_beside_streams.py", "engine/test_scheduler_fuzz.py", "config/test_model_fuzz.py",
    "models/test_checkpoint_fuzz.py", "serve/test_llm.py::*pressure*", "serve/test_llm.py::*torchrun*",
    "serve/test_llm_deterministic.py::*any_crowd[[]?p1]", "serve/test_llm_deterministic.py::*any_crowd[[]pp2]",
    # The tuner's and the planner's whole runs, and pictures.
    "tune/test_cli.py::*one_command*", "tune/test_cli.py::*finished_record*", "tune/test_html_report.py::*two_dtypes*",
    "tune/test_html_report.py::*layers_with*", "planner/test_search.py::*more_*", "planner/test_simulate.py::*kept_throughput*",
    "bench/prediction/test_calibrate.py::*points_of_the_demo*", "bench/test_evidence.py::*the_demo_agrees*",
    "health/test_failed_start.py::*remedy*",
    # What `make check` runs, and proofs that others of their kind stand for.
    "architecture/*", "scripts/test_train_eagle3.py::*accepts*", "acceptance/test_adapters.py::*[[]1-1]",
    # The logits of each family are test_registry's, in models; of the servers, one of each kind of family stays.
    "acceptance/test_tokens_recurrent.py::*granite-fp8*", "acceptance/test_tokens_recurrent.py::*nemotron-fp8*",
    "acceptance/test_tokens_recurrent.py::*next-layout0]", "acceptance/test_tokens_recurrent.py::*transformers[[]3.5*",
    "acceptance/test_tokens_recurrent.py::*state_of_the_prefix[[]granite*", "acceptance/test_tokens_recurrent.py::*5000_tokens*",
    "acceptance/test_tokens_traits.py::*transformers[[][!gl]*", "acceptance/test_tokens_traits.py::*transformers[[]gemma[!4]*",
    "acceptance/test_tokens_traits.py::*glm4_moe-layout1]", "acceptance/test_tokens_traits.py::*llama4-layout[67]]",
    "models/test_eagle3.py::test_a_head_changes_no_answer[[]1-?]", "worker/speculation/test_build.py::*no_answer[[]own]",
    "worker/test_warmup_record.py::*another*", "worker/test_warmup_record.py::*costs_time_only*",
    "serve/test_app_predictions.py::*sampling[1-9]]", "serve/test_app_calls_or_answer.py::*False]",
    "acceptance/test_documents.py::*front_page*", "acceptance/test_documents.py::*python_api*",
    # Kernels: each is compiled for sm_90 and run in the interpreter; other architectures, and the slowest variants, are here.
    "comm/test_twoshot.py::*scales_compile*", "kernels/attention/test_prefill.py::*fp32_fits*",
    "kernels/attention/test_decode.py::*fits_a_multiprocessor[[]*[!1][!6]-???]",
    "kernels/attention/test_prefill_hopper.py::test_compiles[[]*fp16*",
    "kernels/attention/test_prefill_hopper.py::test_compiles[[]False*",
    "kernels/attention/test_latent_decode_hopper.py::test_compiles[[]*fp16*",
    "kernels/attention/test_latent_decode_hopper.py::test_compiles[[]*[!6][!4]]",
    "kernels/moe/test_grouped_gemm.py::test_compiles[[]90-*row-[14]*", "kernels/moe/test_biased_gemm.py::test_compiles[[]90-*-1]",
    "kernels/moe/test_biased_gemm.py::test_compiles[[]90-mxfp4-1024]",
    "kernels/moe/test_biased_gemm.py::test_compiles[[]90-*zeros*",
    "kernels/gemm/test_block_gemm.py::test_compiles_in_e4m3[[]89*",
    "kernels/*::*compile*80*", "kernels/*::*compile*100*", "comm/*::*compile*80*", "comm/*::*compile*100*",
    "kernels/attention/test_latent_decode.py::test_compiles*", "kernels/attention/test_split_reduce.py::*interpreter*",
    "kernels/moe/test_biased_gemm.py::*interpreter*", "models/layers/attention/test_triton.py::*zeros*",
    "models/layers/test_linear_gemv.py::*interpreter*",
)  # fmt: skip
"""Patterns of fnmatch for files below tests/, or for "file::test[parameters]"."""
