# SPDX-License-Identifier: Apache-2.0
"""The dashboard that comes with the project: its queries name series that are exported, show all of them, and never add servers
or hide one; by a real Prometheus, which `.ci/run` fetches with promtool."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from phalanx.deploy.ray_serve import free_ports
from phalanx.metrics import Metrics
from tests.support.filled_metrics import filled, samples
from tests.support.serve_http_app import Scripted, live
from tests.support.serve_processes import until

BOARD = json.loads((Path(__file__).resolve().parents[1] / "dashboards" / "phalanx.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if "targets" in panel]
VARIABLES = {entry["name"]: entry["query"] for entry in BOARD["templating"]["list"] if entry["type"] == "query"}
OF_PROMETHEUS = {"instance", "job"}
"""Labels that a scrape adds."""
SERVERS = {"a:8000": 1, "b:8000": 2}
"""Servers that Prometheus knows, and their engines."""
STEP, STEPS = 15, 20


def everything(engines: int = 1) -> Metrics:
    metrics = filled(engines=engines)
    adapters = {"adapters_running": {"sql": 1}, "adapters_waiting": {"sql": 2}, "adapters_in_slots": ["sql"], "max_adapters": 2}
    metrics.engines = [msgspec.structs.replace(stats, **adapters) for stats in metrics.engines]
    metrics.accepted_field("chat user")
    metrics.first_token(0.02)
    metrics.next_tokens(0.01, 1)
    metrics.finished("stop", 0.5)
    return metrics


def queries() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]] + list(VARIABLES.values())


def test_series_are_there():
    exported = samples(everything())
    assert len(queries()) > 20
    for expr in queries():
        named = re.findall(r"((?:phalanx:|process_)\w+)(?:\{([^}]*)\})?", expr)
        assert named, f"no metric in {expr}"
        grouped = {word for group in re.findall(r"by \(([^)]*)\)", expr) for word in group.replace(",", " ").split()}
        for name, selector in named:
            assert name in exported, f"{name} of the dashboard is not exported"
            known = {label for labels in exported[name] for label, _ in labels} | OF_PROMETHEUS
            wanted = grouped | set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", selector))
            assert wanted <= known, f"{expr}: {name} has no {sorted(wanted - known)}"


def test_every_series_is_shown():
    shown = " ".join(queries())
    for name in samples(everything()):
        if name.startswith("phalanx:") and not name.endswith(("_count", "_sum")):
            assert name in shown, f"{name} is on no panel"


MISSING = [tool for tool in ("prometheus", "promtool") if shutil.which(tool) is None]
needs_prometheus = pytest.mark.skipif(bool(MISSING), reason=f"not run: {' and '.join(MISSING)} not installed")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """A Prometheus whose two servers have counted for five minutes, to the last whole step before now."""
    folder = tmp_path_factory.mktemp("prometheus")
    start = int(time.time()) - STEP * STEPS
    lines = []
    for number, (instance, engines) in enumerate(SERVERS.items(), start=1):
        for name, series in samples(everything(engines)).items():
            for labels, value in series.items():
                text = ",".join(f'{label}="{content}"' for label, content in (*labels, ("instance", instance), ("job", "phalanx")))
                for step in range(STEPS + 1):
                    counted = value * (1 + number * step) if name.endswith(("_total", "_bucket", "_count", "_sum")) else value
                    lines.append(f"{name}{{{text}}} {counted} {start + step * STEP}")
    (folder / "series").write_text("\n".join([*lines, "# EOF", ""]), encoding="utf-8")
    blocks = ["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "series", folder / "data"]
    subprocess.run(blocks, check=True, capture_output=True, timeout=60)
    with started(folder, {}) as http:
        http.params = http.params.set("time", start + STEP * STEPS)
        yield http


@contextlib.contextmanager
def started(folder: Path, config: dict) -> Iterator[httpx.Client]:
    """A Prometheus with its data below `folder`."""
    port = free_ports()
    (folder / "config.yml").write_text(json.dumps(config), encoding="utf-8")
    options = [f"--config.file={folder}/config.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
            until(lambda: answers(http))
            yield http
    finally:
        process.terminate()
        process.wait(20)


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def results(http: httpx.Client, expr: str, **chosen: str) -> list[dict]:
    """What Grafana would show of an expression. chosen: values of variables; the others are All."""
    for variable in VARIABLES:
        expr = expr.replace(f"${variable}", chosen.get(variable, ".*"))
    answer = http.get("/api/v1/query", params={"query": expr.replace("$__rate_interval", "1m")})
    assert answer.status_code == 200, (expr, answer.text)
    return answer.json()["data"]["result"]


@needs_prometheus
def test_no_panel_is_empty_and_no_two_curves_have_one_name(prometheus):
    for panel in PANELS:
        names = []
        for target in panel["targets"]:
            shown = results(prometheus, target["expr"])
            assert shown, target["expr"]
            names += [legend(target["legendFormat"], series["metric"]) for series in shown]
        assert len(names) == len(set(names)), (panel["title"], sorted(names))


def legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), text)


@needs_prometheus
@pytest.mark.parametrize(
    "chosen", [{"instance": "b:8000"}, {"instance": "b:8000", "engine": "1"}, {"instance": "a:8000", "rank": "0"}], ids=str
)
def test_nothing_but_the_chosen_server_engine_and_rank_is_shown(prometheus, chosen):
    for target in (target for panel in PANELS for target in panel["targets"]):
        expr = target["expr"]
        shown = results(prometheus, expr, **chosen)
        assert shown or "power_limit" in expr, expr  # which rank 1 alone has
        for labels in (series["metric"] for series in shown):
            assert "histogram_quantile" in expr or labels["instance"] == chosen["instance"]
            for variable in ("engine", "rank"):  # series of the server itself, and sums, have none
                if f"${variable}" in expr and variable in labels and variable in chosen:
                    assert labels[variable] == chosen[variable], expr
        assert not results(prometheus, expr, instance="c:8000"), expr


@needs_prometheus
def test_servers_are_not_added(prometheus):
    """Server b counts twice as fast as a, and has two engines."""
    exprs = {target["legendFormat"]: target["expr"] for panel in PANELS for target in panel["targets"]}

    def values(legend: str) -> dict[str, float]:
        return {series["metric"]["instance"]: float(series["value"][1]) for series in results(prometheus, exprs[legend])}

    assert values("{{instance}} made") == pytest.approx({"a:8000": 70 / STEP, "b:8000": 2 * 2 * 70 / STEP})
    assert values("{{instance}} requests") == pytest.approx({"a:8000": 4 / 16, "b:8000": 4 / 16})
    assert values("{{instance}} running") == {"a:8000": 3, "b:8000": 6}


@needs_prometheus
def test_variables_have_the_values_of_servers(prometheus):
    expected = {"model": {"demo"}, "instance": set(SERVERS), "engine": {"0", "1"}, "rank": {"0", "1"}}
    assert set(VARIABLES) == set(expected)
    for variable, query in VARIABLES.items():
        expr, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        assert {series["metric"][label] for series in results(prometheus, expr)} == expected[variable]


@needs_prometheus
def test_prometheus_scrapes_a_server_under_the_names_of_the_dashboard(tmp_path):
    with live(Scripted("one")) as server:
        jobs = [{"job_name": "phalanx", "scrape_interval": "200ms", "scrape_timeout": "200ms"}]
        jobs[0]["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
        with started(tmp_path, {"scrape_configs": jobs}) as http:
            until(lambda: results(http, 'up{job="phalanx"} == 1'))
            until(lambda: all(results(http, f"phalanx:{stem}") for stem in ("engine_up", "time_to_first_token_seconds_bucket")))
            names = {series["metric"]["__name__"] for series in results(http, '{job="phalanx"}')}
            assert not [name for name in names if name.startswith("phalanx_")]
