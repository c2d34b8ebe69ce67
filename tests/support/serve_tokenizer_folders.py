# SPDX-License-Identifier: Apache-2.0
"""Tokenizer folders at random: every place in which a token or a flag may stand, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, processors

from tests.support.serve_small_tokenizers import byte_level, sentencepiece

TOKENS = ["<s>", "</s>", "<tool>", "<unk>", "<pad>", "<late>", "<|endoftext|>", "hello", "[INST]", " wide"]
NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "image_token"]
CLASSES = [
    "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer",
    "Qwen2TokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast", None,
]  # fmt: skip
MODELS = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", None]


def write_folder(folder: Path, random: Random) -> dict[str, Any]:
    """Write a folder, and return its JSON files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = random.choice([byte_level, sentencepiece])()
    for token in random.sample(TOKENS, random.randrange(4)):
        backend.add_tokens([AddedToken(token, **_flags(random))])
    if random.random() < 0.2:
        backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    if random.random() < 0.2:
        backend.enable_padding(pad_token=random.choice(TOKENS), length=40)
    backend.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {}
    config: dict[str, Any] = {name: _named(random) for name in random.sample(NAMES, random.randrange(5))}
    model = random.choice(MODELS)
    if model is not None:
        files["config.json"] = {"model_type": model}
    stated = random.choice(CLASSES)
    if stated is not None:
        (config if model is None or random.random() < 0.8 else files["config.json"])["tokenizer_class"] = stated
    ids = backend.get_vocab(with_added_tokens=True)
    if random.random() < 0.5:
        tokens = random.sample(TOKENS, random.randrange(6))
        config["added_tokens_decoder"] = {
            str(ids.get(token, 900 + i)): {"content": token, **_flags(random)} for i, token in enumerate(tokens)
        }
    if random.random() < 0.4:
        config[random.choice(["additional_special_tokens", "extra_special_tokens"])] = _list(random)
    if random.random() < 0.2:
        config["extra_special_tokens"] = {"video_token": random.choice(TOKENS)}
    for name, values in {
        "add_prefix_space": [True, False, None], "legacy": [True, False, None], "split_special_tokens": [True, False],
        "add_bos_token": [True, False], "add_eos_token": [True, False], "clean_up_tokenization_spaces": [True, False],
    }.items():  # fmt: skip
        if random.random() < 0.3:
            config[name] = random.choice(values)
    files["tokenizer_config.json"] = config
    if random.random() < 0.5:
        legacy = {name: _named(random, typed=False) for name in random.sample(NAMES[:5], random.randrange(5))}
        if random.random() < 0.5:
            legacy["additional_special_tokens"] = random.sample(TOKENS, random.randrange(1, 3))
        files["special_tokens_map.json"] = legacy
    if random.random() < 0.4:
        files["added_tokens.json"] = {token: ids.get(token, 950 + i) for i, token in enumerate(random.sample(TOKENS, 3))}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return files


def text_of(random: Random) -> str:
    """A text with tokens inside, in which the flags of tokens and spaces before words matter."""
    words = [*TOKENS, "hello", "world", "wide1234", "  ", " ", "\n", "é", "你好", "🙂", "Tool", "can't"]
    return "".join(random.choice(words) + random.choice(["", " ", "x"]) for _ in range(random.randrange(1, 12)))


def _flags(random: Random) -> dict[str, bool]:
    return {name: random.random() < 0.4 for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}


def _named(random: Random, *, typed: bool = True) -> Any:
    text = random.choice(TOKENS)
    if random.random() < 0.6:
        return text
    return {"content": text, **_flags(random), **({"__type": "AddedToken"} if typed else {})}


def _list(random: Random) -> list[Any]:
    return [_named(random) for _ in range(random.randrange(4))]
