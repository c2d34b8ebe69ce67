# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from phalanx.config import EngineOptions, SamplingParams
from phalanx.config.serving import ServeOptions
from phalanx.errors import OptionError, UnknownOption


def test_unknown_keyword_names_the_nearest():
    with pytest.raises(TypeError, match=r"'tensor_paralel_size' is unknown; did you mean 'tensor_parallel_size'\?"):
        EngineOptions.of(model="m", tensor_paralel_size=2)
    with pytest.raises(UnknownOption, match="did you mean 'shutdown_timeout'"):
        ServeOptions.of(shutdown_timeot=3)


def test_keyword_like_nothing_lists_the_known():
    with pytest.raises(UnknownOption, match=r"known: .*max_batch_size"):
        EngineOptions.of(model="m", zzzzzz=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 0), ("max_batch_size", -1), ("kv_cache_free_gpu_memory_fraction", 0.0),
        ("kv_cache_free_gpu_memory_fraction", 1.5), ("dtype", "int3"), ("device", "tpu"), ("stall_timeout", float("nan")),
        ("max_seq_len", "many"), ("max_seq_len", 1), ("master_port", 70000), ("max_batch_size", 10**9),
        ("kernel_cache_dir", ""),
    ],
)  # fmt: skip
def test_bad_values_name_option_and_value(name, value):
    with pytest.raises(OptionError, match=name):
        EngineOptions.of(model="m", **{name: value})


@pytest.mark.parametrize(("spelling", "dtype"), [("float16", "fp16"), ("bfloat16", "bf16"), ("half", "fp16"), ("fp32", "fp32")])
def test_dtype_spellings(spelling, dtype):
    assert EngineOptions.of(model="m", dtype=spelling).dtype == dtype


@pytest.mark.parametrize("model", ["", 5, None])
def test_a_model_is_a_name(model):
    with pytest.raises(OptionError, match="model="):
        EngineOptions.of(model=model)


def test_options_are_frozen_and_a_path_is_a_model():
    options = EngineOptions.of(model=Path("folder"), kernel_cache_dir=Path("kernels"))
    assert (options.model, options.kernel_cache_dir) == ("folder", "kernels")
    with pytest.raises(ValidationError):
        options.model = "other"


def test_world_is_pp_x_ep_x_tp():
    assert EngineOptions.of(model="m", tensor_parallel_size=4, pipeline_parallel_size=2, expert_parallel_size=3).world_size == 24


def test_a_key_is_never_shown():
    assert "hunter2" not in repr(ServeOptions.of(api_key="hunter2"))
    with pytest.raises(OptionError) as refused:
        ServeOptions.of(api_key=["hunter2"])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("prefix", ["", "9a", "a b", "a:b"])
def test_a_metrics_prefix_must_be_a_name(prefix):
    with pytest.raises(OptionError, match="metrics_prefix"):
        ServeOptions.of(metrics_prefix=prefix)


def test_a_name_that_is_near_to_none_gets_the_list() -> None:
    with pytest.raises(UnknownOption, match="'best_of' is unknown; known: "):
        SamplingParams(best_of=2)
