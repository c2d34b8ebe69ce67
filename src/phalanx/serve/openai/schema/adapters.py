# SPDX-License-Identifier: Apache-2.0
"""The bodies of `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from pydantic import Field

from phalanx.serve.openai.schema.fields import Body


class LoadAdapterRequest(Body):
    """lora_path: a folder of the server. load_inplace: an adapter of this name is replaced."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None


class UnloadAdapterRequest(Body):
    """The name of an adapter."""

    lora_name: str = Field(min_length=1, max_length=200)
