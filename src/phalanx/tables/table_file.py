# SPDX-License-Identifier: Apache-2.0
"""A table as a JSON file: written completely or not at all, and read strictly.

{"format": "phalanx-allreduce-table", "version": 2, "digest": sha256, "fingerprint": {sm, link, world}, "made": {fact: text},
 "sections": [{dtype, fusion, caller, rows: [{hidden: [first, last], spans: [[first, last, choice, gain or null]]}]}],
 "seed": {origin, estimated, models: {fusion: {choice: [a, b, c]}}, order: {fusion: [choice]},     (a, b, c in femtoseconds)
          sequence_parallel: {origin, estimated, rs_norm_ag_min_tokens or null, gemm_rs_min_bytes or null}}}

Version 1 has no callers, no `estimated` and no `sequence_parallel`. Such a file is read: its sections are of callers that need the
whole residual, and sequence parallelism runs by the thresholds of the machine's class until it is tuned.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from phalanx.errors import OptionError, TableError, file_named
from phalanx.hardware.fingerprint import Fingerprint
from phalanx.tables.message import Caller, Fusion
from phalanx.tables.seed import Latency, Seed, SequenceParallelSeed, sequence_parallel
from phalanx.tables.strategy import Choice
from phalanx.tables.table import HiddenRange, Section, Span, Table, digest_of

_FORMAT, _VERSION, _OLD = "phalanx-allreduce-table", 2, 1


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` completely or not at all: readers see the old file or the new one. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with file_named(path), os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
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
        keys = ", ".join(f'"{key}": {json.dumps(section[key])}' for key in ("dtype", "fusion", "caller"))
        begin = f'  {{{keys}, "rows": ['
        rows = ",\n".join(f"   {json.dumps(row)}" for row in section["rows"])
        lines.append(f"{begin}\n{rows}\n  ]}}" + ("," if number + 1 < len(plain["sections"]) else ""))
    models = ",\n".join(f"   {json.dumps(name)}: {json.dumps(model)}" for name, model in plain["seed"]["models"].items())
    facts = ", ".join(f'"{key}": {json.dumps(plain["seed"][key])}' for key in ("origin", "estimated", "sequence_parallel"))
    seed = f' "seed": {{{facts}, "models": {{\n{models}\n  }},'
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
    top = fields(data, "the file", format=str, version=int, digest=str, made=dict, fingerprint=dict, sections=list, seed=dict)
    version = top["version"]
    if top["format"] != _FORMAT or version not in (_VERSION, _OLD):
        reads = f"this reads {_FORMAT!r} versions {_OLD} and {_VERSION}"
        raise TableError(f"format {top['format']!r} version {version}", held=reads)
    key = fields(top["fingerprint"], "fingerprint", sm=int, link=str, world=int)
    if not all(isinstance(text, str) for text in top["made"].values()):
        raise TableError("field 'made' has a value that is not a string")
    fingerprint = Fingerprint(key["sm"], key["link"], key["world"])
    seed = _seed(top["seed"], fingerprint if version == _OLD else None)
    table = Table(fingerprint, tuple(_section(item, version) for item in top["sections"]), seed, top["made"])
    digest = table.digest if version == _VERSION else digest_of(_as_old(table.deciding()))
    if digest != top["digest"]:
        raise TableError(f"the digest is {top['digest'][:16]}..., the content's {digest[:16]}...", why="the file was changed")
    return table


def _as_old(deciding: dict[str, Any]) -> dict[str, Any]:
    """What decides, as version 1 has it."""
    sections = [{key: value for key, value in section.items() if key != "caller"} for section in deciding["sections"]]
    seed = {key: value for key, value in deciding["seed"].items() if key not in ("estimated", "sequence_parallel")}
    return deciding | {"sections": sections, "seed": seed}


def _section(data: Any, version: int) -> Section:
    if version == _OLD and isinstance(data, dict):
        data = data | {"caller": Caller.REPLICATED.label}
    section = fields(data, "a section", dtype=str, fusion=str, caller=str, rows=list)
    callers = {caller.label: caller for caller in Caller}
    if section["caller"] not in callers:
        raise TableError(f"caller {section['caller']!r} is unknown", next=f"use {', '.join(callers)}")
    where = f"section {section['dtype']} {section['fusion']}"
    rows = []
    for item in section["rows"]:
        row = fields(item, f"{where}: a row", hidden=list, spans=list)
        first, last = values(row["hidden"], f"{where}: hidden", int, int)
        spans = [values(span, f"{where}: a span", int, int, str, float) for span in row["spans"]]
        rows.append(HiddenRange(first, last, tuple(Span(a, b, Choice.parse(choice), gain) for a, b, choice, gain in spans)))
    return Section(section["dtype"], Fusion.named(section["fusion"]), tuple(rows), callers[section["caller"]])


def _seed(data: Any, old: Fingerprint | None) -> Seed:
    """old: of the machine of a file of version 1."""
    if old is not None:
        seed = fields(data, "seed", origin=str, models=dict, order=dict)
        estimated, sharded = not seed["origin"].startswith("fitted to "), sequence_parallel(old)
    else:
        seed = fields(data, "seed", origin=str, estimated=bool, sequence_parallel=dict, models=dict, order=dict)
        estimated, sharded = seed["estimated"], _sequence_parallel(seed["sequence_parallel"])
    if set(seed["order"]) != set(seed["models"]):
        raise TableError("seed: models and order name different fusions")
    models: dict[Fusion, dict[Choice, Latency]] = {}
    for name, order in seed["order"].items():
        by_choice = seed["models"][name]
        if not isinstance(by_choice, dict) or not isinstance(order, list) or sorted(map(str, order)) != sorted(by_choice):
            raise TableError(f"seed: models and order of {name} name different choices")
        latencies = {Choice.parse(c): Latency(*values(by_choice[c], f"seed {name} {c}", int, int, int)) for c in order}
        models[Fusion.named(name)] = latencies
    return Seed(seed["origin"], models, estimated, sharded)


def _sequence_parallel(data: dict[str, Any]) -> SequenceParallelSeed:
    thresholds = {"rs_norm_ag_min_tokens": data.get("rs_norm_ag_min_tokens"), "gemm_rs_min_bytes": data.get("gemm_rs_min_bytes")}
    kinds: dict[str, type] = {name: type(None) if value is None else int for name, value in thresholds.items()}
    seed = fields(data, "seed sequence_parallel", origin=str, estimated=bool, **kinds)
    return SequenceParallelSeed(**thresholds, origin=seed["origin"], estimated=seed["estimated"])


def fields(data: Any, where: str, **kinds: type) -> dict[str, Any]:
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


def values(data: Any, where: str, *kinds: type) -> list[Any]:
    """`data` as a list of exactly these kinds."""
    if not isinstance(data, list) or len(data) != len(kinds):
        raise TableError(f"{where} is not a list of {len(kinds)}")
    for value, kind in zip(data, kinds, strict=True):
        _kind(value, kind, where)
    return data


def _kind(value: Any, kind: type, where: str) -> None:
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    fits = fits or (kind is float and value is None)
    if not fits or (kind is float and value is not None and not (math.isfinite(value) and value > 0)):
        raise TableError(f"{where} holds {value!r}, which is not {kind.__name__}")
