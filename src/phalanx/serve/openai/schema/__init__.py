# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests and responses, which `/openapi.json` describes."""

from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest

__all__ = ["ChatRequest", "CompletionRequest", "DetokenizeRequest", "TokenizeRequest"]
