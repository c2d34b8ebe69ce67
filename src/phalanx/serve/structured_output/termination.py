# SPDX-License-Identifier: Apache-2.0
"""Whether every text that a grammar allows to begin can end.

A rule that only leads to itself has no finite text: the model would write without end, or reach a state that allows no token.
"""

from __future__ import annotations

import re

_RULE = re.compile(r"^([\w.-]+) ::= ", re.MULTILINE)
_CHARACTERS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
_CALL = re.compile(r"\w+\s*=\s*\w+|\b[A-Z]\w*(?=\()")
"""Calls, which are not rules: Regex(json_string=true), TagDispatch(...), Token(...)."""
_LOOKAHEAD = "(=("
_NAME = re.compile(r"([\w.-]+)(\{0)?")


def nonterminating_rule(grammar: str, root: str = "root") -> str | None:
    """The first rule reachable from the root that no finite text satisfies, or None.

    grammar: as xgrammar prints it: each rule is a choice of sequences of characters, rules and repeated rules.
    """
    texts = _RULE.split(_CHARACTERS.sub('""', grammar))[1:]
    rules = {name: _alternatives(body) for name, body in zip(texts[::2], texts[1::2], strict=True)}
    waiting: dict[str, list[tuple[str, int]]] = {}
    missing: dict[tuple[str, int], int] = {}
    ends: list[str] = []
    for name, alternatives in rules.items():
        for i, needs in enumerate(alternatives):
            required = {other for other, skippable in needs if other in rules and not skippable}
            missing[name, i] = len(required)
            for other in required:
                waiting.setdefault(other, []).append((name, i))
            if not required:
                ends.append(name)
    ending: set[str] = set()
    while ends:
        name = ends.pop()
        if name in ending:
            continue
        ending.add(name)
        for alternative in waiting.get(name, ()):
            missing[alternative] -= 1
            if missing[alternative] == 0:
                ends.append(alternative[0])
    return next((name for name in _reached(rules, root) if name not in ending), None)


def _reached(rules: dict[str, list[list[tuple[str, bool]]]], root: str) -> list[str]:
    """The rules that the root leads to, itself first."""
    reached = {root: None} if root in rules else {}
    order = list(reached)
    for name in order:
        for other in (other for needs in rules[name] for other, _ in needs):
            if other in rules and other not in reached:
                reached[other] = None
                order.append(other)
    return order


def _alternatives(body: str) -> list[list[tuple[str, bool]]]:
    """Per alternative: the rules that it names, and whether each may be left out. A TagDispatch may also use none of them."""
    dispatches = body.startswith("TagDispatch")
    plain = _CALL.sub("", body.split(_LOOKAHEAD, 1)[0])
    every = [[(name, skip != "") for name, skip in _NAME.findall(part)] for part in plain.split("|")]
    return [*([[]] if dispatches else []), *every]
