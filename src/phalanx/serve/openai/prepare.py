# SPDX-License-Identifier: Apache-2.0
"""What a body says, by endpoint (`Endpoint`): made in the server's process or, of a large body, in another one.

`Prepared` has sampling parameters and prompts, a `PreparedResponse` also the items of its input, an `Answer` the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from phalanx.config.sampling_params import SamplingParams
from phalanx.serve.openai import api_errors
from phalanx.serve.openai.api_errors import CHAT, RESPONSES, bad_request
from phalanx.serve.openai.prompt_context import PromptContext
from phalanx.serve.openai.prompts import (
    encode_chat,
    encode_pairs,
    encode_prediction,
    encode_prompts,
    encodes_quickly,
    prompt_name,
    prompts_of,
    renders_quickly,
    shortened,
)
from phalanx.serve.openai.request_params import StructuredOutputField, chat_params, completion_params, structured_output_of
from phalanx.serve.openai.responses.conversation import Items, chat_request, input_items
from phalanx.serve.openai.responses.store import EncodedItems, Item
from phalanx.serve.openai.schema.chat import ChatRequest
from phalanx.serve.openai.schema.completion import CompletionRequest
from phalanx.serve.openai.schema.embeddings import EmbeddingsRequest, RerankRequest, ScoreRequest
from phalanx.serve.openai.schema.fields import Body, SampledRequest
from phalanx.serve.openai.schema.responses_request import ResponsesRequest

Request = TypeVar("Request", bound=Body)
Result = TypeVar("Result", bound="Prepared[Any] | PreparedResponse | Answer")

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


@dataclass(frozen=True)
class Endpoint(Generic[Request, Result]):
    """A path of the API, its body, and what that says. prepare: also gets the items of stored responses; raises ApiError 400 naming
    the field."""

    path: str
    request: type[Request]
    prepare: Callable[[Request, PromptContext, Items], Result]


@dataclass(frozen=True)
class Answer:
    """An answer that no engine makes. content: its body; it takes milliseconds, or more for a long text."""

    content: Callable[[], bytes | memoryview]


@dataclass(frozen=True)
class Prepared(Generic[Request]):
    """prompts: as they were sent, texts or token ids; none of a chat. token_ids: those of each prompt; None: they are not encoded
    yet. See `encoded`.

    The request of a large body has no prompt, and nothing that `structured_output` says.
    """

    request: Request
    params: SamplingParams
    structured_output: StructuredOutputField | None = None
    prompts: Sequence[str] | Sequence[list[int]] = ()
    token_ids: list[list[int]] | None = None

    def encoded(self, context: PromptContext) -> list[list[int]]:
        """The token ids of each prompt; of a chat with a prediction also those of the prediction. Raises ApiError or RequestError
        for a prompt that is empty or invalid for this model."""
        prompts = self.prompts
        if isinstance(self.request, RerankRequest):
            query, *documents = (text for text in prompts if isinstance(text, str))
            prompts = [query, *(shortened(text, self.request.max_tokens_per_doc, context) for text in documents)]
        if isinstance(self.request, (RerankRequest, ScoreRequest)) and self.params.pooling == "logits":
            return encode_pairs(self._pairs(prompts), context, self.request.instruction, self.name)
        if isinstance(self.request, ChatRequest):
            prompt, prediction = encode_chat(self.request, context), self.request.prediction
            return [prompt] if prediction is None else [prompt, encode_prediction(prediction, context)]
        return encode_prompts(prompts, context, self.request if isinstance(self.request, SampledRequest) else None)

    def _pairs(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[tuple[str, str]]:
        """The texts that are asked about together, each pair in one prompt of the model."""
        texts = [text for text in prompts if isinstance(text, str)]
        if isinstance(self.request, ScoreRequest):
            return list(zip(texts[::2], texts[1::2], strict=True))
        return [(texts[0], document) for document in texts[1:]]

    @property
    def count(self) -> int:
        """How many prompts the model gets."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return len(self._pairs(self.prompts) if self.params.pooling == "logits" else self.prompts)

    def name(self, index: int) -> str | None:
        """What errors call the prompt of these token ids; None: the prompt. Of a pair it is the second text."""
        if self.params.pooling != "logits":
            return prompt_name(index, len(self.prompts))
        return f"prompt[{2 * index + 1 if isinstance(self.request, ScoreRequest) else index + 1}]"

    @property
    def returns_prompts(self) -> bool:
        """Whether the answer has the prompts."""
        return any(getattr(self.request, name, False) for name in ("echo", "return_documents"))

    @property
    def encodes_quickly(self) -> bool:
        """Whether the prompts are so short that a thread would cost more than it saves."""
        return renders_quickly(self.request) if isinstance(self.request, ChatRequest) else encodes_quickly(self.prompts)


@dataclass(frozen=True)
class PreparedResponse:
    """items: those of the input. The request of a large body has no input."""

    request: ResponsesRequest
    items: Sequence[Item] | EncodedItems
    chat: Prepared[ChatRequest]


def prepare_chat(request: ChatRequest, context: PromptContext) -> Prepared[ChatRequest]:
    """Raises ApiError 400 naming the field."""
    params = chat_params(request, context.facts)
    return Prepared(request, params, structured_output_of(request, context.output))


def _completion(request: CompletionRequest, context: PromptContext, _: Items) -> Prepared[CompletionRequest]:
    prompts = prompts_of(request.prompt)
    params = completion_params(request, context.facts)
    return Prepared(request, params, structured_output_of(request, context.output), prompts)


def _response(request: ResponsesRequest, context: PromptContext, stored: Items) -> PreparedResponse:
    previous: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        previous = stored.conversation(request.previous_response_id)
    items = input_items(request, stored)
    return PreparedResponse(request, items, prepare_chat(chat_request(request, [*previous, *items]), context))


def _embeddings(request: EmbeddingsRequest, context: PromptContext, _: Items) -> Prepared[EmbeddingsRequest]:
    _require_vectors(context)
    return Prepared(request, _ONE_TOKEN, prompts=prompts_of(request.input))


def _rerank(request: RerankRequest, context: PromptContext, _: Items) -> Prepared[RerankRequest]:
    """The query, then the documents."""
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    return _compared(request, [request.query, *documents], context)


def _score(request: ScoreRequest, context: PromptContext, _: Items) -> Prepared[ScoreRequest]:
    """The texts of each pair, one pair behind the other."""
    first, second = ([one] if isinstance(one, str) else one for one in (request.text_1, request.text_2))
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts, and text_2 {len(second)}: it must have one, or as many"
        raise bad_request(message, param="text_1", code="invalid_value")
    each = first * (len(second) // len(first))
    return _compared(request, [text for pair in zip(each, second, strict=True) for text in pair], context)


def _compared(request: Request, texts: list[str], context: PromptContext) -> Prepared[Request]:
    _require_vectors(context)
    if context.yes_no is not None:
        return Prepared(request, context.yes_no.params, prompts=texts)
    if getattr(request, "instruction", None) is not None:
        message = "instruction needs a model that answers yes or no, and this server compares vectors: write it into the query"
        raise bad_request(message, param="instruction", code="unsupported")
    if "" in texts:  # also where the tokenizer would add a token to it
        name = f"prompt[{texts.index('')}]"
        raise bad_request(f"{name}: the text is empty, so it has no vector; leave it out", param=name, code="empty_prompt")
    return Prepared(request, _ONE_TOKEN, prompts=texts)


def _require_vectors(context: PromptContext) -> None:
    if context.facts.layout.dp > 1:
        raise bad_request("this server makes no embeddings: they need expert_parallel_size=1", code="unsupported")


CHATS = Endpoint(CHAT, ChatRequest, lambda request, context, _: prepare_chat(request, context))
COMPLETIONS = Endpoint("/v1/completions", CompletionRequest, _completion)
STORED_RESPONSES = Endpoint(RESPONSES, ResponsesRequest, _response)
EMBEDDINGS = Endpoint("/v1/embeddings", EmbeddingsRequest, _embeddings)
RERANK = Endpoint(api_errors.RERANK, RerankRequest, _rerank)
SCORE = Endpoint(api_errors.SCORE, ScoreRequest, _score)
