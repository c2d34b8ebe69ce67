# SPDX-License-Identifier: Apache-2.0
"""A live server in this process: real uvicorn on a thread, the shipped fake engine behind it, and a small real tokenizer."""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import uvicorn

from phalanx.config import EngineOptions
from phalanx.config.serving import ServeOptions
from phalanx.serve.app import make_app, make_service
from phalanx.serve.connections.listen import bind
from phalanx.serve.connections.timed_protocol import timed_protocol
from phalanx.serve.fake_client import FakeEngineClient, fake_facts
from phalanx.serve.openai.service import Service, ServingEngine
from phalanx.serve.openai.yes_no import YesNo
from phalanx.serve.output_parsing import OutputFormat
from phalanx.serve.tokenizer import Tokenizer
from tests.support.serve_small_tokenizers import byte_level, write

MODEL = "tiny"

HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'For each call return: <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_TEMPLATE = (
    "{% if tools %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}. Functions: '
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}\n{% endfor %}<|assistant|>'
)


@functools.cache
def tokenizer_of(template: str | None = None) -> Tokenizer:
    """The small byte-level tokenizer; with another chat template than its plain one, which knows no tool format."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(write(Path(folder), byte_level()))
    if template is not None:
        tokenizer.set_chat_template(template, origin="test")
    return tokenizer


class Scripted(FakeEngineClient):
    """Says the texts that it is given, each ended by eos; the last one again and again."""

    def __init__(
        self, *texts: str, delay: float = 0.0, max_seq_len: int = 1024, max_batch_size: int = 8, tokenizer: Tokenizer | None = None,
        eos: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """eos: tokens that end a text, beside the tokenizer's eos."""
        self.tokenizer = tokenizer = tokenizer or tokenizer_of()
        assert tokenizer.eos_token_id is not None
        eos_token_ids = [tokenizer.eos_token_id, *(tokenizer.backend.token_to_id(text) for text in eos)]
        facts = fake_facts(vocab_size=tokenizer.vocab_size, max_seq_len=max_seq_len, eos_token_ids=eos_token_ids)
        facts.max_batch_size = max_batch_size
        self.texts = list(texts)
        super().__init__(lambda add: self._says(), facts=facts, delay=delay)

    def _says(self) -> Iterator[int]:
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return forever(self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id or 0)


def forever(tokens: Sequence[int], eos: int) -> Iterator[int]:
    yield from tokens
    while True:
        yield eos


@dataclass
class Live:
    """A server that listens. loop: its event loop, for acts that belong there (`on_loop`)."""

    url: str
    service: Service
    engine: FakeEngineClient
    loop: asyncio.AbstractEventLoop

    def on_loop(self, act, *args):
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (act(*args), done.set()))
        assert done.wait(10)

    def client(self, **more) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **more)

    def openai(self, **more) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=more.pop("api_key", "none"), max_retries=0, timeout=60, **more)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@contextmanager
def live(
    engine: FakeEngineClient,
    *,
    template: str | None = None,
    tokenizer: Tokenizer | None = None,
    ready: bool = True,
    model: str = "tests",
    **serving: object,
) -> Iterator[Live]:
    """Serve `engine` on a free port until the context ends. tokenizer: that of the engine; template: for the usual one."""
    options = ServeOptions.of(**{"host": "127.0.0.1", "port": 0, "served_model_name": MODEL, **serving})
    service = make_service(EngineOptions(model=model), options)
    app = make_app(service, options, api_keys=options.read_api_keys())
    tokenizer = tokenizer or tokenizer_of(template)
    output = OutputFormat.detect(tokenizer, reasoning=options.reasoning_parser, tools=options.tool_call_parser)
    if ready:
        service.admission.begin(batch=engine.facts.max_batch_size, max_reqs=options.max_num_queued_reqs)
        service.engine = ServingEngine(
            engine, tokenizer, output, escape_special_tokens=options.escape_special_tokens,
            yes_no=YesNo.detect(options.rerank_by, model, tokenizer),
        )  # fmt: skip
        engine.on_failure(service.admission.fail)
    sockets = bind("127.0.0.1", 0)
    protocol = timed_protocol(header_seconds=options.header_timeout, body_seconds=options.body_timeout)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", http=protocol))
    began: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        began.append(asyncio.get_running_loop())
        await server.serve(sockets=sockets)

    port = sockets[0].getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield Live(f"http://127.0.0.1:{port}", service, engine, began[0])
    finally:
        server.should_exit = True
        thread.join(20)
        service.close()
        assert not thread.is_alive()
