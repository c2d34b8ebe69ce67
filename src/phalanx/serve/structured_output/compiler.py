# SPDX-License-Identifier: Apache-2.0
"""Structured output as the engine follows it: `compile_structured_output` writes a format as a grammar, and checks it.

A hostile schema may take seconds or gigabytes, or overflow the stack of the library: each check runs in a fork (`worker`).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future

import msgspec

from phalanx.config.sampling_params import StructuredOutputParams
from phalanx.errors import OptionError
from phalanx.serve.forks.server import ForkServer
from phalanx.serve.structured_output.json_schema import MAX_BYTES, read_json

NICE = 5
"""How much lower the priority of the checks is than the server's."""
_MAX_CACHED = 256
AT_ONCE = 4
_CHECK_SECONDS = 3
"""CPU time of one check."""
_CHECK_MEMORY = 1 << 30


def compile_structured_output(params: StructuredOutputParams) -> StructuredOutputParams:
    """The params with the grammar as `compiled`, unless it is there.

    Waits for the check, the first time also for the start of its process (0.3 s): call it on a thread. Raises OptionError saying
    what is wrong with the params, EngineError if the process does not start.
    """
    return _grammar_checks.compile(params)


class GrammarChecks:
    """Checks formats, and caches the latest. Several threads may use it at once. seconds, memory: limits of one check, in seconds
    of CPU time and bytes."""

    def __init__(self, *, seconds: int = _CHECK_SECONDS, memory: int = _CHECK_MEMORY) -> None:
        self.forks = ForkServer(
            "grammars", "phalanx.serve.structured_output.worker:make_task",
            at_once=AT_ONCE, nice=NICE, seconds=seconds, memory=memory,
        )  # fmt: skip
        self._limits = f"it takes more than {seconds} s, {memory >> 20} MiB, or the library's stack"
        self._cached: OrderedDict[tuple[str, str], Future[str]] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputParams) -> StructuredOutputParams:
        """As `compile_structured_output`. Callers that want the same format at once share one check."""
        if params.compiled is not None:
            return params
        kind, text = _format_of(params)
        if len(text) > MAX_BYTES:
            read_json(text, what=kind)  # refuses it
        with self._lock:
            shared = self._cached.get((kind, text))
            result = self._cached.setdefault((kind, text), Future())
            self._cached.move_to_end((kind, text))
            while len(self._cached) > _MAX_CACHED:
                self._cached.popitem(last=False)
        if shared is None:
            try:
                result.set_result(self._check(kind, text))
            except BaseException as error:
                with self._lock:
                    self._cached.pop((kind, text), None)
                result.set_exception(error)
        return msgspec.structs.replace(params, compiled=result.result())

    def _check(self, kind: str, text: str) -> str:
        try:
            with self.forks.task() as fork:
                fork.send_bytes(json.dumps({"kind": kind, "text": text}).encode())
                reply = json.loads(fork.recv_bytes())
        except (OSError, EOFError):
            raise OptionError(f"this {kind} cannot be checked", why=self._limits, next="simplify it") from None
        if "invalid" in reply:
            raise OptionError(reply["invalid"])
        return str(reply["grammar"])


_grammar_checks = GrammarChecks()


def _format_of(params: StructuredOutputParams) -> tuple[str, str]:
    if params.json_object:
        return "json_object", ""
    fields = ("json_schema", "regex", "grammar", "structural_tag")
    return next((kind, text) for kind in fields if (text := getattr(params, kind)) is not None)
