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
from phalanx.health.host import Host, ResourceLimit, is_orphan
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


def job_of_four_gib(root):
    """A job of Slurm has 4 GiB and 150 tasks, and this task of it "max"."""
    for name, text in {
        "proc/self/cgroup": "0::/job_7/task_0\n", "sys/fs/cgroup/job_7/memory.max": f"{4 << 30}\n",
        "sys/fs/cgroup/job_7/task_0/memory.max": "max\n", "sys/fs/cgroup/job_7/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/job_7/pids.max": "150\n", "sys/fs/cgroup/job_7/task_0/pids.max": "max\n",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_limits_of_a_group_above_this_one(tmp_path):
    examined = subject("llama-3-8b", root=job_of_four_gib(tmp_path), device="cpu")
    assert [finding.summary for finding in findings("control_group", examined)] == [
        f"the control group job_7, above this one, allows {amount}" for amount in ("4.00 GiB", "0.5 cores", "150 tasks")
    ]
    assert only("host_memory", examined).summary.startswith("the control group job_7, above this one, allows 4.00 GiB")
    need = only("host_memory", subject("demo", root=tmp_path, device="cpu")).facts["need"]
    kept = only("host_memory", subject("demo", root=tmp_path, device="cpu", kv_host_memory=3 << 30))
    assert kept.facts["need"] == need + (3 << 30), "what KV blocks have of the host"
    assert only("cpu_cores", examined).level == "warning"
    assert only("task_limit", examined).summary.startswith("the control group (pids.max) allows 150")
    (tmp_path / "sys/fs/cgroup/job_7/rdma.max").write_text("mlx5_0 hca_handle=2\n")
    assert findings("control_group", examined)[0].summary.endswith("rdma.max is mlx5_0 hca_handle=2, a limit that is not looked at")
    assert only("control_group", subject(root=tmp_path / "none")).summary == "no limit is set"


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


@pytest.mark.parametrize("name", ["../outside.safetensors", "../../etc/passwd", "config.json", "in/a.safetensors"])
def test_an_index_may_name_plain_weight_files_only(tmp_path, name):
    """Neither the content nor the size of another file is told."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    weights = next(folder.glob("*.safetensors")).rename(folder / "a.safetensors")  # model.safetensors counts before an index
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
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    finding = only("model_files", subject(str(folder)))
    assert finding.level == "error"
    assert finding.summary.startswith("model.safetensors.index.json cannot be read: ")


def test_library_versions(monkeypatch):
    from phalanx.health.checks import software

    monkeypatch.setattr(software, "requires", lambda name: ["httpx>=99.1", "no-such-package>=1", "ray>=2; extra == 'ray'"])
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


def snapshot(hub, commit, ref=None, *, weights="there"):
    """A snapshot of org/model in a cache of the Hub."""
    folder = hub / "models--org--model/snapshots" / commit
    shutil.copytree(DEMO, folder)
    if weights == "dangling":
        for file in folder.glob("*.safetensors"):
            file.unlink()
            file.symlink_to(hub / "models--org--model/blobs" / file.name)
    if ref is not None:
        (hub / "models--org--model/refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (hub / "models--org--model/refs" / ref).write_text(commit)
    return folder


def test_the_snapshot_that_a_start_takes(tmp_path):
    """Of refs/main or --revision; others may be newer, and whole."""
    snapshot(tmp_path, "aaaa", "main", weights="dangling")
    snapshot(tmp_path, "bbbb", "v2")
    snapshot(tmp_path, "cccc", "refs/pr/1")

    def examined(revision=None, variable="HF_HUB_CACHE"):
        return only("model_files", subject("org/model", environment={variable: str(tmp_path)}, revision=revision))

    assert examined().level == "error"
    assert examined().summary.startswith("1 of 1 weight files are links to nothing: ")
    assert examined(variable="HUGGINGFACE_HUB_CACHE").level == "error"
    assert examined("main").level == "error"
    assert examined("v2").level == "ok"
    assert examined("bbbb").level == "ok"
    assert examined("refs/pr/1").level == "ok"
    assert examined("v3").summary == "org/model is not on this host yet: the start downloads it"
    for path in ("/nothing/here", "./here", "~/here"):
        assert only("model_files", subject(path)).summary == f"there is no folder {path}"


@pytest.mark.parametrize(
    "environment",
    [
        {}, {"HF_HOME": "/a"}, {"HF_HUB_CACHE": "/b"}, {"HUGGINGFACE_HUB_CACHE": "/c"}, {"XDG_CACHE_HOME": "/d"},
        {"HF_HUB_CACHE": "/b", "HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/a"}, {"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/a"},
        {"HF_HOME": "~/a"}, {"HF_HUB_CACHE": "~/b"}, {"XDG_CACHE_HOME": "/d", "HF_HOME": "/a"},
    ],
)  # fmt: skip
def test_the_cache_is_where_the_hubs_client_has_it(environment):
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
    assert str(subject(environment=environment).hub_cache) == done.stdout.strip()


def test_home_folder():
    from phalanx.config.home import temporary_home

    finding = only("home_folder", subject(environment={"HOME": str(temporary_home())}))
    assert finding.level == "warning"
    assert finding.summary == f"user {os.getuid()} has no home folder: {temporary_home()} is used, and lost with the container"


def test_an_empty_variable_is_set(monkeypatch):
    """An empty CUDA_VISIBLE_DEVICES hides every GPU; an empty RAY_ADDRESS, NCCL_ALGO or proxy is as good as none."""
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "NCCL_ALGO", "http_proxy", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICE", "3")
    examined = subject(nvml=machine(2), environment=Host().environment)
    assert examined.devices.unusable == "CUDA_VISIBLE_DEVICES='' hides the 2 GPUs of this host"
    assert only("visible_devices", examined).level == "warning"
    assert only("ray_cluster", examined).level == "skipped"
    assert [only(name, examined).level for name in ("variables", "proxy")] == ["ok", "ok"]


def test_service_variables():
    links = {"PHALANX_API_SERVICE_HOST": "10.0.0.1", "PHALANX_PORT": "tcp://10.0.0.1:80", "PHALANX_TENSOR_PARALLEL_SIZE": "2"}
    finding = only("service_variables", subject(environment=links))
    assert finding.level == "note"
    assert finding.summary.startswith(
        "2 variables of Kubernetes' Services begin as options do: PHALANX_API_SERVICE_HOST, PHALANX_PORT"
    )
    status, report = doctor("--check", "service_variables", environment=links)
    assert (status, finding_of(report, "service_variables")["level"]) == (0, "note")


def test_listen_address(tmp_path, monkeypatch):
    def examined(host, addresses, root=Path("/")):
        one = subject("demo", host=host, root=root)
        monkeypatch.setattr(type(one.host), "interfaces", lambda _: {"eth0": addresses})
        monkeypatch.setattr(type(one.host), "interface_is_up", lambda *_: True)
        return only("listen_address", one).level

    assert examined("0.0.0.0", ["fd00::7"]) == "error"
    assert examined("::", ["fd00::7"]) == "ok"
    assert examined("0.0.0.0", ["10.0.0.7", "fd00::7"]) == "ok"
    assert examined("0.0.0.0", ["10.0.0.7"]) == "ok"
    assert examined("localhost", ["10.0.0.7"], tmp_path) == "ok"
    (tmp_path / ".dockerenv").touch()
    assert examined("localhost", ["10.0.0.7"], tmp_path) == "note"


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


def test_master_address():
    own = next(entry.address for entry in psutil.net_if_addrs()[outward()] if entry.family == socket.AF_INET)
    assert only("master_address", subject("demo", master_addr=own, **TWO_HOSTS)).level == "ok"
    finding = only("master_address", subject("demo", master_addr=own, node_rank=1, **TWO_HOSTS))
    assert finding.level == "error"
    assert finding.summary.endswith("is this host's own address, and this is node 1")


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


def test_a_variable_that_matters_to_several_hosts(tmp_path):
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert only("variables", subject("demo", environment={"NCCL_IB_DISABLE": "1"}, root=tmp_path, **TWO_HOSTS)).level == "warning"


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
