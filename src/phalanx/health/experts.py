# SPDX-License-Identifier: Apache-2.0
"""`phalanx experts`: the load of each expert of a running server as a heat map, how evenly its ranks share it, and what a placement
would give. From GET /experts alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.sax.saxutils import escape

import httpx
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.config.experts import require_places
from phalanx.errors import EngineError, OptionError
from phalanx.health.servers import TIMEOUT, authorization, normal
from phalanx.layout.expert_placement import balanced_placement, default_placement, imbalance, rank_loads

SHADES = " ░▒▓█"
HOT = 4.0
"""Times the mean of its layer from which an expert is drawn in the last colour."""
_COLORS = ((13, 8, 135), (126, 3, 168), (204, 71, 120), (248, 149, 64), (240, 249, 33))  # matplotlib's "plasma"
_LABEL = 6  # columns before a row of the map
_CELL, _GAP, _TOP = 12, 56, 44  # pixels of the picture


@dataclass(frozen=True)
class LayerView:
    """A layer with experts. tokens: pairs of a token and one of its experts, by expert; rank_tokens: by rank, as they were counted.

    imbalance: the largest of rank_tokens over their mean. rearranged: what it would be with the same places differently filled, and
    redundant: with further copies, where the load stays as it is.
    """

    layer: int
    tokens: list[int]
    ranks: list[int]
    rank_tokens: list[int]
    imbalance: float
    rearranged: float
    redundant: float | None = None


@dataclass(frozen=True)
class EngineView:
    """One engine behind the server. seconds: over which tokens were counted; None: since its start."""

    engine: int
    seconds: float | None
    redundant: int
    layers: tuple[LayerView, ...]

    @property
    def imbalances(self) -> tuple[float, float, float | None]:
        """Now, rearranged, and with further copies, averaged over layers."""
        count = len(self.layers)
        copied = [layer.redundant for layer in self.layers if layer.redundant is not None]
        return (
            sum(layer.imbalance for layer in self.layers) / count, sum(layer.rearranged for layer in self.layers) / count,
            sum(copied) / count if copied else None,
        )  # fmt: skip


def read(url: str, *, client: httpx.Client | None = None) -> dict[str, Any]:
    """What the server at a URL answers to GET /experts. Raises EngineError where it does not."""
    base = normal(url)
    with client or httpx.Client(timeout=TIMEOUT, trust_env=False, headers=authorization()) as http:
        try:
            answer = http.get(f"{base}/experts")
            answer.raise_for_status()
            body: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                f"{base}/experts does not answer as it should", why=f"{type(error).__name__}: {error}",
                next="check the URL and PHALANX_API_KEY, and that /ready answers 200",
            ) from None  # fmt: skip
    return body


def views(body: dict[str, Any], *, recent: bool = False, redundant: int = 0) -> list[EngineView]:
    """body: of /experts. recent: of the last minute, else since the start. redundant: the number of further copies in each layer
    that a placement may make, 0 for none. Raises LayoutError for a number that is not possible."""
    result = []
    for engine in body["engines"]:
        layers = tuple(_layer(row, engine["experts"], recent, redundant) for row in engine["layers"])
        result.append(EngineView(engine["engine"], engine["recent_seconds"] if recent else None, redundant, layers))
    return result


def _layer(row: dict[str, Any], experts: int, recent: bool, redundant: int) -> LayerView:
    tokens, by_rank = (row["recent_tokens"], row["recent_rank_tokens"]) if recent else (row["tokens"], row["rank_tokens"])
    ranks, current = len(row["ranks"]), tuple(row["placement"])
    rearranged = imbalance(rank_loads(tokens, balanced_placement(tokens, current, ranks), ranks))
    copied = None
    if redundant:
        copies = len(current) - experts + redundant
        require_places(experts, ranks, copies)
        copied = imbalance(rank_loads(tokens, balanced_placement(tokens, default_placement(experts, ranks, copies), ranks), ranks))
    return LayerView(row["layer"], tokens, row["ranks"], by_rank, imbalance(by_rank), rearranged, copied)


def heat(tokens: Sequence[int]) -> list[float]:
    """Each expert's tokens over the mean of the layer; 0 where there are none."""
    total = sum(tokens)
    return [count * len(tokens) / total if total else 0.0 for count in tokens]


def render(engines: Sequence[EngineView], width: int = 100) -> RenderableType:
    """Draw maps of at most `width` columns. Where a layer has more experts than that, a cell is the hottest of neighbours."""
    if not engines:
        return Text("the model has no experts")
    return Group(*(part for engine in engines for part in _engine_parts(engine, width, named=len(engines) > 1)))


def _engine_parts(engine: EngineView, width: int, *, named: bool) -> list[RenderableType]:
    count = len(engine.layers[0].tokens)
    beside = -(-count // max(1, width - _LABEL))
    period = "since the start" if engine.seconds is None else f"in the last {engine.seconds:.0f} s"
    total = sum(sum(layer.tokens) for layer in engine.layers)
    prefix = f"engine {engine.engine}: " if named else ""
    cell = "1 expert" if beside == 1 else f"the hottest of {beside} experts"
    parts: list[RenderableType] = [
        Text(f"{prefix}{total:,} pairs of a token and an expert {period}; a row is a layer, a cell {cell}"),
        Text.assemble(
            " " * _LABEL, *((SHADES[-1] * 3, _style(step / 4 * HOT)) for step in range(5)), f"  0 to {HOT:.0f} x the mean or more"
        ),
    ]
    for layer in engine.layers:
        values = heat(layer.tokens)
        cells = [max(values[begin : begin + beside]) for begin in range(0, count, beside)]
        row = Text(f"{layer.layer:>{_LABEL - 1}} ")
        for value in cells:
            row.append(SHADES[min(len(SHADES) - 1, round(value / HOT * (len(SHADES) - 1) + 0.49))], _style(value))
        parts.append(row)
    if len(engine.layers[0].ranks) > 1:
        parts += [_rank_table(engine), Text(_summary(engine))]
    else:
        parts.append(Text("all experts are on each rank, which has a slice of every one: the ranks always have the same load"))
    return parts


def _rank_table(engine: EngineView) -> Table:
    """The layers that a placement would help most."""
    copied = ["with copies"] if engine.redundant else []
    columns = ["layer", "largest rank / mean", "rearranged", *copied, "tokens by rank"]
    table = Table(*columns, box=None, pad_edge=False)
    worst = sorted(engine.layers, key=lambda layer: layer.rearranged - layer.imbalance)[:8]
    for layer in sorted(worst, key=lambda each: each.layer):
        by_rank = ", ".join(f"{rank}: {count:,}" for rank, count in zip(layer.ranks, layer.rank_tokens, strict=True))
        copied = [f"{layer.redundant:.2f}"] if layer.redundant is not None else []
        table.add_row(str(layer.layer), f"{layer.imbalance:.2f}", f"{layer.rearranged:.2f}", *copied, by_rank)
    return table


def _summary(engine: EngineView) -> str:
    now, rearranged, copied = engine.imbalances
    text = f"largest rank over the mean, averaged over {len(engine.layers)} layers: {now:.2f}; rearranged {rearranged:.2f}"
    return text if copied is None else f"{text}; with {engine.redundant} further copies in each layer {copied:.2f}"


def _color(value: float) -> tuple[int, int, int]:
    place = min(max(value / HOT, 0.0), 1.0) * (len(_COLORS) - 1)
    low = min(int(place), len(_COLORS) - 2)
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(_COLORS[low], _COLORS[low + 1], strict=True))
    return red, green, blue


def _style(value: float) -> str:
    return "rgb({},{},{})".format(*_color(value))


def picture(engines: Sequence[EngineView]) -> str:
    """The maps as an SVG, with the imbalance of each layer beside its row. Raises OptionError for a model without experts."""
    if not engines:
        raise OptionError("there is nothing to draw", why="the model has no experts", next="leave out --out")
    parts: list[str] = []
    top, width = 0, 0
    for engine in engines:
        columns = len(engine.layers[0].tokens)
        width = max(width, _GAP + columns * _CELL + 150)
        period = "since the start" if engine.seconds is None else f"in the last {engine.seconds:.0f} s"
        title = f"engine {engine.engine}: tokens of each expert over the mean of its layer, {period}"
        parts.append(f'<text x="{_GAP}" y="{top + 18}" font-weight="bold">{escape(title)}</text>')
        parts.append(f'<text x="{_GAP}" y="{top + 34}">{escape(_summary(engine))}</text>')
        for number, layer in enumerate(engine.layers):
            y = top + _TOP + number * _CELL
            parts.append(f'<text x="{_GAP - 6}" y="{y + 10}" text-anchor="end">{layer.layer}</text>')
            for expert, value in enumerate(heat(layer.tokens)):
                fill = "#{:02x}{:02x}{:02x}".format(*_color(value))
                hint = f"layer {layer.layer}, expert {expert}: {layer.tokens[expert]:,} tokens, {value:.2f} x the mean"
                place = f'x="{_GAP + expert * _CELL}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}"'
                parts.append(f'<rect {place} fill="{fill}"><title>{escape(hint)}</title></rect>')
            note = f"{layer.imbalance:.2f}, rearranged {layer.rearranged:.2f}"
            parts.append(f'<text x="{_GAP + columns * _CELL + 6}" y="{y + 10}">{note}</text>')
        top += _TOP + len(engine.layers) * _CELL + 24
    for step in range(41):
        fill = "#{:02x}{:02x}{:02x}".format(*_color(step / 40 * HOT))
        parts.append(f'<rect x="{_GAP + step * 5}" y="{top}" width="5" height="10" fill="{fill}"/>')
    parts.append(f'<text x="{_GAP + 212}" y="{top + 9}">0 to {HOT:.0f} x the mean or more</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 24}" font-family="sans-serif" font-size="10">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def dumps(engines: Sequence[EngineView]) -> str:
    """For scripts."""
    rows = []
    for engine in engines:
        now, rearranged, copied = engine.imbalances
        rows.append({**asdict(engine), "imbalance": now, "imbalance_rearranged": rearranged, "imbalance_redundant": copied})
    return json.dumps({"engines": rows}, indent=2)


def show(engines: Sequence[EngineView], console: Console) -> None:
    console.print(render(engines, console.width))
