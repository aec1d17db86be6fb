"""A target for the time between tokens becomes a number of prompt tokens, by measurement."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.engine import device_build
from infer.engine.itl_target import prompt_tokens_within
from infer.errors import ConfigError


@pytest.mark.parametrize(
    ("target_ms", "tokens"), [(1.0, 16), (4.0, 16), (5.4, 32), (10.0, 64), (100.0, 1024), (1e6, 2048)]
)
def test_the_most_tokens_fit_that_three_quarters_of_the_target_have_room_for(
    target_ms: float, tokens: int
) -> None:
    def seconds_of(num_tokens: int) -> float:
        return (2 + num_tokens * 0.0625) / 1e3  # 16 tokens take 3 ms, 32 take 4

    assert prompt_tokens_within(target_ms, seconds_of, max_tokens=2048) == tokens


@pytest.mark.parametrize("max_tokens", [1, 8, 15])
def test_steps_of_few_tokens_have_no_more(max_tokens: int) -> None:
    assert prompt_tokens_within(100, lambda _: 0.001, max_tokens=max_tokens) == max_tokens


def test_a_target_that_cannot_be_kept_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert prompt_tokens_within(0.1, lambda _: 0.5, max_tokens=64) == 16
    assert "target cannot be met target_ms=0.1 of_which_for_prompts_ms=0.075" in caplog.text
    assert "prompt_tokens_per_step=16 measured_ms=500.00" in caplog.text


def test_an_engine_measures_once_and_generates_the_same(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def note(_model: Any, _device: Any, num_tokens: int) -> float:
        measured.append(num_tokens)
        return num_tokens / 1e3

    monkeypatch.setattr(device_build, "prefill_seconds", note)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7] * 12, [9] * 30, [11, 12]]
    plain = LLM(checkpoint, dtype="float32")
    target = LLM(checkpoint, dtype="float32", itl_target_ms=50)
    assert measured == [16, 32, 64][: len(measured)] and measured
    assert target.engine.scheduler.config.prefill_tokens_while_decoding == 32
    answers = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in (plain, target)]
    assert answers[0] == answers[1]
    given = LLM(checkpoint, dtype="float32", itl_target_ms=50, prefill_tokens_while_decoding=8)
    assert given.engine.scheduler.config.prefill_tokens_while_decoding == 8


@pytest.mark.parametrize(
    "knobs",
    [
        {"use_chunked_prefill": False},
        {"batching_mode": "static"},
        {"scheduler_policy": "prefill_first"},
        {"kv_cache_backend": "naive"},
    ],
)
def test_settings_without_chunks_beside_decoding_refuse_a_target(
    checkpoint: str, knobs: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="itl_target_ms needs prompts that come in chunks"):
        LLM(checkpoint, itl_target_ms=20, **knobs)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_target_is_a_number_above_zero(checkpoint: str, value: float) -> None:
    with pytest.raises(ConfigError, match="itl_target_ms must be a number above 0"):
        LLM(checkpoint, itl_target_ms=value)
