# SPDX-License-Identifier: Apache-2.0
"""The common fields of chat and completion requests, and `Neutral`: a known field that is accepted with a neutral value only.

Requests are validated in pydantic's strict JSON mode: "1" is no number, 1 is no boolean, and an unknown name is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from phalanx.config.sampling_params import MAX_LOGPROBS, MAX_TOKEN_COUNT

MAX_N = 128
"""Maximum number of completions per prompt, as in `SamplingParams`."""
MAX_STOPS = 16
MAX_LOGIT_BIAS = 4096
"""Entries of `logit_bias`."""
MAX_SEED = 2**63 - 1 - MAX_N
"""Completion i of n uses seed + i, which must fit into a signed 64-bit integer."""


class Neutral:
    """Annotates a field of the API that is not supported, except with these values (and null, if the field is not `required`).

    Any other value is an error of the type "cannot_honour" with `why` in its message.
    """

    def __init__(self, *values: Any, why: str, required: bool = False) -> None:
        self.values, self.why = (values if required else (None, *values)), why

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Callable[[CoreSchema], Any]) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def _check(self, value: Any) -> Any:
        if any(type(value) is type(known) and value == known for known in self.values):
            return value
        raise PydanticCustomError("cannot_honour", "is not supported: {why}", {"why": self.why})


class FirstError(FailFast):
    """Annotates a list whose validation ends at its first error: a long list may have a million. Can be a member of a union."""

    __hash__ = object.__hash__


class Body(BaseModel):
    """Base of all request bodies: strict types, no unknown field, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
SchemaObject = dict[str, Any]


class StreamOptions(Body):
    """`stream_options`: only with `stream: true`."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Neutral(False, why="chunks are not padded; remove it")] = None


class SampledRequest(Body):
    """The fields for sampling, stopping and streaming that both endpoints have."""

    model: str = Field(min_length=1, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS), FirstError()] | None = None
    logit_bias: dict[TokenIdText, Bias] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}
    )
    user: str | None = None
    # Extensions, with the names that other servers of this API use.
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_COUNT)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_COUNT)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    guided_json: SchemaObject | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)


__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_SEED",
    "MAX_STOPS",
    "Body",
    "FirstError",
    "MetadataKey",
    "MetadataValue",
    "Neutral",
    "SampledRequest",
    "SchemaObject",
    "StreamOptions",
    "TokenId",
]
