"""Penalties against the formula written token by token, and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from infer.sampling.params import SamplingParams
from infer.sampling.penalties import apply_penalties

VOCAB = 40
PROMPT = [3, 3, 17, 0, 39, 8]
OUTPUT = [17, 17, 5, 17, 39, 1]


def random_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def penalised(
    logits: torch.Tensor, params: SamplingParams, tokens: list[int], num_prompt: int
) -> torch.Tensor:
    changed = logits.clone()
    apply_penalties(changed, params, tokens, num_prompt)
    return changed


def by_the_formula(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    expected = []
    for token_id, logit in enumerate(logits.double().tolist()):
        if token_id in PROMPT + OUTPUT:
            r = params.repetition_penalty
            logit = logit / r if logit > 0 else logit * r
        count = OUTPUT.count(token_id)
        expected.append(logit - (params.presence_penalty if count else 0) - params.frequency_penalty * count)
    return torch.tensor(expected)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(presence_penalty=-2.0),
        SamplingParams(frequency_penalty=0.7),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=-0.9),
        SamplingParams(),
    ],
)
def test_every_token_is_penalised_as_the_formula_says(params: SamplingParams) -> None:
    logits = random_logits()
    changed = penalised(logits, params, PROMPT + OUTPUT, len(PROMPT))
    torch.testing.assert_close(changed, by_the_formula(logits, params), rtol=1e-6, atol=1e-6)


def test_repetition_equals_transformers_exactly() -> None:
    logits = random_logits(1)
    reference = RepetitionPenaltyLogitsProcessor(penalty=1.2)
    expected = reference(torch.tensor([PROMPT + OUTPUT]), logits.unsqueeze(0).clone())[0]
    changed = penalised(logits, SamplingParams(repetition_penalty=1.2), PROMPT + OUTPUT, len(PROMPT))
    assert torch.equal(changed, expected)


def test_presence_and_frequency_do_not_see_the_prompt() -> None:
    logits = random_logits()
    params = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(penalised(logits, params, PROMPT, len(PROMPT)), logits)


def test_an_empty_sequence_changes_nothing() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    logits = random_logits()
    assert torch.equal(penalised(logits, params, [], 0), logits)


def test_a_prompt_id_without_a_logit_is_passed_over() -> None:
    """An embedding may have more rows than the head has logits; such an id can be read, not produced."""
    params = SamplingParams(repetition_penalty=2.0)
    logits = random_logits()
    assert torch.equal(penalised(logits, params, [5, VOCAB + 3], 2), penalised(logits, params, [5], 1))


def test_a_forbidden_token_stays_forbidden() -> None:
    logits = random_logits()
    logits[17] = float("-inf")
    for params in (SamplingParams(repetition_penalty=0.5), SamplingParams(frequency_penalty=-2.0)):
        changed = penalised(logits, params, PROMPT + OUTPUT, len(PROMPT))
        assert changed[17] == float("-inf") and not changed.isnan().any()
