# SPDX-License-Identifier: Apache-2.0
"""The heat map of experts: what is drawn is what a server says."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from phalanx.errors import EngineError, LayoutError, OptionError
from phalanx.health import experts


def body(tokens: list[list[int]], ranks: int = 2) -> dict:
    size = len(tokens[0]) // ranks
    layers = [
        {
            "layer": number, "ranks": list(range(ranks)), "placement": list(range(len(row))), "tokens": row,
            "recent_tokens": row[::-1],
            "rank_tokens": [sum(row[rank * size : (rank + 1) * size]) for rank in range(ranks)],
            "recent_rank_tokens": [sum(row[::-1][rank * size : (rank + 1) * size]) for rank in range(ranks)],
        }
        for number, row in enumerate(tokens)
    ]  # fmt: skip
    return {"object": "experts", "engines": [{"engine": 0, "experts": len(tokens[0]), "recent_seconds": 60.0, "layers": layers}]}


SVG = "{http://www.w3.org/2000/svg}"
SKEWED = body([[30, 20, 5, 5], [10, 10, 10, 10], [40, 0, 0, 0]])


def test_imbalance_now_and_by_other_placements() -> None:
    (engine,) = experts.views(SKEWED, redundant=2)
    first, even, single = engine.layers
    assert (first.imbalance, even.imbalance, single.imbalance) == pytest.approx((50 / 30, 1.0, 2.0))
    assert first.rearranged == pytest.approx(35 / 30)
    assert (even.rearranged, single.rearranged) == pytest.approx((1.0, 2.0))
    assert (first.redundant, single.redundant) == pytest.approx((1.0, 1.0))
    assert engine.imbalances == pytest.approx(((50 / 30 + 3) / 3, (35 / 30 + 3) / 3, 1.0))
    recent = experts.views(SKEWED, recent=True)[0]
    assert (recent.seconds, recent.layers[0].rank_tokens) == (60.0, [10, 50])
    with pytest.raises(LayoutError, match="multiple of 2"):
        experts.views(SKEWED, redundant=1)


def drawn(tokens: list[list[int]], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(experts.render(experts.views(body(tokens)), width))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_cell_is_as_dark_as_its_expert_is_hot() -> None:
    lines = drawn([[30, 20, 5, 5], [10, 10, 10, 10], [40, 0, 0, 0]], 100).splitlines()
    assert lines[0].startswith("140 pairs of a token and an expert since the start")
    rows = [line[6:10].ljust(4) for line in lines[2:5]]
    assert rows[2] == "█   "
    assert len(set(rows[1])) == 1
    darkness = [experts.SHADES.index(cell) for cell in rows[0]]
    assert darkness == sorted(darkness, reverse=True)
    assert "1.67" in "\n".join(lines)


def test_many_experts_share_cells_and_the_hottest_shows() -> None:
    row = [1] * 128
    row[77] = 500
    lines = drawn([row], 70).splitlines()
    assert "the hottest of 2 experts" in " ".join(lines[:2])
    (cells,) = [line for line in lines if line.startswith("    0 ")]
    assert cells[6:].index("█") == 77 // 2


def test_the_picture_has_a_cell_for_each_expert() -> None:
    root = ElementTree.fromstring(experts.picture(experts.views(SKEWED)))
    cells = [(node.get("fill"), node[0].text) for node in root.iter(f"{SVG}rect") if len(node)]
    assert len(cells) == 12
    assert cells[0][1] == "layer 0, expert 0: 30 tokens, 2.00 x the mean"
    assert len({fill for fill, _ in cells}) >= 4
    with pytest.raises(OptionError, match="nothing to draw"):
        experts.picture([])


def test_for_scripts_and_without_experts() -> None:
    document = json.loads(experts.dumps(experts.views(SKEWED)))
    assert document["engines"][0]["imbalance_rearranged"] == pytest.approx((35 / 30 + 3) / 3)
    assert "no experts" in str(experts.render(experts.views({"engines": []})))


def test_a_server_that_does_not_answer_is_an_error() -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(404)))
    with pytest.raises(EngineError, match=re.escape("http://host:8000/experts does not answer")):
        experts.read("host:8000", client=client)


def test_from_a_server_to_a_file(tmp_path: Path) -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, json=SKEWED)))
    assert experts.views(experts.read("http://host:8000/v1", client=client))[0].layers[2].tokens == [40, 0, 0, 0]
