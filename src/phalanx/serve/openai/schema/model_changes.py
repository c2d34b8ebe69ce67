# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /weights/update`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from phalanx.serve.openai.schema.fields import Body


class UpdateWeightsRequest(Body):
    """`model_path`: a folder of the host, of every host with several, with a checkpoint of the same model. `mode`: what becomes of
    the requests that run; they finish (wait), or end with an error (abort)."""

    model_path: str = Field(min_length=1, max_length=4096)
    mode: Literal["wait", "abort"] | None = None
