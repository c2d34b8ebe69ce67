# SPDX-License-Identifier: Apache-2.0
"""Traces reach a receiver of OTLP over HTTP, which decodes them with OpenTelemetry's own messages: directly, and through Rotel, a
collector in Rust, which `.ci/run` fetches."""

from __future__ import annotations

import gzip
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from phalanx.deploy.ray_serve import free_ports
from phalanx.errors import OptionError
from phalanx.serve.telemetry.tracing import traces_url
from tests.support.serve_processes import MODEL, fake_server, until

pytestmark = pytest.mark.usefixtures("forked_python")

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP on a free port, as a collector does."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

        spans, resources = self.spans, self.resources = {}, []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                body = self.rfile.read(int(self.headers["Content-Length"]))
                packed = self.headers["Content-Encoding"] == "gzip"
                request = ExportTraceServiceRequest.FromString(gzip.decompress(body) if packed else body)
                for group in request.resource_spans:
                    resources.append(values(group.resource.attributes))
                    for scope in group.scope_spans:
                        spans.update({(span.trace_id.hex(), span.name): span for span in scope.spans})
                body = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def values(attributes):
    plain = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        plain[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return plain


@contextmanager
def through_rotel(url, folder):
    """The URL of a collector that sends what it gets on to another one."""
    http = free_ports(2)
    command = [
        "rotel-agent", "start", "--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{http + 1}",
        "--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", url,
        "--pid-file", str(folder / "rotel.pid"),
    ]  # fmt: skip
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: _listens(http))
        yield f"http://127.0.0.1:{http}"
    finally:
        agent.terminate()
        agent.wait(20)


def _listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def directly(url, _):
    yield url


@pytest.mark.parametrize(
    "way",
    [
        directly,
        pytest.param(through_rotel, marks=pytest.mark.skipif(not shutil.which("rotel-agent"), reason="not run: needs rotel-agent")),
    ],
)
def test_spans_of_a_request_below_the_callers(tmp_path, tiny_model, way):
    collector = Collector()
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_RESOURCE_ATTRIBUTES": "deployment=tests"}
    with (
        way(collector.url, tmp_path) as url,
        fake_server(tmp_path, tiny_model, fake={"latency": 0.01}, otlp_traces_endpoint=url, environment=environment) as served,
    ):
        served.wait_ready()
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "r-1"}
        body = {"model": MODEL, "prompt": "secret", "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "stream": True}
        with served.http() as http:
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
            assert http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "refused"}).status_code in (200, 400)
        until(lambda: len(collector.spans) >= 5)
    request, queue, prefill, decode = (collector.spans[TRACE, name] for name in ("llm_request", "queue", "prefill", "decode"))
    assert (request.parent_span_id.hex(), request.kind) == (CALLER, 2)  # SPAN_KIND_SERVER
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {request.span_id}
    times = [queue.start_time_unix_nano, prefill.start_time_unix_nano, decode.start_time_unix_nano, decode.end_time_unix_nano]
    assert times == sorted(times)
    assert [request.start_time_unix_nano, request.end_time_unix_nano] == [times[0], times[-1]]
    assert [queue.end_time_unix_nano, prefill.end_time_unix_nano] == times[1:3]
    assert decode.end_time_unix_nano - decode.start_time_unix_nano > 30_000_000, "four steps of 10 ms"
    named = values(request.attributes)
    latencies = {name: named.pop(name) for name in list(named) if name.startswith("gen_ai.latency.")}
    assert named == {
        "gen_ai.request.id": "r-1", "http.route": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.response.model": MODEL, "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": named["gen_ai.usage.prompt_tokens"], "gen_ai.usage.completion_tokens": 5,
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 1.0, "gen_ai.request.n": 1,
    }  # fmt: skip
    stem = "gen_ai.latency."
    assert latencies[stem + "e2e"] == pytest.approx((times[3] - times[0]) / 1e9, abs=1e-5)
    assert latencies[stem + "time_in_queue"] == pytest.approx((times[1] - times[0]) / 1e9, abs=1e-5)
    assert latencies[stem + "time_to_first_token"] == pytest.approx((times[2] - times[0]) / 1e9, abs=1e-5)
    inference = latencies[stem + "time_in_model_prefill"] + latencies[stem + "time_in_model_decode"]
    assert latencies[stem + "time_in_model_inference"] == pytest.approx(inference)
    assert collector.resources[0]["service.name"] == "phalanx"
    assert collector.resources[0]["deployment"] == "tests"
    (alone,) = [span for (trace, name), span in collector.spans.items() if trace != TRACE and name == "llm_request"]
    assert alone.parent_span_id == b"", "without a traceparent, a trace of its own"
    assert "secret" not in str(collector.spans)


def test_a_collector_that_is_away_holds_up_nothing(tmp_path, tiny_model):
    with fake_server(
        tmp_path, tiny_model, otlp_traces_endpoint="http://127.0.0.1:9", environment={"OTEL_BSP_SCHEDULE_DELAY": "50"}
    ) as served:
        served.wait_ready()
        with served.http() as http:
            assert http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2}).status_code == 200
        served.process.terminate()
        served.gone(15)
        assert served.process.returncode == 0


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"), ("https://c/", "https://c/v1/traces"), ("http://c/own/path", "http://c/own/path"),
        ("c:4317", None), ("grpc://c:4317", None), ("http://", None),
    ],
)  # fmt: skip
def test_endpoints(endpoint, url):
    if url is None:
        with pytest.raises(OptionError, match="is not a URL of HTTP"):
            traces_url(endpoint)
    else:
        assert traces_url(endpoint) == url
