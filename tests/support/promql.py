# SPDX-License-Identifier: Apache-2.0
"""Alert rules evaluated without Prometheus: the part of PromQL that dashboards/alerts.yaml uses, and the cases of promtool.

Known: selectors with matchers, `sum|avg|min|max by (...)`, `rate(...[Nm])` of series that never fall, `* / > < ==`, `and on (...)`.
Anything else is a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = Vector | float

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d[\d.]*(?:e\d+)?)|(?P<name>[a-zA-Z_][\w:]*)|(?P<text>"[^"]*")|(?P<sign>=~|!~|!=|==|[=(){}\[\],<>*/]))"""
)
_MATCH: dict[str, Callable[[str, str], bool]] = {
    "=": lambda value, text: value == text,
    "!=": lambda value, text: value != text,
    "=~": lambda value, text: re.fullmatch(text, value) is not None,
    "!~": lambda value, text: re.fullmatch(text, value) is None,
}
_MERGE: dict[str, Callable[[list[float]], float]] = {"sum": sum, "min": min, "max": max, "avg": lambda all_: sum(all_) / len(all_)}
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<": float.__lt__, ">": float.__gt__, "==": float.__eq__}
_COMBINE: dict[str, Callable[[float, float], float]] = {"*": float.__mul__, "/": float.__truediv__}


class Series:
    """Samples of series by minute. values: promtool's notation, as "0+10x20" or "1 0x20"."""

    def __init__(self, inputs: list[dict[str, str]]) -> None:
        self._samples: dict[tuple[str, Labels], list[float]] = {}
        for entry in inputs:
            name, _, selector = entry["series"].partition("{")
            labels = frozenset(re.findall(r'(\w+)="([^"]*)"', selector))
            self._samples[name, labels] = [value for part in entry["values"].split() for value in _expand(part)]

    def at(self, name: str, matchers: list[tuple[str, str, str]], minute: int, window: int = 0) -> dict[Labels, list[float]]:
        """The samples of the last `window` minutes before `minute`, and that of the minute, by labels."""
        selected = {}
        for (series, labels), samples in self._samples.items():
            values = dict(labels)
            if series == name and all(_MATCH[sign](values.get(label, ""), text) for label, sign, text in matchers):
                selected[labels] = samples[max(minute - window, 0) : minute + 1]
        return {labels: samples for labels, samples in selected.items() if samples}


def _expand(part: str) -> list[float]:
    counted = re.fullmatch(r"(\d+)(?:\+(\d+))?x(\d+)", part)
    if counted is None:
        return [float(part)]
    begin, step, times = (float(number or 0) for number in counted.groups())
    return [begin + step * index for index in range(int(times) + 1)]


class _Query:
    """One expression at one minute, by recursive descent: and < comparison < product < operand."""

    def __init__(self, expression: str, series: Series, minute: int) -> None:
        self._series, self._minute, self._tokens, position = series, minute, [], 0
        while expression[position:].strip():
            token = _TOKEN.match(expression, position)
            if token is None:
                raise ValueError(f"not understood: {expression[position:]}")
            self._tokens.append(token[0].strip())
            position = token.end()

    def value(self) -> Value:
        result = self._both()
        if self._tokens:
            raise ValueError(f"not understood: {self._tokens}")
        return result

    def _next(self, *expected: str) -> str:
        token = self._tokens.pop(0)
        if expected and token not in expected:
            raise ValueError(f"{token!r} where {expected} must be")
        return token

    def _peek(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _both(self) -> Value:
        left = self._comparison()
        while self._peek() == "and":
            self._next("and"), self._next("on")
            names, right = self._names(), self._comparison()
            assert isinstance(left, dict)
            assert isinstance(right, dict)
            keys = {_only(labels, names) for labels in right}
            left = {labels: value for labels, value in left.items() if _only(labels, names) in keys}
        return left

    def _comparison(self) -> Value:
        left = self._product()
        if self._peek() not in _COMPARE:
            return left
        holds, right = _COMPARE[self._next()], self._product()
        assert isinstance(left, dict)
        others = dict.fromkeys(left, right) if isinstance(right, float) else right
        return {labels: value for labels, value in left.items() if labels in others and holds(value, others[labels])}

    def _product(self) -> Value:
        left = self._operand()
        while self._peek() in _COMBINE:
            combine, right = _COMBINE[self._next()], self._operand()
            if isinstance(left, float):
                assert isinstance(right, dict)
                left = {labels: combine(left, value) for labels, value in right.items()}
            else:
                others = dict.fromkeys(left, right) if isinstance(right, float) else right
                left = {labels: combine(value, others[labels]) for labels, value in left.items() if labels in others}
        return left

    def _operand(self) -> Value:
        token = self._next()
        if token[0].isdigit():
            return float(token)
        if token == "(":
            inner = self._both()
            self._next(")")
            return inner
        if token in _MERGE:
            self._next("by")
            names = self._names()
            self._next("(")
            inner = self._both()
            self._next(")")
            assert isinstance(inner, dict)
            groups: dict[Labels, list[float]] = {}
            for labels, value in inner.items():
                groups.setdefault(_only(labels, names), []).append(value)
            return {labels: _MERGE[token](values) for labels, values in groups.items()}
        if token == "rate":
            return self._rate()
        return {labels: samples[-1] for labels, samples in self._series.at(token, self._matchers(), self._minute).items()}

    def _rate(self) -> Vector:
        """Of samples a minute apart, by which the series has grown a second; one sample has no rate."""
        self._next("(")
        name, matchers = self._next(), self._matchers()
        self._next("["), (minutes := self._next()), self._next("m"), self._next("]"), self._next(")")
        samples = self._series.at(name, matchers, self._minute, int(minutes))
        return {labels: (of[-1] - of[0]) / (60 * (len(of) - 1)) for labels, of in samples.items() if len(of) > 1}

    def _matchers(self) -> list[tuple[str, str, str]]:
        matchers = []
        if self._peek() == "{":
            self._next("{")
            while self._peek() != "}":
                matchers.append((self._next(), self._next(*_MATCH), self._next().strip('"')))
                if self._peek() == ",":
                    self._next()
            self._next("}")
        return matchers

    def _names(self) -> set[str]:
        self._next("(")
        names = set()
        while (token := self._next()) != ")":
            names |= {token} - {","}
        return names


def _only(labels: Labels, names: set[str]) -> Labels:
    return frozenset((name, value) for name, value in labels if name in names)


def firing(rule: dict[str, Any], series: Series, minute: int) -> list[tuple[dict[str, str], dict[str, str]]]:
    """(labels, annotations) of the alerts that a rule raises at a minute, after its condition has held for `for`."""
    wait = int(rule["for"].removesuffix("m"))
    if minute < wait:
        return []
    vectors = [_Query(rule["expr"], series, at).value() for at in range(minute - wait, minute + 1)]
    alerts = []
    for labels in vectors[-1] if isinstance(vectors[-1], dict) else ():
        if all(isinstance(vector, dict) and labels in vector for vector in vectors):
            values = dict(labels)
            annotations = {name: _filled(text, values) for name, text in rule["annotations"].items()}
            alerts.append(({**values, **rule["labels"]}, annotations))
    return alerts


def _filled(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda name: labels[name[1]], text)
