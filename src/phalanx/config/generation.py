# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's own sampling: the fields of generation_config.json that are defaults of requests.

transformers 4 wrote them into config.json before it had generation_config.json; they count where that file states none. A request
that states a field has its own value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.config.json_fields import FieldTable, JsonFields
from phalanx.config.sampling_params import SamplingParams
from phalanx.errors import ModelError, OptionError

GENERATION = "generation_config.json"
SamplingDefaults = dict[str, int | float]
"""Fields of `SamplingParams` -> the checkpoint's value."""

_FIELD_OF = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
}  # fmt: skip
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],), "begin_suppress_tokens": ([],), "constraints": ([],), "diversity_penalty": (0,),
    "dola_layers": (), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "exponential_decay_length_penalty": (), "force_words_ids": ([],), "forced_bos_token_id": (),
    "forced_decoder_ids": ([],), "forced_eos_token_id": (), "guidance_scale": (1,), "max_length": (20,), "max_time": (),
    "min_length": (0,), "no_repeat_ngram_size": (0,), "num_beams": (1,), "num_return_sequences": (1,), "penalty_alpha": (0,),
    "renormalize_logits": (False,), "sequence_bias": ([], {}), "stop_strings": ([],), "suppress_tokens": ([],),
    "token_healing": (False,), "top_h": (), "typical_p": (1,), "watermarking_config": (),
}  # fmt: skip
"""Fields that would change an answer and are not honoured: a warning names them -> the values that ask for nothing, beside null."""
_HARMLESS = """
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bos_token_id cache_config
cache_implementation compile_config continuous_batching_config decoder_start_token_id disable_compile early_stopping is_assistant
length_penalty low_memory max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
output_attentions output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens
remove_invalid_values return_dict_in_generate return_legacy_cache speculation_type target_lookbehind transformers_version
trust_remote_code use_cache use_mtp
"""
FIELDS = FieldTable.of(f"eos_token_id do_sample {' '.join([*_FIELD_OF, *WITHOUT_EFFECT])}", _HARMLESS)
"""Of generation_config.json. Those of beams alone (`length_penalty`, `early_stopping`) change nothing without beams."""


def read_sampling_defaults(generation: JsonFields, config: Mapping[str, Any]) -> SamplingDefaults:
    """generation: generation_config.json, sorted by FIELDS. config: config.json, which counts where the former states no default.

    What would change an answer and is not honoured becomes one of the `additions`.
    """
    names = ("do_sample", *_FIELD_OF, *WITHOUT_EFFECT)
    stated = {name: generation.value(name) for name in names if generation.value(name) is not None}
    file = GENERATION
    if not stated:
        stated, file = {name: config[name] for name in names if config.get(name) is not None}, "config.json"
    for name, nothing in WITHOUT_EFFECT.items():
        if name in stated and stated[name] not in nothing:
            generation.additions.append(f"{file}: {name}={stated[name]!r}")
    defaults = {field: stated[name] for name, field in _FIELD_OF.items() if name in stated}
    if stated.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def require_possible(defaults: SamplingDefaults) -> SamplingDefaults:
    """The defaults. Raises ModelError if no request can have them."""
    try:
        SamplingParams(**with_defaults({}, {"max_tokens": None, **defaults}))
    except OptionError as error:
        raise ModelError(
            f"{GENERATION} states impossible defaults of requests", why=str(error),
            next="correct the file, or give --generation_config none",
        ) from None  # fmt: skip
    return defaults


def with_defaults(stated: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request and, for those that it does not state, the defaults. A default length gives way to a stated one."""
    fields = {**defaults, **stated}
    if (most := fields.get("max_tokens")) is not None and fields.get("min_tokens", 0) > most:
        if "min_tokens" not in stated:
            fields["min_tokens"] = most
        elif "max_tokens" not in stated:
            fields["max_tokens"] = fields["min_tokens"]
    return fields


def defaults_line(defaults: SamplingDefaults) -> str:
    """For the log of a start."""
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"the checkpoint's defaults of requests ({GENERATION}): {values or 'none'}; --generation_config none ignores them"
