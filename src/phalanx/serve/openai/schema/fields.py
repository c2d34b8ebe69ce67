# SPDX-License-Identifier: Apache-2.0
"""`Body`, the base of all request bodies, and the common fields of chat and completion requests.

Requests are validated in pydantic's strict JSON mode: "1" is no number, 1 is no boolean, and an unknown name is an error.
`field_table` lists the fields that are accepted or refused beside the declared ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from phalanx.config.sampling_params import MAX_LOGPROBS, MAX_TOKEN_COUNT
from phalanx.serve.openai.schema.field_table import Row, Treatment, undeclared

MAX_N = 128
"""Maximum number of completions per prompt, as in `SamplingParams`."""
MAX_STOPS = 16
MAX_CACHE_SALT = 4096
MAX_LOGIT_BIAS = 4096
"""Entries of `logit_bias`."""
MAX_SEED = 2**63 - 1
"""Completion i of n uses seed + i, which goes on at -2**63 beyond it."""


class OnlyValue:
    """Annotates a field that must have one of these values. Any other is an error of the type "cannot_honour" that names it."""

    def __init__(self, *values: Any, why: str) -> None:
        self.values, self.why = values, why

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Callable[[CoreSchema], Any]) -> dict[str, Any]:
        return {"enum": list(self.values)} if self.values else {"not": {}}

    def _check(self, value: Any) -> Any:
        if any(type(value) is type(known) and value == known for known in self.values):
            return value
        shown = repr(value)
        raise PydanticCustomError("cannot_honour", "is not supported: {why}", {"why": f"{self.why} ({shown[:60]})"})


class OneOf:
    """Annotates a union of bodies, of which a value is the first one whose `field` may have the value's; else the last. A text is
    the member that is no body. kind: tells the value of `field` in another way.

    Errors are those of that one member. Its name in their location is no identifier, by which a path leaves it out.
    """

    def __init__(self, field: str = "type", *, kind: Callable[[Any], Any] | None = None) -> None:
        self._field, self._kind = field, kind or partial(value_of, name=field)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = get_args(source)
        tags = {one: f"<{getattr(one, '__name__', 'text')}>" for one in members}
        bodies = [one for one in members if isinstance(one, type) and issubclass(one, BaseModel)]
        last, texts = tags[members[-1]], [tags[one] for one in members if one not in bodies]
        by_kind = {kind: tags[one] for one in reversed(bodies) for kind in _values(one, self._field)}

        def choose(value: Any) -> str:
            if isinstance(value, str) and texts:
                return texts[0]
            kind = self._kind(value)
            return by_kind.get(kind, last) if kind is None or isinstance(kind, str) else last

        return core_schema.tagged_union_schema({tags[one]: handler.generate_schema(one) for one in members}, choose)


def value_of(value: Any, name: str) -> Any:
    """A field of a body, or of the JSON that it is made of."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _values(body: type[BaseModel], name: str) -> set[str | None]:
    """The values that a field may have, if it has only some; None where it may be absent."""
    annotation = body.model_fields[name].annotation if name in body.model_fields else None
    values: set[str | None] = set()
    for part in [annotation, *get_args(annotation)]:
        if part is type(None):
            values.add(None)
        elif get_origin(part) is Literal:
            values |= set(get_args(part))
    return values


class FirstError(FailFast):
    """Annotates a list whose validation ends at its first error: a long list may have a million. Can be a member of a union."""

    __hash__ = object.__hash__


class Body(BaseModel):
    """Base of all request bodies: strict types, no NaN or infinity, and no field that the table of fields does not have.

    A field that the class does not declare is judged by `field_table`: accepted and dropped, or an error. null is absent. With a
    set as the context of the validation, the fields that were accepted without effect are added to it as "Class.field".
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="after")
    def _judge_others(self, info: ValidationInfo) -> Self:
        others = self.__pydantic_extra__
        if not others:
            return self
        kind = type(self)
        rows = _undeclared(kind)
        for name, value in others.items():
            if value is None:
                continue
            row = rows.get(name)
            if row is None:
                raise PydanticCustomError("unknown_field", "unknown field", {"field": name})
            if not row.takes(value):
                raise PydanticCustomError("cannot_honour", "is not supported: {why}", {"why": row.meaning, "field": name})
            if row.treatment is Treatment.ACCEPTED and info.context is not None:
                info.context.add(f"{kind.__name__}.{name}")
        others.clear()
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(schema)
        body = handler.resolve_ref_schema(described)
        body.setdefault("properties", {}).update({name: row.json_schema() for name, row in _undeclared(cls).items()})
        body["additionalProperties"] = {"type": "null"}
        return described


@cache
def _undeclared(kind: type[Body]) -> dict[str, Row]:
    return undeclared(kind, {field.alias or name: field for name, field in kind.model_fields.items()})


StopText = Annotated[str, Field(max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
SchemaObject = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024), FirstError()]


class StreamOptions(Body):
    """`stream_options`: only with `stream: true`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Body):
    """`structured_outputs`: vLLM's newer form of the guided_ fields. One of the formats."""

    json_: SchemaObject | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: Choices | None = None
    grammar: str | None = Field(None, min_length=1)
    json_object: bool | None = None
    structural_tag: str | None = Field(None, min_length=1)


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
    logit_bias: dict[TokenIdText, Bias | None] | None = Field(
        None, max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}
    )
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
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, min_length=1)
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKEN_COUNT)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT)


__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_SEED",
    "MAX_CACHE_SALT",
    "MAX_STOPS",
    "Body",
    "Choices",
    "FirstError",
    "MetadataKey",
    "MetadataValue",
    "OnlyValue",
    "SampledRequest",
    "SchemaObject",
    "StreamOptions",
    "StructuredOutputs",
    "TokenId",
]
