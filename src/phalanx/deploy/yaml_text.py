# SPDX-License-Identifier: Apache-2.0
"""YAML that every parser reads alike: no string that another parser takes for a number.

kubectl and Docker read YAML with Go libraries, whose plain scalars differ from PyYAML's: `y` is a boolean there, `08` and `1e5` are
numbers. Strings stand in quotes, unless they are words in every version of YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[A-Za-z/][\w./=-]*(?: [\w./=-]+)*", re.I | re.ASCII)
_WIDTH = 1 << 30  # one line for each string


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"'),
)


def dumps(documents: Iterable[dict[str, Any]], *, comments: Iterable[str] = ()) -> str:
    """The documents as one YAML text, keys in their order, below lines of comment."""
    head = "".join(f"# {' '.join(line.split())}\n" for line in comments)
    texts = (
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH, default_flow_style=False)
        for document in documents
    )
    return head + "---\n".join(texts)
