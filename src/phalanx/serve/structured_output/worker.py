# SPDX-License-Identifier: Apache-2.0
"""The process that compiles structured output: `python -m phalanx.serve.structured_output.worker`, started by `compiler`.

It is a process of its own, because a hostile schema may take minutes or gigabytes, or crash C++ code. Its parent ends it when it
takes too long, and nothing else is affected. It also keeps xgrammar, and torch, which xgrammar imports, out of the API server.

Messages are lines of JSON over a Unix socket: {"kind", "text"} in; {"path"} or {"refused"} out. The first one out is {"tokenizer"}.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import socket
from pathlib import Path
from typing import Any

import msgspec

from phalanx.comm.launch import read_config
from phalanx.serve.structured_output.termination import nonterminating_rule

_SEPARATORS = (", ", ": ")
_MAX_COMPILED = 32 << 20
"""Bytes of a compiled grammar. The engine needs tens of milliseconds per MiB to read it."""
_MAX_MEMORY = 4 << 30
"""Memory limit of compilations, in bytes."""


def main() -> None:
    config = read_config()
    import xgrammar

    vocabulary = msgspec.msgpack.decode(Path(config["vocabulary"]).read_bytes(), type=list[bytes])
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=config["eos_token_ids"]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=min(4, os.cpu_count() or 1), cache_enabled=False)
    folder = Path(config["folder"])
    _limit_memory()
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rwb") as stream:
        connection.connect(config["socket"])
        _send(stream, {"tokenizer": str(store(folder, info.serialize_json()))})
        for request in stream:
            message = json.loads(request)
            _send(stream, _reply(compiler, folder, message["kind"], message["text"]))


def _reply(compiler: Any, folder: Path, kind: str, text: str) -> dict[str, str]:
    try:
        grammar = _compile(compiler, kind, text)
        problem = _unsatisfiable(grammar)
        if problem is not None:
            return {"refused": problem}
        compiled = str(grammar.serialize_json())
    except Exception as error:  # xgrammar raises RuntimeError, errors of its own, and those of a conversion of the text
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
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def _send(stream: Any, message: dict[str, str]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _reason(error: Exception) -> str:
    """The message of an xgrammar error without time stamps, source lines and failed checks."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?", "", str(error)).strip()
    return text[:500] or type(error).__name__


def _limit_memory() -> None:
    """Limit the memory taken from here on. The limit is on address space, of which the libraries already use much."""
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # without /proc, only the time limit applies
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + _MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
