# SPDX-License-Identifier: Apache-2.0
"""The doctor as a whole: no false alarm on healthy machines, exit status, report, `--fix`; and each check has its tests."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from phalanx import cli
from phalanx.health.check import Check, Level, Need, error, note, ok, warning
from phalanx.health.checks import gpu, limits, nvlink
from phalanx.health.doctor import about, examine, show
from phalanx.health.pairs import Measured, Measurements
from phalanx.health.registry import every, named
from phalanx.health.servers import visit
from tests.support.health_host import executable, outward, rdma
from tests.support.health_nvml import machine
from tests.support.health_subject import metrics_text, no_gpu, served, subject

NAMES = [check.name for check in every()]
MACHINES = {
    "no GPU": no_gpu,
    "H200": lambda: machine(1),
    "2 x H200": lambda: machine(2),
    "H100": lambda: machine(1, name="NVIDIA H100 80GB HBM3", memory=85_520_809_984),
    "2 x H100 NVL, 12 of 18 links": lambda: machine(2, name="NVIDIA H100 NVL", links=12, switch=False, watts=400),
    "guest that refuses half": lambda: (
        machine(2).refuse("nvmlDeviceGetPersistenceMode").refuse("nvmlDeviceGetFieldValues").refuse("nvmlDeviceGetEnforcedPowerLimit")
        .refuse("nvmlDeviceGetGpuFabricInfoV").refuse("nvmlDeviceGetComputeRunningProcesses").refuse("nvmlDeviceGetNvLinkErrorCounter")
    ),
    "under load at its power cap": lambda: machine(2).change("nvmlDeviceGetCurrentClocksEventReasons", 0x4),
}  # fmt: skip


@pytest.fixture(autouse=True)
def rest_of_the_machine(monkeypatch):
    """What belongs to a machine beside NVML's answers: its cores, its torch, its driver's library."""
    monkeypatch.setattr(gpu, "torch_cuda", lambda: "12.8")
    monkeypatch.setattr(nvlink, "multicast_offered", lambda: True)
    monkeypatch.setattr(limits, "cores", lambda *_: 32)


def healthy(nvml, **options):
    cards = subject(nvml=nvml).devices.gpus
    examined = subject(
        "llama-3-8b" if cards else "demo", nvml=nvml, port=0, **{**options, **({} if cards else {"max_seq_len": 512})}
    )
    count = len(examined.devices.gpus)
    pairs = tuple(Measured(a, b, 393e9 if count else 1e9, 9e-6, True) for a in range(count) for b in range(count) if a != b)
    examined.measured = Measurements(pairs)
    return examined


@pytest.mark.parametrize("name", MACHINES)
def test_no_false_alarm(name):
    nvml = MACHINES[name]()
    count = 0 if name == "no GPU" else nvml.nvmlDeviceGetCount()
    report = examine(healthy(nvml, tensor_parallel_size=max(count, 1), max_seq_len=8192))
    assert report.alarms() == []
    assert report.status == 0
    assert not [finding for result in report.results for finding in result.findings if "could not run" in finding.summary]


@pytest.mark.parametrize("name", NAMES)
def test_each_check_is_silent_where_all_is_well(name, tmp_path):
    """Not skipped: a healthy machine of the kind that the check is for."""
    check = named(name)
    options = {"tensor_parallel_size": 2, "max_seq_len": 8192}
    if Need.HOSTS in check.needs:
        own = subject().host.interfaces()[outward()][0]
        options |= {**rdma(tmp_path, mlx5_0="ACTIVE"), "master_addr": own, "tensor_parallel_size": 2}
        (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    if name == "master_ports":
        with served() as url:
            host, _, port = url.removeprefix("http://").partition(":")
            examined = healthy(machine(2), **{**options, "node_rank": 1, "master_addr": host, "master_port": int(port)})
            assert examine(examined, [check]).results[0].level is Level.OK
        return
    if name == "xid":
        options["environment"] = executable(tmp_path / "bin", "dmesg", "echo quiet")
    if name == "ray_cluster":
        ray = executable(tmp_path / "bin", "ray", "echo ' 1 node_a'; echo ' 0.0/8.0 GPU'")
        options["environment"] = {"RAY_ADDRESS": "here", **ray}
    examined = healthy(machine(2), **options)
    if name == "locked_memory":
        pytest.skip("not run here: test_checks_host.test_locked_memory runs it without a limit")
    if Need.QUALITY in check.needs:
        pytest.skip("not run here: test_checks_answers starts the engine")
    if Need.SERVER in check.needs or name == "clock":
        with served(metrics_text(running=1)) as url:
            examined.servers = (visit(url, interval=0.01),)
    if Need.PEERS in check.needs:
        examined.peers = ({"host": about(examined)},)
    result = examine(examined, [check]).results[0]
    assert result.level in (Level.OK, Level.NOTE), [finding.summary for finding in result.findings]


def sources_of_checks_tests():
    """The source of every test of a check, with its decorators, and of every row of a table."""
    for file in sorted(Path(__file__).parent.glob("test_checks*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield "\n".join(text.splitlines()[first - 1 : node.end_lineno])
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
                yield from (ast.get_source_segment(text, row) for row in node.value.elts)


@pytest.mark.parametrize("name", NAMES)
def test_each_check_is_provoked_by_a_test(name):
    """Some test names the check, and expects more than ok of it."""
    expected = re.compile(r'"(error|warning|note)"|summary|\.startswith\(| in levels\(|in only\(')
    assert any(f'"{name}"' in test and expected.search(test) for test in sources_of_checks_tests()), f"no test provokes {name}"


def test_each_check_is_complete():
    assert len(NAMES) >= 30
    for check in every():
        assert check.what
        assert check.why
        assert check.cure
        assert check.threads
        assert all(thread.startswith("https://") for thread in check.threads)
        for pattern in check.symptoms:
            re.compile(pattern)


def fake(name, *results, needs=()):
    return Check(name, "what", "why", "cure", ("https://example.com",), lambda _: list(results), needs)


def test_status_and_report():
    subject_here = subject()
    assert examine(subject_here, [fake("a", ok("fine")), fake("b", note("odd"))]).status == 0
    report = examine(
        subject_here, [fake("a", ok("fine")), fake("b", warning("slow", "do", "run me"), error("broken", "mend", "run me"))]
    )
    assert report.status == 1
    document = report.document()
    assert [(entry["name"], entry["level"]) for entry in document["checks"]] == [("a", "ok"), ("b", "error")]
    assert document["healthy"] is False
    assert json.loads(json.dumps(document, default=str))["checks"][1]["findings"][1]["cure"] == "mend"
    assert report.commands() == ["run me"]
    assert [finding.summary for finding in report.alarms()] == ["broken", "slow"]


def test_a_check_that_fails_has_its_error():
    """One that a file refuses is skipped; of one that fails otherwise nobody knows what a start would meet there."""

    def refused(_):
        raise PermissionError("refused")

    broken, unread = (Check("b", "w", "y", "c", ("https://example.com",), of) for of in (lambda _: 1 / 0, refused))
    others = [fake("a", ok("fine")), fake("n", error("x", "y"), needs=(Need.GPU,))]
    report = examine(subject(), [broken, *others])
    assert [result.level for result in report.results] == [Level.WARNING, Level.OK, Level.SKIPPED]
    assert report.results[0].findings[0].summary == "the check could not run: ZeroDivisionError: division by zero"
    assert report.results[2].findings[0].summary == "no GPU is visible"
    assert report.alarms()
    report = examine(subject(), [unread, *others])
    assert (report.results[0].level, report.status, report.alarms()) == (Level.SKIPPED, 0, [])


def test_page():
    report = examine(subject(), [fake("a", ok("fine")), fake("b", error("it is broken", "mend it", "mend --now"))])
    page = io.StringIO()
    show(report, Console(file=page, width=120))
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    assert lines[:4] == ["error    b: it is broken", "         why: why", "         cure: mend it", "         $ mend --now"]
    assert lines[-1].startswith("not well: 2 checks in")
    assert "fine" not in page.getvalue()


def run(capsys, *line):
    status = cli.main(["doctor", *line])
    return status, capsys.readouterr().out


def test_command(capsys):
    status, out = run(capsys, "demo", "--check", "memory_budget", "--kv_cache_bytes", "100")
    assert status == 1
    assert "is less than one KV block" in out
    status, out = run(capsys, "demo", "--check", "memory_budget", "--kv_cache_bytes", "100", "--fix")
    assert status == 1
    assert re.fullmatch(r"phalanx serve demo --kv_cache_bytes \d+\n", out)
    status, out = run(capsys, "demo", "--check", "memory_budget", "--kv_cache_bytes", out.split()[-1], "--json", "-")
    assert status == 0
    assert json.loads(out)["checks"][0]["level"] == "ok"
    status, out = run(capsys, "--list")
    assert status == 0
    assert all(name in out for name in NAMES)
    assert cli.main(["doctor", "--check", "nothing"]) == 2
    assert cli.main(["doctor", "one", "two"]) == 2
    assert cli.main(["doctor", "--peer", "/no/such/file"]) == 2


@pytest.mark.parametrize("verb", [["doctor", "--check", "clocks"], ["topo", "--no_measure"], ["monitor"], ["experts"]])
@pytest.mark.parametrize("text", ["precious", '{"precious": 1}', "[[1, 2]]", ""])
def test_a_report_replaces_no_other_file(verb, text, tmp_path, capsys):
    notes = tmp_path / "notes.txt"
    notes.write_text(text)
    assert cli.main([*verb, "--json", str(notes)]) == 2
    assert "a file is there that is no earlier report, and would be lost" in capsys.readouterr().err
    assert notes.read_text() == text


def test_a_report_replaces_an_earlier_one(tmp_path):
    report = tmp_path / "report.json"
    for _ in range(2):
        cli.main(["doctor", "--check", "clocks", "--json", str(report)])
        assert json.loads(report.read_text())["host"]


def test_command_on_a_server(capsys):
    with served(status=503, phase="draining") as url:
        status, out = run(capsys, url, "--check", "server_ready")
    assert status == 1
    assert "takes no requests, it is draining" in out


def test_fast_without_gpus_and_without_torch():
    code = (
        "import sys, time; begin = time.monotonic(); from phalanx import cli; status = cli.main(['doctor', 'demo'])\n"
        "assert 'torch' not in sys.modules; print(time.monotonic() - begin); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split()[-1]) < 10
