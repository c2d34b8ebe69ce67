# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates that write reasoning and tool calls as the families do, in small."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from phalanx.serve.output_parsing import deepseek, harmony
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_small_tokenizers import byte_level, write

_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"


@dataclass(frozen=True)
class Family:
    """special, plain: tokens of the vocabulary. eos: those that end an output. template: the chat template."""

    template: str
    special: Sequence[str] = ()
    plain: Sequence[str] = ()
    eos: Sequence[str] = ()


OUTPUT_FAMILIES = {
    "qwen3": Family(
        "{% if tools %}Tools:\n" + _TOOLS + 'Return <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>\n{% endif %}'
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
        special=("<|im_start|>", "<|im_end|>"), plain=("<think>", "</think>", "<tool_call>", "</tool_call>"), eos=("<|im_end|>",),
    ),
    "deepseek_r1": Family(
        _TOOLS + "{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}{% else %}"
        "<\uff5cAssistant\uff5c>{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}{% for m in messages if m.tool_calls %}"
        "{{ '" + deepseek.CALLS_BEGIN + deepseek.CALL_BEGIN + "function" + deepseek.SEPARATOR + "' }}{% endfor %}"
        "{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n{% endif %}",
        plain=("<think>", "</think>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", *deepseek.MARKERS),
    ),
    "mistral": Family(
        "{% if tools %}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('the id must have 9 letters') }}{% endif %}"
        "[TOOL_CALLS] [{{ c.function | tojson }}]{% endfor %}[INST]{{ m.content }}[/INST]{% endfor %}",
        special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[THINK]", "[/THINK]"),
    ),
    "llama": Family(
        "{% if tools %}Respond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}. ' + _TOOLS + "{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
        special=("<|python_tag|>", "<|eom_id|>"), eos=("<|eom_id|>",),
    ),
    "pythonic": Family(
        "{% if tools %}Answer with [func_name1(name=value), func_name2()].\n" + _TOOLS + "{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
        special=("<|python_start|>", "<|python_end|>"),
    ),
    "minimax_m2": Family(
        "{% if tools %}" + _TOOLS + '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1'
        "</parameter>\n</invoke>\n</minimax:tool_call>{% endif %}{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n"
        "{% endfor %}{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}",
        special=("]~b]", "[e~["), plain=("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"), eos=("[e~[",),
    ),
    "hy_v3": Family(
        "{% set s = ':opensource' %}{% if tools %}" + _TOOLS + "{{ '<tool_call%s>{name}<tool_sep%s>\n' % (s, s) }}{% endif %}"
        "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}{{ '<think' ~ s ~ '>' }}",
        special=tuple(
            f"<{end}{tag}:opensource>" for tag in ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
            for end in ("", "/")
        ),
    ),
    "cohere": Family(
        "{% if tools %}Write <|START_THINKING|>, a plan and <|END_THINKING|>, then <|START_ACTION|>, calls and <|END_ACTION|>.\n"
        + _TOOLS + "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|CHATBOT_TOKEN|>",
        plain=tuple(f"<|{end}_{tag}|>" for tag in ("THINKING", "ACTION", "RESPONSE") for end in ("START", "END")),
    ),
    "olmo3": Family(
        "{% if tools %}Output any function calls within <function_calls></function_calls> XML tags.\n" + _TOOLS + "{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
        special=("<|im_start|>", "<|im_end|>"), plain=("<function_calls>", "</function_calls>"), eos=("<|im_end|>",),
    ),
    "gpt_oss": Family(
        "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}\n" + _TOOLS + "<|end|>"
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        special=harmony.MARKERS, eos=("<|return|>", "<|call|>"),
    ),
}  # fmt: skip


def backend_of(family: Family) -> tokenizers.Tokenizer:
    """The small byte-level tokenizer with the tokens of a family."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    return backend


@functools.cache
def tokenizer_of_family(name: str) -> Tokenizer:
    """The tokenizer of a family with its chat template."""
    family = OUTPUT_FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write(Path(folder), backend_of(family), chat_template=family.template))


def write_reciting_checkpoint(folder: Path, name: str, conversations: Sequence[tuple[dict[str, Any], str]]) -> Path:
    """A tiny Llama that has learned one answer by heart for each conversation, in the format of a family; returns the folder.

    conversations: what `Tokenizer.apply_chat_template` takes, and the answer, special tokens in letters. It ends with the eos token
    of the family. Raises AssertionError if the answers are not learned.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    family = OUTPUT_FAMILIES[name]
    tokenizer = Tokenizer.load(write(folder, backend_of(family), chat_template=family.template))
    token_id = tokenizer.backend.token_to_id
    eos = [token_id(text) for text in family.eos] or [token_id("</s>")]
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=0, eos_token_id=eos,
    )  # fmt: skip
    pairs = [
        (
            tokenizer.encode(tokenizer.apply_chat_template(**template_arguments), add_special_tokens=False),
            _encoded(tokenizer, answer, eos),
        )
        for template_arguments, answer in conversations
    ]
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.zeros(len(pairs), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for _ in range(400):
            loss = model(input_ids=ids, labels=labels).loss
            if loss.item() < 5e-3:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss.item() < 2e-2, f"the answers are not learned: loss {loss.item():.3f}"
    model.generation_config.eos_token_id = eos
    model.save_pretrained(folder)
    return folder


def _encoded(tokenizer: Tokenizer, answer: str, eos: Sequence[int]) -> list[int]:
    ids = tokenizer.encode(answer, add_special_tokens=False)
    return ids if ids[-1] in eos else [*ids, eos[0]]
