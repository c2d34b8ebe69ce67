# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint folder, as transformers 5 reads it.

A folder may hold a token in five places: `tokenizer.json`, `tokenizer_config.json` (by name, in a list, in `added_tokens_decoder`),
`special_tokens_map.json` and `added_tokens.json`. Which of them wins follows `PreTrainedTokenizerBase._from_pretrained` and
`TokenizersBackend.__init__` of transformers; the tests compare with it.

Importing transformers takes seconds, because it imports torch. So the folders of the model families here are read without it
(`_class_of`), and transformers reads all others.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from phalanx.config.json_fields import FieldTable
from phalanx.errors import ModelError, ModelNotFound
from phalanx.log import get_logger
from phalanx.serve.tiktoken_ranks import PATTERNS, RANKS, read_ranks

log = get_logger(__name__)

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FIELDS = FieldTable.of(
    " ".join(NAMED)
    + """ added_tokens_decoder additional_special_tokens extra_special_tokens model_specific_special_tokens
    chat_template split_special_tokens tokenizer_class add_prefix_space legacy fast_tokenizer_files fix_mistral_regex
    trust_remote_code add_bos_token add_eos_token""",
    """model_max_length max_len max_length padding_side truncation_side truncation_strategy truncation stride pad_to_multiple_of
    pad_token_type_id padding model_input_names return_token_type_ids name_or_path verbose tokenizer_file vocab_file merges_file
    special_tokens_map_file added_tokens_file processor_class backend is_local local_files_only use_fast from_slow device_map
    files_loaded init_inputs sp_model_kwargs use_default_system_prompt spaces_between_special_tokens errors response_schema
    response_template chat_control_tokens slow_tokenizer_class tokenizer_type model_type transformers_version revision""",
)
"""Of tokenizer_config.json: honoured fields change ids, harmless ones change no id of a prompt and no text of an answer. Any other
field whose name ends with `_token` is a named special token, and honoured."""
NOT_HONOURED = {
    "auto_map": "the checkpoint's own Python code is never run",
    "clean_up_tokenization_spaces": "spaces before punctuation are kept, as the model wrote them",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": "spaces are kept as the model wrote them",
}
"""Fields that could change an answer and have no effect here: one warning names them."""

_AS_WRITTEN = "TokenizersBackend"
_GENERIC = (_AS_WRITTEN, "PreTrainedTokenizer", "PythonBackend")
CLASS_OF_MODEL = {
    "llama": None, "mistral": _AS_WRITTEN, "mixtral": _AS_WRITTEN, "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer", "gpt_oss": None, "deepseek_v2": None, "deepseek_v3": None,
}  # fmt: skip
"""`model_type` of config.json -> the tokenizer class that transformers registers for it."""
_OWN_TEMPLATES = {"deepseek_v32": Path(__file__).parent / "data" / "deepseek_v32.jinja"}
OVERRULED = ("qwen2",)
"""Model types whose registered class replaces the one that the folder names."""
_ADDITIONAL, _EXTRA = "additional_special_tokens", "extra_special_tokens"
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_VOCABULARIES = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt", "spiece.model", "tiktoken.model")


@dataclass(frozen=True)
class TokenizerFolder:
    """What a folder holds. special: name -> text of the special tokens, for example {"bos_token": "<s>"}. chat_templates: name ->
    source."""

    backend: tokenizers.Tokenizer
    special: dict[str, str]
    chat_templates: dict[str, str]


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """Raises ModelNotFound if the folder has no tokenizer, ModelError if it cannot be read."""
    config = _read_json(folder / "tokenizer_config.json")
    file = _read_tokenizer_json(folder)
    name = None if file is None else _class_of(folder, config, byte_level=file[1])
    rebuilt = _REBUILT.get(name or "")
    backend = None
    if file is not None and name is not None:
        backend = file[0] if rebuilt is None else _rebuild(file[0], rebuilt, config)
    pattern = PATTERNS.get(str(config.get("tokenizer_class")))
    if file is None and pattern is not None and (folder / RANKS).is_file():
        listed = _listed(folder, config)
        backend = read_ranks(folder / RANKS, pattern, listed)
        special = {name: _token(config[name]).content for name in NAMED if config.get(name) is not None}
    elif file is None or backend is None:
        backend, special = _read_by_transformers(folder)
    else:
        special = _add_tokens(backend, file[0], folder, config, rebuilt or _Rebuilt())
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    # A truncation or padding that was saved with the tokenizer would change prompts silently.
    backend.no_truncation()
    backend.no_padding()
    _warn_of_fields(folder, config)
    return TokenizerFolder(backend, special, _chat_templates(folder, config))


def _listed(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """added_tokens_decoder, by id. Raises ModelError where an id is no number."""
    listed = config.get("added_tokens_decoder") or {}
    if strange := next((token_id for token_id in listed if not str(token_id).isdecimal()), None):
        raise ModelError(f"{folder.name} has the id {strange!r} in added_tokens_decoder", why="ids are numbers")
    return {int(token_id): _token(token) for token_id, token in listed.items()}


def _class_of(folder: Path, config: dict[str, Any], *, byte_level: bool) -> str | None:
    """The class of transformers that reads tokenizer.json: the generic one, which takes the file as it is, or one of `_REBUILT`.
    None: transformers must read the folder itself. The rules are those of `AutoTokenizer.from_pretrained`."""
    model = _read_json(folder / "config.json")
    kind = model.get("model_type")
    if (kind is not None and kind not in CLASS_OF_MODEL) or any(config.get(name) for name in _LEFT_TO_TRANSFORMERS):
        return None
    registered = CLASS_OF_MODEL[kind] if kind is not None else None
    stated = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    name = registered if kind in OVERRULED or not stated else stated
    if name is None or name in _GENERIC or registered == _AS_WRITTEN or (name == "LlamaTokenizer" and byte_level):
        return _AS_WRITTEN
    return name if name in _REBUILT else None


_LEFT_TO_TRANSFORMERS = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "trust_remote_code")


@dataclass(frozen=True)
class _Rebuilt:
    """A class of transformers that takes only the model and the post-processor from tokenizer.json.

    defaults: the special tokens that it has where the folder names none. model: the settings of the BPE model. parts: the fields of
    tokenizer_config.json -> normalizer, pre-tokenizer, decoder. plain_special_tokens: whether all special tokens lose their flags.
    """

    defaults: dict[str, str | None] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    parts: Callable[[dict[str, Any]], tuple[Any, Any, Any]] = lambda _: (None, None, None)
    plain_special_tokens: bool = False


def _llama_parts(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    spaced = config.get("add_prefix_space") is not False
    scheme = "never" if not spaced else "always" if config.get("legacy") else "first"
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if spaced else []
    return None, pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False), decoders.Sequence(steps)


_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _qwen2_parts(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    split = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    return normalizers.NFC(), pre_tokenizers.Sequence([split, letters]), decoders.ByteLevel()


def _gpt2_parts(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    return None, pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space"))), decoders.ByteLevel()


_END = "<|endoftext|>"
_REBUILT = {
    "LlamaTokenizer": _Rebuilt(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, {"fuse_unk": True, "byte_fallback": True}, _llama_parts
    ),
    "Qwen2Tokenizer": _Rebuilt(
        {"unk_token": _END, "eos_token": _END, "pad_token": _END}, {}, _qwen2_parts, plain_special_tokens=True
    ),
    "GPT2Tokenizer": _Rebuilt({"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}, {}, _gpt2_parts),
}


def _rebuild(written: tokenizers.Tokenizer, rebuilt: _Rebuilt, config: dict[str, Any]) -> tokenizers.Tokenizer | None:
    """The tokenizer that the class makes of tokenizer.json, still without added tokens. None if its model is of another kind."""
    model = written.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    settings = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    for name, value in {**settings, **rebuilt.model}.items():
        setattr(model, name, value)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = rebuilt.parts(config)
    if written.post_processor is not None:
        backend.post_processor = written.post_processor
    return backend


def _add_tokens(
    backend: tokenizers.Tokenizer, written: tokenizers.Tokenizer, folder: Path, config: dict[str, Any], rebuilt: _Rebuilt
) -> dict[str, str]:
    """Add the tokens of all files of the folder; later ones replace the flags of earlier ones. Returns the named special tokens.

    written: the tokenizer as tokenizer.json has it.
    """
    config = dict(config)
    if _ADDITIONAL in config and not config.get(_EXTRA):
        config[_EXTRA] = config.pop(_ADDITIONAL)
    if config.get("added_tokens_decoder") is not None:
        listed = _listed(folder, config)
    else:
        listed = _legacy_tokens(folder, config) | written.get_added_tokens_decoder()
    padding = {} if written.padding is None else {"pad_token": written.padding["pad_token"]}
    config = {**padding, **rebuilt.defaults, **config}
    flags = {token.content: token for token in listed.values()}
    others = {name: value for name, value in config.items() if name not in NAMED and _is_special(name, value)}
    for name in (_EXTRA, "model_specific_special_tokens"):
        others |= config.pop(name) if isinstance(config.get(name), dict) else {}
    named = {name: config[name] for name in NAMED if config.get(name) is not None}
    named = {name: flags.get(_token(value).content, value) for name, value in named.items()} | others
    extra = config.get(_EXTRA, config.get(_ADDITIONAL)) or []
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | flags.keys()
    missing: dict[str, AddedToken] = {}
    for value in (*named.values(), *extra):
        token = _token(value)
        if token.content not in known:  # twice with other flags: those of the last one stay
            missing.setdefault(value if isinstance(value, str) else repr(token), token)
    tokens = [*(listed[token_id] for token_id in sorted(listed)), *missing.values()]
    special = {name: _token(value).content for name, value in named.items()}
    for token in tokens:
        token.special = token.special or token.content in special.values()
    backend.add_tokens(tokens)
    if rebuilt.plain_special_tokens:
        backend.add_tokens(
            [AddedToken(text, special=True) for text in (*special.values(), *(_token(value).content for value in extra))]
        )
    return special


def _is_special(name: str, value: Any) -> bool:
    return name.endswith("_token") and isinstance(value, str | dict | AddedToken)


def _legacy_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Of a folder of transformers 4.33 and before: put special_tokens_map.json into the config, and return added_tokens.json."""
    for name, value in _read_json(folder / "special_tokens_map.json").items():
        if isinstance(value, list):
            before = (config.get(name) or []) if name == _EXTRA else []
            config[name] = [*before, *map(_special, value)]
        else:
            config[name] = value if name == _EXTRA else _special(value)
    extra = config.get(_EXTRA)
    extra = extra if isinstance(extra, list) else []
    # transformers compares texts here before it has read the tokens that tokenizer_config.json holds as objects.
    special = {_token(token).content for token in (*map(config.get, NAMED), *extra) if isinstance(token, str | AddedToken)}
    return {
        token_id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in _read_json(folder / "added_tokens.json").items()
    }


def _special(value: Any) -> Any:
    return _token({**value, "special": True}) if isinstance(value, dict) else value


def _token(value: Any) -> AddedToken:
    """A token as JSON has it: its text, or its fields. Named and listed tokens are special unless their fields say otherwise."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ModelError("a special token of the tokenizer is neither a string nor an object with content", held=repr(value))
    return AddedToken(**{name: value[name] for name in _FIELDS if name in value})


def _read_tokenizer_json(folder: Path) -> tuple[tokenizers.Tokenizer, bool] | None:
    """The tokenizer of tokenizer.json, and whether its letters stand for bytes. None without the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        return tokenizers.Tokenizer.from_str(text), '"ByteLevel"' in text
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path.name} of {folder.name} cannot be read", why=str(error), next="download the file again") from None


def _read_by_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    if not (folder / "tokenizer.json").is_file() and not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ModelNotFound(
            f"{folder.name} has no tokenizer", held="there is no tokenizer.json in it",
            next="give one with tokenizer=..., or set skip_tokenizer_init and pass token ids",
        )  # fmt: skip
    from transformers import AutoTokenizer

    try:
        # Code of a checkpoint is never run. Left out, transformers would ask for it on standard input.
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return loaded.backend_tokenizer, dict(loaded.special_tokens_map)
    except Exception as error:  # converters raise anything, depending on the file format
        why, move = str(error), ""
        if "pip install tiktoken" in why:  # it tries tiktoken's format last, whatever the file is
            text = any(_is_tiktoken(folder / name) for name in _VOCABULARIES)
            why = "its vocabulary is a file of tiktoken, which is not installed" if text else "it is no SentencePiece model"
            move = "pip install tiktoken" if text else "download the file again"
        raise ModelError(f"the tokenizer of {folder.name} cannot be converted to tokenizer.json", why=why, next=move) from None


def _is_tiktoken(path: Path) -> bool:
    """Whether a file has lines of a token in base64 and its rank."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        token, _, rank = file.readline(4096).strip().partition(b" ")
    try:
        return rank.isdigit() and bool(base64.b64decode(token, validate=True))
    except ValueError:
        return False


def _warn_of_fields(folder: Path, config: dict[str, Any]) -> None:
    ignored = [f"{name} ({why})" for name, why in NOT_HONOURED.items() if config.get(name)]
    unknown = [name for name in FIELDS.unknown(config) if name not in NOT_HONOURED and not name.endswith("_token")]
    if unknown:
        ignored.append(f"{', '.join(sorted(unknown))} (no field of a tokenizer that is known here)")
    if ignored:
        log.warning("tokenizer_config.json of %s: without effect are %s", folder.name, "; ".join(ignored))


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> source. Files replace all templates of the config. Of a model that is released without any, our own."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths["default"] = folder / "chat_template.jinja"
    if paths:
        return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    source = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if source is None and (own := _OWN_TEMPLATES.get(_read_json(folder / "config.json").get("model_type", ""))) is not None:
        source = own.read_text(encoding="utf-8")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return source if isinstance(source, dict) else {"default": source} if isinstance(source, str) else {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"{path.name} of {path.parent.name} cannot be read", why=str(error), next="download the file again"
        ) from None
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} of {path.parent.name} cannot be read", why="it is not a JSON object")
    return content
