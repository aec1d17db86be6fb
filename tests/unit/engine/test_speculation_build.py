"""From knobs to drafts: what is refused before weights are read, and what an engine then says of itself."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from infer.config.settings import EngineConfig
from infer.engine import step_costs
from infer.engine.observer import EngineObserver
from infer.errors import CheckpointError, ConfigError, ModelSourceError
from infer.frontend.llm import LLM
from infer.frontend.open_model import open_model
from infer.loader import load
from infer.sampling.params import SamplingParams
from infer.speculative.adaptive import StepCosts
from scripts.make_checkpoint import Sizes, make_checkpoint

KNOBS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": 128, "block_size": 4}
PROMPT = "the cat sat on the mat and the cat sat on the mat and the cat sat"
GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


def make_head(folder: Path, **fields: Any) -> Path:
    """A checkpoint whose config is that of a head on another model's hidden states."""
    make_checkpoint("llama", folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "method", "says"),
    [
        ({"draft_vocab_size": 32}, "auto", "must be 1: heads with more layers are not supported"),
        ({"speculators_model_type": "eagle3"}, "auto", "must be 1: heads with more layers are not supported"),
        ({}, "eagle3", "must be 1: heads with more layers are not supported"),
        ({"num_hidden_layers": 1, "vocab_size": 7}, "eagle3", "made for a vocabulary of 7 tokens"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "draft_model",
            "is an EAGLE-3 head and .*=eagle3, or",
        ),
    ],
)
def test_a_head_that_is_not_for_the_model_is_refused_before_weights_are_read(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    method: str,
    says: str,
) -> None:
    head = make_head(tmp_path / "head", **fields)
    monkeypatch.setattr(load, "plan_moves", None)
    config = EngineConfig.from_knobs(
        model=checkpoint, draft_model=str(head), speculative_method=method, **KNOBS
    )
    with pytest.raises((ConfigError, CheckpointError), match=says):
        open_model(config, show_progress=False)


def test_files_that_are_not_there_are_said_to_be_those_of_the_draft_model(checkpoint: str) -> None:
    config = EngineConfig.from_knobs(model=checkpoint, draft_model="/nope", **KNOBS)
    with pytest.raises(ModelSourceError, match=r"^draft_model: model '/nope': .*, or leave it out$"):
        open_model(config, show_progress=False)


def test_another_vocabulary_is_refused_before_weights_are_read(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path / "other", sizes=Sizes(vocab_size=640))
    monkeypatch.setattr(load, "plan_moves", None)
    config = EngineConfig.from_knobs(model=checkpoint, draft_model=str(tmp_path / "other"), **KNOBS)
    with pytest.raises(ConfigError, match="640 tokens and .* use a draft model with the same"):
        open_model(config, show_progress=False)


def test_a_knob_without_effect_is_a_warning(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="infer")
    LLM(checkpoint, speculative_method="suffix", prompt_lookup_max=3, **KNOBS)
    assert caplog.messages == ["prompt_lookup_max is without effect: the speculative method is not ngram"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, "speculation=ngram,3"),
        ({"method": "suffix"}, "speculation=suffix,8"),
        ({"model": ""}, "speculation=draft_model,5"),
    ],
)
def test_the_text_is_the_same_and_drafts_are_counted(
    checkpoint: str, caplog: pytest.LogCaptureFixture, config: dict[str, Any], said: str
) -> None:
    plain = LLM(checkpoint, **KNOBS).generate(PROMPT, GREEDY)[0]
    caplog.set_level(logging.INFO, logger="infer")
    asked = config | ({"model": checkpoint} if "model" in config else {})
    llm = LLM(checkpoint, speculative_config=asked, adaptive_speculation=False, **KNOBS)
    (line,) = [record.getMessage() for record in caplog.records if "engine built" in record.getMessage()]
    assert line.endswith(said)
    (found,) = llm.generate(PROMPT, GREEDY)
    assert found.token_ids == plain.token_ids and plain.outputs[0].drafts is None
    drafts = found.outputs[0].drafts
    assert drafts is not None
    if "model" in config:
        assert drafts.num_accepted == drafts.num_drafts, "a model agrees with itself"
    told = found.to_dict()["outputs"][0]["speculative_decoding"]
    assert told["num_draft_tokens"] == drafts.num_drafts > 0
    stats = llm.engine.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (drafts.num_drafts, drafts.num_accepted)
    assert len(stats.accepted_by_position) == config.get(
        "num_speculative_tokens", 5 if "model" in config else 8
    )
    llm.close()


def test_a_request_goes_without_drafts(checkpoint: str) -> None:
    llm = LLM(checkpoint, speculative_method="ngram", adaptive_speculation=False, **KNOBS)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, num_speculative_tokens=0)
    assert llm.generate(PROMPT, params)[0].outputs[0].drafts is None
    assert llm.engine.stats().num_draft_tokens == 0
    llm.close()


class SlowClock:
    """A clock in which all that is timed takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._now = seconds, 0.0

    def perf_counter(self) -> float:
        self._now += self.seconds
        return self._now


def test_costs_of_a_busy_start_are_measured_again_when_idle_and_cached_prefixes_stay(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an engine whose run is not written down does it; the text and its cached blocks stay."""
    clock = SlowClock(100.0)
    monkeypatch.setattr(step_costs, "time", clock)
    llm = LLM(checkpoint, speculative_method="ngram", **KNOBS)
    speculation = llm.engine.speculation
    assert speculation is not None
    before = speculation.costs
    assert {seconds for _, seconds in before.pairs} == {100.0}, "the machine was busy"
    text = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    clock.seconds = 0.5
    waits = []
    while (wait_s := llm.engine.use_idle_time()) is not None:
        waits.append(wait_s)
    assert [wait_s for wait_s in waits if wait_s] == [10.0, 60.0, 600.0]
    after = speculation.costs
    assert after.pairs == tuple((tokens, 0.5) for tokens, _ in before.pairs)
    assert after.seen_s == pytest.approx(before.seen_s / 200)
    clock.seconds = 0.1
    assert llm.engine.use_idle_time() is None and speculation.costs == after
    hits = llm.engine.stats().num_hit_tokens
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].text == text
    assert llm.engine.stats().num_hit_tokens > hits, "from blocks that were measured in"


def test_a_recorded_run_keeps_the_costs_it_began_with(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SlowClock(100.0)
    monkeypatch.setattr(step_costs, "time", clock)
    llm = LLM(checkpoint, speculative_method="ngram", observer=EngineObserver(), **KNOBS)
    clock.seconds = 0.5
    assert llm.engine.use_idle_time() is None
    assert llm.engine.speculation is not None
    assert llm.engine.speculation.costs.pairs[0][1] == 100.0


def test_a_slower_time_or_another_window_never_makes_costs_worse() -> None:
    costs = StepCosts(((1, 1.0), (2, 2.0), (4, 3.0)), seen_s=0.1)
    faster = step_costs._faster(costs, 2, 1.5)
    assert faster.pairs == ((1, 1.0), (2, 1.5), (4, 1.5)) and faster.seen_s == 0.1


@pytest.mark.parametrize(
    ("first", "all_turns", "count", "later"),
    [(3.0, 9.0, 4, 2.0), (9.0, 8.0, 4, 2.0), (5.0, 4.0, 1, 4.0), (4.0, 5.0, 1, 5.0)],
)  # fmt: skip
def test_a_first_turn_that_was_slowed_down_does_not_make_the_others_free(
    first: float, all_turns: float, count: int, later: float
) -> None:
    assert step_costs.later_turn_seconds(first, all_turns, count) == later


SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)


def table(step_s: float, *, can_be_few: bool = True) -> tuple[dict[int, float], list[tuple[int, int]]]:
    """The seconds of counts, and the sizes that were timed with their runs; a token more takes 1 % longer."""
    timed = list[tuple[int, int]]()

    def seconds_of(size: int, num_probes: int) -> tuple[float, float]:
        timed.append((size, num_probes))
        return step_s, step_s * (1 + size / 100)

    def pad(count: int) -> int:
        return next(size for size in SIZES if size >= count)

    pairs, first_s = step_costs._table(
        seconds_of, step_costs._stretches(128, pad if can_be_few else None), can_be_few=can_be_few
    )
    assert first_s == step_s and len(dict(pairs)) == len(pairs)
    return dict(pairs), timed


@pytest.mark.parametrize(("step_s", "later"), [(0.5e-3, 3), (4e-3, 1)])
def test_sizes_next_to_each_other_are_not_all_timed(step_s: float, later: int) -> None:
    pairs, timed = table(step_s)
    assert timed == [(1, 3), *((size, later) for size in (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128))]
    firsts = {1, *(size + 1 for size in SIZES[:-1])}
    assert pairs.keys() == {*SIZES} | firsts
    for size in SIZES:
        assert pairs[size] == pytest.approx(step_s * (1 + size / 100)), size
    assert pairs[33] == pairs[40] and pairs[65] == pairs[80]


def test_no_more_time_than_allowed_is_spent_and_the_last_size_gives_the_slope() -> None:
    pairs, timed = table(0.1)
    assert timed == [(1, 3), (2, 1), (4, 1), (8, 1)], "1.2, 0.4 and 0.4 s, and the one that ends it"
    assert sorted(pairs) == [1, 2, 3, 4, 8]
    assert table(0.3, can_be_few=False)[1] == [(1, 3), (2, 3), (4, 3)], (
        "on a CPU, steps are not run behind others"
    )
