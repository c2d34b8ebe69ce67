# SPDX-License-Identifier: Apache-2.0
"""The process that compiles guides: `python -m phalanx.serve.structured_output.worker`, started by `serve.grammar`.

By itself, because a hostile schema may take minutes, gigabytes or a crash in C++: its parent ends it when it takes too long, and
nobody else is hurt. It also keeps xgrammar, and the torch that it imports, out of the API server.

One line of JSON each way over a Unix socket: {"kind", "text"} in; {"path"} or {"refused"} out. The first line out is {"tokenizer"}.
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
"""Bytes of a compiled grammar; the engine takes some tens of milliseconds per MiB to read one."""
_MAX_MEMORY = 4 << 30
"""Bytes that a compilation may take."""


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
    with socket.socket(socket.AF_UNIX) as line, line.makefile("rwb") as stream:
        line.connect(config["socket"])
        _say(stream, {"tokenizer": str(store(folder, info.serialize_json()))})
        for request in stream:
            asked = json.loads(request)
            _say(stream, _answer(compiler, folder, asked["kind"], asked["text"]))


def _answer(compiler: Any, folder: Path, kind: str, text: str) -> dict[str, str]:
    try:
        made = _compile(compiler, kind, text)
        refused = _without_end(made)
        if refused is not None:
            return {"refused": refused}
        compiled = str(made.serialize_json())
    except Exception as error:  # xgrammar raises RuntimeError, its own kinds, and whatever a conversion of the text raises
        return {"refused": _reason(error)}
    if len(compiled) > _MAX_COMPILED:
        return {"refused": f"compiled it has {len(compiled) >> 20} MiB, and {_MAX_COMPILED >> 20} are the most: simplify it"}
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


def _without_end(compiled: Any) -> str | None:
    """Why a model could not write a text that satisfies the grammar, if so."""
    import numpy as np
    import xgrammar

    rule = nonterminating_rule(str(compiled.grammar))
    if rule is not None:
        return f"no finite text satisfies it: its rule {rule!r} leads to itself on every way; give it a way that ends"
    info = compiled.tokenizer_info
    mask = np.zeros((1, (info.vocab_size + 31) // 32), dtype=np.int32)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not info.stop_token_ids)
    matcher.fill_next_token_bitmask(mask)
    return None if mask.any() else "no text of this model satisfies it: none of its tokens may come first"


def store(folder: Path, text: str) -> Path:
    """Write a text under its digest, whole or not at all."""
    content = text.encode()
    path = folder / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.json"
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def _say(stream: Any, words: dict[str, str]) -> None:
    stream.write(json.dumps(words).encode() + b"\n")
    stream.flush()


def _reason(error: Exception) -> str:
    """xgrammar's message without its time stamps, source lines and failed checks."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?", "", str(error)).strip()
    return text[:500] or type(error).__name__


def _limit_memory() -> None:
    """Bound what is taken from here on. The bound is on addresses, of which the libraries hold many already."""
    try:
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # no /proc here: the time limit remains
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = held + _MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


if __name__ == "__main__":
    main()
