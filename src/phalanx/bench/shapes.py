# SPDX-License-Identifier: Apache-2.0
"""Published model shapes by their short names. A folder with config.json and a substitute tokenizer is all that dummy weights need.

The dimensions are those of the planner's models (src/phalanx/layout/data/models.json).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.bench.report import os_failure
from phalanx.errors import OptionError
from phalanx.layout.families import known
from phalanx.layout.families.registry import short_names

_LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
_OTHERS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}


def _config(name: str) -> dict[str, Any]:
    """config.json of a model that the planner knows, with what only an engine reads."""
    config = known(name)
    assert config is not None, name
    return {**(_LLAMA if name.startswith("llama") else _OTHERS), **config}


SHAPES: dict[str, dict[str, Any]] = {name: _config(name) for name in short_names()}
"""Name -> config.json, of every model that is known without a network."""


_BY_LAYER = ("layer_types", "mlp_layer_types", "hybrid_override_pattern")
"""Fields with an entry for each layer."""


def config_of(name: str) -> dict[str, Any] | None:
    """config.json of a shape, or None where the name is of none. NAME:LAYERS is the shape cut to its first layers: what a layer
    costs of a model that is too large for the GPUs at hand.

    Raises OptionError where LAYERS is no number from 1 to the shape's own.
    """
    base, colon, layers = name.partition(":")
    config = SHAPES.get(base)
    if config is None or not colon:
        return config
    most = _text(config)["num_hidden_layers"]
    if not layers.isdecimal() or not 1 <= int(layers) <= most:
        raise OptionError(f"{name!r}: {layers!r} is no number of layers of {base}", next=f"use {base}:1 to {base}:{most}")
    by_layer = {name: value[: int(layers)] for name, value in _text(config).items() if name in _BY_LAYER}
    cut = {**_text(config), **by_layer, "num_hidden_layers": int(layers)}
    if "num_kv_shared_layers" in cut:  # the last layers
        cut["num_kv_shared_layers"] = max(0, cut["num_kv_shared_layers"] - (most - int(layers)))
    return {**config, "text_config": cut} if "text_config" in config else cut


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the text model: wrappers of several models have it as text_config."""
    text: dict[str, Any] = config.get("text_config", config)
    return text


def write(name: str, folder: Path) -> Path:
    """Write config.json and a tokenizer of a shape into `folder`, which is created if it is missing; returns the folder.

    The tokenizer is a substitute for the real one, which needs a network: bytes first, then invented words up to the vocabulary's
    size, so that every token id has a text. It does not tell how many tokens a text takes.
    Raises OptionError for an unknown name, where the folder holds a model or a tokenizer already, and where it cannot be written;
    no file is left of a shape that could not be written completely.
    """
    config, failure = config_of(name), f"shape {name!r} cannot be written to {folder}"
    if config is None:
        raise OptionError(f"shape {name!r} is unknown", next=f"use one of {', '.join(SHAPES)}")
    special = {config["bos_token_id"]: "<|begin|>", config["eos_token_id"]: "<|end|>"}
    named = {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }
    files = {
        folder / "config.json": json.dumps(config, indent=1) + "\n",
        folder / "tokenizer.json": json.dumps(_tokenizer(_text(config)["vocab_size"], special)),
        folder / "tokenizer_config.json": json.dumps(named),
    }
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if existing := [path.name for path in files if path.exists()]:
            raise OptionError(failure, held=f"a {existing[0]} is there", next="name a new folder")
        for path, text in files.items():
            written.append(path)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise OptionError(failure, why=os_failure(error), next="name a new folder, where files can be written") from None
    return folder


@contextmanager
def folder_of(model: str) -> Iterator[str]:
    """The model as an engine takes it: for the name of a shape a folder that lives as long as the context, else the name itself."""
    if config_of(model) is None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-shape-") as parent:
        yield str(write(model, Path(parent) / model))


def _tokenizer(vocab_size: int, special: dict[int, str]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges."""
    letters = _byte_letters()
    words = (f"\u0120{_word(number)}" for number in range(vocab_size))
    vocabulary = {special.get(i) or (letters[i] if i < 256 else next(words)): i for i in range(vocab_size)}
    added = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in sorted(special.items())
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": level,
        "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip


def _word(number: int) -> str:
    """0, 1, 2, ... as words of at least two letters: ba, bb, ..."""
    text = ""
    number += 26
    while number:
        number, letter = divmod(number, 26)
        text = chr(ord("a") + letter) + text
    return text


def _byte_letters() -> list[str]:
    """The 256 letters with which byte-level BPE writes bytes: printable ones as they are, the others from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
