# SPDX-License-Identifier: Apache-2.0
"""The options of the HTTP server: `ServeOptions`. Those of its engine are `EngineOptions`.

`phalanx serve` builds both and calls `phalanx.serve.app.run(engine: EngineOptions, serving: ServeOptions)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.config.options import option_error, refuse_unknown
from phalanx.errors import OptionError


class ServeOptions(BaseModel):
    """Address, access and queue limits of the server. Times in seconds.

    The API key is left out of the repr and of every error message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("localhost", min_length=1, description="Address or host name to listen on. 0.0.0.0: every interface.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0: any free port, which is logged.")
    api_key: str | None = Field(None, min_length=1, repr=False, description="Bearer key that requests must carry. None: no key.")
    api_key_file: str | None = Field(
        None, min_length=1, description="File with the bearer key, which then stands in no process list. None: api_key."
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="Name of the model in the API. None: the value of the option model."
    )
    chat_template: str | None = Field(
        None, min_length=1, description="File with a Jinja chat template, or the template itself. None: the model's own."
    )
    metrics_prefix: str = Field(
        "phalanx", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", description="Prefix of metric names, before the colon."
    )
    shutdown_timeout: float = Field(30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM.")
    max_num_queued_reqs: int | None = Field(
        None,
        ge=0,
        description="Maximum number of requests that wait for a place in the batch; further ones get status 429. None: 8 x "
        "max_batch_size.",
    )
    max_num_queued_tokens: int | None = Field(
        None,
        ge=0,
        description="Maximum number of prompt tokens that wait; a request that exceeds it gets status 429. None: no limit.",
    )

    def read_api_key(self) -> str | None:
        """The key, from api_key or its file; None for no key. Raises OptionError if both are given, or the file has no key."""
        if self.api_key_file is None:
            return self.api_key
        if self.api_key is not None:
            raise OptionError("api_key and api_key_file exclude each other", why="both are the key", next="give one of them")
        name = f"api_key_file={self.api_key_file!r}"
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise OptionError(f"{name} cannot be read", why=str(error), next="name a readable file with the key") from None
        if not key or len(key.splitlines()) > 1:
            raise OptionError(f"{name} has no key", why="it must have one line that is not empty", next="write the key into it")
        return key

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
