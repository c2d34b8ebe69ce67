# SPDX-License-Identifier: Apache-2.0
"""The load of experts beside a real server with real ranks, and their moves under load: what it counts is what transformers' router
decides, and greedy completions stay the same while experts change their ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from phalanx import cli
from phalanx.layout.expert_placement import imbalance
from tests.support.serve_processes import MODEL, rank_server, until
from tests.support.skewed_experts import EXPERTS, LAYERS, Skewed, write

pytestmark = pytest.mark.usefixtures("forked_python")

NEW_TOKENS = 20
LAYOUTS = {
    "two ranks": ("--tp_size", "2", "--moe_ep_size", "2"),
    "stages, with copies": ("--tp_size", "2", "--moe_ep_size", "2", "--pp_size", "2", "--redundant_experts", "4"),
    "two GPUs": ("--device", "cuda", "--tp_size", "2", "--moe_ep_size", "2"),
}
ON_GPUS = {"two GPUs": pytest.mark.gpu2}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Skewed:
    return write(tmp_path_factory.mktemp("skewed"), new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=ON_GPUS.get(name, ())) for name in LAYOUTS])
def server(request: pytest.FixtureRequest, skewed: Skewed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    flags = ("--dtype", "fp32", "--no_enable_prefix_caching", *LAYOUTS[request.param])
    with rank_server(tmp_path_factory.mktemp("server"), skewed.folder, *flags) as served:
        yield served.wait_ready()


def complete(client: httpx.Client, skewed: Skewed, number: int) -> str:
    """The greedy completion of a prompt."""
    body = {"model": MODEL, "prompt": skewed.prompts[number], "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body | {"skip_special_tokens": False})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def texts(skewed: Skewed) -> list[str]:
    """Transformers' greedy completions."""
    tokenizer = Tokenizer.from_file(str(skewed.folder / "tokenizer.json"))
    return [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in skewed.tokens]


def experts(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/experts")
    assert answer.status_code == 200, answer.text
    engine: dict[str, Any] = answer.json()["engines"][0]
    return engine


def counts(client: httpx.Client, pairs: int) -> dict[str, Any]:
    """What /experts says once every layer has so many pairs of a token and an expert: ranks report within seconds."""

    def complete_counts() -> dict[str, Any] | None:
        state = experts(client)
        return state if all(sum(row["tokens"]) == pairs for row in state["layers"]) else None

    state: dict[str, Any] = until(complete_counts, 20.0, every=0.2)
    return state


def test_counters_equal_the_routers_own_decisions(server: Any, skewed: Skewed) -> None:
    with server.http() as client:
        assert [complete(client, skewed, number) for number in range(len(skewed.prompts))] == texts(skewed)
        counted = counts(client, sum(skewed.counts[0]))
        assert [row["tokens"] for row in counted["layers"]] == skewed.counts
        exported: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == "phalanx:expert_tokens_total":
                    exported[sample.labels["layer"], sample.labels["expert"]] = sample.value
                if sample.name == "phalanx:expert_imbalance":
                    by_layer = [imbalance(row["recent_rank_tokens"]) for row in experts(client)["layers"]]
                    assert sample.value == pytest.approx(sum(by_layer) / LAYERS)
                    assert sample.value > 1.02
        expected = {(str(layer), str(expert)): skewed.counts[layer][expert] for layer in range(LAYERS) for expert in range(EXPERTS)}
        assert exported == expected


def test_a_rebalance_under_load_loses_nothing(server: Any, skewed: Skewed, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients ask all the time; each completion is transformers'. Ranks are more even after it, as counted by the ranks."""
    expected, stop, failures, done = texts(skewed), threading.Event(), [], [0, 0, 0]

    def ask(thread: int) -> None:
        with server.http() as client:
            number = thread
            while not stop.is_set():
                text = complete(client, skewed, number % len(expected))
                if text != expected[number % len(expected)]:
                    failures.append((number, text))
                done[thread] += 1
                number += 1

    with server.http() as client:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(done))]
        for thread in threads:
            thread.start()
        until(lambda: min(done) > 1, 60.0)
        answer = client.post("/experts/rebalance")
        assert answer.status_code == 202, answer.text
        assert answer.json()["engines"][0]["layers_left"] >= LAYERS - 1
        until(lambda: experts(client)["layers_left"] == 0, 60.0)
        during = sum(done)
        until(lambda: sum(done) > during + 2, 60.0)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        # What ranks count for the same requests, before and after.
        before = [imbalance(row["rank_tokens"]) for row in default_loads(skewed, experts(client))]
        start = until(lambda: steady(client), 20.0)
        assert [complete(client, skewed, number) for number in range(len(expected))] == expected
        pairs = sum(skewed.counts[0])
        moved = counts(client, sum(start["layers"][0]["tokens"]) + pairs)
        after = []
        for old, new in zip(start["layers"], moved["layers"], strict=True):
            assert [b - a for a, b in zip(old["tokens"], new["tokens"], strict=True)] == skewed.counts[new["layer"]]
            after.append(imbalance([b - a for a, b in zip(old["rank_tokens"], new["rank_tokens"], strict=True)]))
        print(f"imbalance before {before}, after {after}; longest move {moved['longest_move_seconds'] * 1e3:.1f} ms")
        assert sum(after) / LAYERS < sum(before) / LAYERS - 0.1
        assert moved["moved"] > 0
        assert moved["longest_move_seconds"] < 0.5  # other processes may take the core meanwhile
    capsys.readouterr()
    assert cli.main(["experts", server.url, "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)["engines"][0]
    assert [layer["tokens"] for layer in shown["layers"]] == [row["tokens"] for row in moved["layers"]]


def default_loads(skewed: Skewed, state: dict[str, Any]) -> list[dict[str, Any]]:
    """What the ranks had of the same requests before experts moved: each of two has half of the experts."""
    half = EXPERTS // 2
    assert all(len(row["ranks"]) == 2 for row in state["layers"])
    return [{"rank_tokens": [sum(row[:half]), sum(row[half:])]} for row in skewed.counts]


def steady(client: httpx.Client) -> dict[str, Any] | None:
    """/experts, if all layers say the same number of pairs and nothing has changed for longer than ranks take to report."""
    first = experts(client)
    time.sleep(4.0)
    second = experts(client)
    same = [row["tokens"] for row in first["layers"]] == [row["tokens"] for row in second["layers"]]
    return second if same and len({sum(row["tokens"]) for row in second["layers"]}) == 1 else None
