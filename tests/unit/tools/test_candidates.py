from __future__ import annotations

import numpy as np
import pytest
import torch

from infer.sampling.filters import filter_rows
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.sampling.penalties import apply_penalties
from infer.tools.candidates import BANNED, KEPT, MASKED, UNKNOWN, Candidate, DrawContext, weigh

VOCAB_SIZE = 64
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5, top_p=0.8),
    SamplingParams(temperature=1.7, top_p=0.5),
    SamplingParams(top_k=3),
    SamplingParams(temperature=0.7, top_k=8, top_p=0.9),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(top_k=20, top_p=0.6, min_p=0.02),
    SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=1.0, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, top_k=5, presence_penalty=-1.0),
    SamplingParams(top_p=0.9, logit_bias={3: 4.0, 7: -2.0}),
    SamplingParams(top_k=4, logit_bias={60: 9.0}),
    SamplingParams(temperature=1e-5, top_p=0.9),
]


def report(logits_V: torch.Tensor, count: int, chosen: int = 0) -> RowLogprobs:
    logprobs = torch.log_softmax(logits_V, dim=-1)
    values, ids = torch.topk(logprobs, count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return RowLogprobs(chosen, float(logprobs[chosen]), 1, top)


def true_shares(logits_V: torch.Tensor, params: SamplingParams, context: DrawContext) -> torch.Tensor:
    """What the sampler itself leaves of a whole row."""
    row_V = logits_V.clone()
    for token_id, bias in params.logit_bias.items():
        row_V[token_id] += bias
    for token_id in range(VOCAB_SIZE):
        if token_id in context.banned or not context.allows(token_id):
            row_V[token_id] = -torch.inf
    apply_penalties(row_V, params, context.tokens, context.num_prompt)
    row_V = (row_V - row_V.max()) / max(params.temperature, 1e-30)
    return filter_rows(row_V.unsqueeze(0), [params])[0].softmax(dim=-1)


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
def test_no_fate_is_wrong(params: SamplingParams, spread: float) -> None:
    generator = torch.Generator().manual_seed(7)
    num_told = 0
    for number in range(20):
        logits_V = torch.randn(VOCAB_SIZE, generator=generator) * spread
        mask = None
        if number % 4 == 3:
            mask = np.array([0x5A5A5A5A, 0x0F0F0F0F], dtype=np.int32)
        context = DrawContext([1, 2, 3, 3, 9], 2, VOCAB_SIZE, (4, 5) if number % 5 == 4 else (), mask)
        truth = true_shares(logits_V, params, context)
        chosen = int(truth.argmax())
        for each in weigh(report(logits_V, 20, chosen), params, context):
            true_share = float(truth[each.token_id])
            if each.fate == KEPT:
                assert true_share > 0 or params.temperature < 0.01, each
                num_told += 1
            elif each.fate != UNKNOWN:
                assert true_share == 0, each
                num_told += 1
            if each.share is not None:
                assert each.share == pytest.approx(true_share, abs=0.006), each
    assert num_told > 0


def by_id(candidates: list[Candidate]) -> dict[int, Candidate]:
    return {each.token_id: each for each in candidates}


def test_the_worked_example_of_the_docs() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -2.0])
    params = SamplingParams(temperature=0.5, top_k=4, top_p=0.95, min_p=0.1)
    found = weigh(report(logits, 5), params, DrawContext([], 0, 5))
    assert [each.fate for each in found] == [KEPT, KEPT, "min_p 0.1", "top_p 0.95", "top_k 4"]
    assert [each.share for each in found[:2]] == [
        pytest.approx(0.8808, abs=1e-4),
        pytest.approx(0.1192, abs=1e-4),
    ]


def test_bans_and_masks_are_told_by_name() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -2.0])
    mask = np.array([0b11011], dtype=np.int32)
    found = by_id(
        weigh(report(logits, 5, 3), SamplingParams(temperature=0), DrawContext([], 0, 5, (0,), mask))
    )
    assert [found[token_id].fate for token_id in range(5)] == [BANNED, KEPT, MASKED, KEPT, KEPT]


def test_a_repetition_penalty_is_noted_and_hides_shares() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -2.0])
    params = SamplingParams(repetition_penalty=1.3, top_p=0.9)
    found = by_id(weigh(report(logits, 5, 1), params, DrawContext([0], 1, 5)))
    assert found[0].note == "repetition_penalty 1.3"
    assert {each.fate for each in found.values()} == {KEPT, UNKNOWN}
    assert found[1].fate == KEPT, "it was drawn"
    assert all(each.share is None for each in found.values())


def test_penalties_and_bias_are_added_up_in_a_note() -> None:
    logits = torch.tensor([2.0, 1.0])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={0: 2.0})
    found = by_id(weigh(report(logits, 2), params, DrawContext([0, 0, 0], 1, 2)))
    assert found[0].note == "logit +1" and found[1].note == ""
