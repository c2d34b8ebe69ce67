# SPDX-License-Identifier: Apache-2.0
"""YAML that every parser reads alike: the same bytes for the same documents, and no string that another parser takes for a number.

kubectl and Docker read YAML with Go libraries, whose plain scalars differ from PyYAML's: `y` is a boolean there, `08` and `1e5` are
numbers. PyYAML, which writes such strings without quotes, is used to read only; what it writes also depends on its version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from phalanx.errors import OptionError

_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/][\w./=-]*(?: [\w./=-]+)*", re.I | re.ASCII)
"""Strings without quotes: words that no version of YAML reads as anything but a string."""
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""What JSON writes as it is, and YAML does not allow."""


def dumps(documents: Iterable[dict[str, Any]], *, comments: Iterable[str] = ()) -> str:
    """The documents as one YAML text, keys in their order, below lines of comment. Values: dict, list, str, bool, int and None."""
    head = "".join(f"# {' '.join(line.split())}\n" for line in comments)
    return head + "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    """The lines of a mapping or list that is not empty."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if isinstance(entry, (dict, list)) and entry:
                yield f"{_scalar(name)}:"
                yield from (f"  {line}" for line in _lines(entry))
            else:
                yield f"{_scalar(name)}: {_scalar(entry)}"
    else:
        for entry in value:
            if isinstance(entry, (dict, list)) and entry:
                first, *rest = _lines(entry)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield f"- {_scalar(entry)}"


def _scalar(value: Any) -> str:
    """A scalar, or an empty mapping or list. JSON's strings are strings of YAML in double quotes."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value):
            return value
        return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
    return json.dumps(value)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser in C where PyYAML has it: it reads the same, ten times as fast."""


def loads(text: str, *, what: str) -> list[Any]:
    """The documents of a YAML text, empty ones left out. Raises OptionError naming `what`."""
    try:
        return [document for document in yaml.load_all(text, Loader=_LOADER) if document is not None]
    except yaml.YAMLError as error:
        raise OptionError(f"{what} is not valid YAML", why=" ".join(str(error).split())) from None
