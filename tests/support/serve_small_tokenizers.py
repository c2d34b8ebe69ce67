# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the two kinds that checkpoints have, written as checkpoints hold them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "What is a rank? A rank is one process of the world. Ranks in formation!", "hello world, the world is wide: 1234567890",
    "你好，世界。 héllo wörld 🙂🙃 naïve café", "def f(x):\n    return x * 2\n",
]  # fmt: skip

CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unknown role: ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content | trim }}</s>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% generation %}{% if add_generation_prompt %}<|assistant|>{% endif %}{% endgeneration %}"
)


def byte_level(size: int = 400) -> Tokenizer:
    """As Llama 3 and Qwen have it: bytes as letters, byte pairs joined. <s> and </s> are special, <tool> is just added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: spaces are U+2581, unknown characters fall back to bytes, a leading space is dropped in decoding."""
    letters = sorted(set("".join(TEXT[:2]).replace(" ", "▁")) | {"▁"})
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *letters]
    merges = [("▁", "w"), ("▁w", "o"), ("r", "l"), ("▁wo", "rl"), ("▁", "r"), ("a", "n"), ("h", "e"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces + ["".join(pair) for pair in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
