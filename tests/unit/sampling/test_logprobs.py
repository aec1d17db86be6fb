"""Logprobs against torch.log_softmax and a rank counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from infer.sampling.logprobs import top_logprobs


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def tolerance(vocab_size: int) -> float:
    """Of a logprob whose normaliser is a sum of so many float32, in an order that differs between processors.

    A sum of n terms is off by about sqrt(n) roundings (4: far in the tail); another 64 are two roundings of
    numbers below 32.
    """
    return (4 * math.sqrt(vocab_size) + 64) * 2**-24


@pytest.mark.parametrize("vocab_size", [3, 97, 49_152])
def test_values_ranks_and_alternatives_follow_log_softmax(vocab_size: int) -> None:
    logits = random_logits(4, vocab_size)
    chosen = [0, 1, 2, vocab_size - 1]
    near = tolerance(vocab_size)
    reference = torch.log_softmax(logits.double(), dim=-1)
    for row, found in enumerate(top_logprobs(logits, chosen, [3] * 4)):
        assert found is not None
        ordered = sorted(enumerate(reference[row].tolist()), key=lambda entry: -entry[1])
        assert found.token_id == chosen[row]
        assert found.logprob == pytest.approx(reference[row, chosen[row]].item(), abs=near)
        assert found.rank == 1 + [token_id for token_id, _ in ordered].index(chosen[row])
        assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in ordered[:3]]
        assert [value for _, value in found.top] == pytest.approx([v for _, v in ordered[:3]], abs=near)


def test_each_row_gets_the_number_it_asked_for() -> None:
    found = top_logprobs(random_logits(5, 50), [1, 2, 3, 4, 5], [None, 0, 2, 20, None])
    assert [None if row is None else len(row.top) for row in found] == [None, 0, 2, 20, None]


def test_where_none_are_asked_for_nothing_is_computed() -> None:
    assert top_logprobs(random_logits(2, 5), [0, 1], [None, None]) == [None, None]


def test_a_chosen_token_outside_the_top_is_still_reported() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -2.0]])
    (found,) = top_logprobs(logits, [3], [2])
    assert found is not None
    assert (found.token_id, found.rank) == (3, 4)
    assert [token_id for token_id, _ in found.top] == [0, 1]


def test_the_likeliest_token_equals_the_first_alternative_to_the_last_bit() -> None:
    """Evaluation harnesses decide "was this greedy?" by comparing the two floats."""
    logits = random_logits(20, 1000)
    best = torch.argmax(logits, dim=-1).tolist()
    for found in top_logprobs(logits, best, [1] * 20):
        assert found is not None and found.rank == 1
        assert found.top == ((found.token_id, found.logprob),)


def test_equal_logits_share_the_better_rank() -> None:
    (found,) = top_logprobs(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), [3], [0])
    assert found is not None and found.rank == 1


def test_more_alternatives_than_tokens_lists_every_token() -> None:
    (found,) = top_logprobs(random_logits(1, 4), [2], [20])
    assert found is not None and sorted(token_id for token_id, _ in found.top) == [0, 1, 2, 3]


def test_a_forbidden_alternative_has_logprob_minus_infinity() -> None:
    (found,) = top_logprobs(torch.tensor([[1.0, float("-inf"), 1.0]]), [0], [3])
    assert found is not None
    assert found.logprob == pytest.approx(-math.log(2))
    assert found.top[-1] == (1, float("-inf"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_normalised_in_float32(dtype: torch.dtype) -> None:
    logits = random_logits(3, 5000).to(dtype)
    reference = torch.log_softmax(logits.double(), dim=-1)
    for row, found in enumerate(top_logprobs(logits, [7, 8, 9], [0] * 3)):
        assert found is not None
        assert found.logprob == pytest.approx(reference[row, 7 + row].item(), abs=tolerance(5000))


def test_a_row_reports_the_same_bits_alone_and_in_a_batch() -> None:
    logits = random_logits(7, 4097)
    together = top_logprobs(logits, list(range(7)), [5, None, 0, 5, 20, 5, 5])
    for row, count in enumerate([5, None, 0, 5, 20, 5, 5]):
        assert top_logprobs(logits[row : row + 1], [row], [count]) == [together[row]]
