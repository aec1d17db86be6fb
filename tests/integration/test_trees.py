"""Trees of drafts decide how fast a text comes, never what it says.

The requests and engines are those of chains (test_speculation.py). A model that drafts for itself is right
along the whole main line. Its guesses in another order are right as often, but along side lines: what is kept
was computed in other slots, and is moved.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.errors import ConfigError
from infer.execution import host_sampling
from infer.execution.gpu import draft_device
from infer.sampling import sampler
from infer.speculative.adaptive import Acceptance
from infer.speculative.tree import tree_of
from tests.integration.test_speculation import (
    DEPENDENT,
    MIX,
    PRESSURE,
    VOCAB_SIZE,
    assert_same,
    check,
    checkpoint,
    directory,
    engine_of,
    plain,
    requests_of,
    self_draft,
    serve,
    totals,
)
from tests.support.thinned import thinned

assert directory  # the fixture that makes checkpoints
GPU = (False, True)


def trees_of(count: int, family: str = "qwen3", **knobs: Any) -> dict[str, Any]:
    """The knobs with which a model drafts trees for itself."""
    return self_draft(family, count, speculative_method="tree", **knobs)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Drafts, kept drafts and depth of every window that a sequence has had."""
    found: list[tuple[int, int, int]] = []
    update = Acceptance.update

    def note(self: Acceptance, num_drafts: int, num_accepted: int, longest: int | None = None) -> None:
        if longest is not None:
            found.append((num_drafts, num_accepted, longest))
        update(self, num_drafts, num_accepted, longest)

    monkeypatch.setattr(Acceptance, "update", note)
    return found


@pytest.fixture
def shuffled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The best ids of a draft model come in any order; the list has the tokens that each step has moved."""
    rng, moved, best_ids = random.Random(1), list[int](), sampler.best_ids
    drawn_ids, move_slots = cast(Any, draft_device).best_ids, KVStore.move_slots

    def best(logits_SV: torch.Tensor, rows: Any, count: int) -> list[list[int]]:
        return [rng.sample(each, count) for each in best_ids(logits_SV, rows, count)]

    def drawn(*args: Any) -> torch.Tensor:
        best_WM = drawn_ids(*args)
        columns = [torch.tensor(rng.sample(ids, len(ids))) for ids in best_WM.T.tolist()]
        return torch.stack(columns, dim=1)

    def move(store: KVStore, moves_2M: torch.Tensor) -> None:
        moved.append(int((moves_2M[0] != moves_2M[1]).sum()))
        move_slots(store, moves_2M)

    monkeypatch.setattr(host_sampling, "best_ids", best)
    monkeypatch.setattr(draft_device, "best_ids", drawn)
    monkeypatch.setattr(KVStore, "move_slots", move)
    yield moved


@pytest.mark.parametrize(
    ("count", "family", "on_gpu"), thinned((16, 1, 8), ("qwen3", "qwen3_moe", "glm4"), GPU, keep=5)
)
def test_a_model_that_drafts_for_itself_is_right_along_the_main_line(
    count: int, family: str, on_gpu: bool, windows: list[tuple[int, int, int]]
) -> None:
    requests = requests_of(MIX)
    engine = engine_of(family, on_gpu=on_gpu, **trees_of(count, family))
    expected = plain(requests, family, on_gpu=on_gpu)
    assert_same(serve(engine, requests), expected)
    assert_same(serve(engine, requests, every=3), expected)
    assert windows and all(kept == depth for _, kept, depth in windows)
    assert max(windows) == (count, tree_of(count).depth, tree_of(count).depth)


@pytest.mark.parametrize(("pressure", "on_gpu"), thinned(["none", *PRESSURE], GPU, keep=3))
def test_what_is_kept_of_side_lines_is_moved(pressure: str, on_gpu: bool, shuffled: list[int]) -> None:
    """Under preemption, swaps, chunks and prefix hits as well: a block holds kept tokens alone."""
    requests = requests_of(MIX + MIX[:5], seed=3)
    engine = engine_of(on_gpu=on_gpu, **trees_of(8), **PRESSURE.get(pressure, {}))
    assert_same(serve(engine, requests, every=2), plain(requests, on_gpu=on_gpu))
    assert sum(shuffled) > (20 if pressure == "none" else 1)
    num_drafts, num_accepted = totals(engine)
    assert 0 < num_accepted < num_drafts


@pytest.mark.parametrize("on_gpu", GPU)
def test_rows_whose_tokens_are_counted_or_masked_get_chains(on_gpu: bool, shuffled: list[int]) -> None:
    """Next to others, which get trees."""
    pytest.importorskip("llguidance")
    masked: list[dict[str, Any]] = [
        {"structured": {"regex": "[a-c]{3,30}"}, "logprobs": 0, "max_tokens": 20},
        {"structured": {"regex": "(ab|cd)+e"}, "temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 1, "logprobs": 2},
    ]
    requests = requests_of(DEPENDENT + masked)
    engine = engine_of(on_gpu=on_gpu, **trees_of(6))
    assert_same(serve(engine, requests), plain(requests, on_gpu=on_gpu))
    assert totals(engine)[1] > 10 and sum(shuffled) > 0


@pytest.mark.parametrize(("lie", "on_gpu"), thinned(("wrong", "random", "twice"), GPU, keep=2))
def test_lies_change_nothing(lie: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, best_ids, drawn_ids = random.Random(2), sampler.best_ids, cast(Any, draft_device).best_ids

    def best(logits_SV: torch.Tensor, rows: Any, count: int) -> list[list[int]]:
        found = best_ids(logits_SV, rows, count)
        if lie == "twice":
            return [[each[1]] * count for each in found]
        return [[21] * count if lie == "wrong" else rng.choices(range(VOCAB_SIZE), k=count) for _ in found]

    def drawn(logits_MV: torch.Tensor, *args: Any) -> torch.Tensor:
        best_WM, shape = drawn_ids(logits_MV, *args[:-1], 2), (args[-1], len(logits_MV))
        lies = {"wrong": torch.full(shape, 21), "random": torch.randint(VOCAB_SIZE, shape)}
        return lies[lie] if lie in lies else best_WM[1].repeat(args[-1], 1)

    monkeypatch.setattr(host_sampling, "best_ids", best)
    monkeypatch.setattr(draft_device, "best_ids", drawn)
    requests = requests_of(MIX, seed=6)
    is_adaptive = lie == "wrong"
    engine = engine_of(on_gpu=on_gpu, **trees_of(8) | {"adaptive_speculation": is_adaptive})
    assert_same(serve(engine, requests, every=5), plain(requests, on_gpu=on_gpu))
    assert totals(engine)[0] > 0


@pytest.mark.parametrize("on_gpu", GPU)
def test_another_model_drafts_trees_at_its_own_pace(on_gpu: bool) -> None:
    """Its guesses are wrong, so that no draft pays soon; and a request may ask for fewer."""
    requests = requests_of([{"max_tokens": 60}, {"max_tokens": 60, "num_speculative_tokens": 2}])
    knobs = {"speculative_method": "tree", "draft_model": checkpoint("llama")}
    engine = engine_of(on_gpu=on_gpu, **knobs)
    assert_same(serve(engine, requests), plain(requests, on_gpu=on_gpu))
    assert 0 < totals(engine)[0] < 400


@pytest.mark.parametrize("on_gpu", GPU)
def test_aborts_leave_no_trace(on_gpu: bool, shuffled: list[int]) -> None:
    rng = random.Random(3)
    requests = requests_of([{"max_tokens": 30, "temperature": 1.0, "seed": n} for n in range(8)], seed=4)
    engine = engine_of(on_gpu=on_gpu, **trees_of(8))
    for request in requests:
        engine.add(request)
    alive = [request.request_id for request in requests]
    while engine.has_work:
        engine.step()
        check(engine)
        if alive and rng.random() < 0.3:
            engine.abort(alive.pop(rng.randrange(len(alive))))
            check(engine)
    assert engine.scheduler.pool.usage().num_used == 0
    again = requests[:3]  # what the prefix cache has kept is right
    assert_same(serve(engine, again), plain(again, on_gpu=on_gpu))
    assert sum(shuffled) > 0


@pytest.mark.parametrize("on_gpu", GPU)
def test_chance_keeps_part_of_the_main_line(on_gpu: bool, windows: list[tuple[int, int, int]]) -> None:
    """For benchmarks: the text is wrong, and the books balance."""
    requests = requests_of([{"max_tokens": 40, "temperature": 1.0, "seed": n} for n in range(3)])
    engine = engine_of(on_gpu=on_gpu, **trees_of(8, synthetic_acceptance=0.7))
    answers = serve(engine, requests)
    assert all(len(answer.tokens) == 40 for answer in answers.values())
    assert {kept for _, kept, _ in windows} >= {0, 1, 2, 4} and all(
        kept <= depth for _, kept, depth in windows
    )


def test_8_bit_caches_move_their_scales(shuffled: list[int]) -> None:
    requests = requests_of(MIX[:4])
    expected = serve(engine_of(kv_cache_dtype="int8"), requests)
    assert_same(serve(engine_of(kv_cache_dtype="int8", **trees_of(8)), requests), expected)
    assert sum(shuffled) > 0


@pytest.mark.parametrize(
    ("family", "knobs", "reason"),
    [
        ("qwen3", {"deterministic": True}, "deterministic"),
        ("mistral", {}, "a window of the text"),
    ],
)
def test_what_cannot_have_trees_is_refused_by_name(family: str, knobs: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_method=tree cannot be used with .*{reason}"):
        engine_of(family, **trees_of(4, family), **knobs)


def test_a_draft_model_with_windows_cannot_draft_trees() -> None:
    knobs = trees_of(4) | {"draft_model": checkpoint("mistral")}
    with pytest.raises(ConfigError, match=r"tree cannot be used with draft_model=.*a window of the text"):
        engine_of(**knobs)
