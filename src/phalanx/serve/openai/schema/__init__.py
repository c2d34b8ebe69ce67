# SPDX-License-Identifier: Apache-2.0
"""What a client may say and what it hears: the bodies of requests and answers, which `/openapi.json` shows."""

from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest

__all__ = ["ChatRequest", "CompletionRequest", "DetokenizeRequest", "TokenizeRequest"]
