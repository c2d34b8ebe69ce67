# SPDX-License-Identifier: Apache-2.0
"""Structured output: a guide is compiled here, where it cannot hold up the engine, and followed there (`engine.grammar`).

A compiled grammar for 128,000 tokens has megabytes. So it does not travel with each request: it lies in a private folder of this
process, under the digest of its content, and `StructuredOutputParams.compiled` names it. The folder goes when the process ends.

JSON is written with one blank behind ":" and "," and no other white space, since a model that may write white space without end
sometimes does. Schemas are strict: what they do not mention is not allowed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from phalanx.comm import launch
from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.errors import EngineError, OptionError
from phalanx.log import get_logger
from phalanx.serve.structured_output.json_schema import MAX_BYTES, enforceable, read_json
from phalanx.serve.structured_output.regex import expand_unicode_classes, unsupported_construct
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

_KEPT = 256  # compiled guides per tokenizer
_IN_USE = 120.0  # seconds for which a file that was asked for stays, whatever else is compiled
_MOST_WHITESPACE = 2  # in a row
_START_SECONDS = 120.0
_COMPILE_SECONDS = 15.0


def compile_structured_output(
    params: StructuredOutputParams, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> StructuredOutputParams:
    """The guide with `compiled` set, for an engine on this host.

    vocab_size: the width of the model's logits, which may exceed the tokenizer's. eos_token_ids: what the model ends with; allowed
    once the text is complete. The text of special tokens (those that skip_special_tokens drops) is never written with those tokens.
    Waits for the compiler, the first time for its start too (seconds): call it on a thread. A `compiled` that is there already is
    replaced. Raises OptionError that says what is wrong with the guide, EngineError when the compiler does not start.
    """
    return _compiler(tokenizer, vocab_size, tuple(sorted(eos_token_ids))).compile(params)


_compilers: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], StructuredOutputCompiler]] = (
    weakref.WeakKeyDictionary()
)
_compilers_lock = threading.Lock()


def _compiler(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> StructuredOutputCompiler:
    with _compilers_lock:
        made = _compilers.setdefault(tokenizer, {})
        if (vocab_size, eos_token_ids) not in made:
            made[vocab_size, eos_token_ids] = StructuredOutputCompiler(token_bytes(tokenizer, vocab_size), eos_token_ids)
        return made[vocab_size, eos_token_ids]


class StructuredOutputCompiler:
    """Compiles guides for one vocabulary, and keeps the latest. May be used from many threads; one compiles at a time.

    vocabulary: the bytes of each token id, empty for ids that no text may use. seconds: what one compilation may take.
    """

    def __init__(self, vocabulary: list[bytes], eos_token_ids: Sequence[int], *, seconds: float = _COMPILE_SECONDS) -> None:
        self._process = _Process(vocabulary, eos_token_ids, seconds)
        self._end = weakref.finalize(self, self._process.end)
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def compile(self, params: StructuredOutputParams) -> StructuredOutputParams:
        """The guide with `compiled` set. Raises OptionError that says what is wrong with it."""
        kind, text = _asked(params)
        compiled = self._find(kind, text)
        if compiled is None:
            checked = _checked(kind, text)
            with self._compiling:
                compiled = self._find(kind, text) or self._keep(kind, text, *self._process.compile(kind, checked))
        return msgspec.structs.replace(params, compiled=compiled)

    def close(self) -> None:
        """End the compiler and remove its files; requests that are not yet admitted lose their grammars."""
        self._end()

    def _find(self, kind: str, text: str) -> str | None:
        with self._lock:
            kept = self._kept.get((kind, text))
            if kept is None or not kept.grammar.exists():  # somebody may have cleaned the temporary folder
                return None
            kept.used = time.monotonic()
            self._kept.move_to_end((kind, text))
            return kept.compiled

    def _keep(self, kind: str, text: str, tokenizer: Path, grammar: Path) -> str:
        with self._lock:
            kept = self._kept[kind, text] = _Kept(tokenizer, grammar)
            while len(self._kept) > _KEPT and next(iter(self._kept.values())).used < time.monotonic() - _IN_USE:
                _, gone = self._kept.popitem(last=False)
                if all(gone.grammar != other.grammar for other in self._kept.values()):
                    gone.grammar.unlink(missing_ok=True)
            return kept.compiled


class _Kept:
    """A compiled guide's file, and when it was last asked for."""

    def __init__(self, tokenizer: Path, grammar: Path) -> None:
        self.grammar, self.used = grammar, time.monotonic()
        self.compiled = json.dumps({"tokenizer": str(tokenizer), "grammar": str(grammar)})


class _Process:
    """The compiler's process (`serve.grammar_worker`): started when it is first needed, and again after it was ended."""

    def __init__(self, vocabulary: list[bytes], eos_token_ids: Sequence[int], seconds: float) -> None:
        self._vocabulary = msgspec.msgpack.encode(vocabulary)
        self._eos, self._seconds = list(eos_token_ids), seconds
        self._folder: Path | None = None
        self._child: launch.Child | None = None
        self._line: socket.socket | None = None
        self._tokenizer = Path()

    def compile(self, kind: str, text: str) -> tuple[Path, Path]:
        """The files of the tokenizer's facts and of the grammar. Raises OptionError."""
        if self._child is None or not self._child.alive or self._folder is None or not self._folder.exists():
            self._start()
        answer = self._ask({"kind": kind, "text": text})
        if "path" not in answer:
            raise OptionError(f"this {kind} cannot be used", why=answer["refused"])
        return self._tokenizer, Path(answer["path"])

    def end(self) -> None:
        """End the process and remove its files."""
        self._stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._stop()
        began = time.monotonic()
        if self._folder is None or not self._folder.exists():
            self._folder = Path(tempfile.mkdtemp(prefix="phalanx-grammars-"))
        vocabulary, address = self._folder / "vocabulary", self._folder / "line"
        vocabulary.write_bytes(self._vocabulary)
        address.unlink(missing_ok=True)
        config = {"vocabulary": str(vocabulary), "eos_token_ids": self._eos, "folder": str(self._folder), "socket": str(address)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(1)
            listener.settimeout(0.2)
            self._child = launch.start("phalanx.serve.structured_output.worker", config, "phalanx grammars")
            deadline = time.monotonic() + _START_SECONDS
            while self._line is None:
                with contextlib.suppress(TimeoutError):
                    self._line, _ = listener.accept()
                if self._line is None and (not self._child.alive or time.monotonic() > deadline):
                    held = "it ended" if not self._child.alive else f"it has not answered for {_START_SECONDS:g} s"
                    self._stop()
                    raise EngineError("the compiler of grammars was started", held=held, next="its log is above")
        self._tokenizer = Path(self._hear(_START_SECONDS)["tokenizer"])
        logger.info("the compiler of grammars is ready, %.1f s after its start", time.monotonic() - began)

    def _ask(self, words: dict[str, str]) -> dict[str, str]:
        assert self._child is not None
        assert self._line is not None
        kind = words["kind"]
        try:
            self._line.settimeout(self._seconds)
            self._line.sendall(json.dumps(words).encode() + b"\n")
            return self._hear(self._seconds)
        except TimeoutError:
            self._stop()
            raise OptionError(
                f"this {kind} cannot be used", why=f"compiling it took longer than {self._seconds:g} s", next="simplify it"
            ) from None
        except (OSError, ValueError):
            launch.wait([self._child], 5.0)
            held = launch.exit_words(self._child.process.returncode) if not self._child.alive else "went silent"
            self._stop()
            raise OptionError(f"this {kind} cannot be used", why=f"its compiler {held} over it", next="simplify it") from None

    def _hear(self, seconds: float) -> dict[str, str]:
        """The next line. Raises TimeoutError, or ValueError at the end of the line."""
        assert self._line is not None
        deadline, data = time.monotonic() + seconds, b""
        while not data.endswith(b"\n"):
            self._line.settimeout(max(deadline - time.monotonic(), 0.001))
            more = self._line.recv(65536)
            if not more:
                raise ValueError("the line was closed")
            data += more
        heard: dict[str, str] = json.loads(data)
        return heard

    def _stop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._child is not None:
            launch.stop([self._child], 0.0)
            self._child = None


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each of vocab_size token ids adds to a text; none for special tokens and ids without a token.

    Byte-level vocabularies (GPT-2's alphabet) and those with byte fallback ("<0x0A>") and "▁" for a blank are undone; in others a
    token is its text.
    """
    backend = tokenizer.backend
    decoders = set(_decoders(json.loads(backend.to_str()).get("decoder")))
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    letters = _byte_letters() if "ByteLevel" in decoders else {}
    found = [b""] * vocab_size
    for text, i in backend.get_vocab(with_added_tokens=True).items():
        if i >= vocab_size or i in tokenizer.special_ids:
            continue
        if i in added:
            found[i] = added[i].encode()
        elif letters:
            found[i] = bytes(letters[c] for c in text) if all(c in letters for c in text) else text.encode()
        elif "ByteFallback" in decoders and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
            found[i] = bytes([int(text[3:5], 16)])
        elif decoders & {"Metaspace", "Replace"}:
            found[i] = text.replace("▁", " ").encode()
        else:
            found[i] = text.encode()
    return found


def _decoders(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield decoder["type"]
        for part in decoder.get("decoders") or ():
            yield from _decoders(part)


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for the letters from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _asked(params: StructuredOutputParams) -> tuple[str, str]:
    if params.json_object:
        return "json_object", '{"type": "object"}'
    fields = ("json_schema", "regex", "grammar", "structural_tag")
    return next((kind, text) for kind in fields if (text := getattr(params, kind)) is not None)


def _checked(kind: str, text: str) -> str:
    """The text as the compiler gets it. Raises OptionError for what is too large to compile, or would not be enforced."""
    if kind == "json_schema":
        return json.dumps(enforceable(read_json(text, what=kind)))
    if kind == "structural_tag":
        tag = read_json(text, what=kind)
        for content in _contents_of_tag(tag):
            if "json_schema" in content:
                content["json_schema"] = enforceable(content["json_schema"], what="json_schema of the structural_tag")
                content["max_whitespace_cnt"] = _whitespace(content.get("max_whitespace_cnt"))
            if content.get("type") == "regex" and isinstance(content.get("pattern"), str):
                content["pattern"] = _checked_regex(content["pattern"], what="regex of the structural_tag")
        return json.dumps(tag)
    if len(text) > MAX_BYTES // 4:
        raise OptionError(f"a {kind} of {len(text)} characters was asked for", why=f"it may have {MAX_BYTES // 4}")
    return _checked_regex(text, what=kind) if kind == "regex" else text


def _checked_regex(pattern: str, *, what: str) -> str:
    part = unsupported_construct(pattern)
    if part is not None:
        raise OptionError(f"the {what} asks for {part}", why="the grammar cannot enforce it", next="say it without")
    return expand_unicode_classes(pattern)


def _whitespace(asked: Any) -> Any:
    """What a tag may have between the parts of its JSON: 2 characters at most; what is no number is left to the compiler."""
    if asked is None:
        return _MOST_WHITESPACE
    return min(asked, _MOST_WHITESPACE) if isinstance(asked, int) else asked


def _contents_of_tag(tag: Any) -> Iterator[dict[str, Any]]:
    """Every object of a structural tag, but for those of its schemas."""
    if isinstance(tag, dict):
        yield tag
        for name, value in tag.items():
            if name != "json_schema":
                yield from _contents_of_tag(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from _contents_of_tag(value)
