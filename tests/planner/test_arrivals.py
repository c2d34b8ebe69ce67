# SPDX-License-Identifier: Apache-2.0
"""Arrivals from traces in the two public forms, and from processes; what cannot be read is named."""

from __future__ import annotations

import json
import time

import pytest

from phalanx.errors import OptionError
from phalanx.planner import arrivals

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


def test_times_count_from_the_first_request_in_either_form(tmp_path):
    head, first, second = AZURE.splitlines()
    path = tmp_path / "unsorted.csv"
    path.write_text("\n".join((head, second, first)))
    assert [(row.at, row.input_len) for row in of(path)] == [(0.0, 374), (pytest.approx(4.314579), 396)]
    path = tmp_path / "slice.jsonl"
    path.write_text("".join(json.dumps({**row, "timestamp": row["timestamp"] + 1_000_000}) + "\n" for row in MOONCAKE))
    assert [row.at for row in of(path)] == [0.0, 3.0]


def test_times_without_an_offset_are_utc(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        path = tmp_path / "trace.csv"
        path.write_text(f"{AZURE.splitlines()[0]}\n2024-03-31 01:59:59,1,1\n2024-03-31 03:00:00.5,1,1\n")
        assert [row.at for row in of(path)] == [0.0, 3601.5]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "second", ["2024-05-10 00:00:01.009930+00:00", "2024-05-10T02:00:01.009930+02:00", "2024-05-10 00:00:01.00993Z"]
)
def test_times_with_an_offset(tmp_path, second):
    path = tmp_path / "trace.csv"
    path.write_text(f"{AZURE.splitlines()[0]}\n2024-05-10 00:00:00.009930+00:00,1,1\n{second},1,1\n")
    assert [row.at for row in of(path)] == [0.0, pytest.approx(1.0, abs=1e-6)]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    for name, content in (("trace.csv", AZURE), ("trace.jsonl", json.dumps(MOONCAKE[0]))):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert of(tmp_path / name)[0].input_len in (374, 600)


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
        ("trace.jsonl", json.dumps({**MOONCAKE[0], "hash_ids": [1]}), "line 1: 1 hash ids for 600 tokens"),
        ("trace.jsonl", '\n{"timestamp": NaN}', "line 2: timestamp is nan"),
        ("trace.jsonl", '{"timestamp": 1e400}', "line 1: timestamp is inf"),
        ("trace.jsonl", '{"timestamp": 0, "output_length": 2}', "line 1: input_length is missing"),
        ("trace.jsonl", json.dumps({**MOONCAKE[0], "input_length": 1.5}), "line 1: input_length is 1.5"),
        ("trace.jsonl", json.dumps({**MOONCAKE[0], "output_length": -1}), "line 1: output_length is -1"),
        ("trace.jsonl", json.dumps({**MOONCAKE[0], "hash_ids": ["a", 2]}), "line 1: hash_ids is "),
        ("trace.jsonl", "[1]", "line 1 is not an object"), ("trace.jsonl", "{", "line 1 is not JSON"),
        ("trace.csv", AZURE + "yesterday,1,1\n", "line 4: TIMESTAMP is 'yesterday'"),
        ("trace.csv", AZURE + "2023-11-16 18:15:51,1.5,1\n", "line 4: ContextTokens is '1.5'"),
        ("trace.csv", AZURE + "2023-11-16 18:15:51,1,-1\n", "line 4: GeneratedTokens is '-1'"),
        ("trace.csv", AZURE + "2023-11-16 18:15:51,999999999999,1\n", "line 4: ContextTokens is '999999999999'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(OptionError, match=reason):
        of(tmp_path / name)
    for rate in ("0", "-1", "fast", "inf", "nan", "1e-320"):
        with pytest.raises(OptionError, match="no rate"):
            of(f"poisson:{rate}")


def test_a_shorter_trace_is_equal_where_it_was(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    first, second = arrivals.shortened(of(path), 64)
    assert (first.input_len, first.output_len, second.input_len, second.output_len) == (16, 1, 10, 1)
    one, other = first.tokens(0), second.tokens(1)
    assert one[:8] == other[:8]
    assert one[8] != other[8]
    for factor in (0, 3):
        with pytest.raises(OptionError, match=f"a trace cannot be {factor} times shorter"):
            arrivals.shortened(of(path), factor)
