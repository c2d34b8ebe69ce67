# SPDX-License-Identifier: Apache-2.0
"""Reads an options file: YAML, option -> value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from phalanx.errors import OptionError


def read(path: Path) -> dict[str, Any]:
    """Its options, by the names that it spells. Raises OptionError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the options file {path} cannot be read", why=str(error), next="name a readable YAML file") from None
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise OptionError(f"the options file {path} is not valid YAML", why=" ".join(str(error).split())) from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise OptionError(f"the options file {path} is not a mapping", why="it must hold lines of the form option: value")
    return content


class _StrictLoader(yaml.SafeLoader):
    """A YAML loader for which a repeated key is an error. PyYAML itself would take the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)
