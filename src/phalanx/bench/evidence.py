# SPDX-License-Identifier: Apache-2.0
"""`phalanx bench evidence`: what a user with a checkpoint shows of it. A real server is started; the log probabilities that it
gives texts are put beside those of transformers, its greedy tokens too; its speed is measured; lm-eval asks it tasks, if wanted.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from phalanx.bench import load, offline, report
from phalanx.bench.reference import GREEDY_TOKENS
from phalanx.config import EngineOptions
from phalanx.config.locate import locate
from phalanx.config.sources import RawOptions, build_options, client_api_key
from phalanx.errors import EngineError, OptionError
from phalanx.hardware import probe, provenance
from phalanx.log import get_logger

logger = get_logger(__name__)

TEXTS = (
    "The harbour master counted the boats twice before the storm. Nine had left at dawn, and nine lanterns burned along the quay "
    "when the rain came in from the west. She closed the book, put the pencil behind her ear, and went to tell the families.",
    "To solve 3x + 7 = 22, subtract 7 from both sides, which gives 3x = 15, and divide by 3: x = 5. Check the answer: 3 * 5 + 7 is "
    "22. For the second equation, 2x - y = 4, put x = 5 into it: 10 - y = 4, and so y = 6.",
    "def moving_average(values, width):\n    total = sum(values[:width])\n    averages = [total / width]\n"
    "    for new, old in zip(values[width:], values):\n        total += new - old\n        averages.append(total / width)\n"
    "    return averages\n",
    '{"order": 1187, "customer": {"name": "Ada", "city": "London"}, "items": [{"sku": "A-3", "count": 2, "price": 9.5}, '
    '{"sku": "B-1", "count": 1, "price": 120.0}], "paid": true, "note": null}',
    "Die Sitzung beginnt um neun Uhr. Zuerst wird das Protokoll der letzten Woche verlesen, danach berichtet jede Gruppe, was sie "
    "erreicht hat und was noch fehlt. Fragen werden am Ende gestellt.",
    "Photosynthesis converts light into chemical energy. In plants it takes place in the chloroplasts, where chlorophyll absorbs "
    "mostly blue and red light; water is split, oxygen is released, and carbon dioxide is bound into sugars.",
)
"""Texts of several kinds, which no model is asked to like: the two programs must only agree on them."""
MOST_CHANGE = 0.02
"""The perplexity over all texts may differ from transformers' by this part. 16-bit arithmetic moves it by less than a hundredth of
that; a layer that is wrong moves it by far more."""
STREAMS = (1, 8, 32)
"""Streams of the measurements of speed."""
_START_SECONDS = 3600.0
_MOST_LOSS = 700.0
"""Nats a token. A perplexity beyond that is no number any more, nor is that of probabilities which are none: null in the report."""


@dataclass(frozen=True)
class Questions:
    """reference_device: "cuda", "cpu", or "none" for no reference. tasks: of lm-eval, by name; limit: samples of each."""

    reference_device: str
    tasks: Sequence[str] = ()
    limit: int = 100


def check(wanted: Questions) -> None:
    """Raise OptionError, before anything is started, for what cannot be done here."""
    if wanted.reference_device not in ("cuda", "cpu", "none"):
        raise OptionError(f"--reference_device {wanted.reference_device!r} is unknown", next="give cuda, cpu or none")
    if wanted.tasks and lm_eval_program() is None:
        raise OptionError(
            f"--lm_eval {','.join(wanted.tasks)} needs lm-eval", held="there is no program lm_eval",
            next='install it with pip install "lm-eval[api]", or leave --lm_eval out',
        )  # fmt: skip
    if wanted.tasks and client_api_key() is not None:
        raise OptionError(
            "--lm_eval cannot ask a server that wants a key", held="PHALANX_API_KEY or PHALANX_API_KEY_FILE is set",
            next="unset it: the server of this command listens on this host alone",
        )  # fmt: skip


def lm_eval_program() -> str | None:
    """Beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / "lm_eval"
    return str(beside) if beside.exists() else shutil.which("lm_eval")


def run(raw_options: RawOptions, wanted: Questions, commit: str | None = None) -> report.Document:
    """Gather the evidence. Raises what the server's start raises as EngineError."""
    options = build_options(EngineOptions, raw_options)
    folder = locate(options.model, options.revision)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        reference = transformers_reference(folder, wanted.reference_device, Path(scratch))
        begin = time.perf_counter()
        with server(raw_options, Path(scratch)) as url, _client(url) as ask:
            results["start_s"] = round(time.perf_counter() - begin, 1)
            model = _checked(ask.get("/v1/models"), "its list of models").json()["data"][0]["id"]
            if isinstance(reference, str):
                results["transformers"] = {"not_run": reference}
            else:
                results["transformers"] = compared(reference, [answer(ask, model, each["tokens"]) for each in reference])
            results["speed"] = [speed(url, streams) for streams in STREAMS]
            if wanted.tasks:
                results["lm_eval"] = lm_eval(url, model, folder, wanted, Path(scratch))
    machine = probe.usable_machine(options.device)
    device = options.device if options.device != "auto" else "cuda" if machine.gpus else "cpu"
    return {
        "about": provenance.collect(commit).as_json(),
        "asked": offline.changed_options(options, options.model),
        "engine": {"device": device},
        "results": results,
    }


def transformers_reference(folder: Path, device: str, scratch: Path) -> list[dict[str, Any]] | str:
    """What `phalanx.bench.reference` gives for TEXTS, or why there is nothing."""
    if device == "none":
        return "--reference_device none"
    texts, out = scratch / "texts.json", scratch / "reference.json"
    texts.write_text(json.dumps(TEXTS), encoding="utf-8")
    logger.info("transformers computes %d texts on %s", len(TEXTS), device)
    command = [sys.executable, "-m", "phalanx.bench.reference", str(folder), device, str(texts), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"transformers ended with status {done.returncode}: {lines[-1] if lines else 'it said nothing'}"
    return list(json.loads(out.read_text(encoding="utf-8")))


@contextmanager
def server(raw_options: RawOptions, scratch: Path) -> Iterator[str]:
    """Run `phalanx serve` with these options, on a free port of this host; yields its URL once it is ready."""
    with closing(socket.socket()) as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    config, log = scratch / "options.yaml", scratch / "server.log"
    engine = {name: value for name, value in raw_options.values.items() if name in EngineOptions.model_fields}
    config.write_text(json.dumps(engine, default=str), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "phalanx", "serve", "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + _START_SECONDS
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    raise EngineError("the server did not start", why=lines[-1] if lines else "it said nothing")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    return False


def _client(url: str) -> httpx.Client:
    """Of the server, which has the key of this process's environment, if there is one."""
    key = client_api_key()
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=600.0, trust_env=False)


def _checked(response: httpx.Response, what: str) -> httpx.Response:
    if response.status_code != 200:
        raise EngineError(f"the server refused {what}", held=f"status {response.status_code}", why=response.text[:300])
    return response


def answer(ask: httpx.Client, model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """What the server gives for a text: as `reference.reference_of`, without its tokens."""
    body = {
        "model": model, "prompt": list(tokens), "max_tokens": GREEDY_TOKENS, "min_tokens": GREEDY_TOKENS,
        "temperature": 0, "prompt_logprobs": 1,
    }  # fmt: skip
    choice = _checked(ask.post("/v1/completions", json=body), "a text").json()["choices"][0]
    entries = choice["prompt_logprobs"][1:]
    return {
        "logprobs": [entry[str(token)]["logprob"] for entry, token in zip(entries, tokens[1:], strict=True)],
        "best": [int(next(token for token, value in entry.items() if value["rank"] == 1)) for entry in entries],
        "greedy": choice["text"],
    }


def compared(reference: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far the server is from transformers, over all texts. agrees: the perplexities differ by MOST_CHANGE at most."""
    theirs, ours = ([value for each in side for value in each["logprobs"]] for side in (reference, answers))
    best = [a == b for ref, own in zip(reference, answers, strict=True) for a, b in zip(ref["best"], own["best"], strict=True)]
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    losses = [-statistics.fmean(side) if all(map(math.isfinite, side)) else math.inf for side in (theirs, ours)]
    perplexities = [math.exp(loss) if loss < _MOST_LOSS else None for loss in losses]
    return {
        "positions": len(theirs),
        "perplexity": perplexities[1], "perplexity_of_transformers": perplexities[0],
        "mean_difference": _finite(statistics.fmean(differences)), "largest_difference": _finite(max(differences)),
        "same_best_token": statistics.fmean(best),
        "greedy_equal": [_equal_part(ref["greedy"], own["greedy"]) for ref, own in zip(reference, answers, strict=True)],
        "agrees": abs(losses[1] - losses[0]) <= math.log1p(MOST_CHANGE),
    }  # fmt: skip


def _equal_part(one: str, other: str) -> float:
    """Which part of the longer text is equal, from its beginning to the first difference."""
    one, other = one.lstrip(), other.lstrip()  # transformers drops the blank that some tokenizers begin with
    equal = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return equal / max(len(one), len(other), 1)


def speed(url: str, streams: int) -> dict[str, Any]:
    """Tokens per second and times of a closed loop."""
    wanted = load.Load(requests=2 * streams, input_len=128, output_len=128, concurrency=streams)
    figures = load.run(url, client_api_key(), wanted)["results"]
    return {"streams": streams, "output_tok_s": figures["output_tok_s"], "ttft_ms": figures["ttft_ms"], "itl_ms": figures["itl_ms"]}


def lm_eval(url: str, model: str, folder: Path, wanted: Questions, scratch: Path) -> dict[str, Any]:
    """The metrics of each task, as lm-eval writes them. Raises EngineError where it fails."""
    program = lm_eval_program()
    assert program is not None
    out = scratch / "lm_eval"
    arguments = (
        f"model={model},base_url={url}/v1/completions,num_concurrent=16,max_retries=1,tokenizer_backend=huggingface,"
        f"tokenizer={folder}"
    )
    command = [
        program, "--model", "local-completions", "--model_args", arguments, "--tasks", ",".join(wanted.tasks),
        "--limit", str(wanted.limit), "--output_path", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = sorted(out.rglob("results*.json"))
    if done.returncode or not files:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise EngineError(f"lm-eval ended with status {done.returncode}", why=lines[-1] if lines else "it said nothing")
    results: dict[str, Any] = json.loads(files[-1].read_text(encoding="utf-8"))["results"]
    return {"limit": wanted.limit, "tasks": results}


def _finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _shown(value: float | None) -> str:
    return "no number" if value is None else f"{value:.5f}"


def tables(document: report.Document) -> list[Any]:
    """What a reader wants to see: the comparison, the speed, the tasks."""
    results, beside = document["results"], document["results"]["transformers"]
    parts: list[Any] = []
    where = report.device_name(document["about"], document["engine"])
    if "not_run" in beside:
        parts.append(f"transformers: not run: {beside['not_run']}")
    else:
        rows = [
            ["perplexity, Phalanx", _shown(beside["perplexity"])],
            ["perplexity, transformers", _shown(beside["perplexity_of_transformers"])],
            ["log probability, mean difference", _shown(beside["mean_difference"])],
            ["log probability, largest difference", _shown(beside["largest_difference"])],
            ["same most probable token", f"{beside['same_best_token']:.2%}"],
            [f"equal part of {GREEDY_TOKENS} greedy tokens", " ".join(f"{part:.0%}" for part in beside["greedy_equal"])],
        ]
        verdict = "agrees with transformers" if beside["agrees"] else "DIFFERS from transformers"
        title = f"{document['asked']['model']} {verdict}: {beside['positions']} positions of {len(TEXTS)} texts"
        parts.append(report.table(title, ["", "value"], rows))
    rows = [
        [str(each["streams"]), f"{each['output_tok_s']:,.1f}", f"{each['ttft_ms']['p50']:.1f}", f"{each['itl_ms']['p50']:.2f}"]
        for each in results["speed"]
    ]
    caption = f"128 tokens in, 128 out; the server was ready after {results['start_s']} s"
    columns = ["streams", "output tok/s", "first token, ms, median", "between tokens, ms, median"]
    parts.append(report.table(f"speed over HTTP, on {where}", columns, rows, caption))
    if "lm_eval" in results:
        rows = [
            [task, metric, f"{value:.4f}"]
            for task, metrics in results["lm_eval"]["tasks"].items()
            for metric, value in metrics.items() if isinstance(value, float)
        ]  # fmt: skip
        parts.append(report.table(f"lm-eval, {results['lm_eval']['limit']} samples a task", ["task", "metric", "value"], rows))
    return parts
