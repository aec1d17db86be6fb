"""Spans of requests; those that need OpenTelemetry's SDK are skipped where it is not installed."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import logging
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest.mock import MagicMock

import pytest

from infer.config.server import ServerConfig
from infer.errors import ConfigError
from infer.server import tracing
from infer.server.fleet.metered_client import MeteredClient
from infer.server.state import RequestRecord, recording
from infer.server.tracing import Tracing, with_path
from tests.support.app import Site
from tests.support.fake_client import FakeClient
from tests.unit.server.test_metrics import request

ENDPOINT = "http://127.0.0.1:4318"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def has_sdk() -> bool:
    names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
    try:
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        return False


needs_sdk = pytest.mark.skipif(not has_sdk(), reason="OpenTelemetry's SDK is not installed")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (ENDPOINT, ENDPOINT + "/v1/traces"),
        (ENDPOINT + "/", ENDPOINT + "/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
)
def test_a_collector_without_a_path_gets_that_of_otlp(given: str, used: str) -> None:
    assert with_path(given) == used


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be a URL such as"):
        ServerConfig(otlp_traces_endpoint="127.0.0.1:4317")


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(tracing, "import_module", absent)
    with pytest.raises(ConfigError, match=r"pip install 'infer\[otel\]'"):
        Site(otlp_traces_endpoint=ENDPOINT)


def test_a_server_without_traces_does_not_import_the_sdk() -> None:
    """Other packages may import OpenTelemetry's API, which is small and does nothing by itself."""
    code = (
        "import sys; from infer.server import create_app; create_app();"
        "print([n for n in sys.modules if n.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout == "[]\n", done.stderr


async def _read_all(record: RequestRecord, client: MeteredClient) -> None:
    with recording(record):
        async for _ in client.generate(request()):
            pass


@pytest.mark.parametrize("is_traced", [False, True])
def test_stages_follow_each_other_and_are_noted_only_where_a_request_is_traced(is_traced: bool) -> None:
    record = RequestRecord("r", 0.0, spans=[] if is_traced else None)
    asyncio.run(_read_all(record, MeteredClient(FakeClient(), ("m", "0"), None)))
    if not is_traced:
        assert record.spans is None
        return
    assert record.spans is not None
    queue, prefill, decode = record.spans
    assert [span.name for span in record.spans] == ["queue", "prefill", "decode"]
    assert queue.start <= queue.end == prefill.start <= prefill.end == decode.start <= decode.end
    assert prefill.facts["gen_ai.usage.input_tokens"] == 7
    assert decode.facts["gen_ai.usage.output_tokens"] == 5
    assert decode.facts["gen_ai.response.finish_reason"] == "length"


def test_what_the_sdk_logs_is_one_warning_that_names_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracing, "import_module", lambda name: MagicMock())  # a SDK that sends nothing
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "propagate", False)  # only the server's handlers
    sdk = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    sending = Tracing(ENDPOINT)
    for _ in range(3):
        sdk.warning("Transient error %s encountered while exporting", "HTTPConnectionPool(...)")
    sdk.error("Failed to export spans batch due to timeout, max retries or shutdown.")
    said = f"cannot send to otlp_traces_endpoint={ENDPOINT}: Transient error HTTPConnectionPool(...)"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [f"{said} encountered while exporting"]
    monkeypatch.setattr(sending._warning, "_next_at", 0.0)
    sdk.error("Failed")
    assert caplog.messages[1:] == [f"cannot send to otlp_traces_endpoint={ENDPOINT}: Failed"]
    assert capsys.readouterr().err == "", "nothing comes from Python's last resort"
    sending.close()
    assert not logging.getLogger("opentelemetry").handlers


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> tuple[Site, Any, Tracing]:
    """A site whose spans are kept in memory."""
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    kept = Tracing(ENDPOINT, exporter)
    monkeypatch.setattr("infer.server.app.Tracing", lambda endpoint: kept)
    return Site(otlp_traces_endpoint=ENDPOINT), exporter, kept


@needs_sdk
def test_a_request_continues_the_trace_of_its_client(traced: tuple[Site, Any, Tracing]) -> None:
    site, exporter, kept = traced
    answer = site.request("GET", "/version", headers={"traceparent": PARENT})
    kept.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET /version" and span.kind.name == "SERVER"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", "0af7651916cd43dd8448eb211c80319c", "01")
    assert span_id == f"{span.context.span_id:016x}"
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["infer.request_id"] == answer.headers["x-request-id"]
    assert span.start_time < span.end_time
    assert span.resource.attributes["service.name"] == "infer"


@needs_sdk
@pytest.mark.parametrize("given", ["rubbish", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", ""])
def test_a_traceparent_that_means_nothing_begins_a_trace(
    traced: tuple[Site, Any, Tracing], given: str
) -> None:
    site, exporter, kept = traced
    assert site.request("GET", "/version", headers={"traceparent": given}).status_code == 200
    kept.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


@needs_sdk
def test_a_client_that_does_not_sample_gets_no_span(traced: tuple[Site, Any, Tracing]) -> None:
    site, exporter, kept = traced
    answer = site.request("GET", "/version", headers={"traceparent": PARENT[:-1] + "0"})
    kept.close()
    assert exporter.get_finished_spans() == ()
    assert answer.headers["traceparent"].endswith("-00")


@needs_sdk
def test_polls_are_not_traced_and_refusals_are(traced: tuple[Site, Any, Tracing]) -> None:
    site, exporter, kept = traced
    for path in ("/health", "/metrics", "/nothing"):
        site.request("GET", path)
    kept.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "GET unmatched" and span.attributes["http.response.status_code"] == 404


@needs_sdk
def test_stages_are_children_of_the_request(traced: tuple[Site, Any, Tracing]) -> None:
    _, exporter, kept = traced
    record = RequestRecord("req-1", 0.0)
    scope = {"type": "http", "method": "POST", "headers": []}
    span = kept.begin(scope, record)
    assert record.spans == []
    asyncio.run(_read_all(record, MeteredClient(FakeClient(), ("m", "0"), None)))
    record.status = 200
    kept.end(span, scope, record, "/v1/completions")
    kept.close()
    *stages, parent = exporter.get_finished_spans()
    assert [stage.name for stage in stages] == ["queue", "prefill", "decode"]
    assert {stage.parent.span_id for stage in stages} == {parent.context.span_id}
    assert parent.name == "POST /v1/completions"
    assert parent.attributes["gen_ai.usage.output_tokens"] == 5


@needs_sdk
def test_a_collector_gets_the_spans_over_http() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.handle_request)
        thread.start()
        sending = Tracing(f"http://127.0.0.1:{collector.server_port}")
        record = RequestRecord("req-1", 0.0, status=200)
        scope = {"type": "http", "method": "POST", "headers": []}
        sending.end(sending.begin(scope, record), scope, record, "/v1/completions")
        sending.close()
        thread.join(60)
    ((path, body),) = received
    message = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    sent = message.ExportTraceServiceRequest.FromString(
        gzip.decompress(body) if body[:1] == b"\x1f" else body
    )
    assert path == "/v1/traces"
    assert sent.resource_spans[0].scope_spans[0].spans[0].name == "POST /v1/completions"
