# SPDX-License-Identifier: Apache-2.0
"""A table as a JSON file: written completely or not at all, and read strictly.

{"format": "phalanx-allreduce-table", "version": 1, "digest": sha256, "fingerprint": {sm, link, world}, "made": {fact: text},
 "sections": [{dtype, fusion, rows: [{hidden: [first, last], spans: [[first, last, choice, gain or null]]}]}],
 "seed": {origin, models: {fusion: {choice: [a, b, c]}}, order: {fusion: [choice]}}}     (a, b, c in femtoseconds)
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError, TableError
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Fusion
from phalanx.tables.seed import Latency, Seed
from phalanx.tables.strategy import Choice
from phalanx.tables.table import HiddenRange, Section, Span, Table

_FORMAT, _VERSION = "phalanx-allreduce-table", 1


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` completely or not at all: readers see the old file or the new one. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def dumps(table: Table) -> str:
    """The text of the file, with one section or row a line, so that tables can be compared."""
    head = {"format": _FORMAT, "version": _VERSION, "digest": table.digest, "made": table.provenance}
    plain = table.deciding()
    lines = ["{"]
    lines += [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines += [f' "fingerprint": {json.dumps(plain["fingerprint"])},', ' "sections": [']
    for number, section in enumerate(plain["sections"]):
        begin = f'  {{"dtype": {json.dumps(section["dtype"])}, "fusion": {json.dumps(section["fusion"])}, "rows": ['
        rows = ",\n".join(f"   {json.dumps(row)}" for row in section["rows"])
        lines.append(f"{begin}\n{rows}\n  ]}}" + ("," if number + 1 < len(plain["sections"]) else ""))
    models = ",\n".join(f"   {json.dumps(name)}: {json.dumps(model)}" for name, model in plain["seed"]["models"].items())
    seed = f' "seed": {{"origin": {json.dumps(plain["seed"]["origin"])}, "models": {{\n{models}\n  }},'
    lines += [" ],", seed, f'  "order": {json.dumps(plain["seed"]["order"])}}}', "}"]
    return "\n".join(lines) + "\n"


def save(table: Table, path: Path) -> None:
    write_whole(path, dumps(table))


def load(path: Path) -> Table:
    """Read a table. Raises TableError that names the file and the cure."""
    try:
        return loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"table {path} cannot be read", why=error.strerror or str(error), next="check the path") from None
    except UnicodeDecodeError:
        raise TableError(f"table {path} is not text", next="tune again with `phalanx allreduce tune`") from None
    except (TableError, OptionError) as error:
        cure = "restore the file, or tune again with `phalanx allreduce tune`"
        raise TableError(f"table {path} is faulty", why=str(error), next=cure) from None


def loads(text: str) -> Table:
    """The inverse of dumps. Raises TableError: no JSON, an unknown or missing field, a wrong kind, a digest that does not match."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TableError(f"not JSON: {error}") from None
    top = _fields(data, "the file", format=str, version=int, digest=str, made=dict, fingerprint=dict, sections=list, seed=dict)
    if (top["format"], top["version"]) != (_FORMAT, _VERSION):
        raise TableError(f"format {top['format']!r} version {top['version']}", held=f"this reads {_FORMAT!r} version {_VERSION}")
    key = _fields(top["fingerprint"], "fingerprint", sm=int, link=str, world=int)
    if not all(isinstance(text, str) for text in top["made"].values()):
        raise TableError("made holds a value that is not text")
    table = Table(
        Fingerprint(key["sm"], key["link"], key["world"]),
        tuple(_section(item) for item in top["sections"]),
        _seed(top["seed"]),
        top["made"],
    )
    if table.digest != top["digest"]:
        raise TableError(f"the digest is {top['digest'][:16]}..., the content's {table.digest[:16]}...", why="the file was changed")
    return table


def _section(data: Any) -> Section:
    section = _fields(data, "a section", dtype=str, fusion=str, rows=list)
    where = f"section {section['dtype']} {section['fusion']}"
    rows = []
    for item in section["rows"]:
        row = _fields(item, f"{where}: a row", hidden=list, spans=list)
        first, last = _values(row["hidden"], f"{where}: hidden", int, int)
        spans = [_values(span, f"{where}: a span", int, int, str, float) for span in row["spans"]]
        rows.append(HiddenRange(first, last, tuple(Span(a, b, Choice.parse(choice), gain) for a, b, choice, gain in spans)))
    return Section(section["dtype"], Fusion.named(section["fusion"]), tuple(rows))


def _seed(data: Any) -> Seed:
    seed = _fields(data, "seed", origin=str, models=dict, order=dict)
    if set(seed["order"]) != set(seed["models"]):
        raise TableError("seed: models and order name different fusions")
    models: dict[Fusion, dict[Choice, Latency]] = {}
    for name, order in seed["order"].items():
        by_choice = seed["models"][name]
        if not isinstance(by_choice, dict) or not isinstance(order, list) or sorted(map(str, order)) != sorted(by_choice):
            raise TableError(f"seed: models and order of {name} name different choices")
        latencies = {Choice.parse(c): Latency(*_values(by_choice[c], f"seed {name} {c}", int, int, int)) for c in order}
        models[Fusion.named(name)] = latencies
    return Seed(seed["origin"], models)


def _fields(data: Any, where: str, **kinds: type) -> dict[str, Any]:
    """`data` as an object with exactly these fields of these kinds."""
    if not isinstance(data, dict):
        raise TableError(f"{where} is not an object")
    for name in data:
        if name not in kinds:
            raise TableError(f"{where} has the unknown field {name!r}", next=f"use {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in data:
            raise TableError(f"{where} lacks the field {name!r}")
        _kind(data[name], kind, f"{where}: {name}")
    return data


def _values(data: Any, where: str, *kinds: type) -> list[Any]:
    """`data` as a list of exactly these kinds."""
    if not isinstance(data, list) or len(data) != len(kinds):
        raise TableError(f"{where} is not a list of {len(kinds)}")
    for value, kind in zip(data, kinds, strict=True):
        _kind(value, kind, where)
    return data


def _kind(value: Any, kind: type, where: str) -> None:
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    fits = fits or (kind is float and value is None)
    if not fits or (kind is float and value is not None and not (math.isfinite(value) and value > 0)):
        raise TableError(f"{where} holds {value!r}, which is not {kind.__name__}")
