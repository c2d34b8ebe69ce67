# SPDX-License-Identifier: Apache-2.0
"""What the user asks of the HTTP server: `ServeOptions`. The engine behind it is asked for by `EngineOptions`.

`phalanx serve` builds both and calls `phalanx.serve.app.run(engine: EngineOptions, serving: ServeOptions)`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from phalanx.config.options import option_error, refuse_unknown
from phalanx.errors import OptionError


class ServeOptions(BaseModel):
    """Where the server listens, who may ask, and how much may wait. Times in seconds.

    The key is left out of the repr, and of every error message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("localhost", min_length=1, description="Address or name to listen on; 0.0.0.0 for every interface.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and says which.")
    api_key: str | None = Field(None, min_length=1, repr=False, description="The key that every request must bring; None: no key.")
    served_model_name: str | None = Field(None, min_length=1, description="The model's name in the API; None: as it was given.")
    chat_template: str | None = Field(
        None, min_length=1, description="A file with a Jinja chat template, or the template itself; None: the model's own."
    )
    metrics_prefix: str = Field(
        "phalanx", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", description="What stands before the colon in the names of metrics."
    )
    shutdown_timeout: float = Field(30.0, ge=0, description="Seconds that accepted requests may take to finish after SIGTERM.")
    max_num_queued_reqs: int | None = Field(
        None, ge=0, description="Requests that may wait for a place in the batch; more are answered with 429. None: 8 batches."
    )
    max_num_queued_tokens: int | None = Field(
        None, ge=0, description="Prompt tokens that may wait; a request that exceeds it is answered with 429. None: no limit."
    )

    @classmethod
    def of(cls, **asked: Any) -> ServeOptions:
        """Build from keywords. Raises UnknownOption naming the nearest known name, OptionError for a bad value."""
        refuse_unknown(asked, cls.model_fields, what="serve option")
        try:
            return cls(**asked)
        except ValidationError as error:
            if error.errors()[0]["loc"][:1] == ("api_key",):
                raise OptionError("this api_key cannot be used", why="a key is a text of at least one character") from None
            raise option_error(error) from None
