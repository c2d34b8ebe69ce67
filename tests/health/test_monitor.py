# SPDX-License-Identifier: Apache-2.0
"""The monitor: what it shows equals /metrics; rates and quantiles are those between two readings; each warning, and its silence."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from phalanx import cli
from phalanx.health import monitor, monitor_live
from phalanx.health.servers import parse
from tests.support.health_subject import metrics_text, served

pytestmark = pytest.mark.usefixtures("forked_python")

GIB = 2**30
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def gauges(**changes):
    values = {
        "gpu_utilization_perc": 93.0,
        "power_watts": 655.0,
        "power_limit_watts": 700.0,
        "temperature_celsius": 61.0,
        "sm_clock_mhz": 1755.0,
        "nvlink_tx_bytes": 0.0,
        "nvlink_rx_bytes": 0.0,
        "clock_reason/power_cap": 1.0,
        "clock_reason/thermal": 0.0,
    }
    return {**values, **changes}


def loaded(later: bool, **changes):
    """70B on two GPUs under load, at one moment and 2 seconds later."""
    scale = 1 if later else 0
    memory = {
        "weights": 36 * GIB,
        "activations": GIB,
        "kv": 80 * GIB,
        "graphs": GIB // 2,
        "total": 118 * GIB,
        "capacity": 140 * GIB,
    }
    fields = {
        "running": 256,
        "waiting": 12,
        "blocks_referenced": 61,
        "generation_tokens": 1000 + 11_800 * scale,
        "prompt_tokens": 5000 + 3000 * scale,
        "prefix_queries": 4000 + 3000 * scale,
        "prefix_hits": 1000 + 1500 * scale,
        "rank_bytes": {0: memory, 1: memory},
        "allreduce": {"ONESHOT/RESIDUAL_RMS_NORM": 100 + 900 * scale, "NCCL/NONE": 50 + 100 * scale},
        "ran": {"decode graph/steps": 10 + 90 * scale, "eager/steps": 1 + 4 * scale},
        "rank_gauges": {rank: gauges(nvlink_tx_bytes=40e9 + 96e9 * scale, nvlink_rx_bytes=41e9 + 97e9 * scale) for rank in (0, 1)},
        "queued": 20,
        "queue_limit": 2048,
        "ttft": [0.08] * 10 + [0.2] * (10 * scale),
        "tpot": [0.02] * 20 + [0.022] * (20 * scale),
    }
    fields.update(changes)
    return metrics_text("llama-3-70b", **fields)


def view(first: str, last: str, seconds: float = 2.0, url: str = "http://prefill-0:8000"):
    return monitor.view(url, parse(first, 100.0), parse(last, 100.0 + seconds))


def frame(*views, seconds: float = 2.0):
    return monitor.Frame(tuple(views), seconds)


def text_of(shown, width: int = 150) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(monitor.render(shown))
    return out.getvalue()


def test_rates_and_shares_between_two_readings():
    server = view(loaded(False), loaded(True))
    assert server.generated_per_s == pytest.approx(5900)
    assert server.prompted_per_s == pytest.approx(1500)
    assert server.prefix_hits == pytest.approx(0.5)
    assert server.kv_used == pytest.approx(0.61)
    assert server.strategies == {"ONESHOT": 0.9, "NCCL": 0.1}
    assert server.steps == {"decode graph": 90.0, "eager": 4.0}
    assert 0.1 < server.ttft["p50"] <= 0.25
    assert 0.02 < server.tpot["p99"] <= 0.03
    assert [rank.nvlink for rank in server.ranks] == [{"tx": 48e9, "rx": 48.5e9}] * 2
    assert server.warnings == ()


def test_what_is_shown_equals_metrics():
    """Each number of a frame, from the exposition by another way."""
    text = loaded(True)
    samples = [
        (sample.name.partition(":")[2] or sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]

    def value(name, **labels):
        return sum(amount for stem, sample_labels, amount in samples if stem == name and labels.items() <= sample_labels.items())

    server = view(loaded(False), text)
    assert server.model == "llama-3-70b"
    assert (server.running, server.waiting, server.queued) == (
        value("num_requests_running"),
        value("num_requests_waiting"),
        value("num_requests_queued"),
    )
    assert server.queue_limit == value("queue_limit", kind="requests") == 2048
    assert server.kv_used == value("kv_cache_usage_perc")
    for rank in server.ranks:
        for kind, count in rank.memory.items():
            assert count == value("rank_memory_bytes", rank=rank.rank, kind=kind)
        assert rank.utilization == value("rank_gpu_utilization_perc", rank=rank.rank) == 93
        assert rank.power == value("rank_power_watts", rank=rank.rank)
        assert rank.clock == value("rank_sm_clock_mhz", rank=rank.rank)
        assert rank.temperature == value("rank_temperature_celsius", rank=rank.rank)
        assert rank.slowed_by == ("power_cap",)
    shown = text_of(frame(server))
    for word in (
        "5,900",
        "1,500",
        "256",
        "12",
        "20/2048",
        "61%",
        "50%",
        "93 %",
        "655/700 W",
        "1755 MHz",
        "61 C",
        "48.0/48.5 GB/s",
        "36.0 GiB",
    ):
        assert word in shown, word


def words(first, last):
    return [(warned.what, warned.remedy) for warned in view(first, last).warnings]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"preemptions": 9}, "4.5 sequences a second are preempted"),
        ({"blocks_referenced": 97}, "the KV cache is 97% full, and 12 requests wait"),
        ({"refused": 6}, "3.0 requests a second are refused"),
        ({"queued": 2000}, "2000 of 2048 places of the queue are taken"),
        ({"rank_bytes": {0: {"kv": 90 * GIB}, 1: {"kv": 40 * GIB}}}, "memory is uneven: rank 0 has 90.0 GiB, rank 1 40.0 GiB"),
        (
            {"rank_gauges": {0: gauges(gpu_utilization_perc=12.0), 1: gauges()}},
            "rank 0 is used below 50 percent, and 12 requests wait",
        ),
        ({"rank_gauges": {0: gauges(), 1: gauges()}}, "NVLink is idle while all-reduces run"),
        ({"rank_gauges": {0: gauges(**{"clock_reason/thermal": 1.0})}}, "rank 0 is slowed down by heat (61 degrees)"),
        ({"rank_gauges": {0: gauges(**{"clock_reason/power_brake": 1.0})}}, "rank 0 is slowed down by its power supply"),
        ({"rank_gauges": {0: gauges(sm_clock_mhz=900.0), 1: gauges()}}, "rank 0 runs at 900 MHz, another at 1755"),
        ({"ran": {"decode graph/steps": 20, "eager/steps": 81}}, "89% of the steps ran without a graph"),
    ],
)
def test_each_warning(changes, what):
    warned = words(loaded(False), loaded(True, **changes))
    assert what in [entry for entry, _ in warned]
    assert all(remedy for _, remedy in warned)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rank_gauges": {0: gauges(nvlink_tx_bytes=1e12, **{"clock_reason/power_cap": 1.0}), 1: gauges(nvlink_tx_bytes=1e12)}},
        {"rank_gauges": {}},
        {"waiting": 0, "blocks_referenced": 99},
        {"rank_bytes": {0: {"kv": 90 * GIB}}},
    ],
    ids=["loaded", "at the power cap", "no GPU", "full and nobody waits", "one rank"],
)
def test_no_warning(changes):
    assert words(loaded(False), loaded(True, **changes)) == []


def test_an_idle_server_warns_of_nothing():
    idle = loaded(False, rank_gauges={0: gauges(gpu_utilization_perc=0.0, sm_clock_mhz=345.0), 1: gauges(gpu_utilization_perc=0.0)})
    assert words(idle, idle) == []


def test_a_restarted_server_counts_from_zero():
    assert view(loaded(True), loaded(False)).generated_per_s == pytest.approx(500)


def test_experts():
    def routed(busy, rest):
        lines = [
            f'phalanx:expert_tokens_total{{model_name="m",engine="0",expert="{expert}"}} {busy if expert == 0 else rest}'
            for expert in range(8)
        ]
        return loaded(True) + "# TYPE phalanx:expert_tokens counter\n" + "\n".join(lines) + "\n"

    assert view(routed(0, 0), routed(100, 100)).experts == pytest.approx(1.0)
    uneven = view(routed(0, 0), routed(800, 100))
    assert uneven.experts == pytest.approx(8 * 800 / 1500)
    assert any("the busiest expert gets 4.3 times the mean" in warned.what for warned in uneven.warnings)


def test_a_server_that_asks_for_a_key():
    with served(metrics=401) as url, monitor.ServerWatch([url]) as watch:
        watch.read()
    assert watch.frame().servers[0].failure == "/metrics gives 401 Unauthorized; set PHALANX_API_KEY to a key of the server"


def test_several_servers_one_of_which_is_gone():
    with served(loaded(False), loaded(True)) as url, monitor.ServerWatch([url, "http://127.0.0.1:9"]) as watch:
        watch.read()
        time.sleep(0.05)
        watch.read()
    shown = watch.frame()
    assert not watch.reached
    assert shown.servers[0].running == 256
    assert shown.servers[0].generated_per_s == pytest.approx(11_800 / shown.seconds)
    assert "ConnectError" in shown.servers[1].failure
    assert "does not answer: ConnectError" in text_of(shown)


def of_replicas(text: str, replicas: int) -> str:
    """The exposition of a server with several engines: each series once for each engine."""
    lines = []
    for line in text.splitlines():
        own = 'engine="0"' in line
        lines += [line.replace('engine="0"', f'engine="{engine}"') for engine in range(replicas)] if own else [line]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("replicas", [1, 2, 3, 11])
def test_ranks_of_replicas(replicas):
    shown = view(of_replicas(loaded(False), replicas), of_replicas(loaded(True), replicas))
    own = [f"{engine}.{rank}" for engine in range(1, replicas) for rank in (0, 1)]
    assert [rank.rank for rank in shown.ranks] == ["0", "1", *own]
    assert {rank.used for rank in shown.ranks} == {shown.ranks[0].used}
    assert shown.kv_used == pytest.approx(view(loaded(False), loaded(True)).kv_used)
    assert all(rank in text_of(frame(shown)) for rank in own)


@pytest.mark.parametrize("text", [loaded(False).replace('rank="1"', 'rank="one"'), loaded(False).replace('rank="1"', 'rank=""')])
def test_ranks_with_other_names_are_shown(text):
    assert len(view(text, text).ranks) == 2


def test_a_server_whose_metrics_are_not_understood_stands_beside_healthy_ones():
    well, odd = loaded(False), re.sub(r"(rank_memory_bytes\{.*\}) .*", r"\1 NaN", loaded(False))
    with (
        served(well) as one,
        served(odd) as other,
        monitor.ServerWatch([one, other]) as watch,
    ):
        watch.read()
        shown = watch.frame()
    assert [bool(server.failure) for server in shown.servers] == [False, True]
    assert "its metrics are not understood" in text_of(shown)


def test_command(capsys):
    with served(loaded(False), loaded(True)) as url:
        assert cli.main(["monitor", url, "--once", "--interval", "0.05", "--json", "-"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["servers"][0]["running"] == 256
        assert cli.main(["monitor", url, url, "--once", "--interval", "0.05"]) == 0
        assert "over 2 servers" in capsys.readouterr().out
    assert cli.main(["monitor", "http://127.0.0.1:9", "--once", "--interval", "0.01"]) == 1
    assert cli.main(["monitor", "--interval", "0"]) == 2


def test_live_ends_with_ctrl_c(monkeypatch):
    with served(loaded(False), loaded(True)) as url:
        naps = []

        def nap(seconds):
            naps.append(seconds)
            if len(naps) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(monitor_live.time, "sleep", nap)
        out = io.StringIO()
        with monitor.ServerWatch([url]) as watch:
            monitor_live.live(watch, 0.5, Console(file=out, width=150))
    assert naps == pytest.approx([0.5] * 3, abs=0.1)
    assert "llama-3-70b" in out.getvalue()


def test_first_tokens_are_of_the_last_minute(monkeypatch):
    """Readings of 30 s each: what came over a minute ago no longer counts, and rates are of the last two."""
    texts = [metrics_text("m", ttft=[5.0] * 10, generation_tokens=0)]
    texts += [metrics_text("m", ttft=[5.0] * 10 + [0.001] * slow, generation_tokens=60 * slow) for slow in (1, 2, 3, 4)]
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr(monitor.time, "monotonic", lambda: float(next(clock)))
    with served(*texts) as url, monitor.ServerWatch([url]) as watch:
        watch.read()
        assert watch.frame().servers[0].ttft == {}
        for number in range(1, 5):
            watch.read()
            (server,) = watch.frame().servers
            assert server.ttft["p99"] <= 0.001, "those of five seconds were there before the monitor"
            assert server.history == (2.0,) * number
            assert server.generated_per_s == 2.0
    assert "tokens/s \u2588\u2588\u2588\u2588 at most 2" in text_of(frame(server))


def test_what_is_full_is_red():
    def colours(**changes):
        console = Console(file=io.StringIO(), width=150, force_terminal=True, color_system="standard")
        console.print(monitor.render(frame(view(loaded(False), loaded(True, **changes)))))
        return console.file.getvalue()

    assert "\x1b[31m96%" in colours(blocks_referenced=96)
    assert "\x1b[33m80%" in colours(blocks_referenced=80)
    assert "\x1b[31m" not in colours() + colours(blocks_referenced=70)
    assert "\x1b[31m2,000/2048" in colours(queued=2000)
    assert "\x1b[31m61 C" in colours(rank_gauges={0: gauges(**{"clock_reason/thermal": 1.0})})
    assert "\x1b[33m12 %" in colours(rank_gauges={0: gauges(gpu_utilization_perc=12.0)})


def test_keys_sort_and_help():
    quiet, busy = view(loaded(False), loaded(False), url="http://a"), view(loaded(False), loaded(True), url="http://b")

    def shown(state):
        console = Console(file=io.StringIO(), width=150)
        console.print(state.render(frame(quiet, busy)))
        text = console.file.getvalue()
        return text.splitlines()[1].split()[0], text

    state, firsts = monitor_live.Shown(), []
    for _ in monitor_live.ORDERS:
        firsts.append((state.order, shown(state)[0]))
        state = state.after("s")
    assert state == monitor_live.Shown()
    assert dict(firsts) == {
        "the command line": "a",
        "tokens/s": "b",
        "requests that wait": "a",
        "queue": "a",
        "KV": "a",
        "TTFT": "b",
    }
    assert monitor_live.KEYS in shown(state.after("h"))[1]
    assert state.after("h").after("h") == state.after("x") == state


def test_keys_at_a_terminal():
    """A real terminal: s sorts, h shows the keys, q ends, and the terminal is as before."""
    with served(loaded(False), loaded(True)) as url:
        leader, follower = pty.openpty()
        before = termios.tcgetattr(follower)
        command = [sys.executable, "-m", "phalanx", "monitor", url, "--interval", "60"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
        with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
            text = ""
            for key, expected in (("", "llama-3-70b"), ("s", "sorted by tokens/s"), ("h", "q ends"), ("q", None)):
                os.write(leader, key.encode())
                while expected is not None and expected not in text:
                    assert select.select([leader], [], [], 60)[0], (expected, text)
                    text += os.read(leader, 65536).decode(errors="replace")
            assert process.wait(30) == 0
        assert termios.tcgetattr(follower) == before
        os.close(leader)
        os.close(follower)


def picture(shown, title: str) -> str:
    console = Console(
        record=True, width=132, file=io.StringIO(), force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    console.print(monitor.render(shown))
    return re.sub(r"terminal-\d+", "terminal", console.export_svg(title=title, unique_id="terminal"))


@pytest.mark.parametrize("name", ["monitor", "monitor_warnings"])
def test_pictures_of_the_docs(name):
    """docs/pictures/*.svg are made here: HEALTH_TEST_WRITE_PICTURES=1 writes them, else they must be what the code draws."""
    healthy = replace(view(loaded(False), loaded(True)), history=(0.0, 900.0, 4100.0, 5700.0, 6100.0, 5200.0, 5800.0, 5900.0))
    changes = {"preemptions": 9, "rank_gauges": {0: gauges(**{"clock_reason/thermal": 1.0, "sm_clock_mhz": 990.0}), 1: gauges()}}
    troubled = view(loaded(False), loaded(True, **changes), url="http://prefill-1:8000")
    shown = frame(healthy) if name == "monitor" else frame(healthy, troubled)
    drawn = picture(shown, f"phalanx monitor {' '.join(server.url for server in shown.servers)}")
    file = PICTURES / f"{name}.svg"
    if "HEALTH_TEST_WRITE_PICTURES" in os.environ:
        file.parent.mkdir(exist_ok=True)
        file.write_text(drawn, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == drawn


def test_cost_of_a_scrape_to_the_server():
    """One reading every 2 s must take under 1 percent of a core: 20 ms of the server's time."""
    from phalanx.engine.messages import Stats
    from phalanx.metrics import Metrics

    metrics = Metrics(prefix="phalanx", model_name="m", version="1")
    stats = Stats(
        rank_bytes={rank: {"kv": 1, "weights": 2} for rank in range(8)},
        rank_gauges={rank: gauges() for rank in range(8)},
        ran={"eager/steps": 1},
    )
    metrics.engines = [stats]
    begin = time.process_time()
    for _ in range(20):
        metrics.exposition()
    assert (time.process_time() - begin) / 20 < 0.02
