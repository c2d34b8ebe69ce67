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
import itertools
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
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from phalanx.comm import launch
from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.errors import EngineError, OptionError
from phalanx.log import get_logger
from phalanx.serve.structured_output.checks import checked
from phalanx.serve.structured_output.json_schema import MAX_BYTES
from phalanx.serve.tokenizer import Tokenizer

logger = get_logger(__name__)

_PREFIX, _LOCK, _NEW_LOCK = "phalanx-grammars-", "lock", "new-lock"
NO_TEXT = b"\xff"
"""A byte that UTF-8 never has."""
_MAX_CACHED = 256  # compiled grammars per tokenizer
_IN_USE = 120.0  # seconds for which a requested file stays, whatever else is compiled
_START_SECONDS = 120.0
_COMPILE_SECONDS = 15.0
_COMPILE_MEMORY = 2 << 30
_SILENT_SECONDS = 600.0
NICE = 5
"""How much lower the priority of the compiler is than the server's. What takes long has a lower one still."""
"""A compilation waits for its turn, but never so long."""


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
    """Compiles formats for one vocabulary, and caches the latest. Several threads may use it, and compile at once.

    vocabulary: the bytes of each token id; empty for ids that no text may use. seconds, memory: limits of one compilation, in
    seconds and bytes.
    """

    def __init__(
        self,
        vocabulary: list[bytes],
        eos_token_ids: Sequence[int],
        *,
        seconds: float = _COMPILE_SECONDS,
        memory: int = _COMPILE_MEMORY,
    ) -> None:
        self._process = _CompilerProcess(vocabulary, eos_token_ids, seconds, memory)
        self._end = weakref.finalize(self, self._process.end)
        self._cached: OrderedDict[tuple[str, str], _CachedGrammar] = OrderedDict()
        self._compiling: dict[tuple[str, str], Future[str]] = {}
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputParams) -> StructuredOutputParams:
        """The params with `compiled` set. Raises OptionError saying what is wrong with them.

        Callers that want the same format at once share one compilation.
        """
        kind, text = _format_of(params)
        compiled = self._find(kind, text)
        if compiled is None:
            if len(text) > MAX_BYTES:
                checked(kind, text)  # refuses it
            with self._lock:
                shared = self._compiling.get((kind, text))
                result = self._compiling.setdefault((kind, text), Future())
            if shared is None:
                self._compile(kind, text, result)
            compiled = result.result()
        return msgspec.structs.replace(params, compiled=compiled)

    def _compile(self, kind: str, text: str, result: Future[str]) -> None:
        try:
            result.set_result(self._find(kind, text) or self._store(kind, text, *self._process.compile(kind, text)))
        except BaseException as error:
            result.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                del self._compiling[kind, text]

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


class _CompilerProcess:
    """The compiler's process (`structured_output.worker`): started when it is first needed, and again after it has ended.

    Several threads wait for its replies at once, which a thread of its own receives.
    """

    def __init__(self, vocabulary: list[bytes], eos_token_ids: Sequence[int], seconds: float, memory: int) -> None:
        self._vocabulary = msgspec.msgpack.encode(vocabulary)
        self._eos, self._limits = list(eos_token_ids), {"seconds": seconds, "memory": memory}
        self._folder: Path | None = None
        self._lock_file = -1
        self._child: launch.Child | None = None
        self._connection: socket.socket | None = None
        self._tokenizer = Path()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()

    def compile(self, kind: str, text: str) -> tuple[Path, Path]:
        """The files of the tokenizer info and of the compiled grammar. Raises OptionError."""
        with self._lock:
            if self._child is None or not self._child.alive or self._folder is None or not self._folder.exists():
                self._start()
            assert self._connection is not None
            number, tokenizer = next(self._numbers), self._tokenizer
            reply: Future[dict[str, Any]] = Future()
            self._pending[number] = reply
            with contextlib.suppress(OSError):  # it has ended, and whoever receives its replies says so
                self._connection.sendall(json.dumps({"number": number, "kind": kind, "text": text}).encode() + b"\n")
        try:
            answer = reply.result(_SILENT_SECONDS)
        except TimeoutError:
            answer = {"refused": "the compiler stopped answering at it"}
        finally:
            self._pending.pop(number, None)
        if "invalid" in answer:
            raise OptionError(answer["invalid"])
        if "path" not in answer:
            raise OptionError(f"this {kind} cannot be compiled", why=answer["refused"], next=answer.get("next", ""))
        return tokenizer, Path(answer["path"])

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
        config: dict[str, Any] = {
            "vocabulary": str(vocabulary),
            "eos_token_ids": self._eos,
            "folder": str(self._folder),
            "socket": str(address),
        }
        config |= self._limits
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(1)
            listener.settimeout(0.2)
            self._child = launch.start("phalanx.serve.structured_output.worker", config, "phalanx grammars")
            launch.set_nice(self._child.pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICE))
            deadline = time.monotonic() + _START_SECONDS
            while self._connection is None:
                with contextlib.suppress(TimeoutError):
                    self._connection, _ = listener.accept()
                if self._connection is None and (not self._child.alive or time.monotonic() > deadline):
                    problem = "ended" if not self._child.alive else f"did not connect within {_START_SECONDS:g} s"
                    self._stop()
                    raise EngineError(f"the compiler of structured output {problem} at its start", next="see its log above")
        self._connection.settimeout(_START_SECONDS)
        stream = self._connection.makefile("rb")
        try:
            self._tokenizer = Path(json.loads(stream.readline())["tokenizer"])
        except (OSError, ValueError) as error:  # it has ended, as with a full disk, or says nothing
            stream.close()
            self._stop()
            raise EngineError(
                "the compiler of structured output ended at its start", why=str(error), next="see its log above"
            ) from None
        self._connection.settimeout(None)
        threading.Thread(target=_receive, args=(stream, self._child, self._pending), daemon=True).start()
        logger.info("the compiler of structured output is ready, %.1f s after its start", time.monotonic() - start_time)

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._child is not None:
            launch.stop([self._child], 0.0)
            self._child = None


def _receive(stream: BinaryIO, child: launch.Child, pending: dict[int, Future[dict[str, Any]]]) -> None:
    """Give each reply of a process to whoever waits for it; when the process ends, all who wait hear of it."""
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            reply = json.loads(line)
            future = pending.get(reply["number"])
            if future is not None:
                future.set_result(reply)
    launch.wait([child], 5.0)
    problem = launch.exit_words(child.process.returncode) if not child.alive else "stopped answering"
    for future in list(pending.values()):
        if not future.done():
            future.set_result({"refused": f"the compiler {problem} at it", "next": "simplify it"})


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
    """The bytes that each of vocab_size token ids adds to a text; empty for ids without a token.

    Special tokens begin with a byte that no text contains: a grammar can name such a token, and no text allows it.

    Byte-level vocabularies (GPT-2's alphabet) and those with byte fallback ("<0x0A>") and "▁" for a space are decoded; in others,
    a token is its own text.
    """
    backend = tokenizer.backend
    decoders = set(_decoders(json.loads(backend.to_str()).get("decoder")))
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    byte_of = _byte_letters() if "ByteLevel" in decoders else {}
    contents = [b""] * vocab_size
    for text, i in backend.get_vocab(with_added_tokens=True).items():
        if i >= vocab_size:
            continue
        if i in tokenizer.special_ids:
            contents[i] = NO_TEXT + text.encode()
        elif i in added:
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
