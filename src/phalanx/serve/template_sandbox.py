# SPDX-License-Identifier: Apache-2.0
"""The sandbox of chat templates: Jinja's immutable one, with limits of time, of memory and of the size of values.

Jinja's sandbox keeps a template from Python's internals, but not from `'x'.ljust(10**9)`. Here every operator, method and filter
that can make a value much larger than what it gets computes the size before it makes the value. What a template keeps of many small
values is seen by the memory of the process, which each iteration, macro, filter and written value compares with that at the start.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, update_wrapper
from types import BuiltinMethodType
from typing import Any

import psutil
from jinja2 import nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, do_batch, make_attrgetter, sync_do_slice
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from phalanx.errors import RequestError

MAX_SECONDS = 10.0
"""Time of one rendering. A body at the size limit takes less than a second."""
MAX_CHARACTERS = 2**25
"""Characters of the prompt, and of each text or list that an operator, method or filter makes."""
MAX_LARGE_CHARACTERS = 2**28
"""Characters of all values of one rendering that are longer than _LARGE."""
MAX_MEMORY = 2**29
"""Bytes by which the process may grow during one rendering. What other threads take meanwhile counts, too: they have no account
of their own. A body at the size limit takes some 100 MiB."""
MAX_VALUES = 2**20
"""Values inside a list or mapping that is written, compared or made JSON. One that holds another twice holds its values twice."""
MAX_INTEGER_BITS = 2**16
"""Of a product or power: the time to multiply grows faster than the length."""
_LARGE = 2**20  # characters; a prompt of so many fits no model
_FIRST_LOOK_SECONDS = 0.01
"""A rendering that ends sooner is not judged by the memory of the process: it cannot have taken so much."""
_LOOK_SECONDS = 0.002
"""Between two looks at the memory: time for about 20 MiB."""
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0 +-]*(\d+|\*)?(?:\.(\d+|\*))?")
_NUMBER = re.compile(r"\d+")


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (the interface of Jinja)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates call `step` in each iteration and macro, and make no huge values. Raises RequestError where one
    would."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=limit_value
        )  # fmt: skip
        self.concat = _concat  # type: ignore[method-assign]  # a plain attribute of Jinja's environments
        del self.globals["lipsum"]  # makes as much text as it is asked to
        self.filters |= {name: _bounded(FILTERS[name], size) for name, size in _FILTER_SIZES.items()}
        self.filters |= {"join": _join, "replace": _replace, "string": _string, "batch": _batch, "slice": _slice, "sum": self._sum}
        self.filters = {name: _looking(function) for name, function in self.filters.items()}

    def begin(self) -> None:
        """A rendering begins on this thread."""
        now = time.monotonic()
        _rendering.deadline, _rendering.next_look = now + MAX_SECONDS, now + min(MAX_SECONDS, _FIRST_LOOK_SECONDS)
        _rendering.memory = _process_memory()
        _rendering.large_characters = 0

    def end(self) -> None:
        """It has ended: what is compiled next on this thread has no limits of a rendering."""
        _rendering.deadline = _rendering.next_look = math.inf

    def step(self) -> str:
        """Raise RequestError if the rendering takes too long or too much memory."""
        look()
        return ""

    def joined(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(limit_value(value)) for value in values]
        limit_length(sum(map(len, texts)))
        return "".join(texts)

    def comparable(self, value: Any) -> Any:
        """The value: an operand of a comparison, which looks at all values inside it."""
        return limit_value(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if isinstance(value, (str, list, tuple)) else None for value in (left, right)]
        numbers = [abs(value) if isinstance(value, int) else 1 for value in (left, right)]
        if operator == "%":
            if isinstance(left, str):
                limit_length(len(left) + _percent_size(left, right))
        elif operator == "**":
            _limit_integer(numbers[0].bit_length() * numbers[1])
        elif operator == "+":
            limit_length(sum(size or 0 for size in sizes))
        elif any(size is not None for size in sizes):
            limit_length(max(size or 0 for size in sizes) * max(numbers))
        else:
            _limit_integer(numbers[0].bit_length() + numbers[1].bit_length())
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja asks it for what a template gets as an attribute. Methods of texts that make longer ones are replaced."""
        owner = getattr(value, "__self__", None)
        if not isinstance(value, BuiltinMethodType) or not isinstance(owner, str):
            return super().wrap_str_format(value)
        if value.__name__ in ("format", "format_map"):
            sandboxed = super().wrap_str_format(value)
            assert sandboxed is not None
            layout: str = owner

            def formatted(*args: Any, **names: Any) -> str:
                return _format(sandboxed, layout, args, names)

            return update_wrapper(formatted, value)
        size = _METHOD_SIZES.get(value.__name__)
        if size is None:
            return None
        bounded = _bounded(getattr(str, value.__name__), size)

        def call(*args: Any, **names: Any) -> Any:
            return bounded(owner, *_listed(args), **names)

        return update_wrapper(call, value)

    def _sum(self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """The filter `sum`: each addition is one of the operator."""
        for value in values:
            self.step()
            start = self.call_binop(None, "+", start, value if attribute is None else self.getitem(value, attribute))
        return start

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock))
            node.body.insert(0, nodes.ExprStmt(_call("step", [], node.lineno), lineno=node.lineno))
        return _Operators().visit(tree)  # type: ignore[no-any-return]


class _Operators(NodeTransformer):
    """Replaces the operator `~`, and the operands of comparisons: a sandbox cannot intercept them."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call("comparable", [node.expr], node.lineno)
        for operand in node.ops:
            operand.expr = _call("comparable", [operand.expr], node.lineno)
        return node


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of a method of the environment. A template cannot name it, nor hide it with a variable."""
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(line)
    return call


# ---- limits ----------------------------------------------------------------------------------------------------------


class _Rendering(threading.local):
    """The rendering on this thread. Times are those of the monotonic clock; memory: bytes of the process at its start."""

    deadline = next_look = math.inf
    memory = 0
    large_characters = 0


_rendering = _Rendering()


def look() -> None:
    """Raise RequestError if the rendering takes too long, or the process has grown too much since its start."""
    now = time.monotonic()
    if now < _rendering.next_look:
        return
    _rendering.next_look = now + _LOOK_SECONDS
    if now > _rendering.deadline:
        raise RequestError(f"the chat template takes longer than {MAX_SECONDS:g} s", next="shorten the messages")
    if _process_memory() - _rendering.memory > MAX_MEMORY:
        raise RequestError(f"the chat template takes more than {MAX_MEMORY >> 20} MiB of memory", next="shorten the messages")


def _process_memory() -> int:
    return int(_process(os.getpid()).memory_info().rss)


@cache
def _process(pid: int) -> psutil.Process:
    """Made once in each process: that takes longer than to ask it."""
    return psutil.Process(pid)


def limit_length(length: int) -> None:
    """Raise RequestError where the template is about to make a text or list of more than MAX_CHARACTERS, or too many large ones."""
    look()
    if length > MAX_CHARACTERS:
        raise RequestError(f"the chat template makes a text of {length} characters", held=f"the limit is {MAX_CHARACTERS}")
    if length > _LARGE:
        _rendering.large_characters += length
        if _rendering.large_characters > MAX_LARGE_CHARACTERS:
            raise RequestError(
                f"the chat template makes long texts of {_rendering.large_characters} characters together",
                held=f"the limit is {MAX_LARGE_CHARACTERS}",
            )  # fmt: skip


def limit_value(value: Any) -> Any:
    """The value. Raises RequestError where lists and mappings in it hold more than MAX_VALUES values or too many characters."""
    look()
    if not isinstance(value, (list, tuple, dict)):
        return value
    values = characters = 0
    waiting: list[Any] = [value]
    while waiting:
        container = waiting.pop()
        values += len(container)
        if values > MAX_VALUES:
            raise RequestError("the chat template writes or compares a list of too many values", held=f"the limit is {MAX_VALUES}")
        for inner in (*container, *container.values()) if isinstance(container, dict) else container:
            if isinstance(inner, str):
                characters += len(inner)
            elif isinstance(inner, (list, tuple, dict)):
                waiting.append(inner)
        if characters > MAX_CHARACTERS:
            limit_length(characters)
    return value


def _limit_integer(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise RequestError(f"the chat template makes a number of {bits} bits", held=f"the limit is {MAX_INTEGER_BITS}")


def _percent_size(layout: str, values: Any) -> int:
    """The most characters of `layout % values` beyond those of the layout. `*` takes a width from the values."""
    fields = list(_PERCENT.finditer(layout))
    widths = [width for match in fields for width in match.groups() if width]
    starred = [value for value in (values if isinstance(values, tuple) else (values,)) if isinstance(value, int)]
    texts = _written(values) * (len(fields) if isinstance(values, dict) else 1)
    return texts + sum(int(width[:12]) for width in widths if width != "*") + (sum(map(abs, starred)) if "*" in widths else 0)


def _written(value: Any) -> int:
    """About how many characters str(value) has; at least as many as the texts inside it."""
    limit_value(value)
    return sum(len(inner) if isinstance(inner, str) else 24 for inner in _inner(value))


def _format(sandboxed: Callable[..., str], layout: str, args: tuple[Any, ...], names: dict[str, Any]) -> str:
    """`layout.format(...)`. Any number in the layout may be a width, and so may any value that is a number, by `{:{width}}`."""
    fields = layout.count("{")
    widths = [int(number[:12]) for number in _NUMBER.findall(layout)]
    if re.search(r":[^}]*\{", layout):
        numbers = (int(value[:12]) if isinstance(value, str) and value.isdecimal() else value for value in _inner((args, names)))
        widths += [abs(number) for number in numbers if isinstance(number, int)]
    limit_length(len(layout) + sum(widths) * max(fields, 1) + _written((args, names)) * fields)
    return sandboxed(*args, **names)


def _inner(value: Any) -> Iterator[Any]:
    """The values inside lists and mappings, or the value where it is none."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _inner(inner)
    else:
        yield value


def _concat(parts: Iterable[str]) -> str:
    """What a macro, a call block or a `set` block writes."""
    texts = list(parts)
    limit_length(sum(map(len, texts)))
    return "".join(texts)


# ---- methods and filters ---------------------------------------------------------------------------------------------


def _padded(text: Any, width: int = 80, *_: Any, **__: Any) -> int:
    return max(len(str(text)), width)


def _replaced(text: Any, old: str, new: str, *_: Any, **__: Any) -> int:
    text = str(text)
    return len(text) + (len(text) + 1 if not old else text.count(str(old))) * len(str(new))


def _expanded(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * max(tabsize, 0)


def _joined(separator: str, values: list[Any]) -> int:
    return sum(len(value) for value in values if isinstance(value, str)) + len(separator) * len(values)


def _translated(text: str, table: Any) -> int:
    longest = max((len(value) for value in table.values() if isinstance(value, str)), default=1) if isinstance(table, dict) else 1
    return len(text) * max(longest, 1)


def _indented(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    text = str(text)
    return len(text) + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else max(width, 0))


def _formatted(layout: Any, *args: Any, **names: Any) -> int:
    return len(str(layout)) + _percent_size(str(layout), names or args)


def _wrapped(text: Any, *args: Any, **names: Any) -> int:
    longest = max((len(value) for value in (*args, *names.values()) if isinstance(value, str)), default=1)
    return len(str(text)) * (1 + longest)


_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "ljust": _padded, "rjust": _padded, "center": _padded, "zfill": _padded, "replace": _replaced, "expandtabs": _expanded,
    "join": _joined, "translate": _translated,
}  # fmt: skip
_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded, "indent": _indented, "format": _formatted, "wordwrap": _wrapped,
}  # fmt: skip
"""How long the result may be, at most, from the same arguments. Each value of arguments of a method is a list where it was another
iterable."""


def _bounded(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    def bounded(*args: Any, **names: Any) -> Any:
        limit_value(args)
        limit_length(size(*args, **names))
        return function(*args, **names)

    return update_wrapper(bounded, function)


def _looking(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes part in the limits: `map` calls it for each of many values."""

    def filtered(*args: Any, **names: Any) -> Any:
        look()
        return function(*args, **names)

    return update_wrapper(filtered, function)


@pass_environment
def _join(environment: BoundedEnvironment, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    texts, length = [], 0
    for value in values:
        environment.step()
        texts.append(str(limit_value(value)))
        length += len(texts[-1]) + len(d)
        if length > MAX_CHARACTERS:
            limit_length(length)
    limit_length(length)
    return d.join(texts)


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(limit_value(text)), str(old), str(new)
    limit_length(_replaced(text, old, new))
    replaced: str = text.replace(old, new, -1 if count is None else count)
    return replaced


def _string(value: Any) -> str:
    return str(limit_value(value))


def _batch(values: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterator[list[Any]]:
    limit_length(linecount if fill_with is not None else 0)
    return do_batch(values, linecount, fill_with)


def _slice(values: Collection[Any], slices: int, fill_with: Any = None) -> Iterator[list[Any]]:
    limit_length(slices)
    return sync_do_slice(values, slices, fill_with)


def _listed(args: tuple[Any, ...]) -> list[Any]:
    """Iterators as lists: they can be read once only."""
    return [list(value) if hasattr(value, "__next__") else value for value in args]
