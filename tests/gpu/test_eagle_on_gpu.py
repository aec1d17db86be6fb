"""An EAGLE-3 head on a GPU: its kernels and graphs draft what the head drafts on a CPU, and change no text.

Models and heads are random. Requests that leave few tokens to choose from (`BIASED`) make drafts right now
and then; what a head drafts is compared with the same head over the whole text, computed on the CPU.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infer import LLM, SamplingParams
from infer.config.settings import EngineConfig
from infer.engine import draft_head
from infer.engine.build import build_engine
from infer.engine.draft_head import DraftHead
from infer.engine.engine import Engine
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.graphs import StepSize
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.scheduling.request import Request
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES
from tests.integration.test_eagle import (
    BIASED,
    DRAFT_IDS,
    GREEDY,
    HALF_MUST_BE_RIGHT,
    head_knobs,
    share_right,
)
from tests.integration.test_speculation import (
    COSTS,
    DEPENDENT,
    MIX,
    PRESSURE,
    Answers,
    assert_same,
    checkpoint,
    collect,
    directory,
    engine_of,
    requests_of,
    serve,
    totals,
)
from tests.support.eagle import watch, write_head
from tests.support.kv_store import fill_store

__all__ = ["directory"]  # a fixture for all tests here

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen3", "gemma3", "mixtral")  # one table, several, experts
BIASED_MIX = [kind | {"logit_bias": BIASED} for kind in MIX[1:5]]
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "launched": {"use_cuda_graphs": False},
    "no overlap": {"use_overlap": False},
    **PRESSURE,
}


@functools.cache
def on_gpu(family: str, dtype: str) -> LoadedModel:
    return load_model(resolve_model(checkpoint(family), show_progress=False), dtype=dtype, device="cuda")


def gpu_engine(family: str, dtype: str = "float32", **knobs: Any) -> Engine:
    """An engine on the GPU whose caches, the head's included, hold NaN wherever nothing was written."""
    usual = FEW_SIZES | {"num_blocks": 128, "block_size": 4}
    engine = build_engine(EngineConfig.from_knobs(**(usual | knobs)), on_gpu(family, dtype), step_costs=COSTS)
    assert isinstance(engine.device, GpuDevice)
    fill_store(engine.device.store, float("nan"))
    if engine.speculation is not None:
        fill_store(head_device(engine).store, float("nan"))
    return engine


def head_device(engine: Engine) -> GpuDevice:
    """The device half of an engine's head."""
    drafter = engine.speculation and engine.speculation._drafter
    assert isinstance(drafter, DraftHead) and isinstance(drafter._device, GpuDevice)
    return drafter._device


@functools.cache
def expected(family: str, dtype: str) -> Answers:
    """What is said without drafts."""
    return serve(gpu_engine(family, dtype, deterministic=True), requests())


def requests() -> list[Request]:
    """Greedy and drawn, forks, penalties, ends inside of windows, and few tokens to choose from."""
    return requests_of(MIX + BIASED_MIX + DEPENDENT[:4])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "float32") for family in FAMILIES), ("qwen3", "bfloat16")]
)
def test_the_text_is_the_same(family: str, dtype: str, way: str) -> None:
    knobs = WAYS[way]
    if family == "gemma3" and "num_blocks" in knobs:
        knobs = knobs | {"num_blocks": 60}  # it has several tables
    count = 2 + (FAMILIES.index(family) + list(WAYS).index(way)) % 6
    engine = gpu_engine(family, dtype, deterministic=True, **head_knobs(family, count, **knobs))
    for every in (0, 1):  # the second time prompts are cached, and come one by one
        assert_same(serve(engine, requests(), every=every), expected(family, dtype))
    num_drafts, num_accepted = totals(engine)
    assert num_drafts > num_accepted
    assert num_accepted > 10 or way in PRESSURE, "moments in which drafts are made are rare there"
    if way == "graphs":
        assert engine.scheduler.pool.usage().num_hit_tokens > 0
    if way in ("recompute", "swap") and family == "qwen3":
        assert engine.scheduler.num_preemptions > 0


def test_the_text_of_others_is_the_same_when_requests_are_aborted() -> None:
    engine = gpu_engine("qwen3", deterministic=True, **head_knobs("qwen3", 4))
    answers: Answers = {}
    for request in requests():
        engine.add(request)
    aborted = ("1", "3", "10", "12")
    for number in range(500):
        if not engine.has_work:
            break
        collect(answers, engine.step())
        if number % 4 == 3 and number // 4 < len(aborted):
            collect(answers, engine.abort(aborted[number // 4]))
    assert not engine.has_work
    wanted = expected("qwen3", "float32")
    for key, answer in answers.items():
        if key[0] not in aborted:
            assert (answer.tokens, answer.reasons) == (wanted[key].tokens, wanted[key].reasons), key
    assert engine.scheduler.pool.usage().num_used == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_are_those_of_the_whole_text(family: str, way: str) -> None:
    """Against the CPU, in float32: so the head has seen every position once and in its place."""
    knobs = WAYS[way] | {"use_prefix_caching": False}
    if family == "gemma3" and "num_blocks" in knobs:
        knobs |= {"num_blocks": 60}
    engine = gpu_engine(family, **head_knobs(family, 4, **knobs))
    found = watch(engine)
    serve(engine, requests_of(GREEDY + GREEDY[:2], seed=3), every=1)
    assert len(found) > 20
    assert share_right(family, found) > 0.97  # two tokens may be as good as equally likely


def test_as_many_drafts_are_kept_as_on_a_cpu() -> None:
    kinds = [{"logit_bias": BIASED, "temperature": 4.0, "seed": seed, "max_tokens": 40} for seed in range(9)]
    knobs = head_knobs("llama", 4, use_overlap=False)
    rates = []
    for engine in (gpu_engine("llama", max_batch_size=16, **knobs), engine_of("llama", **knobs)):
        serve(engine, requests_of(kinds))
        num_drafts, num_accepted = totals(engine)
        assert num_accepted > 0.45 * num_drafts > 40
        rates.append(num_accepted / num_drafts)
    assert rates[0] == pytest.approx(rates[1], abs=0.02)


def test_steps_and_turns_are_graphs() -> None:
    """All of them are captured before the first request, and none is launched kernel by kernel."""
    engine = gpu_engine("qwen3", "bfloat16", **head_knobs("qwen3", 4))
    while engine.prepare():
        pass
    device, head = engine.device, head_device(engine)
    assert isinstance(device, GpuDevice)
    launched = Mock(side_effect=AssertionError("a step that is no graph"))
    for half in (device, head):
        assert all(half.graphs.is_captured(size) for size in half.graphs.sizes)
        half.graphs._forward = half.graphs._sample = half.graphs._follow = launched
    assert {size.num_tokens for size in head.graphs.sizes} == {0}
    found = watch(engine)
    serve(engine, requests_of([kind for kind in MIX + BIASED_MIX if "n" not in kind]))
    assert len(found) > 20
    assert launched.call_count == 0


def test_steps_overlap_where_nobody_has_drafts() -> None:
    """The head follows without a word to the host."""
    engine = gpu_engine("qwen3", **head_knobs("qwen3", 4))
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, num_speculative_tokens=0)
    engine.add(Request(request_id="quiet", prompt=tuple(range(30, 44)), params=params))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine._flights))
    assert most == engine._steps_ahead > 0
    assert totals(engine) == (0, 0)


def test_steps_are_not_followed_where_drafts_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower's graph is not launched then, and texts stay the same."""
    monkeypatch.setattr(draft_head, "PATIENCE", 8)
    kinds = [{"temperature": 1.0, "seed": seed, "max_tokens": 24, "ignore_eos": True} for seed in range(20)]
    requests = requests_of(kinds, seed=11)
    knobs = head_knobs("qwen3", 4, adaptive_speculation=True)
    plain, engine = (gpu_engine("qwen3", deterministic=True, **more) for more in ({}, knobs))
    assert engine.speculation is not None and isinstance(engine.device, GpuDevice)
    engine.speculation._lengths.use(HALF_MUST_BE_RIGHT)
    graphs, followed = engine.device.graphs, list[int]()
    follow = graphs.follow

    def count(size: StepSize) -> None:
        followed[-1] += 1
        follow(size)

    monkeypatch.setattr(graphs, "follow", count)
    for request in requests:
        followed.append(0)
        assert_same(serve(engine, [request]), serve(plain, [request]))
    assert followed[0] > 8 and sorted(followed)[12] <= 1


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_fast_kernels(head_dim: int, tmp_path: Path) -> None:
    """Shapes of published heads, whose turns take the CUDA C++ kernels of `auto`."""
    make_checkpoint("llama", tmp_path / "model", sizes=Sizes(hidden_size=256), dtype="bfloat16")
    loaded = load_model(resolve_model(str(tmp_path / "model"), show_progress=False), device="cpu")
    write_head(tmp_path / "head", loaded.config, DRAFT_IDS, head_dim=head_dim, context_len=256)
    knobs: dict[str, Any] = {"draft_model": str(tmp_path / "head"), "speculative_method": "eagle3"}
    knobs |= {"adaptive_speculation": False, "num_speculative_tokens": 5, **FEW_SIZES}
    params = [
        SamplingParams(temperature=2.0, seed=seed, max_tokens=60, ignore_eos=True, logit_bias=BIASED)
        for seed in range(6)
    ]
    prompts = [[(7 * i + j) % 200 + 10 for j in range(3 + 17 * i)] for i in range(6)]
    with LLM(str(tmp_path / "model"), device="cuda", dtype="bfloat16", **knobs) as llm:
        for answer in llm.generate(prompts, params):
            assert set(answer.token_ids) <= set(BIASED)
        num_drafts, num_accepted = totals(llm.engine)
    assert num_accepted > 0.3 * num_drafts > 30
