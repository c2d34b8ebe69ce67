# SPDX-License-Identifier: Apache-2.0
"""Compile structured output: formats are compiled here, where they cannot delay the engine, and followed in `engine.grammar`.

A compiled grammar for 128,000 tokens has megabytes. So it is not sent with each request: it is a file in a private folder of this
process, named by the digest of its content, and `StructuredOutputParams.compiled` names the file. The folder is removed when the
process ends.

JSON is written with one space after ":" and "," and no other white space, because a model that may write any white space sometimes
never stops. Schemas are strict: properties that they do not mention are not allowed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import stat
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

_PREFIX, _LOCK, _NEW_LOCK = "phalanx-grammars-", "lock", "new-lock"
_MAX_CACHED = 256  # compiled grammars per tokenizer
_IN_USE = 120.0  # seconds for which a requested file stays, whatever else is compiled
_MAX_WHITESPACE = 2  # white-space characters in a row
_START_SECONDS = 120.0
_COMPILE_SECONDS = 15.0


def compile_structured_output(
    params: StructuredOutputParams, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> StructuredOutputParams:
    """The params with `compiled` set, for an engine on this host.

    vocab_size: the width of the model's logits, which may exceed that of the tokenizer. eos_token_ids: tokens that end the text;
    allowed once the text is complete. Special tokens (those that skip_special_tokens drops) are never used to write their text.
    Waits for the compiler, the first time also for its start (seconds): call it on a thread. An existing `compiled` is replaced.
    Raises OptionError saying what is wrong with the params, EngineError if the compiler does not start.
    """
    return _compiler(tokenizer, vocab_size, tuple(sorted(eos_token_ids))).compile(params)


_compilers: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[int, tuple[int, ...]], StructuredOutputCompiler]] = (
    weakref.WeakKeyDictionary()
)
_compilers_lock = threading.Lock()


def _compiler(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> StructuredOutputCompiler:
    with _compilers_lock:
        compilers = _compilers.setdefault(tokenizer, {})
        if (vocab_size, eos_token_ids) not in compilers:
            compilers[vocab_size, eos_token_ids] = StructuredOutputCompiler(token_bytes(tokenizer, vocab_size), eos_token_ids)
        return compilers[vocab_size, eos_token_ids]


class StructuredOutputCompiler:
    """Compiles formats for one vocabulary, and caches the latest. Several threads may use it; one compiles at a time.

    vocabulary: the bytes of each token id; empty for ids that no text may use. seconds: limit of one compilation.
    """

    def __init__(self, vocabulary: list[bytes], eos_token_ids: Sequence[int], *, seconds: float = _COMPILE_SECONDS) -> None:
        self._process = _Process(vocabulary, eos_token_ids, seconds)
        self._end = weakref.finalize(self, self._process.end)
        self._cached: OrderedDict[tuple[str, str], _CachedGrammar] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def compile(self, params: StructuredOutputParams) -> StructuredOutputParams:
        """The params with `compiled` set. Raises OptionError saying what is wrong with them."""
        kind, text = _format_of(params)
        compiled = self._find(kind, text)
        if compiled is None:
            checked = _checked(kind, text)
            with self._compiling:
                compiled = self._find(kind, text) or self._store(kind, text, *self._process.compile(kind, checked))
        return msgspec.structs.replace(params, compiled=compiled)

    def close(self) -> None:
        """End the compiler and remove its files; requests that the engine has not read yet lose their grammars."""
        self._end()

    def _find(self, kind: str, text: str) -> str | None:
        with self._lock:
            cached = self._cached.get((kind, text))
            if cached is None or not cached.grammar.exists():  # the temporary folder may have been cleaned
                return None
            cached.used = time.monotonic()
            self._cached.move_to_end((kind, text))
            return cached.compiled

    def _store(self, kind: str, text: str, tokenizer: Path, grammar: Path) -> str:
        with self._lock:
            cached = self._cached[kind, text] = _CachedGrammar(tokenizer, grammar)
            while len(self._cached) > _MAX_CACHED and next(iter(self._cached.values())).used < time.monotonic() - _IN_USE:
                _, evicted = self._cached.popitem(last=False)
                if all(evicted.grammar != other.grammar for other in self._cached.values()):
                    evicted.grammar.unlink(missing_ok=True)
            return cached.compiled


class _CachedGrammar:
    """The file of a compiled grammar, and the time of its last use."""

    def __init__(self, tokenizer: Path, grammar: Path) -> None:
        self.grammar, self.used = grammar, time.monotonic()
        self.compiled = json.dumps({"tokenizer": str(tokenizer), "grammar": str(grammar)})


class _Process:
    """The process of the compiler (`structured_output.worker`): started when it is first needed, and again after it has ended."""

    def __init__(self, vocabulary: list[bytes], eos_token_ids: Sequence[int], seconds: float) -> None:
        self._vocabulary = msgspec.msgpack.encode(vocabulary)
        self._eos, self._seconds = list(eos_token_ids), seconds
        self._folder: Path | None = None
        self._lock_file = -1
        self._child: launch.Child | None = None
        self._connection: socket.socket | None = None
        self._tokenizer = Path()

    def compile(self, kind: str, text: str) -> tuple[Path, Path]:
        """The files of the tokenizer info and of the compiled grammar. Raises OptionError."""
        if self._child is None or not self._child.alive or self._folder is None or not self._folder.exists():
            self._start()
        reply = self._request({"kind": kind, "text": text})
        if "path" not in reply:
            raise OptionError(f"this {kind} cannot be compiled", why=reply["refused"])
        return self._tokenizer, Path(reply["path"])

    def end(self) -> None:
        """End the process and remove its files."""
        self._stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock_file)
            self._folder = None

    def _start(self) -> None:
        self._stop()
        start_time = time.monotonic()
        if self._folder is None or not self._folder.exists():
            if self._folder is not None:  # somebody removed it
                os.close(self._lock_file)
                self._folder = None
            sweep_folders(Path(tempfile.gettempdir()))
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock_file, self._folder = _lock_folder(folder), folder
        vocabulary, address = self._folder / "vocabulary", self._folder / "socket"
        vocabulary.write_bytes(self._vocabulary)
        address.unlink(missing_ok=True)
        config = {"vocabulary": str(vocabulary), "eos_token_ids": self._eos, "folder": str(self._folder), "socket": str(address)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(1)
            listener.settimeout(0.2)
            self._child = launch.start("phalanx.serve.structured_output.worker", config, "phalanx grammars")
            deadline = time.monotonic() + _START_SECONDS
            while self._connection is None:
                with contextlib.suppress(TimeoutError):
                    self._connection, _ = listener.accept()
                if self._connection is None and (not self._child.alive or time.monotonic() > deadline):
                    problem = "ended" if not self._child.alive else f"did not connect within {_START_SECONDS:g} s"
                    self._stop()
                    raise EngineError(f"the compiler of structured output {problem} at its start", next="see its log above")
        self._tokenizer = Path(self._receive(_START_SECONDS)["tokenizer"])
        logger.info("the compiler of structured output is ready, %.1f s after its start", time.monotonic() - start_time)

    def _request(self, message: dict[str, str]) -> dict[str, str]:
        assert self._child is not None
        assert self._connection is not None
        kind = message["kind"]
        try:
            self._connection.settimeout(self._seconds)
            self._connection.sendall(json.dumps(message).encode() + b"\n")
            return self._receive(self._seconds)
        except TimeoutError:
            self._stop()
            raise OptionError(
                f"this {kind} cannot be compiled", why=f"it takes longer than {self._seconds:g} s", next="simplify it"
            ) from None
        except (OSError, ValueError):
            launch.wait([self._child], 5.0)
            problem = launch.exit_words(self._child.process.returncode) if not self._child.alive else "stopped answering"
            self._stop()
            raise OptionError(f"this {kind} cannot be compiled", why=f"the compiler {problem} at it", next="simplify it") from None

    def _receive(self, seconds: float) -> dict[str, str]:
        """The next message. Raises TimeoutError, or ValueError if the connection is closed."""
        assert self._connection is not None
        deadline, data = time.monotonic() + seconds, b""
        while not data.endswith(b"\n"):
            self._connection.settimeout(max(deadline - time.monotonic(), 0.001))
            more = self._connection.recv(65536)
            if not more:
                raise ValueError("the connection was closed")
            data += more
        message: dict[str, str] = json.loads(data)
        return message

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._child is not None:
            launch.stop([self._child], 0.0)
            self._child = None


def sweep_folders(parent: Path) -> None:
    """Remove the folders of this user's servers that have ended without removing them: nobody holds their locks any more."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock_file = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock_file)


def _lock_folder(folder: Path) -> int:
    """The descriptor of a new folder's lock, which the kernel releases when this process ends."""
    lock_file = os.open(folder / _NEW_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock_file, fcntl.LOCK_EX)
    (folder / _NEW_LOCK).rename(folder / _LOCK)  # under this name it is locked from the start
    return lock_file


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each of vocab_size token ids adds to a text; empty for special tokens and ids without a token.

    Byte-level vocabularies (GPT-2's alphabet) and those with byte fallback ("<0x0A>") and "▁" for a space are decoded; in others,
    a token is its own text.
    """
    backend = tokenizer.backend
    decoders = set(_decoders(json.loads(backend.to_str()).get("decoder")))
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    byte_of = _byte_letters() if "ByteLevel" in decoders else {}
    contents = [b""] * vocab_size
    for text, i in backend.get_vocab(with_added_tokens=True).items():
        if i >= vocab_size or i in tokenizer.special_ids:
            continue
        if i in added:
            contents[i] = added[i].encode()
        elif byte_of:
            contents[i] = bytes(byte_of[c] for c in text) if all(c in byte_of for c in text) else text.encode()
        elif "ByteFallback" in decoders and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
            contents[i] = bytes([int(text[3:5], 16)])
        elif decoders & {"Metaspace", "Replace"}:
            contents[i] = text.replace("▁", " ").encode()
        else:
            contents[i] = text.encode()
    return contents


def _decoders(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield decoder["type"]
        for part in decoder.get("decoders") or ():
            yield from _decoders(part)


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet, letter -> byte: printable Latin-1 letters are their bytes; those from U+0100 on are the rest, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _format_of(params: StructuredOutputParams) -> tuple[str, str]:
    if params.json_object:
        return "json_object", '{"type": "object"}'
    fields = ("json_schema", "regex", "grammar", "structural_tag")
    return next((kind, text) for kind in fields if (text := getattr(params, kind)) is not None)


def _checked(kind: str, text: str) -> str:
    """The text for the compiler. Raises OptionError if it is too large, or the grammar would not enforce all of it."""
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
        raise OptionError(f"the {kind} has {len(text)} characters", why=f"the limit is {MAX_BYTES // 4}", next="simplify it")
    return _checked_regex(text, what=kind) if kind == "regex" else text


def _checked_regex(pattern: str, *, what: str) -> str:
    part = unsupported_construct(pattern)
    if part is not None:
        raise OptionError(f"the {what} has {part}", why="the grammar cannot enforce it", next="rewrite it without")
    return expand_unicode_classes(pattern)


def _whitespace(limit: Any) -> Any:
    """The limit of white space between the parts of a tag's JSON: at most 2 characters. The compiler rejects what is no number."""
    if limit is None:
        return _MAX_WHITESPACE
    return min(limit, _MAX_WHITESPACE) if isinstance(limit, int) else limit


def _contents_of_tag(tag: Any) -> Iterator[dict[str, Any]]:
    """All objects of a structural tag, except those of its schemas."""
    if isinstance(tag, dict):
        yield tag
        for name, value in tag.items():
            if name != "json_schema":
                yield from _contents_of_tag(value)
    elif isinstance(tag, list):
        for value in tag:
            yield from _contents_of_tag(value)
