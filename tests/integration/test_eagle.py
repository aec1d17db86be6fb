"""An EAGLE-3 head in an engine: its drafts are those of the whole text, and change nothing of it.

Heads are random, so hardly a draft is right unless requests leave few tokens to choose from. What a head
drafts is compared with the same head over the whole text, computed at once: so it has seen every position
once and in its place, whatever became of the sequence in between.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from infer.config.settings import EngineConfig
from infer.engine import draft_head, machine
from infer.engine.build import build_engine
from infer.engine.device_build import resolve_for
from infer.engine.draft_head import DraftHead
from infer.engine.engine import Engine
from infer.engine.speculation_build import load_draft
from infer.errors import ConfigError
from infer.execution.device import PendingStep
from infer.execution.head_model import HeadModel
from infer.execution.order import UNSEEN, StepOrder
from infer.kernels.cpu.library import library
from infer.kernels.runtime.communicator import RankGroup
from infer.loader.eagle import head_bytes, load_eagle
from infer.loader.find.source import resolve_model
from infer.loader.load import load_model
from infer.models.eagle3 import Eagle3, Guess
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.speculative.adaptive import StepCosts
from tests.integration.test_speculation import (
    ALL_FAMILIES,
    COSTS,
    DEPENDENT,
    MIX,
    PRESSURE,
    ROOT,
    VOCAB_SIZE,
    assert_same,
    checkpoint,
    directory,
    engine_of,
    on_both,
    plain,
    requests_of,
    serve,
    target,
    totals,
)
from tests.support.eagle import Drafted, share_of_whole_text, watch, write_head
from tests.support.failing_allocator import FailingAllocator, FailingEngine
from tests.support.thinned import thinned

__all__ = ["directory"]  # a fixture for all tests here

DRAFT_IDS = tuple(range(20, VOCAB_SIZE, 3))
HALF_MUST_BE_RIGHT = StepCosts(((1, 1e-3), (128, 64.5e-3)), gap_s=1e-9, is_ahead=True)
BIASED = {DRAFT_IDS[place]: 100.0 for place in (3, 17, 40)}  # the model and the head choose among these


@functools.cache
def make_head(family: str) -> Path:
    """The directory of a random head for a model."""
    path = ROOT[-1] / f"head of {family}"
    write_head(path, target(family).config, DRAFT_IDS)
    return path


def head_knobs(family: str, count: int, **knobs: Any) -> dict[str, Any]:
    """The knobs with which a head drafts for a model, as many as it can."""
    own = {"draft_model": str(make_head(family)), "speculative_method": "eagle3"}
    return own | {"adaptive_speculation": False, "num_speculative_tokens": count} | knobs


@functools.cache
def loaded_head(family: str) -> Eagle3:
    return load_eagle(make_head(family), target(family), num_drafts=8)


def share_right(family: str, found: list[Drafted]) -> float:
    """The share of windows whose drafts are those of the whole text."""
    return share_of_whole_text(target(family), loaded_head(family), found)


GREEDY: list[dict[str, Any]] = [
    {},
    {"max_tokens": 30},
    {"n": 3, "max_tokens": 11, "seed": 1},
    {"max_tokens": 2},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "max_tokens": 40},
    {"max_tokens": 25, "logprobs": 1},
    {"prompt_logprobs": 1},
]
COMPUTED: dict[str, dict[str, Any]] = {  # in many ways, none of which finds a prefix of another text
    "at once": {},
    "plain": {"attention_backend": "torch_ref", "record_cpu_step": False},
    "not recorded": {"record_cpu_step": False},
    **{name: knobs | {"use_prefix_caching": False} for name, knobs in PRESSURE.items()},
}


ON_GPU: dict[str, dict[str, Any]] = {  # the same code on the kernels' references (execution/gpu/device.py)
    "at once": {},
    "launched": {"use_cuda_graphs": False},
    "no overlap": {"use_overlap": False},
    **{name: knobs | {"use_prefix_caching": False} for name, knobs in PRESSURE.items()},
}
WAYS = {f"cpu {way}": (False, knobs) for way, knobs in COMPUTED.items()} | {
    f"gpu {way}": (True, knobs) for way, knobs in ON_GPU.items()
}


@pytest.mark.parametrize(("way", "family"), thinned(WAYS, ("llama", "gemma3"), keep=3))
def test_drafts_are_those_of_the_whole_text(way: str, family: str) -> None:
    on_gpu, knobs = WAYS[way]
    knobs = {"use_prefix_caching": False} | knobs
    if family == "gemma3" and "num_blocks" in knobs:
        knobs |= {"num_blocks": 60}  # it has several tables
    requests = requests_of(GREEDY + GREEDY[:2], seed=3)
    engine = engine_of(family, on_gpu=on_gpu, **head_knobs(family, 4, **knobs))
    found = watch(engine)
    assert_same(serve(engine, requests, every=1), plain(requests, family))
    assert len(found) > 20
    assert share_right(family, found) == 1.0
    if way.endswith(("recompute", "swap")) and family == "llama":
        assert engine.scheduler.num_preemptions > 0


@on_both
def test_after_a_prefix_hit_one_entry_is_of_another_text(on_gpu: bool) -> None:
    """Of a text that goes on otherwise; one that is the same throughout finds its own."""
    prompt, params = tuple(range(30, 51)), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine = engine_of("llama", on_gpu=on_gpu, **head_knobs("llama", 3))
    serve(engine, [Request(request_id="first", prompt=prompt, params=params)])
    found = watch(engine)
    serve(engine, [Request(request_id="again", prompt=prompt, params=params)])
    assert engine.scheduler.pool.usage().num_hit_tokens == 20
    assert share_right("llama", found) == 1.0
    serve(engine, [Request(request_id="other", prompt=(*prompt[:12], 9, 8, 7), params=params)])
    assert engine.scheduler.pool.usage().num_hit_tokens == 32
    assert len(found) > 12


@pytest.mark.parametrize(
    ("family", "on_gpu"),
    [*thinned(ALL_FAMILIES, (False,), keep=5), ("mistral", True), ("mixtral", True)],
)
def test_the_text_is_the_same(family: str, on_gpu: bool) -> None:
    """Greedy and drawn, alone and together, with drafts that are often right and that are wrong."""
    biased = [kind | {"logit_bias": BIASED} for kind in MIX[1:5]]
    requests = requests_of(MIX + biased + DEPENDENT[:4])
    expected = plain(requests, family)
    count = 1 + ALL_FAMILIES.index(family) % 7
    engine = engine_of(family, on_gpu=on_gpu, **head_knobs(family, count))
    assert_same(serve(engine, requests), expected)
    assert_same(serve(engine, requests, every=3), expected)  # prompts that are cached, and come one by one
    num_drafts, num_accepted = totals(engine)
    assert num_drafts > num_accepted > 30
    assert engine.scheduler.pool.usage().num_hit_tokens > 0


def test_a_head_draws_with_the_noise_of_the_sequence() -> None:
    """Where both choose among few tokens, the same noise decides; the likeliest would be right less often."""
    kinds = [{"logit_bias": BIASED, "temperature": 4.0, "seed": seed, "max_tokens": 40} for seed in range(9)]
    engine = engine_of("llama", **head_knobs("llama", 4))
    serve(engine, requests_of(kinds))
    num_drafts, num_accepted = totals(engine)
    assert num_accepted > 0.45 * num_drafts > 40


@pytest.mark.parametrize(("is_adaptive", "on_gpu"), thinned((True, False), (False, True), keep=2))
def test_constrained_sequences(is_adaptive: bool, on_gpu: bool) -> None:
    pytest.importorskip("llguidance")
    kinds: list[dict[str, Any]] = [
        {"structured": {"regex": "[a-c]{3,30}"}, "logprobs": 0, "max_tokens": 20},
        {"structured": {"regex": "(ab|cd)+e"}, "temperature": 1.0, "seed": 5},
        {"structured": {"choice": ["engine", "river", "clock"]}},
        {},
    ]
    requests = requests_of(kinds)
    knobs = head_knobs("qwen3", 4, adaptive_speculation=is_adaptive)
    engine = engine_of("qwen3", on_gpu=on_gpu, **knobs)
    assert_same(serve(engine, requests), plain(requests))
    assert totals(engine)[0] > 0


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_deterministic_logprobs_are_the_same_bits() -> None:
    knobs: dict[str, Any] = {"attention_backend": "auto", "deterministic": True}
    requests = requests_of([kind | {"logprobs": 1} for kind in MIX])
    engine = engine_of("qwen3", **knobs, **head_knobs("qwen3", 5))
    assert serve(engine, requests) == serve(engine_of("qwen3", **knobs), requests)
    assert totals(engine)[0] > 0


@on_both
def test_steps_that_find_no_memory_are_followed_in_halves(on_gpu: bool) -> None:
    """On a GPU, where a row that was sampled has gone on, a head may miss a step and guess worse."""
    requests = requests_of([kind for kind in GREEDY if "n" not in kind], seed=7)
    expected = plain(requests, "llama")
    engine = engine_of("llama", on_gpu=on_gpu, **head_knobs("llama", 3, use_prefix_caching=False))
    every = 997 if on_gpu else 151  # the references of kernels allocate more
    allocator = FailingAllocator(lambda number: number % every == 90)
    FailingEngine(engine, allocator)
    found = watch(engine)
    assert_same(serve(engine, requests), expected)
    assert allocator.num_failed > 0
    assert share_right("llama", found) >= (0.5 if on_gpu else 1.0)


def test_a_head_whose_drafts_are_wrong_is_switched_off() -> None:
    requests = requests_of([{"max_tokens": 60}] * 2)
    always, adaptive = (
        engine_of("llama", **head_knobs("llama", 4, adaptive_speculation=value)) for value in (False, True)
    )
    for engine in (always, adaptive):
        serve(engine, requests)
    assert 0 < totals(adaptive)[0] < totals(always)[0] / 3


@on_both
def test_steps_are_not_followed_where_drafts_do_not_pay(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong drafts end it, but for a trial now and then; a trial with right drafts brings it back."""
    monkeypatch.setattr(draft_head, "PATIENCE", 8)
    plain_params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    wrong = [plain_params | {"seed": seed} for seed in range(20)]
    right = [plain_params | {"seed": seed, "logit_bias": {DRAFT_IDS[7]: 100.0}} for seed in range(14)]
    engine = engine_of("llama", on_gpu=on_gpu, **head_knobs("llama", 4, adaptive_speculation=True))
    assert engine.speculation is not None
    engine.speculation._lengths.use(HALF_MUST_BE_RIGHT)
    drafter = engine.speculation._drafter
    assert isinstance(drafter, DraftHead)
    network = cast("Any", drafter._device).model
    assert isinstance(network, HeadModel)
    followed, follow = list[int](), network.follow

    def count(*args: Any) -> None:
        followed[-1] += 1
        follow(*args)

    monkeypatch.setattr(network, "follow", count)
    requests = requests_of(wrong + right, seed=11)
    expected = plain(requests, "llama", on_gpu=on_gpu)
    for request in requests:
        followed.append(0)
        key = request.request_id, 0
        assert_same(serve(engine, [request]), {key: expected[key]})
    tried = [number for number, count in enumerate(followed[:20]) if count > 1]
    assert tried == [0, 8], "of all others the prompt alone is followed"
    assert max(followed[:20]) < 16, "a trial ends before its text"
    assert all(1 < count < 12 for count in followed[-5:]), "a right trial has brought all back, with windows"


@on_both
def test_texts_are_the_same_while_steps_are_followed_or_not(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come while others run: trials and rows that were not seen share steps and prefixes."""
    monkeypatch.setattr(draft_head, "PATIENCE", 3)
    biased = [kind | {"logit_bias": BIASED} for kind in MIX[1:5]]
    requests = requests_of((MIX + biased + DEPENDENT[:4]) * 2, seed=13)
    engine = engine_of("llama", on_gpu=on_gpu, **head_knobs("llama", 4, adaptive_speculation=True))
    assert engine.speculation is not None
    engine.speculation._lengths.use(HALF_MUST_BE_RIGHT)
    unseen = list[bool]()
    expected = plain(requests, "llama", on_gpu=on_gpu)
    run = engine._device.run

    def note_and_run(order: StepOrder) -> PendingStep:
        unseen.append(bool(order.flags & UNSEEN))
        return run(order)

    monkeypatch.setattr(engine._device, "run", note_and_run)
    for every in (0, 3, 1):
        assert_same(serve(engine, requests, every=every), expected)
    assert 50 < sum(unseen) < len(unseen) - 50
    assert totals(engine)[0] > 0


def guesses_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each guess that a head makes from now on has read what nobody wrote."""
    assert engine.speculation is not None and isinstance(engine.speculation._drafter, DraftHead)
    network = cast("Any", engine.speculation._drafter._device).model
    found, guess = list[bool](), network.guess

    def guess_and_note(*args: Any) -> Guess:
        made: Guess = guess(*args)
        found.append(bool(made.hidden_SD.isnan().any()))
        return made

    monkeypatch.setattr(network, "guess", guess_and_note)
    return found


LEFT_OUT: dict[str, dict[str, Any]] = {
    "swap": {"num_blocks": 24, "preemption": "swap", "swap_blocks": 60, "use_prefix_caching": False},
    "cached": {"num_blocks": 24, "preemption": "recompute"},
    "turns": {},
}


@pytest.mark.parametrize("way", LEFT_OUT)
def test_no_draft_is_made_from_entries_that_were_not_written(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences come back, or a prompt goes on from an answer, after steps that were not followed."""
    monkeypatch.setattr(draft_head, "PATIENCE", 4)
    knobs = head_knobs("llama", 4, adaptive_speculation=True, **LEFT_OUT[way])
    engine = engine_of("llama", **knobs)
    found = guesses_of(engine, monkeypatch)
    assert engine.speculation is not None and isinstance(drafter := engine.speculation._drafter, DraftHead)
    monkeypatch.setattr(engine.speculation, "_is_adaptive", False)  # whoever is ready gets drafts
    began = list[int]()

    def is_tried(num_rows: int, num_drafts: int) -> bool:
        began.append(num_rows)
        return len(began) > 4

    monkeypatch.setattr(drafter._lengths, "is_tried", is_tried)
    drafter._num_idle = 4
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    requests = requests_of([params | {"seed": seed} for seed in range(4)], seed=11)
    answers = serve(engine, requests)
    if way == "turns":
        asked = zip(requests, answers.values(), strict=True)
        turns = [(*request.prompt, *answer.tokens, 33) for request, answer in asked]
        short = SamplingParams(**(params | {"max_tokens": 6}))
        again = [Request(request_id=f"again {n}", prompt=turn, params=short) for n, turn in enumerate(turns)]
        serve(engine, again)
        assert engine.scheduler.pool.usage().num_hit_tokens > 100
        assert not found
    else:
        assert engine.scheduler.num_preemptions > 0
    num_before = len(found)
    serve(engine, requests_of([params], seed=12))
    assert len(found) > num_before, "a new text gets drafts, in blocks that others had"
    assert not any(found)


@on_both
def test_steps_of_a_head_are_measured(on_gpu: bool) -> None:
    settings = EngineConfig.from_knobs(num_blocks=32, block_size=4, **head_knobs("llama", 3))
    with mock.patch.object(machine, "has_gpu_kernels", lambda device: on_gpu):
        engine = build_engine(settings, target("llama"))
    assert engine.speculation is not None
    assert 0 < engine.speculation.costs.draft_s < 10
    assert totals(engine) == (0, 0)


def test_a_request_without_drafts_leaves_the_head_able_to_draft() -> None:
    """The head follows steps in which nobody has drafts."""
    engine = engine_of("llama", **head_knobs("llama", 3, use_prefix_caching=False))
    found = watch(engine)
    quiet = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, num_speculative_tokens=0)
    serve(engine, [Request(request_id="0", prompt=tuple(range(30, 44)), params=quiet)])
    assert not found
    loud = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    serve(engine, [Request(request_id="1", prompt=tuple(range(50, 61)), params=loud)])
    assert found and share_right("llama", found) == 1.0


def test_a_head_of_a_packed_model_is_kept_in_8_bits() -> None:
    source = resolve_model(checkpoint("llama"), show_progress=False)
    packed = load_model(source, dtype="float32", device="cpu", quantization="int8")
    head = load_eagle(make_head("llama"), packed)
    assert head.fc.stored.scheme == "int8"
    assert loaded_head("llama").fc.stored.scheme == "none"
    kept = sum(parameter.numel() * parameter.element_size() for parameter in head.parameters())
    assert head_bytes(head.config, torch.float32, packs=True) == kept
    requests = requests_of([*GREEDY[:2], {"temperature": 1.0, "seed": 3, "logit_bias": BIASED}])
    knobs = {"num_blocks": 64, "block_size": 4}
    plain, drafted = (
        build_engine(EngineConfig.from_knobs(**knobs, **more), packed, step_costs=COSTS)
        for more in ({}, head_knobs("llama", 4))
    )
    assert_same(serve(drafted, requests), serve(plain, requests))
    assert totals(drafted)[1] > 0


def test_a_head_is_refused_where_ranks_have_its_model_in_parts() -> None:
    loaded = target("llama")
    config = resolve_for(EngineConfig.from_knobs(**head_knobs("llama", 3)), loaded)
    ranks = cast("RankGroup", object())
    with pytest.raises(ConfigError, match="leave out tensor_parallel_size"):
        load_draft(config, replace(loaded, ranks=ranks))
