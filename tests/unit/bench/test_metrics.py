from __future__ import annotations

import math

import pytest

from infer.bench.metrics import (
    MEASURES,
    RequestTrace,
    Slo,
    cached_share,
    percentile,
    read_slo,
    show,
    summarise,
)
from infer.bench.report import Figure, make_row
from infer.errors import ConfigError


def trace(
    asked: float, chunks: list[float], *, tokens: int | None = None, error: str | None = None
) -> RequestTrace:
    return RequestTrace(
        session=0,
        turn=0,
        asked=asked,
        chunks=chunks,
        ended=chunks[-1] if chunks else asked,
        num_prompt=10,
        num_output=len(chunks) if tokens is None else tokens,
        error=error,
    )


def test_percentiles_of_known_distributions() -> None:
    uniform = [i / 10_000 for i in range(10_001)]
    assert percentile(uniform, 95) == pytest.approx(0.95)
    exponential = [-math.log(1 - (i + 0.5) / 100_000) for i in range(100_000)]  # its quantiles, evenly
    assert percentile(exponential, 50) == pytest.approx(math.log(2), rel=1e-3)
    assert percentile(exponential, 99) == pytest.approx(math.log(100), rel=1e-3)


def test_the_figures_of_a_run_by_hand() -> None:
    traces = [
        trace(0.0, [1.0, 1.1, 1.2, 1.3, 1.4]),  # TTFT 1.0, TPOT 0.1
        trace(1.0, [1.5, 1.7, 1.9]),  # TTFT 0.5, TPOT 0.2
        trace(2.0, [], error="hung up"),
    ]
    figures = summarise(traces, seconds=4.0, slo=Slo(ttft=0.8))
    assert figures["num_requests"] == 3
    assert figures["num_errors"] == 1
    assert figures["output_tokens_per_s"] == 8 / 4
    assert figures["input_tokens_per_s"] == 20 / 4
    assert figures["ttft_p50_s"] == pytest.approx(0.75)
    assert figures["tpot_p50_s"] == pytest.approx(0.15)
    assert figures["itl_p50_s"] == pytest.approx(0.1)
    assert figures["longest_gap_s"] == pytest.approx(0.2)
    assert figures["e2e_p99_s"] == pytest.approx(0.9 + 0.5 * 0.99)
    assert figures["goodput_per_s"] == 1 / 4  # only the second was quick enough
    assert figures["goodput_share"] == 1 / 3


def test_the_cached_share_counts_requests_that_tell_it() -> None:
    told = [trace(0.0, [1.0]), trace(0.0, [1.0]), trace(0.0, [], error="hung up")]
    assert cached_share(told) is None
    for each, count in zip(told, (0, 5, 10), strict=True):
        each.num_cached = count
    assert told[0].num_prompt == 10
    assert cached_share(told) == 5 / 20
    assert summarise(told, seconds=1.0, slo=Slo())["num_cached_tokens"] == 5


def test_tokens_per_chunk_do_not_change_the_time_per_token() -> None:
    """A server that sends two tokens per frame has half the gaps, each twice as long."""
    one_by_one = trace(0.0, [1.0 + 0.1 * i for i in range(9)])
    in_pairs = trace(0.0, [1.0 + 0.2 * i for i in range(5)], tokens=9)
    assert one_by_one.tpot == pytest.approx(in_pairs.tpot)


def test_what_was_not_seen_is_left_out() -> None:
    figures = summarise([trace(0.0, [], error="refused")], seconds=1.0, slo=Slo())
    assert "ttft_p50_s" not in figures
    assert figures["num_errors"] == 1
    assert "tpot_p50_s" not in summarise([trace(0.0, [1.0])], seconds=1.0, slo=Slo())


def test_an_slo_needs_all_its_limits_met() -> None:
    slo = read_slo("ttft=1,tpot=0.15")
    assert slo == Slo(ttft=1.0, tpot=0.15)
    assert slo.is_met(trace(0.0, [0.9, 1.0, 1.1]))
    assert not slo.is_met(trace(0.0, [0.9, 1.1, 1.3]))
    assert not slo.is_met(trace(0.0, [1.1, 1.2]))
    assert Slo(e2e=1.0).is_met(trace(0.0, [1.0])) and not Slo(e2e=0.9).is_met(trace(0.0, [1.0]))
    for text in ("ttft", "ttft=0", "itl=1", "ttft=x"):
        with pytest.raises(ConfigError, match="an SLO looks like"):
            read_slo(text)


def test_repeats_are_merged_figure_by_figure() -> None:
    row = make_row("r", "", [{"a": 1.0, "b": 2.0}, {"a": 3.0}, {"a": 2.0, "b": 1.0}])
    merged = Figure(median=2.0, low=1.0, high=3.0, values=[1.0, 3.0, 2.0])
    assert row.figures == {"a": merged}  # b was not always there


def test_figures_are_shown_in_their_unit() -> None:
    assert show("ttft_p50_s", 0.01234) == "12.3 ms"
    assert show("output_tokens_per_s", 12345.6) == "12,346 tok/s"
    assert show("goodput_share", 0.5) == "50 %"
    assert show("unheard_of", 2.0) == "2"
    assert all(measure.better in ("", "higher", "lower") for measure in MEASURES.values())
