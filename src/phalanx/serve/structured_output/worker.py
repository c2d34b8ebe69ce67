# SPDX-License-Identifier: Apache-2.0
"""The process that compiles structured output: `python -m phalanx.serve.structured_output.worker`, started by `compiler`.

It keeps xgrammar, and torch, which xgrammar imports, out of the API server. It compiles nothing itself: each format is compiled by
a fork of it, with limits of time and memory, because a hostile schema may take minutes or gigabytes, or crash C++ code.

Short compilations pass long ones. Each begins at once, beside up to `_QUICK_AT_ONCE` others. One that takes longer than
`_QUICK_SECONDS` is long: it goes on with a lower priority if fewer than `_LONG_AT_ONCE` are long; else it is ended, and begins
again when one of those has ended.

xgrammar writes to stderr. Each compilation has a file for its stderr, whose lines come to the log when it ends.

Messages are lines of JSON over a Unix socket: {"number", "kind", "text"} in; {"number", "path"}, {"number", "invalid"} (the format
is wrong) or {"number", "refused"} out. The first one out is {"tokenizer"}.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import resource
import selectors
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from phalanx.comm.launch import exit_words, read_config
from phalanx.errors import OptionError
from phalanx.log import configure, get_logger
from phalanx.serve.structured_output.checks import checked
from phalanx.serve.structured_output.termination import nonterminating_rule

logger = get_logger(__name__)

_SEPARATORS = (", ", ": ")
_MAX_COMPILED = 32 << 20
"""Bytes of a compiled grammar. The engine needs tens of milliseconds per MiB to read it."""
_QUICK_SECONDS = 0.5
_QUICK_AT_ONCE = 4
_LONG_AT_ONCE = 2
_LONG_NICE = 10
_MAX_THREADS = 4
_MAX_LOGGED = 4096
"""Bytes of a compilation's stderr that come to the log, the last ones: a format of a client must not fill it."""
_PR_SET_PDEATHSIG = 1

Reply = dict[str, Any]


def main() -> None:
    config = read_config()
    configure("grammars")
    import numpy  # noqa: F401 (before the forks, which would each load it)
    import xgrammar

    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)  # the threads of libraries are idle
    vocabulary = msgspec.msgpack.decode(Path(config["vocabulary"]).read_bytes(), type=list[bytes])
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=config["eos_token_ids"]
    )
    folder = Path(config["folder"])

    def compile_one(kind: str, text: str) -> Reply:
        compiler = xgrammar.GrammarCompiler(info, max_threads=min(_MAX_THREADS, os.cpu_count() or 1), cache_enabled=False)
        return _reply(compiler, folder, kind, text)

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(config["socket"])
        connection.sendall(json.dumps({"tokenizer": str(store(folder, info.serialize_json()))}).encode() + b"\n")
        Compilations(connection, compile_one, seconds=config["seconds"], memory=config["memory"]).run()


@dataclass(eq=False)
class Compilation:
    """One format. process, pipe, stderr: of its fork. began: when it began (time.monotonic). long: it was not quick."""

    number: int
    kind: str
    text: str
    process: int = 0
    pipe: int = -1
    stderr: IO[bytes] | None = None
    began: float = 0.0
    long: bool = False
    received: bytes = b""


class Compilations:
    """All compilations of this process, in one loop. seconds, memory: limits of each: seconds from its beginning, and bytes."""

    def __init__(self, connection: socket.socket, compile_one: Callable[[str, str], Reply], *, seconds: float, memory: int) -> None:
        self._connection, self._compile_one, self._seconds, self._memory = connection, compile_one, seconds, memory
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._waiting: deque[Compilation] = deque()
        self._long_waiting: deque[Compilation] = deque()
        self._running: list[Compilation] = []
        self._received = b""

    def run(self) -> None:
        """Compile until the connection is closed."""
        while True:
            for key, _ in self._selector.select(self._until_next()):
                if key.fileobj is self._connection:
                    if not self._take_requests():
                        for one in self._running:
                            self._end(one)
                        return
                else:
                    self._take_reply(key.data)
            self._judge()
            self._begin()

    def _until_next(self) -> float | None:
        """Seconds until a compilation becomes long, or has taken too long."""
        now = time.monotonic()
        ends = [one.began + (self._seconds if one.long else min(_QUICK_SECONDS, self._seconds)) for one in self._running]
        return max(0.0, min(ends) - now) if ends else None

    def _take_requests(self) -> bool:
        data = self._connection.recv(1 << 20)
        if not data:
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._waiting.append(Compilation(**json.loads(line)))
        return True

    def _take_reply(self, one: Compilation) -> None:
        data = os.read(one.pipe, 1 << 16)
        one.received += data
        if data:
            return
        status = self._end(one, kill=False)
        try:
            reply = json.loads(one.received)
        except ValueError:
            problem = exit_words(os.waitstatus_to_exitcode(status))
            limit = f"a compilation may have {self._memory >> 20} MiB of memory"
            reply = {"refused": f"the compiler {problem} at it; {limit}", "next": "simplify it"}
        self._send(one, reply)

    def _judge(self) -> None:
        """End what has taken too long; what was not quick goes on as a long one, or waits to be one."""
        now = time.monotonic()
        for one in list(self._running):
            seconds = now - one.began
            if seconds >= self._seconds:
                self._end(one)
                self._send(one, {"refused": f"it takes longer than {self._seconds:g} s", "next": "simplify it"})
            elif not one.long and seconds >= _QUICK_SECONDS:
                one.long = True
                if sum(other.long for other in self._running) <= _LONG_AT_ONCE:
                    os.setpriority(os.PRIO_PROCESS, one.process, _LONG_NICE)
                else:
                    self._end(one)
                    self._long_waiting.append(one)

    def _begin(self) -> None:
        while self._waiting and sum(not one.long for one in self._running) < _QUICK_AT_ONCE:
            self._fork(self._waiting.popleft())
        while self._long_waiting and sum(one.long for one in self._running) < _LONG_AT_ONCE:
            one = self._long_waiting.popleft()
            self._fork(one)
            os.setpriority(os.PRIO_PROCESS, one.process, _LONG_NICE)

    def _fork(self, one: Compilation) -> None:
        reading, writing = os.pipe()
        one.stderr = tempfile.TemporaryFile()  # noqa: SIM115 (`_end` closes it)
        process = os.fork()
        if process == 0:
            try:
                _end_with_parent()
                os.dup2(one.stderr.fileno(), 2)
                os.close(reading)
                self._connection.close()
                _limit_memory(self._memory)
                with open(writing, "wb") as pipe:
                    pipe.write(json.dumps(self._compile_one(one.kind, one.text)).encode())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writing)
        one.process, one.pipe, one.began, one.received = process, reading, time.monotonic(), b""
        self._running.append(one)
        self._selector.register(reading, selectors.EVENT_READ, one)

    def _end(self, one: Compilation, *, kill: bool = True) -> int:
        """Forget a process, ended or not, and return its status."""
        self._selector.unregister(one.pipe)
        os.close(one.pipe)
        self._running.remove(one)
        if kill:
            os.kill(one.process, signal.SIGKILL)
        status = os.waitpid(one.process, 0)[1]
        if one.stderr is not None:
            with one.stderr as stderr:
                stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MAX_LOGGED))
                text = stderr.read().decode(errors="replace").strip()
            if text:
                logger.warning("compiling a %s: %s", one.kind, text)
        return status

    def _send(self, one: Compilation, reply: Reply) -> None:
        self._connection.sendall(json.dumps({"number": one.number, **reply}).encode() + b"\n")


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent, where it can (Linux)."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


def _reply(compiler: Any, folder: Path, kind: str, text: str) -> Reply:
    try:
        grammar = _compile(compiler, kind, checked(kind, text))
        problem = _unsatisfiable(grammar)
        if problem is not None:
            return {"refused": problem}
        compiled = str(grammar.serialize_json())
    except OptionError as error:
        return {"invalid": str(error)}
    except Exception as error:  # xgrammar raises RuntimeError, errors of its own, and those of a conversion of the text
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return {"refused": "it needs more memory than a compilation may have", "next": "simplify it"}
        return {"refused": _reason(error)}
    if len(compiled) > _MAX_COMPILED:
        return {"refused": f"compiled, it has {len(compiled) >> 20} MiB; the limit is {_MAX_COMPILED >> 20} MiB: simplify it"}
    return {"path": str(store(folder, compiled))}


def _compile(compiler: Any, kind: str, text: str) -> Any:
    if kind == "json_schema":
        return compiler.compile_json_schema(text, any_whitespace=False, separators=_SEPARATORS, strict_mode=True)
    if kind == "json_object":
        return compiler.compile_json_schema(text, any_whitespace=False, separators=_SEPARATORS, strict_mode=False)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "grammar":
        return compiler.compile_grammar(text)
    return compiler.compile_structural_tag(text)


def _unsatisfiable(compiled: Any) -> str | None:
    """Why no text of the model can satisfy the grammar; None if one can."""
    import numpy as np
    import xgrammar

    rule = nonterminating_rule(str(compiled.grammar))
    if rule is not None:
        return f"no finite text satisfies it: every alternative of its rule {rule!r} leads to the rule again; add one that ends"
    info = compiled.tokenizer_info
    mask = np.zeros((1, (info.vocab_size + 31) // 32), dtype=np.int32)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not info.stop_token_ids)
    matcher.fill_next_token_bitmask(mask)
    return None if mask.any() else "no text of this model satisfies it: none of its tokens can be the first"


def store(folder: Path, text: str) -> Path:
    """Write a text to a file named by its digest, atomically."""
    content = text.encode()
    path = folder / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.json"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def _reason(error: Exception) -> str:
    """The message of an xgrammar error without time stamps, source lines and failed checks."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?", "", str(error)).strip()
    return text[:500] or type(error).__name__


def _limit_memory(size: int) -> None:
    """Limit the memory (bytes) taken from here on. The limit is on address space, of which the libraries already use much."""
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # without /proc, only the time limit applies
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + size
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
