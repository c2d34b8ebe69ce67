# SPDX-License-Identifier: Apache-2.0
"""A manifest as a folder: one file per object, and a kustomization.yaml that lists them, for `kubectl apply -k DIR`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from phalanx.deploy import yaml_text
from phalanx.errors import OptionError

KUSTOMIZATION = "kustomization.yaml"


def write(documents: list[dict[str, Any]], comments: list[str], folder: Path) -> list[Path]:
    """Write the objects of a manifest; returns the files, the kustomization first. Files of an earlier manifest that this one has
    not stay, but are not listed. Raises OptionError where the folder cannot be written."""
    names = [file_name(document) for document in documents]
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": names}
    files = [(KUSTOMIZATION, yaml_text.dumps([kustomization], comments=comments))]
    files += [(name, yaml_text.dumps([document])) for name, document in zip(names, documents, strict=True)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files:
            (folder / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"the folder {folder} cannot be written", why=str(error), next="give another --out") from None
    return [folder / name for name, _ in files]


def file_name(document: dict[str, Any]) -> str:
    """Of an object, as "network-policy-llama-api.yaml"."""
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", document["kind"]).lower()
    return f"{kind}-{document['metadata']['name']}.yaml"
