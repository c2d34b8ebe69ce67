# SPDX-License-Identifier: Apache-2.0
"""Python processes that start in a moment, for tests that start many.

    with forked_python():
        LLM(folder, tensor_parallel_size=4)  # the engine and its ranks are forks
        subprocess.run([sys.executable, "-m", "phalanx", "version"])  # so is this

A new process that imports torch takes seconds of a core for that. Here `subprocess.Popen` has a template process, which has
imported everything already, fork in place of starting an interpreter anew. What runs in the fork is the real thing: the same
module, command line, environment, standard streams and session. It is a child of the process that started it, with the same exit
status.

- A fork starts as a copy of a process with one thread and no open file, socket or GPU. The template checks that.
- A process that starts others has a template of its own, forked before anything ran in it: so its children are its children, and
  none of them inherits anything of it. The template ends with its process.
- `ip netns exec NAME` before a command of Python's is done by the fork itself, and by its template: its children are there, too.
- Zeros of many MiB are pages that the system gives as they are written, not filled at once: a KV cache has 1 GiB by default on CPU,
  most of a second of a core for each rank, and tests write a few MiB of it.
- A folder of PYTHONPATH that the template lacks makes a new interpreter, unless its sitecustomize.py begins with FORKS_TOO.
- Any other command that is not Python's, that has settings of the interpreter or of torch other than the template's
  (`_AT_START`), or that runs a function before it starts, is started as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import mmap
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LARGEST = 1 << 18
_ANSWER_SECONDS = 60.0
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _CLONE_NEWNET, _MS_SLAVE_REC, _MNT_DETACH = 0x20000, 0x40000000, 0x84000, 2
_ON_A_HOST = ["ip", "netns", "exec"]

_AT_START = re.compile(
    r"PYTHON|LD_|OMP_|MKL_|TORCH(?!INDUCTOR|ELASTIC|_NCCL)|CUDA(?!_VISIBLE_DEVICES$|_DEVICE_ORDER$)|HF_|TRANSFORMERS_|TOKENIZERS_|MPL"
)
"""Variables that are read when an interpreter starts or a library is imported. Those of the visible devices and of their order are
read when the first is opened, which a template never does."""
_FITTED = {"PYTHONWARNINGS": "ignore", "OMP_WAIT_POLICY": "PASSIVE"}
"""Such variables, and the only value that a fork can have. Without one it does what the template does, which waits as OpenMP does
in ranks on CPU."""
_SITE = "sitecustomize.py"
FORKS_TOO = "# forks execute this, too\n"
"""The first line of a sitecustomize.py that may be executed when everything has been imported."""
_ON_DEMAND = 16 << 20
_HUGE, _MADV_COLLAPSE = 2 << 20, 25
_PRELOADED = (
    "encodings.idna", "numpy.ma", "torch", "torch.distributed", "transformers", "transformers.tokenization_utils_fast",
    "safetensors.torch", "phalanx.bench.cli", "phalanx.bench.prediction.cli", "phalanx.cli", "phalanx.comm.reachability",
    "phalanx.comm.sequence_parallel.on_cpu", "phalanx.comm.torch_group", "phalanx.comm.warmup", "phalanx.deploy.cli",
    "phalanx.deploy.ray_serve_cli", "phalanx.engine.process", "phalanx.executor.node", "phalanx.health.cli",
    "phalanx.kernels.attention.dispatch", "phalanx.kernels.compiling.compile_time", "phalanx.models.layers.attention.sdpa",
    "phalanx.models.layers.attention.select", "phalanx.models.registry", "phalanx.models.weights", "phalanx.serve.app",
    "phalanx.serve.llm", "phalanx.tune.cli", "phalanx.tune.ranks.candidates", "phalanx.tune.ranks.measure",
    "phalanx.tune.ranks.setup", "phalanx.tune.ranks.warmup", "phalanx.worker.engine_store", "phalanx.worker.expert_load",
    "phalanx.worker.expert_moves", "phalanx.worker.memory_profile", "phalanx.worker.model_runner", "phalanx.worker.warmup",
    "phalanx.worker.worker",
)  # fmt: skip

_POPEN = subprocess.Popen
_template: Template | None = None
"""This process's, if it has one."""


@contextlib.contextmanager
def forked_python() -> Iterator[None]:
    """Inside, Python processes are forks of the template."""
    _start_template()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _ForkedPopen)
        yield


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """Inside, and inside `forked_python`, processes start as ever again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _POPEN)
        yield


def stop_template() -> None:
    """End the template of this process."""
    global _template
    if _template is not None:
        _template.close()
    _template = None


def _start_template() -> None:
    global _template
    if _template is not None:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with theirs:
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    process.returncode = 0  # the template is waited for by its id
    _template = Template(ours, environment, process.pid)


class Template:
    """The process that forks for this one, whose child it is. environment: what it has imported everything with."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str], pid: int) -> None:
        self.environment = environment
        self._connection = connection
        self._connection.settimeout(_ANSWER_SECONDS)
        self._pid = pid
        self._lock = threading.Lock()

    def fork(self, job: Mapping[str, Any], streams: list[int]) -> int | None:
        """The process id of a new child of this process, or None where the template is gone, or does not answer any more."""
        try:
            with self._lock:
                _adopt_orphans(True)  # the child's parent ends at once
                try:
                    socket.send_fds(self._connection, [json.dumps(job).encode()], streams)
                    answer = self._connection.recv(64)
                finally:
                    _adopt_orphans(False)
        except OSError:
            answer = b""
        if not answer:
            self.kill()
            return None
        return int(answer)

    def kill(self) -> None:
        """End it, whatever it does. Then processes start as ever."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """End it."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _adopt_orphans(adopt: bool) -> None:
    _call("prctl", _PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _call(name: str, *arguments: Any) -> None:
    """A function of the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}{arguments}")


class _ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
    ):  # fmt: skip
        environment = dict(os.environ if env is None else env)
        job = None
        if _template is not None and not (executable or preexec_fn or pass_fds or shell or not close_fds):
            job = _job(args, environment, _template.environment)
        pid = None
        if job is not None and _template is not None:
            job |= {"cwd": os.fspath(cwd or os.getcwd()), "session": more[5], "environment": environment}
            streams = [fd if fd >= 0 else standard for standard, fd in enumerate((p2cread, c2pwrite, errwrite))]
            pid = _template.fork(job, streams)
        if pid is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more,
            )  # fmt: skip
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _job(args: Any, environment: Mapping[str, str], preloaded: Mapping[str, str]) -> dict[str, Any] | None:
    """What a command executes; None where it must start anew."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [os.fsdecode(word) for word in args]
    namespace = None
    if words[:3] == _ON_A_HOST:
        namespace, words = words[3], words[4:]
    command = list(words)
    if words[:1] != [sys.executable] or not _alike(environment, preloaded):
        return None
    words.pop(0)
    safe = words[:1] == ["-P"]
    if safe:
        words.pop(0)
    kind = words[0] if words and words[0] in ("-m", "-c") else "file"
    if kind != "file":
        words.pop(0)
    if not words or (kind == "file" and words[0].startswith("-")):
        return None
    return {"kind": kind, "words": words, "safe": safe, "namespace": namespace, "command": command}


def _alike(environment: Mapping[str, str], preloaded: Mapping[str, str]) -> bool:
    def at_start(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if _AT_START.match(name) and name not in {"PYTHONPATH", *_FITTED}}

    fits = all(environment.get(name, value) == value for name, value in _FITTED.items())
    known = all(map(_is_for_forks, _more_folders(environment, preloaded)))
    return known and fits and at_start(environment) == at_start(preloaded)


def _more_folders(environment: Mapping[str, str], preloaded: Mapping[str, str]) -> list[Path]:
    """Folders of modules that a template does not know."""
    folders, known = (variables.get("PYTHONPATH", "").split(os.pathsep) for variables in (environment, preloaded))
    return [Path(folder) for folder in folders if folder and folder not in known]


def _is_for_forks(folder: Path) -> bool:
    site = folder / _SITE
    return site.is_file() and site.read_text(encoding="utf-8").startswith(FORKS_TOO)


# ---- in the template, and in its forks -----------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, until its process is gone. Returns in forks only: what to do, and the standard streams."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                job = json.loads(message)
                if job["session"]:
                    os.setsid()  # before Popen returns, as it does with one: what it is then asked about the session is right
                os.write(writing, str(os.getpid()).encode())
                for descriptor in (reading, writing):
                    os.close(descriptor)
                connection.close()
                return job, streams
            os._exit(0)
        os.close(writing)  # so that nothing is read if the process between is killed
        pid = os.read(reading, 64)
        os.waitpid(between, 0)  # from here on, the fork is a child of the process that wants it
        connection.send(pid)
        for descriptor in (reading, *streams):
            os.close(descriptor)


def _become(job: dict[str, Any], streams: list[int], environment: Mapping[str, str]) -> None:
    """Make this fork what the job says, up to the code that it runs."""
    import setproctitle

    global _template
    if job["namespace"] is not None:
        _enter(job["namespace"])
    _template = None
    if job["words"][0] != "phalanx.worker":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for descriptor in streams:
                os.close(descriptor)
            _run(theirs, environment)
        theirs.close()
        _template = Template(ours, environment, pid)
    setproctitle.setproctitle(shlex.join(job["command"]))
    for standard, descriptor in enumerate(streams):
        os.dup2(descriptor, standard)
    for descriptor in streams:
        os.close(descriptor)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if "PYTHONWARNINGS" in os.environ:
        warnings.simplefilter("ignore")
    for folder in _more_folders(os.environ, environment):
        sys.path.insert(0, str(folder))
        runpy.run_path(str(folder / _SITE))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = _ForkedPopen  # type: ignore[misc]


def _enter(namespace: str) -> None:
    """Move this process there, as `ip netns exec` does: its network, and a /sys that shows the devices of that."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"", b"/", b"none", _MS_SLAVE_REC, None)
    _call("umount2", b"/sys", _MNT_DETACH)
    _call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)


def _execute(kind: str, words: list[str], safe: bool) -> None:
    """As `python` would."""
    sys.argv = ["-c" if kind == "-c" else words[0], *words[1:]]
    if kind == "-m":
        if not safe:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        if not safe:
            sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        if not safe:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _run(connection: socket.socket, environment: Mapping[str, str]) -> NoReturn:
    """Be a template."""
    import setproctitle

    setproctitle.setproctitle("template of forks")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    job, streams = _serve(connection)
    _become(job, streams, environment)
    status: Any = 0
    try:
        _execute(job["kind"], job["words"], job["safe"])
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(status)


def _end(status: Any) -> NoReturn:
    """What an interpreter does at its end, but for the objects: to visit them all would copy all the pages of the template."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    stop_template()
    if status is None or isinstance(status, int):
        code = status or 0
    else:
        print(status, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by what ran, or by its reader
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _collapse_heap() -> None:
    """Have the memory of this process on huge pages, where the kernel has them: a fork, which copies the table of pages, takes half
    as long."""
    with open("/proc/self/maps", encoding="ascii") as file:
        areas = [line.split() for line in file]
    for addresses, access, _, _, _, *name in areas:
        if access == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE, _HUGE):
                with contextlib.suppress(OSError):  # too little of it is there, or the kernel is older than 6.1
                    _call("madvise", ctypes.c_void_p(page), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE)


def _zero_on_demand() -> None:
    """Have torch.zeros of at least _ON_DEMAND bytes on CPU map pages of zeros."""
    import torch

    filled = torch.zeros

    def zeros(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        length = shape.numel() * (dtype or torch.float32).itemsize
        if options or length < _ON_DEMAND or torch.device(device or "cpu").type != "cpu":
            return filled(*size, dtype=dtype, device=device, **options)
        return torch.frombuffer(mmap.mmap(-1, length), dtype=torch.uint8).view(dtype or torch.float32).view(shape)

    torch.zeros = zeros


def main() -> NoReturn:
    import importlib

    gc.disable()  # nothing that is imported is garbage
    # So that forks, in which this module is not __main__, find the same one.
    sys.modules["tests.support.forked_python"] = sys.modules["__main__"]
    for name in _PRELOADED:
        importlib.import_module(name)
    import torch

    _zero_on_demand()
    torch.set_num_threads(1)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"a process of {len(tasks)} threads cannot be forked safely"
    assert "triton" not in sys.modules, "Triton asks whether it interprets kernels as it is imported"
    gc.collect()
    gc.freeze()
    gc.enable()
    _collapse_heap()
    _run(socket.socket(fileno=int(sys.argv[1])), dict(os.environ))


if __name__ == "__main__":
    main()
