"""OpenTelemetry traces: they show a collector where the time of each request went.

    POST /v1/chat/completions  ├────────────────────────────────────────────┤   the HTTP request
      queue                       ├──────┤                                      until its first step
      prefill                            ├────────┤                             until its first token
      decode                                      ├──────────────────────┤      until its last

A request with a `traceparent` header (W3C) continues the client's trace, and is skipped if the client has not
sampled it. Every traced response has a `traceparent` that names its span.

The server records times anyway, for its metrics. Spans are made from them when a request has ended, and a
thread of OpenTelemetry's SDK sends them; a slow or dead collector does not delay requests. The SDK comes with
`pip install 'infer[otel]'` and is imported only if `otlp_traces_endpoint` is set.
"""

from __future__ import annotations

import logging
from importlib import import_module
from time import perf_counter, time_ns
from typing import Any

from starlette.types import Scope

from infer import __version__
from infer.errors import ConfigError
from infer.server.asgi_call import Headers
from infer.server.state import RequestRecord

TRACEPARENT = "traceparent"
PATH = "/v1/traces"  # path of OTLP over HTTP at a collector
SDK = "opentelemetry"  # logger above all of the SDK's
REPEAT_S = 300.0  # seconds between two warnings

logger = logging.getLogger(__name__)


class CollectorWarning(logging.Handler):
    """Turns the SDK's several lines for each lost batch into one warning that names the endpoint."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint, self._next_at = endpoint, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Log the first line, and drop the lines of the next `REPEAT_S` seconds."""
        if perf_counter() >= self._next_at:
            self._next_at = perf_counter() + REPEAT_S
            logger.warning("cannot send to otlp_traces_endpoint=%s: %s", self._endpoint, record.getMessage())


class Tracing:
    """Makes spans of requests and sends them to a collector; tests pass their own `exporter`."""

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        try:
            sdk = import_module("opentelemetry.sdk.trace")
            export = import_module("opentelemetry.sdk.trace.export")
            resources = import_module("opentelemetry.sdk.resources")
            propagation = import_module("opentelemetry.trace.propagation.tracecontext")
            self._api: Any = import_module("opentelemetry.trace")
            if exporter is None:
                otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
                exporter = otlp.OTLPSpanExporter(endpoint=with_path(endpoint))
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs OpenTelemetry's SDK, which is not installed ({error.name}); "
                "pip install 'infer[otel]', or leave it out"
            ) from None
        own = {"service.name": "infer", "service.version": __version__}
        described = resources.Resource(own).merge(resources.OTELResourceDetector().detect())
        self._provider = sdk.TracerProvider(resource=described)
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("infer", __version__)
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._warning = CollectorWarning(endpoint)
        logging.getLogger(SDK).addHandler(self._warning)
        self._offset_ns = time_ns() - int(1e9 * perf_counter())  # time of day minus perf_counter

    def begin(self, scope: Scope, record: RequestRecord) -> Any:
        """Open the span of an HTTP request, a child of the client's span if there is one."""
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        carrier = {name: value for name, value in headers if name in (TRACEPARENT, "tracestate")}
        span = self._tracer.start_span(
            scope["method"],
            context=self._propagator.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            start_time=self._at(record.arrived_at),
        )
        record.spans = [] if span.is_recording() else None
        return span

    def headers(self, span: Any) -> Headers:
        """Return the response header that names a span; none if the SDK is disabled."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._api.set_span_in_context(span))
        return [(TRACEPARENT.encode(), carrier[TRACEPARENT].encode())] if TRACEPARENT in carrier else []

    def end(self, span: Any, scope: Scope, record: RequestRecord, route: str) -> None:
        """Close the span of a request and add the spans of its stages."""
        parent = self._api.set_span_in_context(span)
        for name, start, end, facts in record.spans or ():
            stage = self._tracer.start_span(name, parent, start_time=self._at(start), attributes=facts)
            stage.end(end_time=self._at(end))
        span.update_name(f"{scope['method']} {route}")
        told: dict[str, str | int | None] = {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": record.status,
            "infer.request_id": record.request_id,
            "gen_ai.request.model": record.model_name,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "error.type": None if record.error is None else str(record.error.code or record.error.status),
        }
        span.set_attributes({name: value for name, value in told.items() if value is not None})
        if record.status >= 500 or (record.error is not None and record.status < 400):  # a broken stream
            span.set_status(self._api.StatusCode.ERROR)
        span.end(end_time=self._at(perf_counter()))

    def close(self) -> None:
        """Send the remaining spans; the SDK also does this when the process exits."""
        self._provider.shutdown()
        logging.getLogger(SDK).removeHandler(self._warning)

    def _at(self, seconds: float) -> int:
        return self._offset_ns + int(1e9 * seconds)


def with_path(endpoint: str) -> str:
    """Return the address of a collector, with the path of OTLP appended if it has no path."""
    scheme, _, rest = endpoint.partition("://")
    return endpoint if rest.partition("/")[2] else f"{scheme}://{rest.rstrip('/')}{PATH}"
