from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from infer.bench.scrape import read_counters
from infer.client.client import InProcessClient
from infer.config.settings import CacheConfig
from infer.engine.stats import STEP_TOKENS, EngineStats, Histogram, add_counters
from infer.errors import EngineError, EngineStopped, QueueFull
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.server.app import build_app
from infer.server.fleet.metered_client import FIRST_TOKEN_S, REQUEST_S, TOKEN_S, MeteredClient
from infer.server.metrics import ServerMetrics
from infer.server.protocol.generation import merge
from infer.server.state import RequestRecord, recording
from infer.tools.nvml import GpuReading
from tests.support.app import Site
from tests.support.fake_client import FakeClient
from tests.support.wire import ScriptedClient, make_state, outputs_of


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
    client = metrics.add("m", FakeClient(delay_s=0.002))

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


def read_two(client: MeteredClient, end: str) -> None:
    """Read two tokens of each choice, then stop in one of several ways."""

    async def read() -> None:
        async with aclosing(client.generate(request(max_tokens=50))) as outputs:
            async for _ in outputs:
                if client.counts["generation_tokens"] == 2:
                    break
            if end == "time is up":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await asyncio.sleep(0)
                        await anext(outputs)
            elif end == "a stop string":
                client.abort("r", 0)
            elif end == "the client left":
                record.is_gone = True
        assert record.num_output_tokens == 2

    record = RequestRecord(request_id="x", arrived_at=0.0)
    with recording(record):
        asyncio.run(read())


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("a stop string", "stop"),
        ("the client left", "abort"),
        ("time is up", "abort"),
        ("closed by whoever serves it", "abort"),
    ],
)
def test_a_reader_that_stops_early_has_seen_enough_only_if_it_says_so(end: str, reason: str) -> None:
    fake = FakeClient()
    client = ServerMetrics("infer").add("m", fake)
    read_two(client, end)
    assert client.finished == {reason: 1}
    assert fake.num_open == 0, "leaving the outer iterator closes the inner one"


@pytest.mark.parametrize(("says_so", "reason"), [(True, "stop"), (False, "abort")])
def test_an_abort_of_the_engine_is_a_stop_only_for_the_reader_who_asked(says_so: bool, reason: str) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, [5, 6], "abort"):
            yield output

    client = ServerMetrics("infer").add("m", ScriptedClient(script))

    async def read() -> None:
        async for _ in client.generate(request()):
            if says_so:
                client.abort("r", 0)

    asyncio.run(read())
    assert client.finished == {reason: 1}


def test_of_two_choices_one_that_is_cut_off_makes_the_request_an_abort() -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield outputs_of(request, [5])[0]  # choice 0 has ended with "length"
        await asyncio.sleep(3600)

    client = ServerMetrics("infer").add("m", ScriptedClient(script))

    async def read() -> None:
        async with asyncio.timeout(0.01), aclosing(client.generate(request(n=2))) as outputs:
            async for _ in outputs:
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(read())
    assert client.finished == {"abort": 1}


def test_when_one_prompt_of_a_body_fails_the_others_are_aborts() -> None:
    async def fails(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield outputs_of(request, [5, 6])[0]
        raise EngineStopped("dead")

    async def hangs(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield outputs_of(request, [5, 6])[0]
        await asyncio.sleep(3600)

    metrics = ServerMetrics("infer")
    clients = [metrics.add("m", ScriptedClient(script)) for script in (fails, hangs)]

    async def read() -> None:
        async with aclosing(merge([client.generate(request()) for client in clients])) as outputs:
            async for _ in outputs:
                pass

    with pytest.raises(EngineStopped):
        asyncio.run(read())
    assert [client.finished for client in clients] == [{"error": 1}, {"abort": 1}]


def test_a_request_that_runs_out_of_time_over_http_is_an_abort(oracle: LLM) -> None:
    async def hangs(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield outputs_of(request, [5, 6])[0]
        await asyncio.sleep(3600)

    state = make_state(oracle.encoder, ScriptedClient(hangs))
    app = build_app(state)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            return await client.post("/v1/completions", json={"prompt": "a", "timeout": 0.01})

    assert asyncio.run(ask()).status_code == 504
    (meter,) = app.state.metrics.meters
    assert meter.finished == {"abort": 1}


def test_a_request_whose_engine_dies_is_an_error() -> None:
    async def dies(request: Request) -> AsyncGenerator[StepOutput, None]:
        script.failure = EngineStopped("dead")
        raise script.failure
        yield outputs_of(request, [5])[0]

    script, metrics = ScriptedClient(dies), ServerMetrics("infer")
    client = metrics.add("m", script)
    read_all(client, EngineStopped)
    assert client.finished == {"error": 1}
    assert numbers(metrics)[f"infer_engine_up{LABELS}"] == 0


@pytest.mark.parametrize("prefix", ["infer_", "vllm:"])
def test_a_prompt_that_does_not_fit_is_no_success_but_an_error_by_its_code(
    oracle: LLM, client: InProcessClient, prefix: str
) -> None:
    site = Site(metrics_prefix=prefix[:-1])
    app = site.app = build_app(make_state(oracle.encoder, client, metrics_prefix=prefix[:-1]))
    body = {"prompt": [5] * 1000, "max_tokens": 1}
    assert site.request("POST", "/v1/completions", json=body).status_code == 422
    (meter,) = app.state.metrics.meters
    assert meter.finished.total() == 0
    found = site.metrics()
    assert {value for name, value in found.items() if name.startswith(f"{prefix}request_success")} == {0}
    assert found[f'{prefix}http_errors_total{{code="context_length_exceeded"}}'] == 1


@pytest.mark.parametrize(
    "failure", [QueueFull("too many are waiting"), EngineStopped("the engine is being restarted")]
)
def test_a_request_that_an_engine_does_not_take_is_in_no_count_of_ends(failure: EngineError) -> None:
    fake = FakeClient()
    fake.failure = failure
    client = ServerMetrics("infer").add("m", fake)
    read_all(client, type(failure))
    assert client.finished.total() == 0


def read_all(client: MeteredClient, raises: type[Exception]) -> None:
    async def read() -> None:
        async for _ in client.generate(request()):
            pass

    with pytest.raises(raises):
        asyncio.run(read())


def test_a_stream_that_breaks_off_is_an_error_though_its_status_is_200(oracle: LLM) -> None:
    async def fails(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield outputs_of(request, [5, 6])[0]
        raise EngineStopped("dead")

    site = Site()
    site.app = build_app(make_state(oracle.encoder, ScriptedClient(fails)))
    body = {"prompt": "a", "stream": True}
    assert site.request("POST", "/v1/completions", json=body).status_code == 200
    assert site.metrics()['infer_http_errors_total{code="503"}'] == 1


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


# Every series that the queries of vLLM's Grafana dashboard (examples/observability/prometheus_grafana) name.
DASHBOARD = [
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
]
# What other dashboards of its users read.
OTHERS = [
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_cached_total",
    "request_time_per_output_token_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "iteration_tokens_total_bucket",
    "iteration_tokens_total_sum",
    "iteration_tokens_total_count",
    "grammar_compile_seconds_bucket",
    "grammar_failures_total",
    "cache_config_info",
]


@pytest.mark.parametrize(("prefix", "second"), [("vllm", "vllm:"), ("our", "our_")])
def test_a_prefix_adds_names_and_takes_none_away(prefix: str, second: str) -> None:
    def values(page: str, start: str) -> list[str]:
        return [line.removeprefix(start) for line in page.splitlines() if line.startswith(start)]

    plain = Site().request("GET", "/metrics").text
    page = Site(metrics_prefix=prefix).request("GET", "/metrics").text
    own = [line.split("{")[0] for line in values(plain, "infer_") if "startup" not in line]
    assert own == [line.split("{")[0] for line in values(page, "infer_") if "startup" not in line]
    renamed = [line.replace("iteration_tokens_total", "iteration_tokens") for line in values(page, second)]
    assert renamed == values(page, "infer_"), "with the same values"
    assert len(values(page, "vllm:iteration_tokens_total_count")) == (prefix == "vllm")
    assert read_counters(page) == read_counters(plain), "and a series is counted once"


ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
UNITS = {"seconds", "bytes", "celsius", "watts", "meters", "grams", "volts", "amperes", "joules", "kelvin"}
SCALED = re.compile(r"^(nano|micro|milli|centi|deci|deca|hecto|kilo|mega|giga|tera|peta|kibi|mebi|gibi|tebi)")


def lint(family: Metric) -> list[str]:
    """What promtool's `check metrics` has against a family, rule by rule."""
    words, names = family.name.split("_"), {sample.name for sample in family.samples}
    labels = {label for sample in family.samples for label in sample.labels}
    is_counter, is_histogram = family.type == "counter", family.type in ("histogram", "summary")
    found = {
        "no help": not family.documentation.strip(),
        "a counter without _total": is_counter and not all(name.endswith("_total") for name in names),
        "_total without a counter": not is_counter and family.name.endswith("_total"),
        "the end of a histogram": family.name.endswith(("_bucket", "_count", "_sum")),
        "the label of a histogram": not is_histogram and bool(labels & {"le", "quantile"}),
        "its type in the name": bool({"gauge", "counter", "histogram", "summary"} & set(words)),
        "a colon": ":" in family.name,
        "capital letters": family.name != family.name.lower(),
        "an abbreviated unit": bool(ABBREVIATIONS & set(words)),
        "a unit that is not a base unit": any(
            SCALED.match(word)
            and SCALED.sub("", word) in UNITS
            or word in ("minutes", "hours", "days", "bits")
            for word in words
        ),
    }
    return [rule for rule, is_broken in found.items() if is_broken]


def test_names_follow_the_rules_that_promtool_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.server.metrics.read_gpu", lambda name: GpuReading(1, 2, 0.5, 0.5, 90.0, 40.0))
    metrics = ServerMetrics("infer")
    client = FakeClient()
    monkeypatch.setattr(client, "stats", lambda: EngineStats(gpu="GPU-1"))
    metrics.add("m", client)
    families = list(metrics.collect())
    assert any("gpu" in family.name for family in families)
    assert {family.name: lint(family) for family in families if lint(family)} == {}
    bad = HistogramMetricFamily("infer_steps_total", "")
    assert lint(bad) == ["no help", "_total without a counter"]


def test_the_vllm_prefix_gives_every_series_its_dashboards_read() -> None:
    site = Site(metrics_prefix="vllm")
    response = site.request("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    assert len({family.name for family in families}) == len(families), "a family is written once"
    samples = {sample.name for family in families for sample in family.samples}
    assert {f"vllm:{name}" for name in (*DASHBOARD, *OTHERS)} <= samples
    labels = [sample.labels for family in families for sample in family.samples if "http" not in family.name]
    assert all(each["model_name"] == "fake" for each in labels if each)
    reasons = {each["finished_reason"] for each in labels if "finished_reason" in each}
    assert reasons == {"stop", "length", "abort", "error"}, "also those that have not happened yet"


def test_the_parts_of_a_request_s_time_add_up() -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        await asyncio.sleep(0.02)
        for output in outputs_of(request, [5, 6, 7]):
            yield msgspec.structs.replace(output, queue_s=0.01)
            await asyncio.sleep(0.002)

    metrics = ServerMetrics("infer")
    client = metrics.add("m", ScriptedClient(script))

    async def read() -> None:
        async for _ in client.generate(request(max_tokens=3)):
            pass

    asyncio.run(read())
    found = numbers(metrics)

    def total(name: str) -> float:
        assert found[f"infer_{name}_count{LABELS}"] == 1
        return found[f"infer_{name}_sum{LABELS}"]

    prefill, decode = total("request_prefill_time_seconds"), total("request_decode_time_seconds")
    assert prefill >= 0.009 and decode >= 0.004
    assert total("request_inference_time_seconds") == pytest.approx(prefill + decode)
    assert (
        total("e2e_request_latency_seconds") >= prefill + decode + total("request_queue_time_seconds") - 1e-6
    )
    assert total("request_max_num_generation_tokens") == 3
    assert total("request_params_max_tokens") == 3


def test_the_longest_choice_and_all_choices_are_told_apart() -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, [5, 6, 7]):
            yield output
        yield msgspec.structs.replace(outputs_of(request, [5])[0], index=1)

    metrics = ServerMetrics("infer")
    client = metrics.add("m", ScriptedClient(script))

    async def read() -> None:
        async for _ in client.generate(request(n=2)):
            pass

    asyncio.run(read())
    found = numbers(metrics)
    assert found[f"infer_request_max_num_generation_tokens_sum{LABELS}"] == 3
    assert found[f"infer_request_generation_tokens_sum{LABELS}"] == 4


def test_steps_and_cache_are_the_engine_s_own(oracle: LLM, client: InProcessClient) -> None:
    """Every step of a real engine is in the histogram, and each token it saw in the sum."""
    for _ in range(1000):  # the last snapshot of an earlier question may still be on its way
        if not (client.stats().num_running or client.stats().num_waiting):
            break
        time.sleep(0.01)
    before = client.stats()
    wire_app = build_app(make_state(oracle.encoder, client))

    async def ask() -> None:
        transport = httpx.ASGITransport(wire_app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as http:
            body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 4, "ignore_eos": True, "cache_salt": "own"}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        for _ in range(1000):  # the answer may overtake the snapshot
            if client.stats().num_steps - before.num_steps >= 4:
                break
            await asyncio.sleep(0.01)

    asyncio.run(ask())
    after = client.stats()
    steps = [b - a for a, b in zip(before.step_sizes, after.step_sizes, strict=True)]
    assert sum(steps) == after.num_steps - before.num_steps == 4
    assert (steps[0], steps[1]) == (3, 1), "one step for the prompt of 5, three of one token"
    assert after.num_step_tokens - before.num_step_tokens == 5 + 3
    page = wire_app.state.metrics.text().decode()
    sizes = f'infer_iteration_tokens_count{{engine="0",model_name="tiny"}} {float(after.num_steps)}'
    assert sizes in page
    assert (
        'infer_cache_config_info{block_size="4",engine="0",model_name="tiny",num_gpu_blocks="256"} 1.0'
        in page
    )


def test_counters_of_an_engine_s_lives_add_up_and_gauges_do_not() -> None:
    sizes = (1, *(0,) * len(STEP_TOKENS))
    past = EngineStats(num_steps=3, num_running=2, num_restarts=1, step_sizes=sizes, num_blocks=8)
    now = EngineStats(num_steps=4, num_running=1, step_sizes=sizes, num_blocks=8)
    total = add_counters(now, past)
    assert (total.num_steps, total.num_running, total.num_restarts, total.num_blocks) == (7, 1, 1, 8)
    assert total.step_sizes[0] == 2
    assert add_counters(EngineStats(), past).step_sizes == sizes
    assert add_counters(now, EngineStats()) == now


def test_times_of_ranks_are_shown_where_there_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, alone, shared = ServerMetrics("infer"), FakeClient(), FakeClient()
    metrics.add("a", alone)
    metrics.add("b", shared)
    assert "infer_rank" not in metrics.text().decode()
    stats = EngineStats(rank_step_s=9.5, rank_wait_s=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    monkeypatch.setattr(metrics.meters[1], "stats", lambda: stats)
    rows = [line for line in metrics.text().decode().splitlines() if line.startswith("infer_rank")]
    assert rows[0] == 'infer_rank_step_seconds_total{engine="0",model_name="b"} 9.5'
    assert rows[2] == 'infer_rank_wait_seconds_total{engine="0",model_name="b",rank="0",wait="stage"} 2.0'
    assert rows[6] == 'infer_rank_wait_seconds_total{engine="0",model_name="b",rank="1",wait="order"} 6.0'
    assert len(rows) == 7


def test_a_new_engine_gets_a_number_that_is_free() -> None:
    metrics = ServerMetrics("infer")
    clients = [metrics.add("m", FakeClient()) for _ in range(3)]
    assert [client.labels[1] for client in clients] == ["0", "1", "2"]
    metrics.remove(clients[0])
    assert metrics.add("m", FakeClient()).labels == ("m", "0")


def test_http_requests_are_counted_by_route_and_status_not_by_path() -> None:
    site = Site()
    site.request("GET", "/health")
    for number in range(3):
        site.request("GET", f"/nowhere/{number}")
    found = site.metrics()
    assert found['infer_http_requests_total{method="GET",route="/health",status="200"}'] == 1
    assert found['infer_http_requests_total{method="GET",route="unmatched",status="404"}'] == 3
    assert found["infer_http_requests_active"] == 0


@pytest.mark.parametrize(
    ("method", "path", "status", "options"),
    [
        ("POST", "/v1/completions", 503, {"json": {"prompt": "a"}}),  # it drains
        ("POST", "/v1/completions", 413, {"content": b" " * 2000}),
        ("POST", "/admin/drain", 401, {}),
        ("GET", "/health", 403, {"headers": {"host": "elsewhere.example"}}),
        ("GET", "/openapi.json", 503, {}),
    ],
)
def test_a_refusal_before_the_routes_is_counted_under_the_route_it_was_for(
    method: str, path: str, status: int, options: dict[str, Any]
) -> None:
    site = Site(admin_key="admin-key-of-the-test", max_body_size="1KiB")
    site.app = build_app(site.state, check_host=True)
    site.state.board.is_draining = True
    headers = {"host": "localhost"} | options.pop("headers", {})
    assert site.request(method, path, headers=headers, **options).status_code == status
    row = f'infer_http_requests_total{{method="{method}",route="{path}",status="{status}"}}'
    assert site.metrics()[row] == 1


@pytest.mark.parametrize(
    ("backend", "is_on"), [("paged", "True"), ("contiguous", "False"), ("naive", "False")]
)
def test_the_metrics_say_whether_prefixes_are_cached_and_not_whether_it_was_asked(
    backend: str, is_on: str
) -> None:
    client = ServerMetrics("infer").add("m", FakeClient())
    client.cache = CacheConfig(use_prefix_caching=True, kv_cache_backend=backend)
    assert client.cache_labels["enable_prefix_caching"] == is_on
