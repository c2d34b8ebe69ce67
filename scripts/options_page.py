# SPDX-License-Identifier: Apache-2.0
"""Write docs/options.md from the option models: one source for flags, keywords, environment and documentation.

python scripts/options_page.py            writes the page
python scripts/options_page.py --check    exits with status 1 if the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.deploy.options import ComposeOptions, K8sOptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
HEAD = """# Options

Each option is a flag (`--NAME`, with `_` or `-`), a key of `--config FILE.yaml`, and an environment variable (`PHALANX_NAME`).
Engine options are also keywords of `LLM(...)`. Flags override environment variables, which override the file.
`scripts/options_page.py` writes this page from the option models.
"""
MANIFESTS = """## Manifests

Flags of `phalanx deploy k8s` and `phalanx deploy compose`, beside those above; they are no keys of a file and no variables.
"""


def page() -> str:
    parts = [HEAD, "## Engine\n", table(EngineOptions), "## Server\n", table(ServeOptions), MANIFESTS]
    parts += ["### deploy k8s\n", table(K8sOptions), "### deploy compose\n", table(ComposeOptions)]
    return "\n".join(parts)


def table(model: type[BaseModel]) -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default}`"
        default = "none" if field.default == () else default
        rows.append(f"| `{name.rstrip('_')}` | {default} | {meaning(field)} |")
    return "\n".join(rows) + "\n"


def meaning(field: FieldInfo) -> str:
    """The description, followed by the allowed values if they are a fixed set."""
    assert field.description, f"an option without a description: {field}"
    values = [value for value in get_args(field.annotation) if isinstance(value, str)]
    return (field.description + (f" One of {', '.join(f'`{v}`' for v in values)}." if values else "")).replace("|", "\\|")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
