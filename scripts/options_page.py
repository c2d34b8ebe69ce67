# SPDX-License-Identifier: Apache-2.0
"""Write docs/options.md from the option models, and the tables of docs/coming_from.md from `config/other_engines.py`: one source
for flags, keywords, environment, hints of errors and documentation.

python scripts/options_page.py            writes the pages
python scripts/options_page.py --check    exits with status 1 if a page is out of date
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from phalanx.config import EngineOptions, other_engines
from phalanx.config.serving import ServeOptions
from phalanx.deploy.options import ComposeOptions, K8sOptions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, COMING_FROM = DOCS / "options.md", DOCS / "coming_from.md"
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


def engines_table(engine: str) -> str:
    """The flags of another engine: those that are the same, then what the others are here."""
    dash = "_" if engine == "TensorRT-LLM" else "-"
    same = ", ".join(f"`--{name.replace('_', dash)}`" for name in other_engines.SAME[engine])
    rows = [*textwrap.wrap(f"The same here: {same}.", 128, break_on_hyphens=False), "", f"| {engine} | here | |", "|---|---|---|"]
    for flag, (ours, note) in other_engines.ENGINES[engine].items():
        rows.append(f"| `--{flag}` | {f'`--{ours}`' if ours else ''} | {note} |")
    return "\n".join(rows)


def coming_from() -> str:
    """The page with each part between `<!-- flags: ENGINE -->` and `<!-- end of flags -->` written anew."""
    text = COMING_FROM.read_text(encoding="utf-8")
    for engine in other_engines.ENGINES:
        before, begin, rest = text.partition(f"<!-- flags: {engine} -->\n")
        _, end, after = rest.partition("\n<!-- end of flags -->")
        assert end, f"{COMING_FROM.name} has no place for the flags of {engine}"
        text = before + begin + engines_table(engine) + end + after
    return text


if __name__ == "__main__":
    pages = {PAGE: page(), COMING_FROM: coming_from()}
    if "--check" in sys.argv[1:]:
        sys.exit(any(path.read_text(encoding="utf-8") != text for path, text in pages.items()))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
