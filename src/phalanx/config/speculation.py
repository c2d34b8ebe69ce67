# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding as a user configures it: `SpeculativeConfig`, with vLLM's field names."""

from __future__ import annotations

import itertools
import json
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.errors import OptionError

MAX_DRAFTS = 32
"""Of num_speculative_tokens."""
MAX_PREDICTION = 2**14
"""Tokens of a request's prediction that are looked up, its first ones."""

NGRAM = ("ngram", "ngram_gpu")
Method = Literal["ngram", "ngram_gpu", "draft_model", "eagle3", "mtp"]
METHODS: tuple[str, ...] = get_args(Method)

_LOSSY = "it would accept tokens that the model does not sample"
REFUSED = {
    **dict.fromkeys(
        ("draft_tensor_parallel_size", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len"),
        "a draft model has the ranks, the back ends, the dtype of the KV cache and the length of the target",
    ),
    "quantization": "a draft model is quantized where its checkpoint is",
    "code_revision": "no code of a checkpoint is run",
    "draft_sample_method": "drafts are the most likely tokens (greedy)",
    "parallel_drafting": "models that draft all tokens in one pass are not built",
    "use_heterogeneous_vocab": "a draft model has the target's vocabulary",
    **dict.fromkeys(
        ("disable_padded_drafter_batch", "use_local_argmax_reduction", "disable_eagle_block_drop"),
        "it is a switch of the insides of vLLM",
    ),
    **dict.fromkeys(
        ("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
         "suffix_decoding_min_token_prob"),
        "suffix decoding is not built",
    ),
    "enforce_eager": "the option cuda_graphs=false is of the whole engine",
    **dict.fromkeys(
        ("posterior_threshold", "posterior_alpha", "typical_acceptance_sampler_posterior_threshold",
         "typical_acceptance_sampler_posterior_alpha", "acceptance_method", "draft_token_acceptance_method",
         "use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta", "accept_threshold_single", "accept_threshold_acc"),
        _LOSSY,
    ),
}  # fmt: skip
"""Fields that other engines have, and why there are none here."""

ELSEWHERE = {
    "speculative_algorithm": '"method"', "speculative_num_draft_tokens": '"num_speculative_tokens"',
    "speculative_num_steps": '"num_speculative_tokens"', "speculative_draft_model_path": '"model"',
    "speculative_ngram_max_match_window_size": '"prompt_lookup_max"',
    "speculative_ngram_min_match_window_size": '"prompt_lookup_min"',
    "decoding_type": '"method"', "max_draft_len": '"num_speculative_tokens"', "speculative_model": '"model"',
    "max_matching_ngram_size": '"prompt_lookup_max"', "draft_len_schedule": '"num_speculative_tokens_per_batch_size"',
    "max_concurrency": '"num_speculative_tokens_per_batch_size"',
}  # fmt: skip
"""SGLang's flags and TensorRT-LLM's fields, and the fields of speculative_config that mean the same."""


class SpeculativeConfig(BaseModel):
    """method: ngram (ngram_gpu: the same, by vLLM's other name) looks for the last tokens earlier in the request, and proposes what
    followed them. draft_model: a language model with the target's vocabulary proposes the tokens that are most likely to it.
    eagle3: so does a head that reads inner states of the target. mtp: so does the target's own module of multi-token prediction.
    model, revision: of the draft model or head, as the options of these names.
    num_speculative_tokens: drafts that a row verifies, at most. The engine chooses fewer, or none, by load and by how many are
    accepted; with num_speculative_tokens_per_batch_size, [[from, to, drafts], ...], it takes the number that is given there.
    prompt_lookup_max, prompt_lookup_min: tokens that must be found again, at most and at least.
    rejection_sample_method: standard, or synthetic for measurements: then a draft is accepted at random, and tokens mean nothing.
    synthetic_acceptance_rates: at each place of a row, given that those before are accepted; synthetic_acceptance_length: tokens
    of a row on average, from which equal rates follow.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    method: Method
    num_speculative_tokens: int = Field(ge=1, le=MAX_DRAFTS)
    model: str | None = Field(None, min_length=1)
    revision: str | None = None
    prompt_lookup_max: int | None = Field(None, ge=1, le=64)
    prompt_lookup_min: int | None = Field(None, ge=1, le=64)
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None

    @classmethod
    def of(cls, value: Any) -> SpeculativeConfig:
        """From a mapping, or JSON text. Raises OptionError naming the field."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise OptionError(f"speculative_config={value!r} is no JSON", why=str(error), next=_EXAMPLE) from None
        if not isinstance(value, dict):
            raise OptionError(f"speculative_config={value!r} is not valid", why="it must be a JSON object", next=_EXAMPLE)
        for name in value:
            plain = str(name).lstrip("-").replace("-", "_")
            if plain in REFUSED:
                raise OptionError(f"speculative_config: {name!r} is not supported", why=REFUSED[plain], next="leave it out")
            if plain in ELSEWHERE:
                raise OptionError(f"speculative_config: {name!r} is another engine's name", next=f"the field is {ELSEWHERE[plain]}")
        if value.get("method") not in (None, *METHODS):
            raise OptionError(
                f"speculative_config: method {value['method']!r} is not built", next=f"methods are {', '.join(METHODS)}"
            )
        if value.get("rejection_sample_method") == "block":
            raise OptionError(
                "speculative_config: rejection_sample_method 'block' is not built",
                why="a draft is accepted where the sampler draws the same token by its own noise", next="leave it out",
            )  # fmt: skip
        try:
            config = cls(**value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            raise OptionError(f"speculative_config: {name} is not valid", why=first["msg"], next=_EXAMPLE) from None
        config._check()
        return config

    def _check(self) -> None:
        alone = self.method in (*NGRAM, "mtp")
        if alone == (self.model is not None):
            raise OptionError(
                f"speculative_config: method {self.method!r} {'takes no' if alone else 'needs a'} model",
                next="leave it out" if alone else 'name the folder or the Hub id of the draft model or head as "model"',
            )
        if self.method not in NGRAM and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise OptionError(f"speculative_config: method {self.method!r} looks up no prompt", next="leave prompt_lookup_* out")
        if self.lookup_min > self.lookup_max:
            raise OptionError(
                f"speculative_config: prompt_lookup_min={self.lookup_min} exceeds prompt_lookup_max={self.lookup_max}"
            )
        if self.revision is not None and self.model is None:
            raise OptionError(
                f"speculative_config: revision={self.revision!r} does nothing", why=f"method {self.method!r} takes no model",
                next="leave it out; the option revision is that of the target",
            )  # fmt: skip
        table = self.num_speculative_tokens_per_batch_size
        if table is not None and not table:
            raise OptionError(
                "speculative_config: num_speculative_tokens_per_batch_size is empty: no row would verify drafts",
                next="leave it out, and the engine chooses; or leave speculative_config out",
            )
        for one, other in itertools.pairwise(sorted(table or [])):
            if other[0] <= one[1]:
                raise OptionError(
                    f"speculative_config: num_speculative_tokens_per_batch_size has {list(one)} and {list(other)}",
                    why="a number of rows is in both", next="let each entry begin behind the one before",
                )  # fmt: skip
        for first, last, drafts in table or []:
            if not 1 <= first <= last or not 0 <= drafts <= self.num_speculative_tokens:
                raise OptionError(
                    f"speculative_config: num_speculative_tokens_per_batch_size has {[first, last, drafts]}",
                    why="each entry is [from, to, drafts], with 1 <= from <= to and drafts up to num_speculative_tokens",
                )
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        synthetic = self.rejection_sample_method == "synthetic"
        if ((rates is None) == (length is None)) if synthetic else (rates is not None or length is not None):
            raise OptionError(
                "speculative_config: synthetic acceptance is not valid",
                why="rejection_sample_method 'synthetic' takes one of synthetic_acceptance_rates and synthetic_acceptance_length; "
                "no other method takes any",
            )
        count = self.num_speculative_tokens
        if rates is not None and (len(rates) != count or not all(0 <= rate <= 1 for rate in rates)):
            raise OptionError(
                "speculative_config: synthetic_acceptance_rates are not valid", why=f"they are {count} numbers of 0 to 1"
            )
        if length is not None and not 1 <= length <= count + 1:
            raise OptionError(f"speculative_config: synthetic_acceptance_length={length} is not from 1 to {count + 1}")

    @property
    def keeps_kv(self) -> bool:
        """Whether drafts have keys and values in the blocks of their request before they are verified."""
        return self.method not in NGRAM

    @property
    def lookup_max(self) -> int:
        """As vLLM: where one of the two is given, the other is equal; 5 where none is."""
        return self.prompt_lookup_max or self.prompt_lookup_min or 5

    @property
    def lookup_min(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or 5

    def max_prediction(self, max_seq_len: int) -> int:
        """How many tokens of a request's prediction are looked up."""
        return min(MAX_PREDICTION, max_seq_len) if self.method in NGRAM else 0

    @property
    def acceptance(self) -> list[float] | None:
        """Synthetic rates by place; None: tokens decide."""
        if self.synthetic_acceptance_length is None:
            return self.synthetic_acceptance_rates
        return equal_rates(self.synthetic_acceptance_length, self.num_speculative_tokens)

    def canonical(self) -> str:
        """JSON of what was given: equal configurations have equal texts."""
        return json.dumps(self.model_dump(exclude_unset=True), sort_keys=True)


def equal_rates(length: float, drafts: int) -> list[float]:
    """How often a draft is accepted if those before it are, the same at each place, for rows of `length` tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(60):  # 1 + r + r^2 + ... grows with r
        rate = (low + high) / 2
        short = sum(rate**place for place in range(drafts + 1)) < length
        low, high = (rate, high) if short else (low, rate)
    return [low] * drafts


_EXAMPLE = """for example --speculative_config '{"method": "ngram", "num_speculative_tokens": 4}'"""
