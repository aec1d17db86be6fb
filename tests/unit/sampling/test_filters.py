"""Top-k, top-p and min-p against transformers' warpers: same tokens kept, same probabilities.

Both ways to filter, by candidates and by whole rows, are compared wherever they must agree, and the
frequencies of real draws with the law.
Ties have a law of their own here: tokens with equal logits stay or go together.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from infer.sampling.filters import FIRST_CANDIDATES, filter_candidates, filter_rows
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import sample
from tests.unit.sampling.sampling_rows import chi_square_p_value, random_logits, row

NO_IDS: Any = torch.zeros(1, 0, dtype=torch.int64)

TOP_K = (0, 1, 7, FIRST_CANDIDATES - 1, FIRST_CANDIDATES, FIRST_CANDIDATES + 44, 100_000)
TOP_P = (1.0, 0.9999, 0.95, 0.5, 1e-6)
MIN_P = (0.0, 0.02, 1.0)


def reference_law(logits_SV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probabilities transformers would draw from."""
    scores = logits_SV.double()  # so that the reference has no rounding of its own
    scores = TemperatureLogitsWarper(float(params.temperature))(NO_IDS, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(NO_IDS, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(NO_IDS, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(NO_IDS, scores)
    return torch.softmax(scores, dim=-1)


def temper(logits_SV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    temperature = torch.tensor([[p.temperature] for p in params])
    return (logits_SV.float() - logits_SV.float().amax(dim=-1, keepdim=True)) / temperature


def our_law(logits_SV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """The probabilities our filters leave. Where the candidates claim to be enough, both ways must agree."""
    scaled = temper(logits_SV, params)
    whole = filter_rows(scaled, params)
    values, ids, is_complete = filter_candidates(scaled, params)
    from_candidates = torch.full_like(scaled, float("-inf")).scatter(1, ids, values)
    assert torch.equal(from_candidates[is_complete], whole[is_complete])
    return torch.softmax(whole, dim=-1)


def assert_same_law(logits_SV: torch.Tensor, params: SamplingParams) -> None:
    ours, theirs = our_law(logits_SV, [params] * logits_SV.shape[0]), reference_law(logits_SV, params)
    assert torch.equal(ours > 0, theirs > 0), (
        f"kept {(ours > 0).sum(dim=-1).tolist()} tokens, transformers {(theirs > 0).sum(dim=-1).tolist()}"
    )
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), list(itertools.product(TOP_K, TOP_P, MIN_P)))
def test_every_combination_equals_transformers(top_k: int, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    for spread in (0.3, 4.0):  # flat: thousands are kept; peaked: a handful
        assert_same_law(random_logits(2, 3001, seed=top_k, spread=spread), params)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 2.0, 100.0])
def test_filters_judge_the_tempered_distribution(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=40, top_p=0.9, min_p=0.01)
    assert_same_law(random_logits(4, 2000), params)


@pytest.mark.parametrize(
    "vocab_size", [1, 2, 5, FIRST_CANDIDATES - 1, FIRST_CANDIDATES, FIRST_CANDIDATES + 1]
)
def test_small_vocabularies_equal_transformers(vocab_size: int) -> None:
    for params in (
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=0.99999),
        SamplingParams(top_k=4, top_p=0.8, min_p=0.1),
    ):
        assert_same_law(random_logits(3, vocab_size), params)


def test_the_candidates_are_enough_for_a_peaked_row_and_not_for_a_flat_one() -> None:
    peaked, flat = random_logits(1, 5000, spread=6.0), random_logits(1, 5000, spread=0.01)
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.9)]
    values, _, is_complete = filter_candidates(temper(torch.cat((peaked, flat)), params), params)
    assert is_complete.tolist() == [True, False]
    assert values.shape[1] == FIRST_CANDIDATES


@pytest.mark.parametrize("top_k", [5, FIRST_CANDIDATES - 1, FIRST_CANDIDATES, FIRST_CANDIDATES + 1, 4999])
def test_the_candidates_are_enough_for_any_top_k_without_ties(top_k: int) -> None:
    params = [SamplingParams(top_k=top_k, top_p=0.99)]
    _, _, is_complete = filter_candidates(temper(random_logits(1, 5000), params), params)
    assert is_complete.item()


@given(
    logits=st.lists(st.floats(-40, 0, width=16) | st.just(float("-inf")), min_size=1, max_size=700),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_candidates_and_whole_rows_agree_on_anything(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    row_logits = torch.tensor([[0.0, *logits]])
    law = our_law(row_logits, [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)])  # asserts it
    assert law[0, 0] > 0


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0]])
    assert (our_law(logits, [SamplingParams(top_k=2)]) > 0).tolist() == [[True] * 4 + [False] * 2]
    assert (our_law(logits, [SamplingParams(top_p=0.6)]) > 0).tolist() == [[True] * 4 + [False] * 2]
    assert (our_law(logits, [SamplingParams(top_p=0.4)]) > 0).tolist() == [[True] + [False] * 5]


def test_a_tie_that_reaches_beyond_the_first_candidates_is_kept_whole() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, 500:] = -5.0
    for params in (SamplingParams(top_k=10), SamplingParams(top_k=10, top_p=0.5), SamplingParams(top_p=0.1)):
        law = our_law(logits, [params])
        assert torch.equal(law[0] > 0, logits[0] == 0.0)


@pytest.mark.parametrize("top_k", [0, 100, 300])
@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_coarse_logits_full_of_ties_follow_the_definition(top_k: int, top_p: float) -> None:
    """bfloat16 logits tie everywhere. Definition: a token stays while those above it hold less than p."""
    logits = random_logits(1, 3000, spread=1.0).bfloat16().float()
    law = our_law(logits, [SamplingParams(top_k=top_k, top_p=top_p)])[0]
    row_logits = logits[0].double()
    edge = torch.topk(row_logits, top_k).values[-1] if top_k else row_logits.min()
    probs = torch.where(row_logits >= edge, row_logits.exp(), 0.0)
    probs /= probs.sum()
    for value in sorted(set(row_logits.tolist())):
        above = probs[row_logits > value].sum()
        group = row_logits == value
        assert (law[group] > 0).all() if value >= edge and above < top_p else (law[group] == 0).all()


def test_a_row_with_few_allowed_tokens_needs_no_second_look() -> None:
    logits = random_logits(1, 600)
    logits[0, 20:] = float("-inf")  # a grammar allows 20 tokens: fewer than the first candidates
    params = SamplingParams(top_k=50, top_p=0.95)
    _, _, is_complete = filter_candidates(temper(logits, [params]), [params])
    assert is_complete.item()
    assert_same_law(logits, params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.4, top_k=12, top_p=0.9, min_p=0.03),
    ],
)
def test_draws_are_as_frequent_as_the_law_says(params: SamplingParams) -> None:
    logits = random_logits(1, 30, seed=4, spread=1.2)
    rows = [row(params, seed=11, position=i) for i in range(6000)]
    ids = torch.tensor(sample(logits.expand(len(rows), -1), rows).ids)
    counts = torch.bincount(ids, minlength=30)
    assert chi_square_p_value(counts, reference_law(logits, params)[0]) > 1e-4


def test_draws_of_a_flat_wide_row_are_as_frequent_as_the_law_says() -> None:
    """The slow road: more tokens are kept than there are first candidates."""
    params = SamplingParams(top_p=0.8)
    logits = random_logits(1, 400, seed=5, spread=0.05)
    rows = [row(params, seed=i) for i in range(3000)]
    counts = torch.bincount(torch.tensor(sample(logits.expand(len(rows), -1), rows).ids), minlength=400)
    law = reference_law(logits, params)[0]
    assert int((law > 0).sum()) > FIRST_CANDIDATES
    assert chi_square_p_value(counts, law) > 1e-4


def test_the_worked_example_of_the_documentation_is_true() -> None:
    """docs/features/sampling.md follows these five tokens through the filters."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -2.0]])
    stages = [
        (SamplingParams(temperature=0.5), [0.8307, 0.1124, 0.0414, 0.0152, 0.0003]),
        (SamplingParams(temperature=0.5, top_k=4), [0.8310, 0.1125, 0.0414, 0.0152, 0.0]),
        (SamplingParams(temperature=0.5, top_k=4, top_p=0.95), [0.8438, 0.1142, 0.0420, 0.0, 0.0]),
        (SamplingParams(temperature=0.5, top_k=4, top_p=0.95, min_p=0.1), [0.8808, 0.1192, 0.0, 0.0, 0.0]),
    ]
    for params, law in stages:
        assert our_law(logits, [params])[0].tolist() == pytest.approx(law, abs=5e-5)
