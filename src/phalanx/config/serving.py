# SPDX-License-Identifier: Apache-2.0
"""The options of the HTTP server: `ServeOptions`. Those of its engine are `EngineOptions`.

`phalanx serve` builds both and calls `phalanx.serve.app.run(engine: EngineOptions, serving: ServeOptions)`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from phalanx.config.options import option_error, refuse_unknown
from phalanx.errors import OptionError

ReasoningParserName = Literal[
    "auto", "none", "deepseek_r1", "deepseek_v3", "qwen3", "mistral", "gpt_oss", "seed_oss", "hy_v3", "cohere_command3", "granite",
    "ernie45", "gemma4",
]  # fmt: skip
ToolCallParserName = Literal[
    "auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "gpt_oss", "kimi_k2", "glm45", "glm47", "minimax_m2", "seed_oss", "hy_v3", "granite", "phi4_mini_json", "cohere_command3",
    "command_r", "olmo3", "gemma4",
]  # fmt: skip

QUEUED_BATCHES = 8
"""Batches of max_batch_size requests that may wait where max_num_queued_reqs is not set."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")


class ServeOptions(BaseModel):
    """Address, access and queue limits of the server. Times in seconds.

    The API key is left out of the repr and of every error message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        "localhost", min_length=1, description="Address or host name to listen on; :: for every address, 0.0.0.0 for those of IPv4."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0: any free port, which is logged.")
    api_key: str | None = Field(
        None,
        min_length=1,
        repr=False,
        description="API keys, separated by commas. A request must send one as a bearer token. None: no key is needed.",
    )
    api_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with API keys, one per line. Unlike a flag, the keys do not appear in the process list. None: api_key.",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="Name of the model in the API. None: its Hub id, or the name of its folder without the path.",
    )
    lora_modules: str | None = Field(
        None,
        min_length=1,
        description="LoRA adapters to load at the start, as NAME=FOLDER, or as JSON objects with name and path, "
        "separated by spaces or commas. Requests name one as their model. Needs max_loras.",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter. Whoever may send requests can then have any folder "
        "of this host read as an adapter.",
    )
    chat_template: str | None = Field(
        None, min_length=1, description="File with a Jinja chat template, or the template itself. None: the model's own."
    )
    metrics_prefix: str = Field(
        "phalanx", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", description="Prefix of metric names, before the colon."
    )
    expert_metrics: bool = Field(
        True,
        description="Report expert_tokens_total of each layer and expert in /metrics: 14,848 series for DeepSeek-V3. Without it, "
        "/metrics has only sums by rank and the imbalance; /experts has everything in both cases.",
    )
    shutdown_timeout: float = Field(30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    max_num_queued_reqs: int | None = Field(
        None,
        ge=0,
        description="Maximum number of requests that wait for a place in the batch; further ones get status 429. "
        f"None: {QUEUED_BATCHES} x max_batch_size.",
    )
    max_num_queued_tokens: int | None = Field(
        None,
        ge=0,
        description="Maximum number of prompt tokens that wait; a request that exceeds it gets status 429. None: no limit.",
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto",
        description="Format of the reasoning in the model's outputs, which becomes reasoning_content. auto: by the checkpoint. "
        "none: reasoning stays in the content.",
    )
    tool_call_parser: ToolCallParserName = Field(
        "auto",
        description="Format of tool calls in the model's outputs. auto: by the checkpoint. none: tools are an error.",
    )
    pooling: Literal["last", "mean"] = Field(
        "last",
        description="What /v1/embeddings and /v1/rerank take of a text's hidden states. last: that of its last token. mean: the "
        "mean of all.",
    )
    rerank_by: Literal["auto", "cosine", "yes_no"] = Field(
        "auto",
        description="How /v1/rerank and /v1/score compare two texts. cosine: by their vectors. yes_no: by the probability that the "
        "model answers yes rather than no. auto: yes_no for a model whose name has Qwen3-Reranker, else cosine.",
    )
    enable_sleep_mode: bool = Field(
        False,
        description="Allow POST /sleep, /wake_up and /weights/update. Whoever may send requests can then stop the engine, and have "
        "it read any checkpoint folder of the host.",
    )
    max_stored_responses: int = Field(
        1000,
        ge=0,
        description="Maximum number of responses that /v1/responses keeps in memory for previous_response_id, 256 MiB at "
        "most. 0: none.",
    )
    stored_response_ttl: float = Field(3600.0, gt=0, description="Seconds for which /v1/responses keeps a response.")
    open_metrics: bool = Field(
        False, description="Answer /metrics without an API key. Otherwise only /live, /ready and /health need no key."
    )
    cors_origins: str | None = Field(
        None,
        min_length=1,
        description="Origins whose pages may call the server from a browser, separated by commas, such as "
        "https://chat.example.org. *: any origin. None: no origin.",
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of the log. json: one object per line.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged: this, and what is worse.")
    log_requests: bool = Field(
        False,
        description="Log a line when a request has been answered: its id, status, tokens, times and finish reason; never content.",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        min_length=1,
        description="URL of an OpenTelemetry collector that gets spans of each request as OTLP over HTTP, such as "
        "http://localhost:4318. Needs the extra otel. None: no traces.",
    )
    header_timeout: float = Field(20.0, gt=0, description="Seconds in which the head of a request must arrive.")
    body_timeout: float = Field(120.0, gt=0, description="Seconds in which the body of a request must arrive after its head.")
    escape_special_tokens: bool = Field(
        False,
        description="Treat special tokens that are written in messages, tools and chat_template_kwargs as ordinary text, so that "
        "they cannot end a message.",
    )

    @field_validator("lora_modules")
    @classmethod
    def _check_modules(cls, value: str | None) -> str | None:
        _modules(value)
        return value

    def read_lora_modules(self) -> dict[str, str]:
        """The folders of `lora_modules`, by the names of the adapters."""
        return _modules(self.lora_modules)

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: str | None) -> str | None:
        for origin in _split(value):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin: it must be scheme://host or scheme://host:port, or *")
        return value

    def require_possible(self, *, deterministic: bool) -> None:
        """Raise OptionError for what contradicts an option of the engine."""
        if deterministic and self.pooling == "mean":
            raise OptionError(
                "pooling='mean' is not possible with deterministic", why="the mean is summed step by step, and steps differ",
                next="use pooling='last'",
            )  # fmt: skip

    def read_cors_origins(self) -> list[str]:
        """The origins of `cors_origins`."""
        return _split(self.cors_origins)

    def read_api_keys(self) -> list[str]:
        """The keys, from api_key or its file; empty for no key. Raises OptionError if both are given, or there is no key in one."""
        if self.api_key_file is None:
            keys = _split(self.api_key)
            if self.api_key is not None and not keys:
                raise bad_api_key()
            return keys
        if self.api_key is not None:
            raise OptionError("api_key and api_key_file exclude each other", why="both are the key", next="give one of them")
        name = f"api_key_file={self.api_key_file!r}"
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise OptionError(f"{name} cannot be read", why=str(error), next="name a readable file with the key") from None
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise OptionError(f"{name} has no key", why="it must have a line that is not empty", next="write a key into it")
        return keys

    @classmethod
    def of(cls, **values: Any) -> ServeOptions:
        """Build the options from keywords. Raises UnknownOption naming the nearest known name, or OptionError for a bad value."""
        refuse_unknown(values, cls.model_fields, what="serve option")
        try:
            return cls(**values)
        except ValidationError as error:
            if error.errors()[0]["loc"][:1] == ("api_key",):
                raise bad_api_key() from None
            raise option_error(error) from None


def bad_api_key() -> OptionError:
    """The error for a value that cannot be an API key. It does not show the value."""
    return OptionError("the api_key is not valid", why="it must be a string of at least one character")


_BETWEEN = ", \t\r\n"
_MODULE_FIELDS = {"name", "path", "base_model_name"}


def _modules(text: str | None) -> dict[str, str]:
    """Name -> folder. Raises ValueError."""
    pairs: list[tuple[str, str]] = []
    rest = text or ""
    while rest := rest.lstrip(_BETWEEN):
        if rest.startswith(("{", "[")):
            value, end = json.JSONDecoder().raw_decode(rest)
            pairs += [_module(entry) for entry in (value if isinstance(value, list) else [value])]
        else:
            end = len(re.split(r"[\s,]", rest, maxsplit=1)[0])
            name, _, folder = rest[:end].partition("=")
            if not name or not folder:
                raise ValueError(f'{rest[:end]!r} must be NAME=FOLDER; with spaces or commas, {{"name": NAME, "path": FOLDER}}')
            pairs.append((name, folder))
        rest = rest[end:]
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"two adapters have the name {twice[0]!r}")
    return dict(pairs)


def _module(entry: object) -> tuple[str, str]:
    if not isinstance(entry, dict) or not {"name", "path"} <= entry.keys() <= _MODULE_FIELDS:
        raise ValueError(f"{entry!r} must be an object with name and path")
    name, folder = entry["name"], entry["path"]
    if not all(isinstance(each, str) and each for each in (name, folder)):
        raise ValueError(f"{entry!r} must have texts as name and path")
    return name, folder


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]
