# SPDX-License-Identifier: Apache-2.0
"""What llguidance says of a grammar, without the vocabulary of the model."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from phalanx.engine.grammar import HEAD, read_grammar, tokenizer_of

if TYPE_CHECKING:
    import llguidance

MAX_TOKENS = 2**19

_ANSWER = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One space after ":" and "," and no other: a model that may write any white space sometimes never stops."""
_ONE_SPELLING = {"json_allowed_escapes": 'nrbtf\\"'}
"""The library allows the names of additional properties in any spelling: "\\u0041" is none of the described names for it, where a
reader takes it for "A". Without \\u, each name has one spelling; strings of such a schema then have no other control characters."""
_MAX_WHITESPACE = 2
"""White-space characters in a row in a call, which a model writes as it was trained to."""


def json_rule(schema: Any, *, flexible: bool = False) -> str:
    """The expression of a prepared schema. flexible: with up to two characters of white space where JSON allows it."""
    if isinstance(schema, bool):
        return f"%json {json.dumps(schema)}"
    options: dict[str, Any] = {"whitespace_pattern": f"[ \\t\\n]{{1,{_MAX_WHITESPACE}}}"} if flexible else _ANSWER
    spelling = _ONE_SPELLING if _describes_some_names(schema) else {}
    return f"%json {json.dumps({**schema, 'x-guidance': {**options, **spelling}}, ensure_ascii=False)}"


def _describes_some_names(node: Any) -> bool:
    """Whether objects within have names that are described, and any others beside them."""
    if isinstance(node, dict):
        names, additional = node.get("properties") or node.get("patternProperties"), node.get("additionalProperties")
        return bool(names and additional is not False) or any(map(_describes_some_names, node.values()))
    return isinstance(node, list) and any(map(_describes_some_names, node))


def problem_of(start: str, *rules: str) -> str | None:
    """Why the library refuses a grammar; None if it does not. start: the expression of its first rule."""
    return problem_of_grammar(f"{HEAD}start: {start}\n" + "\n".join(rules))


def problem_of_grammar(grammar: str) -> str | None:
    """Why no text can begin a grammar, within the limits of the engine."""
    matcher = read_grammar(_letters(), grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    error = matcher.get_error()
    if not error:
        return None
    if "NoExtensionBias" in error:
        return "no text satisfies it"
    lines = [line for line in error.splitlines() if not re.match(r"\s*\d+ \||\s*\^|<", line)]
    if "regex parse error" in error:
        return f"regex parse error: {lines[-1].rpartition('error: ')[2].strip()}"
    reason = re.sub(r"^(?:at )?\d+\(\d+\): |failed to compile JSON schema: ", "", " ".join(lines).strip())
    return re.sub(r"failed to compile JSON schema: | Enable 'coerce_one_of'.*|; following special tokens.*", "", reason)[:500]


@functools.cache
def _letters() -> llguidance.LLTokenizer:
    """All bytes, and as many ids as a vocabulary may have, so that a grammar may name any token."""
    return tokenizer_of([*(bytes([i]) for i in range(256)), *([b""] * (MAX_TOKENS - 256))], [256], slices=())
