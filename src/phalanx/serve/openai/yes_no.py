# SPDX-License-Identifier: Apache-2.0
"""Scores of a reranker that answers "yes" or "no", such as Qwen3-Reranker: `YesNo`.

The prompt asks whether a document fits a query; the score is the probability of "yes" among the two answers, by the logits of the
next token: exp(yes) / (exp(yes) + exp(no)), as the model card of Qwen3-Reranker defines it.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from phalanx.config.sampling_params import SamplingParams
from phalanx.errors import OptionError
from phalanx.log import get_logger
from phalanx.serve.chat_template import ChatTemplate
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

RerankBy = Literal["auto", "cosine", "yes_no"]

QWEN3_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first "
    "| default('Given a web search query, retrieve relevant passages that answer the query') }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"  # Jinja drops the last end of line
)
"""The prompt of Qwen3-Reranker's model card, as a chat template with the roles that vLLM's score templates have."""


class YesNo(msgspec.Struct, frozen=True):
    """yes, no: the tokens of the answers. template: Jinja, of messages with the roles system (an instruction), query and
    document."""

    yes: int
    no: int
    template: str = QWEN3_TEMPLATE

    @classmethod
    def detect(cls, rerank_by: RerankBy, model: str, tokenizer: Tokenizer) -> YesNo | None:
        """How this model compares texts; None: by the cosines of vectors. auto: by the model's name. Logs what it chose.

        Raises OptionError where the tokenizer has no such tokens.
        """
        is_reranker = "rerank" in model.lower()
        if rerank_by == "cosine" or (rerank_by == "auto" and "qwen3-reranker" not in model.lower()):
            if rerank_by == "auto" and is_reranker:
                logger.warning(
                    "%s is called a reranker of an unknown kind; /v1/rerank and /v1/score compare vectors, which may mean nothing. "
                    "If it answers yes or no, start the server with --rerank_by yes_no",
                    model,
                )
            return None
        yes, no = tokenizer.backend.token_to_id("yes"), tokenizer.backend.token_to_id("no")
        if yes is None or no is None:
            raise OptionError(
                f"{model} cannot score by yes and no", why="its vocabulary has no tokens 'yes' and 'no'",
                next="start the server with --rerank_by cosine",
            )  # fmt: skip
        own = tokenizer.chat_template_source
        of_pairs = all(role in own for role in ("'query'", "'document'")) or all(role in own for role in ('"query"', '"document"'))
        logger.info("scores of pairs: by yes and no, with %s", "the chat template" if of_pairs else "the prompt of Qwen3-Reranker")
        return cls(yes, no, own if of_pairs else QWEN3_TEMPLATE)

    @property
    def params(self) -> SamplingParams:
        """Of a request that wants the logits of no and yes."""
        return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, pooling="logits", pooled_tokens=[self.no, self.yes])

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a pair. Raises RequestError if the template rejects it."""
        return _compiled(self.template).render(messages)


def messages_of(query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
    """What the template gets of a pair."""
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    return [*system, {"role": "query", "content": query}, {"role": "document", "content": document}]


@cache
def _compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, origin="the reranker")
