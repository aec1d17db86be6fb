from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import astuple, replace

from infer.bench.simulated import compare, simulate
from infer.bench.traces import LOADS, TraceRequest, draw_trace, read_trace, to_workload
from infer.cache.layout import COPY, Transfer
from infer.config.settings import EngineConfig
from infer.engine.run_manifest import RunFacts
from infer.errors import ConfigError
from infer.scheduling.plan import Chunk, Chunks, StepPlan
from infer.scheduling.request import Request
from infer.tools.record import Record, Recorder
from infer.tools.step_cost import Ranks, StepCost, fit_cost, read_cost
from tests.unit.tools.recorded_runs import make_facts

ONE_SECOND = StepCost(base=1.0, per_token=0.0, per_kv_token=0.0, per_block=0.0)


def run(trace: list[TraceRequest], cost: StepCost = ONE_SECOND, **knobs: Any) -> SimpleNamespace:
    config = EngineConfig.from_knobs(**{"num_blocks": 64, "block_size": 4} | knobs)
    return SimpleNamespace(**simulate(to_workload("trace", trace), config, cost))


def ask(arrival: float, prompt_len: int, output_len: int, **more: Any) -> TraceRequest:
    return TraceRequest(arrival=arrival, prompt_len=prompt_len, output_len=output_len, **more)


# -- the clock and the figures, by hand ---------------------------------------------------------------


def test_one_request_alone_takes_a_step_per_token() -> None:
    result = run([ask(10.0, 6, 5)])
    assert result.num_steps == 5
    assert result.seconds == 15.0
    assert (result.ttft_p50, result.itl_p50, result.longest_gap) == (1.0, 1.0, 1.0)
    assert result.longest_queue_wait == 0.0
    assert result.output_tokens_per_second == pytest.approx(5 / 15)
    assert (result.num_finished, result.num_refused, result.num_preemptions) == (1, 0, 0)


def test_a_request_waits_in_the_queue_while_the_batch_is_full() -> None:
    """Two places: the third request, come at 1.0, starts when the first is done, at 3.0."""
    trace = [ask(0.0, 2, 3), ask(0.0, 2, 8), ask(1.0, 2, 1)]
    result = run(trace, max_batch_size=2)
    assert result.longest_queue_wait == 2.0
    assert result.ttft_p99 == pytest.approx(1.0 + 0.98 * 2.0)  # of 1, 1 and 3, as numpy interpolates
    assert result.num_steps == 8


def test_ranks_divide_the_work_and_wait_for_their_links() -> None:
    """By hand: two layers make four all-reduces in a step; four ranks, one second of latency, 1 kB/s."""
    cost = StepCost(base=8.0, per_token=4.0, per_kv_token=0.4, per_block=0.2)
    ranks = Ranks(size=4, bandwidth=1000.0, latency=1.0, num_layers=2, num_kv_heads=2, row_bytes=100)
    assert ranks.divide(cost) == StepCost(base=2.0, per_token=1.0, per_kv_token=0.2, per_block=0.1)
    # one token, 100 bytes: one shot 1 + 3 * 0.1, ring 6 * (1 + 0.025); many, 10 kB: 1 + 30, 6 * (1 + 2.5)
    assert ranks.communication_s(1) == pytest.approx(4 * 1.3)
    assert ranks.communication_s(100) == pytest.approx(4 * 21.0)
    assert replace(ranks, size=1).communication_s(100) == 0.0
    config = EngineConfig.from_knobs(num_blocks=64, block_size=4)
    told = simulate(to_workload("trace", [ask(0.0, 6, 2)]), config, cost, ranks)
    # the prompt of 6 tokens, then one token that attends to 7
    compute_s = (2 + 6 * 1 + 6 * 0.2) + (2 + 1 + 7 * 0.2)
    wait_s = 4 * (1 + 3 * 0.6) + 4 * 1.3
    assert told["compute_seconds"] == pytest.approx(compute_s)
    assert told["communication_seconds"] == pytest.approx(wait_s)
    assert told["seconds"] == pytest.approx(compute_s + wait_s)
    assert told["num_ranks"] == 4


def test_the_cost_of_a_step_is_its_tokens_its_past_and_its_transfers() -> None:
    cost = StepCost(base=1.0, per_token=0.1, per_kv_token=0.01, per_block=0.001)
    assert cost.seconds(5, 39, 1) == pytest.approx(1.0 + 0.1 * 5 + 0.01 * 39 + 0.001)


def test_shared_prefixes_hit_the_cache_and_other_prompts_do_not() -> None:
    shared = [ask(20.0 * i, 12, 1, prefix_id="p", prefix_len=8) for i in range(4)]
    result = run(shared)
    assert result.cache_hit_rate == pytest.approx(3 * 8 / 48)
    assert run([replace(item, prefix_id=None, prefix_len=0) for item in shared]).cache_hit_rate == 0.0
    assert run(shared, use_prefix_caching=False).cache_hit_rate == 0.0


def test_a_cache_too_small_preempts_and_every_request_finishes() -> None:
    trace = [ask(0.0, 6, 20) for _ in range(6)]
    small, large = run(trace, num_blocks=10), run(trace, num_blocks=64)
    assert small.num_preemptions > 0 == large.num_preemptions
    assert small.num_finished == large.num_finished == 6
    assert small.longest_gap > large.longest_gap == 1.0
    assert small.kv_use_peak > 0.9
    assert small.seconds > large.seconds


def test_what_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    result = run([ask(0.0, 400, 5), ask(0.0, 4, 5)])
    assert (result.num_refused, result.num_finished) == (1, 1)


def test_the_deadline_policy_meets_the_deadline_that_arrival_order_misses() -> None:
    trace = [ask(0.0, 2, 10), ask(0.0, 2, 10), ask(0.0, 2, 2, deadline=4.0)]
    assert run(trace, max_batch_size=1).num_late == 1
    assert run(trace, max_batch_size=1, scheduler_policy="deadline").num_late == 0


def test_prompts_first_give_an_earlier_first_token_and_a_longer_gap() -> None:
    """Three steps' worth of prompts arrive while a sequence decodes."""
    cost = StepCost(base=0.0, per_token=1.0, per_kv_token=0.0, per_block=0.0)
    trace = [ask(0.0, 2, 30), *[ask(1.0, 8, 2) for _ in range(3)]]
    knobs = {"max_batch_size": 8, "max_num_batched_tokens": 8, "prefill_chunk_size": 8}
    fcfs = run(trace, cost, **knobs)
    prompts_first = run(trace, cost, scheduler_policy="prefill_first", **knobs)
    assert prompts_first.longest_gap > fcfs.longest_gap
    assert prompts_first.ttft_p50 < fcfs.ttft_p50


@pytest.mark.parametrize("backend", ["paged", "contiguous", "naive"])
def test_every_layout_serves_the_same_load(backend: str) -> None:
    trace = draw_trace("bursty", num_requests=25, seed=1)
    result = run(trace, kv_cache_backend=backend, num_blocks=4000, block_size=16)
    assert result.num_finished == 25


# -- the same figures again ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(LOADS))
def test_a_seed_decides_everything_but_the_real_time(name: str) -> None:
    def figures(seed: int) -> list[dict[str, Any]]:
        trace = draw_trace(name, num_requests=8, seed=seed)
        config = EngineConfig.from_knobs(max_batch_size=16)
        found = compare(
            to_workload(name, trace), config, StepCost(), policies=["fcfs", "priority"], num_blocks=[260]
        )
        return [result | {"steps_per_real_second": 0} for result in found]

    found = figures(0)
    assert found == figures(0)
    assert found != figures(1)
    assert [row["num_finished"] + row["num_refused"] for row in found] == [8, 8]


def test_workloads_come_in_order_and_fit_their_own_prefixes() -> None:
    for name in LOADS:
        trace = draw_trace(name, num_requests=200, seed=3)
        assert [item.arrival for item in trace] == sorted(item.arrival for item in trace)
        assert all(item.prefix_len <= item.prompt_len for item in trace)
    with pytest.raises(ConfigError, match="workload must be one of mixed, shared_prefix"):
        draw_trace("weather", num_requests=1, seed=0)


def test_prompts_agree_exactly_where_their_prefixes_do() -> None:
    requests = [
        ask(0, 10, 1, prefix_id="x", prefix_len=6),
        ask(0, 9, 1, prefix_id="x", prefix_len=4),
        ask(0, 10, 1, prefix_id="y", prefix_len=6),
        ask(0, 10, 1),
    ]
    a, b, c, d = (session.turns[0].ids for session in to_workload("t", requests).sessions)
    assert (len(a), len(b)) == (10, 9)
    assert a[:4] == b[:4]
    assert not set(a[6:]) & set(b)
    assert not set(a) & set(c)
    assert not set(d) & (set(a) | set(b) | set(c))


# -- files --------------------------------------------------------------------------------------------


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"arrival": 2, "prompt_len": 5, "output_len": 1}\n\n'
        '{"arrival": 0.5, "prompt_len": 9, "output_len": 2, "prefix_id": 7, "prefix_len": 4, "deadline": 3}\n'
    )
    first, second = read_trace(path)
    assert first == ask(0.5, 9, 2, prefix_id=7, prefix_len=4, deadline=3.0)
    assert second == ask(2.0, 5, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1 is not JSON"),
        ("[]", "line 1: expected `object`, got `array`"),
        ('{"arrival": 0, "prompt_len": 5}', "line 1: 'output_len' is missing"),
        ('{"arrival": -1, "prompt_len": 5, "output_len": 1}', "'arrival' is -1, expected `float` >= 0"),
        ('{"arrival": Infinity, "prompt_len": 5, "output_len": 1}', "line 1 is not JSON"),
        (
            '{"arrival": 1e999, "prompt_len": 5, "output_len": 1}',
            "'arrival' is Infinity, expected a number in",
        ),
        ('{"arrival": 0, "prompt_len": 0, "output_len": 1}', "'prompt_len' is 0, expected `int` >= 1"),
        (
            '{"arrival": 0, "prompt_len": 5.5, "output_len": 1}',
            "'prompt_len' is 5.5, expected `int`, got `float`",
        ),
        (
            '{"arrival": 0, "prompt_len": 5, "output_len": 16777216}',
            "'output_len' is 16777216, expected `int` <= 16777215",
        ),
        ('{"arival": 0}', "unknown key 'arival'; did you mean 'arrival'?"),
        ('{"arrival": 0, "prompt_len": 5, "output_len": 1, "prefix_len": 3}', "go together"),
        (
            '{"arrival": 0, "prompt_len": 5, "output_len": 1, "prefix_id": "a", "prefix_len": 6}',
            "prefix_len is 6, longer than prompt_len, 5",
        ),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="cannot read .*: No such file"):
        read_trace(tmp_path / "absent.jsonl")


# -- the cost model -----------------------------------------------------------------------------------


def test_a_cost_is_read_from_json_or_from_a_file_of_it(tmp_path: Path) -> None:
    expected = StepCost(base=0.5, per_token=0.25)
    assert read_cost('{"base": 0.5, "per_token": 0.25}') == expected
    (tmp_path / "c.json").write_text('{\n"base": 0.5,\n"per_token": 0.25}')
    assert read_cost(str(tmp_path / "c.json")) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bass": 1}', "the cost: unknown key 'bass'; did you mean 'base'?"),
        ('{"base": -1}', "the cost: 'base' is -1, expected `float` >= 0.0"),
        ('{"base": 0, "per_token": 0}', "a step must take time"),
        ('{"base"', "the cost is not JSON"),
        ("absent.json", "--cost is neither JSON nor a readable file"),
    ],
)
def test_a_wrong_cost_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cost(text)
    assert message in str(caught.value)


def write_timed_record(path: Path, cost: StepCost, num_steps: int) -> None:
    """A record whose steps took exactly what `cost` says, with idle time before every request."""
    facts: RunFacts = make_facts()
    with Recorder(path) as recorder:
        recorder.on_start(facts)
    now, lines = 0.0, [path.read_text("utf-8")]
    for step in range(1, num_steps + 1):
        now += 100.0  # no request
        with Recorder(path) as recorder:
            recorder.on_start(facts)
            recorder.on_add(step - 1, Request(request_id=str(step), prompt=(1,)))
        added = json.loads(path.read_text("utf-8").splitlines()[1]) | {"t": now}
        start, length = 7 * step % 50, 1 + step * step % 30
        transfers = tuple(Transfer(COPY, 0, 1) for _ in range(step % 3))
        plan = StepPlan(
            step,
            Chunks.of([Chunk(0, start, start + length, 1), Chunk(1, 3 * step, 3 * step + 1, 1)]),
            (),
            transfers,
        )
        now += cost.seconds(plan.chunks.num_tokens, sum(chunk.stop for chunk in plan.chunks), len(transfers))
        ran = {"kind": "step", "step": step, "t": now, "chunks": list(map(astuple, plan.chunks)),
               "preempted": [], "transfers": plan.transfers, "ids": [[1], [2]]}  # fmt: skip
        lines += [json.dumps(added) + "\n", json.dumps(ran) + "\n"]
    path.write_text("".join(lines))


def test_the_cost_of_a_recorded_run_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    cost = StepCost(base=0.03, per_token=0.002, per_kv_token=0.0001, per_block=0.0005)
    write_timed_record(path, cost, 60)
    assert astuple(read_cost(str(path))) == pytest.approx(astuple(cost), rel=1e-6)


def test_too_few_steps_are_no_basis(tmp_path: Path) -> None:
    write_timed_record(tmp_path / "r.jsonl", StepCost(), 5)
    with pytest.raises(ConfigError, match="has 5 timed steps; fitting a cost needs 20"):
        fit_cost(Record(tmp_path / "r.jsonl"))


def test_drafts_that_are_right_take_no_steps_of_their_own() -> None:
    cost = StepCost(base=1.0, per_token=0.01, per_kv_token=0, per_block=0)
    load = [ask(0, 8, 61)]
    plain = run(load, cost)
    fast = run(load, cost, num_speculative_tokens=4, synthetic_acceptance=1.0, adaptive_speculation=False)
    assert plain.num_steps == 61
    assert fast.num_steps == 1 + 12, "60 tokens, five at a time"
    assert fast.seconds < plain.seconds / 4
    wrong = run(load, cost, num_speculative_tokens=4, synthetic_acceptance=0.0, adaptive_speculation=False)
    assert wrong.num_steps == plain.num_steps and wrong.seconds > plain.seconds
    adaptive = run(load, cost, num_speculative_tokens=4, synthetic_acceptance=0.0)
    assert plain.seconds < adaptive.seconds < wrong.seconds


def test_a_simulation_has_no_texts_to_guess_from() -> None:
    for knobs in ({"speculative_method": "ngram"}, {"draft_model": "x", "synthetic_acceptance": 0.5}):
        with pytest.raises(ConfigError, match="give synthetic_acceptance, .* leave speculative decoding out"):
            run([ask(0, 8, 4)], **knobs)


def test_a_probability_without_guesses_is_refused_unless_they_are_turned_off() -> None:
    with pytest.raises(ConfigError, match="is off; turn it on with speculative_decoding"):
        run([ask(0, 8, 4)], synthetic_acceptance=0.5)
    run([ask(0, 8, 4)], synthetic_acceptance=0.5, speculative_decoding=False)
