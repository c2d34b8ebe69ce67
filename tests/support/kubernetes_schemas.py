# SPDX-License-Identifier: Apache-2.0
"""Strict JSON schemas of the objects in kubernetes_shapes.yaml: every field is known, every required one is there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_FORMS: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer", "minimum": 0},
    "bool": {"type": "boolean"},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "name": {"type": "string", "pattern": f"^{_LABEL}$", "maxLength": 63},
    "subdomain": {"type": "string", "pattern": rf"^{_LABEL}(\.{_LABEL})*$", "maxLength": 253},
    "label": {"type": "string", "pattern": r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", "maxLength": 63},
    "quantity": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"},
    "image": {"type": "string", "pattern": r"^[a-z0-9][a-zA-Z0-9._/:@-]*$"},
    "url": {"type": "string", "pattern": r"^https?://[^\s]+$"},
    "path": {"type": "string", "pattern": r"^/"},
    "seconds": {"type": "string", "pattern": r"^[0-9]+s$"},
}


def _schema(shape: Any) -> dict[str, Any]:
    if isinstance(shape, list):
        return {"type": "array", "items": _schema(shape[0]), "minItems": 1}
    if isinstance(shape, str):
        if shape.startswith("$"):
            return {"$ref": f"#/$defs/{shape[1:]}"}
        if shape.startswith("="):
            return {"const": shape[1:]}
        return {"enum": shape.split("|")} if "|" in shape else _FORMS[shape]
    if "*" in shape:
        return {"type": "object", "additionalProperties": _schema(shape["*"])}
    return {
        "type": "object",
        "properties": {name.rstrip("~"): _schema(inner) for name, inner in shape.items()},
        "required": [name for name in shape if not name.endswith("~")],
        "additionalProperties": False,
    }


@cache
def _validators() -> dict[str, Any]:
    shapes = yaml.safe_load((Path(__file__).parent / "kubernetes_shapes.yaml").read_text(encoding="utf-8"))
    definitions = {name: _schema(shape) for name, shape in shapes.items()}
    kinds = [name for name, shape in shapes.items() if "metadata" in shape and "kind" in shape]
    return {kind: jsonschema_rs.validator_for({"$ref": f"#/$defs/{kind}", "$defs": definitions}) for kind in kinds}


def kinds() -> set[str]:
    return set(_validators())


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with an object, as "spec/replicas: ..."; empty where nothing is."""
    validator = _validators().get(str(document.get("kind")))
    if validator is None:
        return [f"no schema for {document.get('kind')}"]
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(document)]
