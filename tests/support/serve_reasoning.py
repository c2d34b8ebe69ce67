# SPDX-License-Identifier: Apache-2.0
"""What models of several families emit when they think, and a server whose scripted engine emits it."""

from __future__ import annotations

from contextlib import contextmanager

from tests.support.serve_http_app import Scripted, live
from tests.support.serve_output_checkpoints import OUTPUT_FAMILIES, tokenizer_of_family

OSLO = '{"city": "Oslo"}'
THOUGHT = "The user asks.\n\nI look."
THINKS = {
    "qwen3": f"<think>\n{THOUGHT}\n</think>\n\n",
    "deepseek_r1": f"{THOUGHT}\n</think>\n\n",
    "mistral": f"[THINK]{THOUGHT}[/THINK]",
    "gpt_oss": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant",
}
ONE_CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}<|call|>"
FINAL = {"gpt_oss": "<|channel|>final<|message|>It rains.<|return|>"}


@contextmanager
def served(family, text, **options):
    tokenizer = tokenizer_of_family(family)
    engine = Scripted(text, tokenizer=tokenizer, eos=OUTPUT_FAMILIES[family].eos)
    with live(engine, tokenizer=tokenizer, **options) as server, server.openai() as client:
        yield server, client
