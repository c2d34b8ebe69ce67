# SPDX-License-Identifier: Apache-2.0
"""`prediction` of a chat, through a real server and a real rank: it saves steps where it is right, and changes no answer."""

from __future__ import annotations

import json

import pytest

from phalanx.config.locate import locate
from tests.support.serve_processes import MODEL, rank_server

pytestmark = pytest.mark.usefixtures("forked_python")

QUESTION = [{"role": "user", "content": "What is a rank?"}]
CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 64, 4]]}


def answer(served, prediction=None, **fields):
    """The text, and the usage."""
    ask = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
    with served.http() as http:
        reply = http.post("/v1/chat/completions", json=ask | ({} if prediction is None else {"prediction": prediction}))
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"], reply.json()["usage"]


def content(text):
    return {"type": "content", "content": text}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    flags = ["--speculative_config", json.dumps(CONFIG), "--max_batch_size", "4"]
    with rank_server(tmp_path_factory.mktemp("served"), locate("demo"), *flags) as running:
        yield running.wait_ready()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(served, sampling):
    text, usage = answer(served, **sampling)
    before = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens", 0)
    half = len(text) // 2
    counts = {}
    for name, prediction in {
        "right": content(text),
        "parts": content([{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]),
        "with an end that differs": content(text[:half] + " or something else, which nobody expects"),
        "long": content(text + " The end." * 20000),  # read in another process, and cut
        "wrong": content("def main():\n    return 1\n" * 10),
        "empty": content(""),
    }.items():
        same, usage_of_it = answer(served, prediction, **sampling)
        assert same == text, name
        assert usage_of_it["prompt_tokens"] == usage["prompt_tokens"], name
        assert usage_of_it["total_tokens"] == usage["total_tokens"], name
        counts[name] = usage_of_it["completion_tokens_details"]
    accepted = {name: one["accepted_prediction_tokens"] for name, one in counts.items()}
    assert min(accepted["right"], accepted["parts"], accepted["long"]) > max(30, 2 * before), accepted
    assert accepted["right"] > accepted["with an end that differs"] > accepted["wrong"], accepted
    assert counts["right"]["rejected_prediction_tokens"] < 15


def test_wrong_types_are_named(served):
    with served.http() as http:
        for prediction in (
            {"type": "text", "content": "x"},
            {"type": "content"},
            content([{"type": "image_url", "image_url": {}}]),
        ):
            ask = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "prediction": prediction}
            reply = http.post("/v1/chat/completions", json=ask)
            assert reply.status_code == 400
            assert "prediction" in reply.json()["error"]["param"]


def test_without_prompt_lookup_it_does_nothing(tmp_path):
    with rank_server(tmp_path, locate("demo"), "--max_batch_size", "4") as running:
        running.wait_ready()
        text, usage = answer(running)
        same, with_it = answer(running, content(text))
        ignored = running.metric("request_fields_without_effect_total")
    assert same == text
    assert "completion_tokens_details" not in usage
    details = with_it.pop("completion_tokens_details")
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert ignored == 1
    assert with_it["total_tokens"] == usage["total_tokens"]
