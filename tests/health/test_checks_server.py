# SPDX-License-Identifier: Apache-2.0
"""Checks of running servers, over real HTTP: what /ready and two readings of /metrics say."""

from __future__ import annotations

import socket

import pytest

from phalanx.health.servers import Histogram, is_url, normal, parse, visit
from tests.support.health_subject import findings, metrics_text, served, subject

pytestmark = pytest.mark.usefixtures("forked_python")


def levels(name, *servers):
    examined = subject()
    examined.servers = tuple(servers)
    return [(str(finding.level), finding.summary) for finding in findings(name, examined)]


def read(*texts, **answers):
    with served(*texts, **answers) as url:
        return visit(url, interval=0.01)


def test_server_ready():
    assert levels("server_ready", read()) == [("ok", "1 servers take requests")]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    level, summary = levels("server_ready", visit(f"http://127.0.0.1:{port}"))[0]
    assert level == "error"
    assert "does not answer: ConnectError" in summary
    closed = levels("server_ready", read(metrics=401))[0]
    assert closed[0] == "error"
    assert closed[1].endswith("/metrics gives 401 Unauthorized; set PHALANX_API_KEY to a key of the server")
    assert levels("server_ready", read(status=503, phase="draining"))[0][0] == "warning"
    failed = levels("server_ready", read(status=503, phase="failed", reason="rank 1 was killed by SIGKILL"))[0]
    assert failed[0] == "error"
    assert failed[1].endswith("has failed: rank 1 was killed by SIGKILL")


def test_server_load():
    quiet = metrics_text(running=2, blocks_referenced=20)
    assert levels("server_load", read(quiet)) == [("ok", "queues and KV caches have room")]
    before, after = metrics_text(preemptions=3, blocks_referenced=99), metrics_text(preemptions=8, blocks_referenced=99)
    level, summary = levels("server_load", read(before, after))[0]
    assert level == "warning"
    assert "5 sequences were preempted during the check, with 99% of the KV cache in use" in summary
    assert levels("server_load", read(after, after))[0][0] == "ok", "old preemptions are no alarm"
    assert "96% full, and 7 requests wait" in levels("server_load", read(metrics_text(blocks_referenced=96, waiting=7)))[0][1]
    assert "4 requests were refused" in levels("server_load", read(metrics_text(refused=1), metrics_text(refused=5)))[0][1]
    assert "14 of 16 places" in levels("server_load", read(metrics_text(queued=14)))[0][1]


def ranks(*sizes):
    return {rank: {"weights": size, "kv": size, "total": 3 * size, "capacity": 10 * 2**40} for rank, size in enumerate(sizes)}


def test_server_balance():
    even = metrics_text(rank_bytes=ranks(40 << 30, 41 << 30), running=30)
    assert levels("server_balance", read(even))[0][0] == "ok"
    uneven = metrics_text(rank_bytes=ranks(60 << 30, 27 << 30))
    level, summary = levels("server_balance", read(uneven))[0]
    assert level == "warning"
    assert summary.endswith("rank 0 has 120.0 GiB and rank 1 54.0 GiB")
    busy, idle = read(metrics_text(running=60)), read(metrics_text(running=1))
    assert levels("server_balance", busy, idle)[0][1].startswith("requests are spread unevenly")
    assert levels("server_balance", busy, busy)[0][0] == "ok"
    assert levels("server_balance", read(metrics_text(running=3)), idle)[0][0] == "ok", "few requests are never even"


def test_server_graphs():
    graphs = {0: {"weights": 1, "graphs": 1 << 28}}
    eager = metrics_text(rank_bytes=graphs, ran={"eager/steps": 90, "decode graph/steps": 10})
    level, summary = levels("server_graphs", read(eager))[0]
    assert level == "warning"
    assert summary.endswith("90% of 100 steps ran without a graph")
    assert (
        levels("server_graphs", read(metrics_text(rank_bytes=graphs, ran={"eager/steps": 10, "decode graph/steps": 90})))[0][0]
        == "ok"
    )
    assert levels("server_graphs", read(metrics_text(ran={"eager/steps": 90})))[0][0] == "ok", "on CPU all are eager"


def test_server_drafts():
    counts = {"drafts": 200, "draft_tokens": 600, "accepted_tokens": [8, 2, 0]}
    level, summary = levels("server_drafts", read(metrics_text(**counts, wrong_head=1)))[0]
    assert level == "warning"
    assert summary.endswith("the first draft was accepted in 4% of 200 rows")
    assert levels("server_drafts", read(metrics_text(**counts)))[0][0] == "ok"
    assert levels("server_drafts", read(metrics_text()))[0][0] == "ok"


def test_server_versions():
    one, same, other = read(version="1.0"), read(version="1.0"), read(version="1.1")
    assert levels("server_versions", one, same)[0][0] == "ok"
    assert levels("server_versions", one, other)[0][1].startswith("servers run different versions: ")
    assert levels("server_versions", one, read(metrics_text(model="another")))[0][1].startswith("servers run different models: ")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:8000", "http://h:8000"), ("h:8000", "http://h:8000"), ("https://h/v1/", "https://h"), ("h:80/metrics", "http://h:80"),
    ],
)  # fmt: skip
def test_urls(text, url):
    assert is_url(text)
    assert normal(text) == url


@pytest.mark.parametrize("text", ["demo", "meta-llama/Meta-Llama-3-8B", "./folder", "/models/a:8000/b", "llama:latest"])
def test_models_are_no_urls(text):
    assert not is_url(text)


def test_quantile_is_prometheus_own():
    histogram = Histogram(((0.1, 10.0), (0.2, 30.0), (float("inf"), 40.0)), 40.0, 5.0)
    assert histogram.quantile(0.5) == pytest.approx(0.15)
    assert histogram.quantile(0.25) == pytest.approx(0.1)
    assert histogram.quantile(0.99) == 0.2
    assert Histogram((), 0.0, 0.0).quantile(0.5) is None
    assert histogram.since(histogram).quantile(0.5) is None
    later = Histogram(((0.1, 10.0), (0.2, 50.0), (float("inf"), 60.0)), 60.0, 8.0)
    assert later.since(histogram).quantile(0.5) == pytest.approx(0.15)
    assert histogram.since(later) == histogram, "a server that was restarted begins anew"


@pytest.mark.parametrize("prefix", ["phalanx", "vllm"])
def test_any_prefix_is_read(prefix):
    scrape = parse(metrics_text(running=3, rank_bytes=ranks(5, 6)).replace("phalanx:", f"{prefix}:"), 0.0)
    assert (scrape.prefix, scrape.model, scrape.value("num_requests_running")) == (prefix, "demo", 3)
    assert scrape.value("rank_memory_bytes", rank="1", kind="kv") == 6
    assert scrape.by("rank_memory_bytes", "kind")[("kv",)] == 11
