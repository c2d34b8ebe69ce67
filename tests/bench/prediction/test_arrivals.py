# SPDX-License-Identifier: Apache-2.0
"""Arrivals from traces in the two public forms, and from processes; what cannot be read is named."""

from __future__ import annotations

import json

import pytest

from phalanx.bench.prediction import arrivals
from phalanx.errors import OptionError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
MOONCAKE = [
    {"timestamp": 3000, "input_length": 600, "output_length": 3, "hash_ids": [0, 2]},
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
]


def of(source, **options):
    return arrivals.of(str(source), **{"isl": 10, "osl": 5, "requests": 0, **options})


def test_azures_form(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = of(path)
    assert (first.at, first.input_len, first.output_len) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579)
    assert first.tokens(0) != second.tokens(1)[:374]
    assert len(second.tokens(1)) == 396
    assert len(of(path, requests=1)) == 1


def test_mooncakes_form_and_its_equal_beginnings(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    first, second = of(path)
    assert (first.at, second.at) == (0.0, 3.0)
    assert (len(first.tokens(0)), len(second.tokens(1))) == (1000, 600)
    assert first.tokens(0)[:512] == second.tokens(1)[:512]
    assert first.tokens(0)[512] != second.tokens(1)[512]


def test_a_poisson_process_has_its_rate():
    rows = of("poisson:4", requests=4000, seed=1)
    assert rows == of("poisson:4", requests=4000, seed=1)
    assert len(rows) / rows[-1].at == pytest.approx(4, rel=0.05)
    assert arrivals.paced(rows, 2.0)[-1].at == rows[-1].at / 2
    assert {row.at for row in of("burst", requests=3)} == {0.0}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.csv", None, "is not a file"), ("trace.txt", "x", "unknown form"), ("trace.csv", "a,b\n1,2\n", "cannot be read"),
        ("trace.csv", AZURE.splitlines()[0], "holds no requests"), ("trace.jsonl", '{"timestamp": 1}', "cannot be read"),
        ("trace.jsonl", json.dumps({**MOONCAKE[0], "hash_ids": [1]}), "1 hash ids for 600 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(OptionError, match=reason):
        of(tmp_path / name)
    for rate in ("0", "-1", "fast", "inf"):
        with pytest.raises(OptionError, match="no rate"):
            of(f"poisson:{rate}")
