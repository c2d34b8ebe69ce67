# SPDX-License-Identifier: Apache-2.0
"""Fields of a JSON file, each checked as it is read: a missing or impossible one is a ModelError naming file and field.

What a reader does with each field is one `FieldTable`: a field outside of it is a warning or an error, never silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.errors import ModelError

_REQUIRED: Any = object()


@dataclass(frozen=True)
class FieldTable:
    """What a reader does with the fields of its object.

    honoured: it reads them, and no others. harmless: they change nothing that it reads for; so does each name that begins with "_".
    refused: what Phalanx does not compute, with the values that ask for nothing. null is false where these are flags, and asks for
    nothing elsewhere.
    """

    honoured: frozenset[str]
    harmless: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, honoured: str, harmless: str = "", refused: Mapping[str, tuple[Any, ...]] | None = None) -> FieldTable:
        """From names that are separated by spaces."""
        return cls(frozenset(honoured.split()), frozenset(harmless.split()), refused or {})

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The names that the table does not have."""
        known = {*self.honoured, *self.harmless, *self.refused}
        return [name for name in names if name not in known and not name.startswith("_")]


@dataclass(frozen=True)
class JsonFields:
    """A JSON object in `file`. prefix: its path in the file, for messages. A field that is null counts as missing; but a flag that
    is null is false, whatever its default is: transformers asks whether it is true.

    table: of the fields; None while the object is not sorted. additions: the paths of fields that are in no table, of this object
    and of those inside it."""

    values: Mapping[str, Any]
    file: str
    prefix: str = ""
    table: FieldTable | None = None
    additions: list[str] = field(default_factory=list)

    def sorted_by(self, table: FieldTable) -> JsonFields:
        """These fields, of which only the honoured ones can be read. Raises ModelError where a refused one asks for something."""
        for name, nothing in table.refused.items():
            value = self.values.get(name)
            if name in self.values and value is None and any(isinstance(each, bool) for each in nothing):
                value = False
            if value is not None and value not in nothing:
                raise self._refuse(name, "Phalanx does not compute what it stands for" + _unless(nothing))
        self.additions.extend(self.prefix + name for name in table.unknown(self.values) if self.values[name] is not None)
        return replace(self, table=table)

    def inner(self, name: str, values: Mapping[str, Any]) -> JsonFields:
        """The fields of an object that is in field `name` of this one."""
        return JsonFields(values, self.file, f"{self.prefix}{name}.", additions=self.additions)

    def either(self, name: str, *aliases: str) -> str:
        """The one of the spellings of a field that is stated, `name` if none is. Raises ModelError where two differ."""
        stated = [each for each in (name, *aliases) if self.value(each) is not None]
        for other in stated[1:]:
            if self.value(other) != self.value(stated[0]):
                raise ModelError(
                    f"{self.file} has {' and '.join(f'{self.prefix}{each}={self.value(each)!r}' for each in (stated[0], other))}",
                    why="they are two names of one field", next="correct the file: keep the one that the weights were made with",
                )  # fmt: skip
        return stated[0] if stated else name

    def reads(self, name: str) -> bool:
        """Whether the table has the field: families differ in it."""
        return self.table is None or name in self.table.honoured

    def value(self, name: str) -> Any:
        """The value as it is in the file; None if there is none."""
        if not self.reads(name):
            raise KeyError(f"{name} is read, but is not among the honoured fields of its table")
        return self.values.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self.value(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"{self.file} has no field {self.prefix}{name}", why="the field is required")
        return default

    def _refuse(self, name: str, why: str) -> ModelError:
        return ModelError(f"{self.file} has {self.prefix}{name}={self.values.get(name)!r}", why=why)

    def count(self, name: str, default: int = _REQUIRED) -> int:
        """An integer of at least 1."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refuse(name, "it must be an integer of at least 1")
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """A finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._refuse(name, "it must be a finite number")
        return float(value)

    def positive(self, name: str, default: float = _REQUIRED) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self._refuse(name, "it must be greater than 0")
        return value

    def numbers(self, name: str) -> list[float]:
        """A list of positive, finite numbers."""
        value = self._get(name, _REQUIRED)
        sound = isinstance(value, list) and all(isinstance(each, int | float) and not isinstance(each, bool) for each in value)
        if not sound or not all(math.isfinite(each) and each > 0 for each in value):
            raise self._refuse(name, "it must be a list of numbers greater than 0")
        return [float(each) for each in value]

    def flag(self, name: str, default: bool) -> bool:
        """default: of a file without the field; null is false."""
        value = self._get(name, False if name in self.values else default)
        if not isinstance(value, bool):
            raise self._refuse(name, "it must be true or false")
        return value

    def text(self, name: str, default: str = _REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._refuse(name, "it must be a string")
        return value

    def optional_mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._get(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise self._refuse(name, "it must be an object")
        return value

    def optional_texts(self, name: str) -> list[str] | None:
        value = self._get(name, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(part, str) for part in value)):
            raise self._refuse(name, "it must be a list of strings")
        return value

    def by_layer(self, name: str, kinds: tuple[str, ...]) -> list[str] | None:
        """A list with one of `kinds` for each of num_hidden_layers."""
        values, layers = self.optional_texts(name), self.count("num_hidden_layers")
        if values is not None and (len(values) != layers or set(values) - set(kinds)):
            unknown = f", {', '.join(sorted(set(values) - set(kinds)))} among them" if set(values) - set(kinds) else ""
            raise ModelError(
                f"{self.file} has {len(values)} {self.prefix}{name}{unknown}",
                why=f"there must be num_hidden_layers={layers}, each {' or '.join(kinds)}",
            )  # fmt: skip
        return values

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, given as one integer, as a list of integers, or not at all; -1 stands for none."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= -1 for token in ids):
            raise self._refuse(name, "it must be a token id or a list of token ids")
        return tuple(token for token in ids if token >= 0)


def _unless(nothing: tuple[Any, ...]) -> str:
    return f"; it may be {' or '.join(repr(value) for value in nothing)}" if nothing else ""
