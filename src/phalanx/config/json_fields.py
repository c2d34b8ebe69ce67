# SPDX-License-Identifier: Apache-2.0
"""Fields of a JSON file, each checked as it is read: a missing or impossible one is a ModelError naming file and field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ModelError

_REQUIRED: Any = object()


@dataclass(frozen=True)
class JsonFields:
    """A JSON object in `file`. prefix: its path in the file, for messages. A field that is null counts as missing."""

    values: Mapping[str, Any]
    file: str
    prefix: str = ""

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
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

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
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

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, given as one integer, as a list of integers, or not at all."""
        value = self._get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self._refuse(name, "it must be a token id or a list of token ids")
        return tuple(ids)
