# SPDX-License-Identifier: Apache-2.0
"""instructor: typed outputs by tools, by schema and by JSON, and in parts."""

from __future__ import annotations

import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
ask = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Which?"}], "max_tokens": 100}


class Choice(BaseModel):
    color: Literal["red", "green"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    typed = instructor.from_openai(client, mode=mode)
    assert typed.chat.completions.create(response_model=Choice, max_retries=0, **ask).color
    *_, last = typed.chat.completions.create_partial(response_model=Choice, **ask)
    assert last.color
