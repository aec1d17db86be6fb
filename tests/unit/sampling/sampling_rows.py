"""Rows and seeds for the sampling tests."""

from __future__ import annotations

import torch

from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow

PLAIN = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def row(
    params: SamplingParams = PLAIN,
    *,
    seed: int = 0,
    position: int = 0,
    tokens: tuple[int, ...] = (),
    num_prompt: int = 0,
    banned: tuple[int, ...] = (),
    num_logprobs: int | None = None,
) -> SampleRow:
    return SampleRow(
        params=params,
        seed=seed,
        position=position,
        num_prompt=num_prompt,
        tokens=tokens,
        banned=banned,
        num_logprobs=num_logprobs,
    )


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How often pure chance would stray at least this far from `probs`; a count where none may be is 0."""
    if counts[probs == 0].any():
        return 0.0
    counts, probs = counts[probs > 0].double(), probs[probs > 0].double()
    expected = probs * counts.sum()
    rare = expected < 5  # together they are one cell
    if rare.any():
        counts = torch.cat((counts[~rare], counts[rare].sum().reshape(1)))
        expected = torch.cat((expected[~rare], expected[rare].sum().reshape(1)))
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(counts.numel() - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
