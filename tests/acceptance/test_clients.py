# SPDX-License-Identifier: Apache-2.0
"""What clients that people have sent when they were tried (`make clients`), sent again. The recordings are of real libraries."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.config.locate import DEMO
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_http_app import MODEL, Scripted, live

pytestmark = pytest.mark.usefixtures("forked_python")

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "scripts" / "clients" / "tools.jinja"
RECORDINGS = ROOT / "tests" / "support" / "recordings" / "clients"
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
FILES = sorted(RECORDINGS.glob("*.jsonl"))
CLIENTS = {
    "openai", "litellm", "openai_agents", "pydantic_ai", "instructor", "langchain_openai", "lm_eval", "guidellm", "aiperf",
    "inference_perf", "open_webui", "litellm_proxy", "sglang_router",
}  # fmt: skip


@pytest.fixture(scope="module")
def http():
    """As `make clients` serves: clients send token ids of the demo model's tokenizer."""
    tokenizer = Tokenizer.load(DEMO)
    tokenizer.set_chat_template(TEMPLATE.read_text(encoding="utf-8"), origin=str(TEMPLATE))
    engine = Scripted("Hello there.", tokenizer=tokenizer, max_seq_len=32_768)  # Open WebUI brings 36 tools along
    with live(engine, tokenizer=tokenizer) as server, server.client() as http:
        yield http


def test_every_client_has_a_recording():
    assert {file.stem for file in FILES} >= CLIENTS


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_requests_of(http, file):
    ids: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        for recorded, ours in ids.items():
            line = line.replace(recorded, ours)
        request = json.loads(line)
        path, body = request["path"].replace("/models/demo", f"/models/{MODEL}"), request.get("body")
        if body is not None and "model" in body:
            body["model"] = MODEL
        answer = http.request(request.get("method", "POST"), path, json=body)
        if path.endswith("/cancel"):  # here the stream was read to its end before
            assert answer.json()["error"]["code"] == "not_cancellable"
            continue
        assert answer.status_code == 200, (request, answer.text)
        if body is not None and body.get("stream"):
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert '"error": {' not in answer.text
        if "id" in request:
            ids[request["id"]] = RESPONSE_ID.search(answer.text).group()
