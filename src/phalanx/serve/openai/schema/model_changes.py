# SPDX-License-Identifier: Apache-2.0
"""The bodies of `POST /weights/update`, `/sleep` and `/wake_up`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from phalanx.serve.openai.schema.fields import Body


class NoFields(Body):
    """The body of a route whose parameters are in its query."""


class UpdateWeightsRequest(Body):
    """`model_path`: a folder of the host, of every host with several, with a checkpoint of the same model. `mode`: what becomes of
    the requests that run; they finish (wait), or end with an error (abort)."""

    model_path: str = Field(min_length=1, max_length=4096)
    mode: Literal["wait", "abort"] | None = None
