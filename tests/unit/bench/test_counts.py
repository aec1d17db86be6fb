"""The regression gate: decisions in counts and ratios, never in time."""

from __future__ import annotations

import json

import pytest

from benchmarks.counts import EXPECTED, GATE, counts, differences
from benchmarks.micro import capacity_rows
from benchmarks.policies import run_knobs, sweep, sweep_workload
from infer.bench.workloads import make_workload


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return counts()


def test_the_engine_decides_as_it_did(found: dict[str, dict[str, float]]) -> None:
    """If a change was meant to change decisions: python -m benchmarks.counts --write, and say why."""
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    assert not differences(found, expected), "\n".join(differences(found, expected))
    assert set(found) == set(GATE)


def test_a_difference_is_named() -> None:
    assert differences({"a": {"num_steps": 2}}, {"a": {"num_steps": 1}}) == ["a: num_steps was 1, is 2"]
    assert differences({}, {"a": {"num_steps": 1}}) == ["a: num_steps was 1, is None"]


def test_each_idea_does_what_it_is_for(found: dict[str, dict[str, float]]) -> None:
    assert found["continuous"]["num_steps"] < 0.7 * found["static"]["num_steps"]
    assert found["prefix"]["num_step_tokens"] < 0.2 * found["no prefix"]["num_step_tokens"]
    assert found["sessions"]["num_hit_tokens"] > 0.5 * found["sessions"]["num_queried_tokens"]
    assert found["paged, small cache"]["num_preemptions"] > 0
    assert found["swap"]["num_preemptions"] > 0
    assert found["drafts"]["num_steps"] < 0.6 * found["one by one"]["num_steps"]
    assert found["drafts"]["num_accepted_tokens"] < found["drafts"]["num_draft_tokens"]
    assert all(row["num_errors"] == 0 for row in found.values())


def test_paged_holds_several_times_the_sequences() -> None:
    contiguous, paged = capacity_rows(seed=0, num_requests=150)
    assert contiguous.figures["peak_running"].median == 16
    assert paged.figures["speed_up"].median > 3


def test_a_simulated_run_is_the_same_every_time() -> None:
    workload = make_workload("continuous_batching")
    first, second = (run_knobs(workload, num_blocks=64) for _ in range(2))
    assert first.figures() == second.figures()
    assert [trace.chunks for trace in first.traces] == [trace.chunks for trace in second.traces]


def test_the_sweep_shows_what_policies_do() -> None:
    rows = {row.name: row.figures for row in sweep(num_requests=16)}
    assert len(rows) == 20
    urgent, plain = rows["mixed priority"], rows["mixed fcfs"]
    assert urgent["ttft_p50_s"].median <= plain["ttft_p50_s"].median
    assert rows["shared_prefix fcfs"]["cache_hit_share"].median > 0.5
    round_robin, plain = rows["forks decode_round_robin"], rows["forks fcfs"]
    assert round_robin["itl_p99_s"].median < plain["itl_p99_s"].median / 2, "all have the same share of steps"


def test_a_trace_keeps_its_shared_prefixes() -> None:
    workload = sweep_workload("shared_prefix", num_requests=40, seed=0)
    assert len({session.turns[0].ids[:300] for session in workload.sessions}) == 4
