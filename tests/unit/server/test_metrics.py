from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from infer.engine.request import Request
from infer.errors import EngineStopped
from infer.sampling.params import SamplingParams
from infer.server.access_log import _RECORD, RequestRecord
from infer.server.metrics import FIRST_TOKEN_S, REQUEST_S, TOKEN_S, Histogram, ServerMetrics
from infer.server.observed import ObservedClient
from tests.support.app import Site
from tests.support.fake_client import FakeClient


def request(max_tokens: int = 5, n: int = 1) -> Request:
    return Request(request_id="r", prompt=tuple(range(7)), params=SamplingParams(max_tokens=max_tokens, n=n))


def numbers(metrics: ServerMetrics) -> dict[str, float]:
    rows = (line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


LABELS = '{engine="0",model_name="m"}'


@given(st.lists(st.floats(0, 3000)))
def test_a_histogram_counts_what_is_not_above_each_bound(values: list[float]) -> None:
    histogram = Histogram(FIRST_TOKEN_S)
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= float(bound) for value in values)
    assert histogram.total == pytest.approx(sum(values))


def test_buckets_rise() -> None:
    for bounds in (FIRST_TOKEN_S, TOKEN_S, REQUEST_S):
        assert list(bounds) == sorted(set(bounds))
    assert (len(FIRST_TOKEN_S), len(TOKEN_S), len(REQUEST_S)) == (22, 19, 21)


def test_a_request_leaves_its_counts_and_times() -> None:
    metrics = ServerMetrics("infer")
    client = ObservedClient(FakeClient(delay_s=0.002), "m", metrics)

    async def read() -> int:
        return len([output async for output in client.generate(request(max_tokens=5, n=2))])

    assert asyncio.run(read()) == 10
    found = numbers(metrics)
    assert found[f"infer_prompt_tokens_total{LABELS}"] == 7
    assert found[f"infer_prompt_tokens_cached_total{LABELS}"] == 4
    assert found[f"infer_generation_tokens_total{LABELS}"] == 10
    assert found[f"infer_time_to_first_token_seconds_count{LABELS}"] == 1
    assert found[f"infer_inter_token_latency_seconds_count{LABELS}"] == 8
    first = found[f"infer_time_to_first_token_seconds_sum{LABELS}"]
    between = found[f"infer_inter_token_latency_seconds_sum{LABELS}"] / 2
    assert found[f"infer_e2e_request_latency_seconds_sum{LABELS}"] == pytest.approx(first + between, abs=1e-3)
    per_token = found[f"infer_request_time_per_output_token_seconds_sum{LABELS}"]
    assert per_token == pytest.approx(between / 4, abs=1e-3)
    assert found['infer_request_success_total{engine="0",finished_reason="length",model_name="m"}'] == 1


@pytest.mark.parametrize(("is_gone", "reason"), [(True, "abort"), (False, "stop")])
def test_a_reader_that_stops_early_has_left_or_has_seen_enough(is_gone: bool, reason: str) -> None:
    metrics = ServerMetrics("infer")
    fake = FakeClient()
    client = ObservedClient(fake, "m", metrics)

    async def read_two() -> None:
        record = RequestRecord(request_id="x", arrived_at=0.0)
        _RECORD.set(record)
        async with aclosing(client.generate(request(max_tokens=50))) as outputs:
            async for _ in outputs:
                if record.is_gone:
                    break
                if client.meter.num_output_tokens == 2:
                    record.is_gone = is_gone
                    break
        assert record.num_output_tokens == 2

    asyncio.run(read_two())
    assert client.meter.finished == {reason: 1}
    assert fake.num_open == 0, "leaving the outer iterator closes the inner one"


def test_a_failure_is_counted_and_passed_on() -> None:
    fake = FakeClient()
    fake.failure = EngineStopped("dead")
    metrics = ServerMetrics("infer")
    client = ObservedClient(fake, "m", metrics)

    async def read() -> None:
        async for _ in client.generate(request()):
            pass

    with pytest.raises(EngineStopped):
        asyncio.run(read())
    assert client.meter.finished == {"error": 1}
    assert numbers(metrics)[f"infer_engine_up{LABELS}"] == 0


def test_gauges_are_the_engine_s_last_snapshot() -> None:
    site = Site(FakeClient(), FakeClient())
    stats = site.clients[1].snapshot
    site.clients[1].snapshot = replace(
        stats, num_running=3, num_waiting=2, num_used_blocks=6, num_hit_tokens=9
    )
    found = site.metrics()
    labels = '{engine="1",model_name="fake"}'
    assert found[f"infer_num_requests_running{labels}"] == 3
    assert found[f"infer_num_requests_waiting{labels}"] == 2
    assert found[f"infer_kv_cache_usage_perc{labels}"] == 0.75
    assert found[f"infer_prefix_cache_hits_total{labels}"] == 9
    assert found['infer_num_requests_running{engine="0",model_name="fake"}'] == 0


VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "prompt_tokens_cached",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
]


def test_the_vllm_prefix_gives_the_names_of_its_dashboards() -> None:
    site = Site(metrics_prefix="vllm")
    response = site.request("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(response.text)}
    assert {f"vllm:{name}" for name in VLLM_NAMES} <= families


def test_http_requests_are_counted_by_route_and_status_not_by_path() -> None:
    site = Site()
    site.request("GET", "/health")
    for number in range(3):
        site.request("GET", f"/nowhere/{number}")
    found = site.metrics()
    assert found['infer_http_requests_total{method="GET",route="/health",status="200"}'] == 1
    assert found['infer_http_requests_total{method="GET",route="unmatched",status="404"}'] == 3
    assert found["infer_http_requests_active"] == 0
