# SPDX-License-Identifier: Apache-2.0
"""Checks of limits, file systems, processes and network, provoked for real: by limits, mounts, ports and processes of this host."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from phalanx.config.locate import DEMO
from phalanx.health.host import ResourceLimit, is_orphan
from tests.support.health_host import executable, outward
from tests.support.health_nvml import machine
from tests.support.health_subject import doctor, finding_of, findings, only, served, subject


def limited(name: str, soft: int, hard: int | None = None):
    """To be called in the child: a resource limit."""
    return lambda: resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, soft if hard is None else hard))


# ---- memory and files ------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_small_shm():
    arguments = ["demo", "--tp_size", "4", "--device", "cpu", "--check", "shm_size"]
    status, report = doctor(*arguments, before="mount -t tmpfs -o size=16m tmpfs /dev/shm")
    finding = finding_of(report, "shm_size")
    assert (status, finding["level"]) == (1, "error")
    assert finding["summary"].startswith("/dev/shm has 16.0 MiB free of 16.0 MiB")
    assert any("--shm-size" in command or "remount" in command for command in finding["commands"])
    status, report = doctor(*arguments, before="mount -t tmpfs -o size=256m tmpfs /dev/shm")
    assert (status, finding_of(report, "shm_size")["level"]) == (0, "ok")


@pytest.mark.root
def test_shm_full_of_others_files():
    fill = "mount -t tmpfs -o size=300m tmpfs /dev/shm; head -c 290M /dev/zero > /dev/shm/nccl-left"
    status, report = doctor("demo", "--tp_size", "4", "--check", "shm_size", "--check", "shm_leftovers", before=fill)
    assert status == 1
    left = finding_of(report, "shm_leftovers")
    assert left["level"] == "warning"
    assert left["commands"] == ["rm /dev/shm/nccl-left"]
    assert "remove what other programs left" in finding_of(report, "shm_size")["cure"]
    used = fill.replace("nccl-left", "nccl-used") + "; sleep 40 < /dev/shm/nccl-used > /dev/null 2>&1 & trap 'kill %1' EXIT; true"
    _, report = doctor("--check", "shm_leftovers", before=used.replace("trap 'kill %1' EXIT; true", "true"))
    assert finding_of(report, "shm_leftovers")["level"] == "ok"


def test_few_open_files():
    arguments = ["demo", "--check", "open_files"]
    status, report = doctor(*arguments, limits=limited("nofile", 512))
    finding = finding_of(report, "open_files")
    assert (status, finding["level"]) == (1, "error")
    assert finding["summary"] == "512 open files are allowed, and 2304 streams need 2816"
    assert finding["commands"][0] == "ulimit -Hn 65536"
    status, report = doctor(*arguments, limits=limited("nofile", 1024, 20000))
    assert (status, finding_of(report, "open_files")["level"]) == (0, "note")
    status, report = doctor(*arguments, "--max_num_queued_reqs", "0", "--max_batch_size", "64", limits=limited("nofile", 1024))
    assert (status, finding_of(report, "open_files")["level"]) == (0, "ok")


def test_locked_memory(tmp_path, monkeypatch):
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    code = (
        "import json, sys, pathlib\nfrom phalanx.health.host import Host\nfrom phalanx.health.subject import Subject\nfrom"
        " phalanx.health.registry import named\nfinding = named('locked_memory').examine(Subject(Host(pathlib.Path(sys.argv[1]),"
        " {})))\nprint(finding.level, finding.summary)"
    )

    def run(root: Path) -> str:
        command = [sys.executable, "-c", code, str(root)]
        return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limited("memlock", 65536)).stdout

    assert run(tmp_path).startswith("error 64.0 KiB of memory may be locked, and RDMA over mlx5_0")
    assert run(tmp_path / "none").startswith("skipped")
    unlimited = subject(root=tmp_path)
    monkeypatch.setattr(type(unlimited.host), "limit", lambda host, name: ResourceLimit(None, None))
    assert only("locked_memory", unlimited).level == "ok"


def test_few_tasks():
    _, report = doctor("demo", "--tp_size", "2", "--check", "task_limit", limits=limited("nproc", 200))
    finding = finding_of(report, "task_limit")
    assert finding["level"] == "error"
    assert "allows 200 processes and threads, and 2 ranks" in finding["summary"]
    assert only("task_limit", subject("demo")).level == "ok"


def cgroup(controller: str, **files: str):
    """A control group of this host, in whichever version it has; its path, or a skip where none can be made."""
    for base in (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup")):
        folder = base / f"phalanx-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                for name, value in files.items():
                    (folder / name.replace("__", ".")).write_text(value)
            except OSError:
                folder.rmdir()
                continue
            return folder
    pytest.skip(f"not run: no control group with {controller} can be made here")


@pytest.mark.root
@pytest.mark.parametrize(
    ("controller", "files", "check", "words"),
    [
        ("memory", {"memory__limit_in_bytes": str(512 << 20)}, "host_memory", "the control group allows 512.0 MiB"),
        ("cpu", {"cpu__cfs_period_us": "100000", "cpu__cfs_quota_us": "50000"}, "cpu_cores", "the control group allows 0.5 cores"),
        ("pids", {"pids__max": "150"}, "task_limit", "the control group (pids.max) allows 150"),
    ],
)
def test_cgroup_limits(controller, files, check, words):
    """For real: the doctor runs inside a control group with a limit."""
    folder = cgroup(controller, **files)
    try:
        status, report = doctor(
            "demo",
            "--device",
            "cpu",
            "--check",
            check,
            limits=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None,
        )
        finding = finding_of(report, check)
        assert status == 1
        assert finding["level"] in ("warning", "error")
        assert finding["summary"].startswith(words)
        status, report = doctor("demo", "--device", "cpu", "--check", check)
        assert finding_of(report, check)["level"] == "ok", report
    finally:
        folder.rmdir()


def test_cgroup_version_2(tmp_path):
    group = tmp_path / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "memory.max").write_text("1073741824\n")
    (group / "pids.max").write_text("max\n")
    host = subject(root=tmp_path).host
    assert (host.cgroup_cores(), host.cgroup_memory(), host.cgroup_tasks()) == (1.5, 1 << 30, None)
    assert only("host_memory", subject("demo", root=tmp_path, device="cpu", tensor_parallel_size=2)).level == "error"


@pytest.mark.root
def test_full_disk(tmp_path):
    mount = f"mount -t tmpfs -o size=64m tmpfs {tmp_path}"
    status, report = doctor("--check", "disk_space", environment={"HF_HOME": str(tmp_path)}, before=mount)
    finding = finding_of(report, "disk_space")
    assert (status, finding["level"]) == (1, "error")
    assert f"{tmp_path}, has 64.0 MiB free, and 512.0 MiB are needed" in finding["summary"]
    assert "export HF_HOME=/path/on/a/larger/disk" in finding["commands"]
    status, report = doctor("--check", "disk_space", environment={"HF_HOME": str(tmp_path)}, before=mount.replace("64m", "2g"))
    assert (status, finding_of(report, "disk_space")["level"]) == (0, "ok")


@pytest.mark.root
def test_read_only_cache(tmp_path):
    arguments = ["some/model", "--check", "cache_writable"]
    mount = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    status, report = doctor(*arguments, environment={"HF_HOME": str(tmp_path)}, before=mount)
    finding = finding_of(report, "cache_writable")
    assert (status, finding["level"]) == (1, "error")
    assert finding["summary"].endswith("cannot be written: Read-only file system")
    status, report = doctor(*arguments, environment={"HF_HOME": str(tmp_path)})
    assert (status, finding_of(report, "cache_writable")["level"]) == (0, "ok")
    status, report = doctor("demo", *arguments[1:], environment={"HF_HOME": str(tmp_path)}, before=mount)
    assert (status, finding_of(report, "cache_writable")["level"]) == (0, "note"), "a model that is here needs no download"


# ---- the checkpoint and libraries ------------------------------------------------------------------------------------


def test_model_files(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    assert only("model_files", subject(str(folder))).level == "ok"
    weights = next(folder.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1000])
    finding = only("model_files", subject(str(folder)))
    assert finding.level == "error"
    assert f"its header promises {len(content)}" in finding.summary
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "pointer of Git LFS" in only("model_files", subject(str(folder))).summary
    weights.unlink()
    assert "has no .safetensors file" in only("model_files", subject(str(folder))).summary
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert only("model_files", subject(str(folder))).summary.startswith(
        "2 of 2 weight files are missing: 1.safetensors, 2.safetensors"
    )
    weights.write_bytes(len(b"[1]").to_bytes(8, "little") + b"[1]")
    (folder / "model.safetensors.index.json").unlink()
    assert "its header describes no tensors" in only("model_files", subject(str(folder))).summary
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["StrangeForCausalLM"]}))
    finding = only("model_files", subject(str(folder)))
    assert finding.level == "error"
    assert "StrangeForCausalLM" in finding.summary
    assert only("model_files", subject("some/model", environment={"HF_HUB_OFFLINE": "1"})).level == "error"
    assert only("model_files", subject("some/model")).level == "note"


@pytest.mark.parametrize("name", ["../outside.safetensors", "../../etc/passwd", "config.json", "in/a.safetensors"])
def test_an_index_may_name_plain_weight_files_only(tmp_path, name):
    """Neither the content nor the size of another file is told."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    weights = next(folder.glob("*.safetensors"))
    (tmp_path / "outside.safetensors").write_bytes(weights.read_bytes())
    (folder / "in").mkdir()
    (folder / "in" / "a.safetensors").write_bytes(weights.read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": weights.name, "b": name}}))
    finding = only("model_files", subject(str(folder)))
    assert finding.level == "error"
    assert finding.summary == f"model.safetensors.index.json names {name!r}, which is no *.safetensors file of its folder"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "\xff"])
def test_an_index_that_is_damaged(tmp_path, text):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    finding = only("model_files", subject(str(folder)))
    assert finding.level == "error"
    assert finding.summary.startswith("model.safetensors.index.json cannot be read: ")


def test_library_versions(monkeypatch):
    from phalanx.health.checks import library_versions

    assert only("library_versions", subject()).level == "ok"
    monkeypatch.setattr(library_versions, "requires", lambda name: ["httpx>=99.1", "no-such-package>=1", "ray>=2; extra == 'ray'"])
    summaries = [finding.summary for finding in findings("library_versions", subject())]
    assert len(summaries) == 2
    assert summaries[0].endswith("is installed, and httpx>=99.1 is needed")
    assert summaries[1] == "no-such-package is not installed"


def test_newer_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "99.0.0"}))
    finding = only("library_versions", subject(str(folder)))
    assert finding.level == "note"
    assert finding.commands == ("pip install 'transformers>=99.0.0'",)


# ---- ports and processes ---------------------------------------------------------------------------------------------

ORPHAN = """
import os, socket, sys, time
import setproctitle
if os.fork():
    os._exit(0)
setproctitle.setproctitle("phalanx rank 7")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def orphan():
    """A rank whose engine has ended, and the port on which it listens."""
    process = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    port, pid = map(int, process.stdout.readline().split())
    process.wait()
    yield port, pid
    os.kill(pid, 9)
    process.stdout.close()


def test_orphan_on_a_port(orphan):
    port, pid = orphan
    deadline = time.monotonic() + 5
    while psutil.Process(pid).ppid() == os.getpid() and time.monotonic() < deadline:
        time.sleep(0.05)
    finding = only("port_free", subject("demo", host="127.0.0.1", port=port))
    assert finding.level == "error"
    assert f"phalanx rank 7 (pid {pid}), an orphan" in finding.summary
    assert finding.commands == (f"kill -9 {pid}",)
    status, report = doctor("--check", "orphans")
    finding = finding_of(report, "orphans")
    assert (status, finding["level"]) == (1, "error")
    assert pid in finding["facts"]["pids"]


def test_rank_with_its_parent_is_no_orphan():
    code = "import setproctitle, time; setproctitle.setproctitle('phalanx rank 3'); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        ours = [each.pid for each in subject().host.processes()]
        assert process.pid in ours
        assert process.pid not in (only("orphans", subject()).facts.get("pids") or [])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("title", "pid", "parent", "orphan"),
    [
        ("phalanx rank 0", 70, "ray::NodeAgent.run", False),
        ("phalanx rank 0", 70, "phalanx engine", False),
        ("phalanx rank 0", 70, "/usr/lib/systemd/systemd --user", True),
        ("phalanx rank 0", 1, "/sbin/init", True),
        ("phalanx engine", 1, "phalanx server", False),
        ("phalanx rank 2", 1, "/opt/bin/python /opt/bin/phalanx serve model --node_rank 1", False),
        ("phalanx server", 1, "/sbin/init", False),
    ],
)
def test_who_may_be_the_parent_of_a_rank(title, pid, parent, orphan):
    """Ray's actors and the first process of a container, too: the cure of an orphan is to kill it."""
    above = SimpleNamespace(pid=pid, cmdline=lambda: [parent], name=lambda: parent[:15])
    assert is_orphan(SimpleNamespace(cmdline=lambda: [title], name=lambda: title, parent=lambda: above)) == orphan


def test_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        finding = only("port_free", subject("demo", host="127.0.0.1", port=port))
        assert finding.level == "error"
        assert f"(pid {os.getpid()})" in finding.summary
        assert f"phalanx serve ... --port {port + 10}" in finding.commands
    assert only("port_free", subject("demo", host="127.0.0.1", port=port)).level == "ok"


def test_closed_port_of_host_0():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        options = {"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2, "master_addr": "127.0.0.1", "master_port": port}
        assert only("master_ports", subject("demo", **options)).level == "ok"
    finding = only("master_ports", subject("demo", **options))
    assert finding.level == "error"
    assert finding.summary == f"port {port} of 127.0.0.1 does not answer: Connection refused"


@pytest.mark.root
def test_port_behind_a_firewall():
    """In namespaces of its own a route that leads nowhere: no answer at all."""
    failure = only(
        "master_ports", subject("demo", nnodes=2, node_rank=1, tensor_parallel_size=2, master_addr="192.0.2.254", master_port=29400)
    )
    assert failure.level == "error"
    assert "192.0.2.254 does not answer" in failure.summary


# ---- network ---------------------------------------------------------------------------------------------------------

TWO_HOSTS = {"nnodes": 2, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, {}, "GLOO_SOCKET_IFNAME=nosuch0 names nosuch0, and this host has"),
        ({"NCCL_SOCKET_IFNAME": "nosuch"}, {}, "NCCL_SOCKET_IFNAME=nosuch names nosuch, and this host has"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker"}, {}, "GLOO_SOCKET_IFNAME=^lo,docker is no interface"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, TWO_HOSTS, "GLOO_SOCKET_IFNAME=lo names lo, which other hosts do not reach"),
    ],
)
def test_wrong_interface(variables, options, words):
    finding = only("network_interface", subject("demo", environment=variables, **options))
    assert finding.level == "error"
    assert finding.summary.startswith(words)
    assert finding.commands


def test_right_interface():
    variables = {"GLOO_SOCKET_IFNAME": outward(), "NCCL_SOCKET_IFNAME": "^lo,docker"}
    assert only("network_interface", subject("demo", environment=variables, **TWO_HOSTS)).level == "ok"
    assert only("network_interface", subject("demo", environment={"GLOO_SOCKET_IFNAME": "lo"})).level == "ok", (
        "one host needs no more"
    )


def test_interface_that_is_down():
    down = [name for name, stats in psutil.net_if_stats().items() if not stats.isup]
    if not down:
        pytest.skip("not run: every interface of this host is up")
    finding = only("network_interface", subject("demo", environment={"GLOO_SOCKET_IFNAME": down[0]}))
    assert finding.level == "error"
    assert finding.summary.endswith("which is down")
    assert finding.commands[0] == f"ip link set {down[0]} up"


@pytest.mark.root
def test_loopback_host_name(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 prefill-7\n")
    before = f"hostname prefill-7; mount --bind {hosts} /etc/hosts"
    arguments = ["demo", "--nnodes", "2", "--tp_size", "2", "--check", "host_name"]
    status, report = doctor(*arguments, "--master_addr", "prefill-7", before=before)
    finding = finding_of(report, "host_name")
    assert (status, finding["level"]) == (1, "error")
    assert finding["summary"].startswith("the host name prefill-7 resolves to 127.0.1.1, which no other host reaches")
    status, report = doctor(*arguments, "--master_addr", "192.0.2.1", before=before)
    assert (status, finding_of(report, "host_name")["level"]) == (0, "note"), "gloo is bound by its route"
    status, report = doctor(*arguments, before=before, environment={"RAY_ADDRESS": "192.0.2.1:6379"})
    assert (status, finding_of(report, "host_name")["level"]) == (1, "warning")
    hosts.write_text("127.0.0.1 localhost\n192.0.2.7 prefill-7\n")
    status, report = doctor(*arguments, before=before)
    assert (status, finding_of(report, "host_name")["level"]) == (0, "ok")
    hosts.write_text("127.0.0.1 localhost\n")
    status, report = doctor(*arguments, before=before.replace("prefill-7", "no-such-name.invalid", 1))
    assert (status, finding_of(report, "host_name")["level"]) == (1, "warning")


def test_master_address_where_ray_places_the_ranks():
    assert only("master_address", subject("demo", launcher="ray", **TWO_HOSTS)).level == "skipped"


def test_master_address():
    own = next(entry.address for entry in psutil.net_if_addrs()[outward()] if entry.family == socket.AF_INET)
    assert only("master_address", subject("demo", master_addr=own, **TWO_HOSTS)).level == "ok"
    assert "is this host's loopback" in only("master_address", subject("demo", **TWO_HOSTS)).summary
    assert "does not resolve" in only("master_address", subject("demo", master_addr="no-such-name.invalid", **TWO_HOSTS)).summary
    finding = only("master_address", subject("demo", master_addr=own, node_rank=1, **TWO_HOSTS))
    assert finding.level == "error"
    assert finding.summary.endswith("is this host's own address, and this is node 1")
    assert only("master_address", subject("demo", master_addr="192.0.2.222", **TWO_HOSTS)).level == "warning"


def test_clock():
    from phalanx.health.servers import visit

    with served(skew=3600) as ahead, served() as right:
        late, fine = subject(), subject()
        late.servers, fine.servers = (visit(ahead, scrapes=1),), (visit(right, scrapes=1),)
        finding = only("clock", late)
        assert finding.level == "warning"
        assert "is 3600 s ahead" in finding.summary or "is 3599 s ahead" in finding.summary
        assert only("clock", fine).level == "ok"


def test_different_software(tmp_path):
    """Two real reports: one written with another variable, option and (in the file) version."""
    path = tmp_path / "host0.json"
    status, report = doctor("demo", "--check", "orphans", environment={"NCCL_ALGO": "Ring"})
    report["host"]["packages"]["torch"] = "2.11.0"
    path.write_text(json.dumps(report))
    status, report_here = doctor("demo", "--max_batch_size", "8", "--check", "same_software", "--peer", str(path))
    check = next(each for each in report_here["checks"] if each["name"] == "same_software")
    fields = {each["facts"]["field"]: each for each in check["findings"]}
    assert status == 1
    assert fields.keys() == {"environment.NCCL_ALGO", "options.max_batch_size", "packages.torch"}
    assert fields["packages.torch"]["summary"].endswith(f"here, 2.11.0 on {report['host']['name']}")
    status, equal = doctor("demo", "--check", "orphans")
    path.write_text(json.dumps(equal))
    status, report = doctor("demo", "--check", "same_software", "--peer", str(path))
    assert (status, finding_of(report, "same_software")["level"]) == (0, "ok")


# ---- variables and settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "TORCH_NCCL_BLOCKING_WAIT"])
def test_slow_variables(name):
    status, report = doctor("--check", "variables", environment={name: "1"})
    finding = finding_of(report, "variables")
    assert (status, finding["level"], finding["commands"]) == (1, "warning", [f"unset {name}"])


def test_harmless_variables(tmp_path):
    assert only("variables", subject()).level == "ok"
    assert only("variables", subject(environment={"NCCL_ALGO": "Ring"})).level == "note"
    assert only("variables", subject(environment={"NCCL_IB_DISABLE": "1"})).level == "ok", "no second host"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert only("variables", subject("demo", environment={"NCCL_IB_DISABLE": "1"}, root=tmp_path, **TWO_HOSTS)).level == "warning"


def test_proxy():
    finding = only("proxy", subject(environment={"http_proxy": "http://proxy:3128", "no_proxy": "localhost,.corp"}))
    assert finding.level == "note"
    assert finding.commands == ("export no_proxy=localhost,.corp,127.0.0.1",)
    assert only("proxy", subject(environment={"http_proxy": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1"})).level == "ok"
    assert only("proxy", subject()).level == "ok"


def test_namespaces(tmp_path):
    assert only("namespaces", subject(root=tmp_path)).summary == "this is no container"
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/comm").write_text("phalanx\n")
    holders = [{"fields": {"pid": 4242, "usedGpuMemory": 1 << 33}}]
    hidden = machine(1).change("nvmlDeviceGetComputeRunningProcesses", holders, gpu=0)
    finding = only("namespaces", subject(root=tmp_path, nvml=hidden))
    assert finding.level == "note"
    assert "pids 4242 of the host" in finding.summary
    assert only("namespaces", subject(root=tmp_path, nvml=machine(1))).level == "ok"


def test_timeouts():
    assert only("timeouts", subject("demo")).level == "ok"
    finding = only("timeouts", subject("demo", stall_timeout=400))
    assert finding.level == "warning"
    assert finding.summary.startswith("stall_timeout=400 is not below step_timeout=300")
    assert only("timeouts", subject("llama-3-70b")).level == "note", "141 GB from a network disk outlast start_timeout"


def test_ray(tmp_path):
    variables = {"RAY_ADDRESS": "10.0.0.1:6379"}
    answer = "cat <<'END'\nActive:\n 1 node_abc\nResources\n 4.0/8.0 GPU\nDemands:\n (no resource demands)\nEND"
    ray = {**variables, **executable(tmp_path / "bin", "ray", answer)}
    fitting = only("ray_cluster", subject("demo", environment=ray, nvml=machine(4), tensor_parallel_size=4))
    assert fitting.level == "ok"
    finding = only("ray_cluster", subject("demo", environment=ray, nvml=machine(4), tensor_parallel_size=4, nnodes=2))
    assert finding.level == "error"
    assert finding.summary == "the Ray cluster has 1 nodes, and num_workers=2"
    finding = only("ray_cluster", subject("demo", environment=ray, nvml=machine(4), tensor_parallel_size=8))
    assert finding.summary == "the Ray cluster has 4 free GPUs, and 8 ranks need one each"
    waiting = {
        **variables,
        **executable(tmp_path / "bin", "ray", "echo ' 1 node_abc'; echo \" {'GPU': 8.0}: 1+ pending tasks/actors\""),
    }
    assert only("ray_cluster", subject("demo", environment=waiting)).level == "warning"
    dead = {**variables, **executable(tmp_path / "bin", "ray", "exit 1")}
    assert "does not answer" in only("ray_cluster", subject("demo", environment=dead)).summary
    assert only("ray_cluster", subject()).level == "skipped"
