# SPDX-License-Identifier: Apache-2.0
"""Traces of requests by OpenTelemetry's own libraries (`[otel]`), sent as OTLP over HTTP: `Tracer`.

A span of each request, below the caller's (`traceparent`), made when it has ended; within it the spans `queue`, `prefill` and
`decode`. Attributes have vLLM's names. Sampler, headers and names of the service are of OpenTelemetry's variables (OTEL_...).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from phalanx.errors import OptionError
from phalanx.log import get_logger
from phalanx.serve.telemetry.request_report import Headers, RequestReport
from phalanx.version import __version__, install_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

logger = get_logger(__name__)

SPAN = "llm_request"
DEFAULT_PATH = "/v1/traces"
CLOSE_SECONDS = 2.0
"""Time for the last spans when the server ends. A collector that does not answer must not hold it up."""
_SERVER_ERROR = 500


class Tracer:
    """Sends the spans of requests from a thread of its own."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        """endpoint: the collector's URL; without a path, the one of OTLP. exporter: takes the place of the one that sends there.

        Raises OptionError where OpenTelemetry is not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise OptionError(
                f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry", held=f"{error.name} is not installed",
                next=f"run: {install_extra('otel')}",
            ) from None  # fmt: skip
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        resource = Resource.create({SERVICE_NAME: "phalanx", "service.version": __version__}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("phalanx", __version__)

    def end(self, report: RequestReport, headers: Headers) -> None:
        """The spans of a request that has ended."""
        trace = self._trace
        # Of several values of one header the first counts, as for the other headers.
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(headers))}
        parent = self._propagator.extract(carrier)
        since = time.time_ns() - time.monotonic_ns()

        def wall(when: float | None) -> int:
            assert when is not None
            return since + int(when * 1e9)

        span = self._tracer.start_span(
            SPAN, parent, kind=trace.SpanKind.SERVER, attributes=_attributes(report), start_time=wall(report.accepted)
        )
        if (report.status or 0) >= _SERVER_ERROR or "error" in report.reasons:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        ends = (report.accepted, report.scheduled, report.first, report.ended)
        for name, begin, end in zip(("queue", "prefill", "decode"), ends, ends[1:], strict=False):
            if end is None or report.params is None:
                break
            self._tracer.start_span(name, inside, start_time=wall(begin)).end(wall(end))
        span.end(wall(report.ended))

    def close(self) -> None:
        """Send what is left, within CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("the last spans were not sent: the collector does not answer")


def traces_url(endpoint: str) -> str:
    """The URL that spans are sent to. Raises OptionError where it is none of HTTP."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(
            f"otlp_traces_endpoint={endpoint!r} is not a URL of HTTP", why="spans are sent as OTLP over HTTP",
            next="give http://HOST:4318, or its whole URL",
        )  # fmt: skip
    return urlunsplit(parts._replace(path=DEFAULT_PATH)) if parts.path in ("", "/") else endpoint


def _attributes(report: RequestReport) -> dict[str, AttributeValue]:
    """Those of the request's span, by vLLM's names; of a request that generated nothing the first ones."""
    attributes: dict[str, AttributeValue] = {"gen_ai.request.id": report.request_id, "http.route": report.path}
    if report.status is not None:
        attributes["http.response.status_code"] = report.status
    params = report.params
    if params is None:
        return attributes
    queue, first, total = map(report.seconds_to, (report.scheduled, report.first, report.ended))
    latencies = {
        "time_in_queue": queue,
        "time_to_first_token": first,
        "e2e": total,
        "time_in_model_prefill": None if queue is None or first is None else first - queue,
        "time_in_model_decode": None if first is None or total is None else total - first,
        "time_in_model_inference": None if queue is None or total is None else total - queue,
    }
    requested = {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p, "n": params.n}
    return {
        **attributes,
        "gen_ai.response.model": report.model,
        "gen_ai.response.finish_reasons": report.reasons,
        "gen_ai.usage.prompt_tokens": report.prompt_tokens,
        "gen_ai.usage.completion_tokens": report.completion_tokens,
        **{f"gen_ai.request.{name}": value for name, value in requested.items() if value is not None},
        **{f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items() if seconds is not None},
    }
