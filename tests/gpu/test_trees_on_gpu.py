"""Trees of drafts on a GPU: windows in CUDA graphs, a mask of ancestors, and kept side lines that are moved.

In float32, where two tokens are hardly ever as likely as each other: texts with trees and without are equal.
The kernel itself is tested by its contract (tests/kernels/attention_contract.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from infer.execution.gpu import draft_device
from tests.gpu.test_speculation_on_gpu import (
    ALWAYS,
    PROMPTS,
    checkpoints,
    make_llm,
    numbers,
    params_of,
    speculation_of,
)

pytestmark = pytest.mark.gpu
assert checkpoints  # a fixture


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_cuda_graphs": False},
        {"kv_cache_dtype": "int8"},
        {"block_size": 16, "num_blocks": 14, "preemption": "recompute", "max_batch_size": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_shuffled", [False, True], ids=["best first", "second first"])
def test_texts_are_those_without_trees(
    more: dict[str, Any],
    is_shuffled: bool,
    checkpoints: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model drafts for itself. In another order its guesses are right along side lines, which are moved."""
    best_ids = cast(Any, draft_device).best_ids

    def drawn(*args: Any) -> torch.Tensor:
        best_WM: torch.Tensor = best_ids(*args)
        return torch.stack([best_WM[1], best_WM[0], best_WM[2]]) if len(best_WM) == 3 else best_WM

    if is_shuffled:
        monkeypatch.setattr(draft_device, "best_ids", drawn)
    directory, params = checkpoints("qwen3"), params_of()
    with make_llm(directory, dtype="float32", **more) as llm:
        expected = numbers(llm, params)
    knobs = ALWAYS | {"speculative_method": "tree", "draft_model": directory, "dtype": "float32"} | more
    with make_llm(directory, **knobs) as llm:
        for _ in range(2):
            found = numbers(llm, params)
            assert [[id_ for id_, _ in row] for row in found] == [[id_ for id_, _ in row] for row in expected]
        one = numbers(llm, params[:1], PROMPTS[:1])
        assert [id_ for id_, _ in one[0]] == [id_ for id_, _ in expected[0]]
        totals = speculation_of(llm).totals
    assert totals.num_accepted > (20 if is_shuffled else 50)
    assert is_shuffled or totals.by_length[-1] == max(totals.by_length), totals.by_length


def test_trees_of_a_machine_that_was_measured(checkpoints: Callable[[str], str]) -> None:
    directory, params = checkpoints("qwen3"), params_of()
    with make_llm(directory, dtype="float32") as llm:
        expected = numbers(llm, params)
    knobs: dict[str, Any] = {"speculative_method": "tree", "draft_model": directory, "dtype": "float32"}
    with make_llm(directory, **knobs) as llm:
        costs = speculation_of(llm).costs
        assert costs.draft_s > 0 and costs.is_ahead
        found = numbers(llm, params)
    assert [[id_ for id_, _ in row] for row in found] == [[id_ for id_, _ in row] for row in expected]
