# SPDX-License-Identifier: Apache-2.0
"""Try the server with software that people have: `make clients`.

Each client gets a virtual environment of its own (under --folder, kept for the next time), with the newest release of its packages.
`phalanx serve demo` runs on CPU, and a proxy records what each client sends. It writes:

- docs/clients.md: which client works, with its version;
- tests/support/recordings/clients/NAME.jsonl: the first request of each shape, which CI sends again.

python scripts/clients/run.py [--folder FOLDER] [NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from recorder import Recording, recording

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
RECORDINGS = ROOT / "tests" / "support" / "recordings" / "clients"
DEMO = ROOT / "src" / "phalanx" / "demo_model"
MODEL = "demo"
CLIENT_SECONDS = 600


@dataclass(frozen=True)
class Client:
    """A client. package: whose version is shown. packages: what is installed. does: what is tried, for the page. command: what is
    executed in its environment, with {python}, {bin}, {url} (without /v1) and {folder} (an empty one); None: its script here.
    offline: HF_HUB_OFFLINE is set, so that nothing is fetched from the Hub."""

    package: str
    packages: tuple[str, ...]
    does: str
    command: tuple[str, ...] | None = None
    needs: tuple[int, int] = (3, 11)
    offline: bool = True


CLIENTS: Mapping[str, Client] = {
    "openai": Client(
        "openai", ("openai",),
        "chats and responses: text, streams, tools, schemas, a chain of three by `previous_response_id`; models; `/tokenize`; the "
        "fields of vLLM in `extra_body`",
    ),
    "litellm": Client(
        "litellm", ("litellm", "mcp"),
        "text, streams, tools with the echo of its own messages, schemas, responses; as `openai/` and as `hosted_vllm/`",
    ),
    "openai_agents": Client("openai-agents", ("openai-agents",), "an agent with a tool, typed outputs, histories; both APIs"),
    "pydantic_ai": Client(
        "pydantic-ai-slim", ("pydantic-ai-slim[openai]",), "tools, typed outputs, streams, histories, over responses and chats"
    ),
    "instructor": Client("instructor", ("instructor",), "typed outputs by tools, strict tools and schemas, whole and streamed"),
    "langchain_openai": Client(
        "langchain-openai", ("langchain-openai",),
        "text, streams, tools, typed outputs, over chats and responses; fields of its models",
    ),
    "lm_eval": Client(
        "lm_eval", ("lm-eval[api]", "transformers"), "a task of texts over chats, and one of log-likelihoods over completions",
        ("{python}", str(HERE / "use_lm_eval.py")),
    ),
    "guidellm": Client(
        "guidellm", ("guidellm",), "a synchronous benchmark with its defaults",
        ("{bin}/guidellm", "run", "--backend", f"kind=openai_http,target={{url}},model={MODEL}",
         "--tokenizer", f"kind=huggingface_auto,model={DEMO}", "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
         "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3", "--disable-console",
         "--output", "kind=json,path={folder}/report.json"),
    ),
    "aiperf": Client(
        "aiperf", ("aiperf",), "a profile of streamed chats",
        ("{bin}/aiperf", "profile", "--model", MODEL, "--url", "{url}", "--endpoint-type", "chat", "--streaming",
         "--request-count", "4", "--concurrency", "2", "--tokenizer", str(DEMO), "--isl", "20", "--osl", "8", "--ui", "none",
         "--artifact-dir", "{folder}/artifacts"),
        offline=False,  # offline, it takes the folder of a tokenizer for a name in the cache
    ),
    "inference_perf": Client(
        "inference-perf", ("inference-perf",), "a load of completions", ("{python}", str(HERE / "use_inference_perf.py")), (3, 12)
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CLIENTS)}; none: all")
    parser.add_argument("--folder", default=str(ROOT / ".venv" / "clients"), help="where environments are kept")
    arguments = parser.parse_args()
    folder, results = Path(arguments.folder), {}
    names = [name.replace("-", "_") for name in arguments.names] or list(CLIENTS)
    if unknown := [name for name in names if name not in CLIENTS]:
        parser.error(f"no client is called {unknown[0]!r}; known: {', '.join(CLIENTS)}")
    rows = earlier_rows(PAGE.read_text(encoding="utf-8"))
    with server(folder) as url:
        for name in names:
            results[name] = try_client(name, CLIENTS[name], folder / name, url)
            print(f"{name}: {' '.join(results[name])}", flush=True)
            version, outcome, python = results[name]
            rows[CLIENTS[name].package] = (version, python, date.today().isoformat(), outcome)
            PAGE.write_text(page(rows), encoding="utf-8")
    return 0 if all(results[name][1] == "works" for name in names) else 1


def try_client(name: str, client: Client, folder: Path, url: str) -> tuple[str, str, str]:
    """Install a client, execute its command, and keep the recording. Returns its version, what came of it, and Python's version."""
    interpreter = python_from(client.needs)
    if interpreter is None:
        return "-", f"not run: it needs Python {'.'.join(map(str, client.needs))} or later", "-"
    try:
        python = installed(client, interpreter, folder / "venv")
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()[-1:]
        return "-", f"cannot be installed: {' '.join(lines)[:200]}", "-"
    query = f"import importlib.metadata as m, platform as p; print(m.version({client.package!r}), p.python_version())"
    answer = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    version, python_version = answer.stdout.split()
    work = folder / f"run-{int(time.time())}"
    work.mkdir(parents=True)
    with recording(url) as log:
        words = client.command or ("{python}", str(HERE / f"use_{name}.py"))
        command = [word.format(python=python, bin=python.parent, url=log.url, folder=work) for word in words]
        environment = {
            **os.environ, "BASE_URL": f"{log.url}/v1", "MODEL": MODEL, "TOKENIZER": str(DEMO),
            **({"HF_HUB_OFFLINE": "1"} if client.offline else {}), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        try:
            done = subprocess.run(
                command, env=environment, cwd=work, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False
            )
            status, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            status, output = -1, f"it took longer than {CLIENT_SECONDS} s"
    (work / "output.txt").write_text(output, encoding="utf-8")
    refused = [f"{request['path']} got {request['status']}" for request in log.requests if request["status"] >= 400]
    posts = [request for request in log.requests if request["method"] == "POST"]
    if status != 0 or refused or not posts:
        print("\n".join(output.splitlines()[-15:]), file=sys.stderr)
        problem = f"fails: status {status}; {'; '.join(sorted(set(refused))) or f'{len(posts)} requests'}"
        return version, problem, python_version
    keep(name, log)
    return version, "works", python_version


def keep(name: str, log: Recording) -> None:
    """Write the recording of a client."""
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {name: request[name] for name in ("method", "path", "body", "id") if request[name] is not None}, ensure_ascii=False
        )
        for request in log.shapes()
    ]
    (RECORDINGS / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def python_from(needs: tuple[int, int]) -> str | None:
    """A Python of at least this version: this one, or one on PATH or of pyenv. A name on PATH may be pyenv's for a version that is
    not switched on: it must execute."""
    if sys.version_info[:2] >= needs:
        return sys.executable
    versions = [f"{needs[0]}.{minor}" for minor in range(needs[1], needs[1] + 4)]
    of_pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    paths = [path for version in versions if (path := shutil.which(f"python{version}"))]
    paths += [str(path) for version in versions for path in sorted(of_pyenv.glob(f"{version}.*/bin/python"))]
    return next(
        (path for path in paths if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0), None
    )


def installed(client: Client, interpreter: str, folder: Path) -> Path:
    """The Python of an environment that has the client's packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, *client.packages], check=True, capture_output=True, text=True)
    return python


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """`phalanx serve demo` with a chat template that has tools. Its log is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "phalanx", "serve", "demo", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--chat_template", str(HERE / "tools.jinja"), "--kv_cache_bytes", str(1 << 26)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"the server ended at its start; see {folder / 'server.log'}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def earlier_rows(text: str) -> dict[str, Sequence[str]]:
    """Version, Python, day and result of each package, from the page as it is."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {package: row for package, *row, _ in cells[1:]}


def page(rows: Mapping[str, Sequence[str]]) -> str:
    """The page with the table of clients. rows: of each package."""
    lines = ["| client | version | Python | day | result | what was tried |", "|---|---|---|---|---|---|"]
    for client in CLIENTS.values():
        lines.append(f"| {' | '.join((client.package, *rows.get(client.package, ('-', '-', '-', 'not tried')), client.does))} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


HEAD = """# Clients

`make clients` installs each client into an environment of its own, with the newest release of its packages, and tries it with
`phalanx serve demo` on CPU. A client works if its program ends well and none of its requests is refused.
`scripts/clients/run.py` writes this page; `day` is the day on which a client was tried last.

"""
TAIL = """
What the clients sent is in `tests/support/recordings/clients`: the first request of each shape. CI sends these requests again
(`tests/acceptance/test_clients.py`). Which fields of requests are honoured is in [http_api.md](http_api.md#fields).
"""


if __name__ == "__main__":
    sys.exit(main())
