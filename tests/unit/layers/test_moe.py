from __future__ import annotations

import torch
import torch.nn.functional as F

from infer.layers.facts import ExpertConfig
from infer.layers.moe import MixtureOfExperts
from infer.layers.norm import RMSNorm
from infer.quant.chosen import SumOfChoices
from infer.quant.residual import ResidualStream, as_tensor


def make_mixture(*, num_choices: int, normalized: bool) -> MixtureOfExperts:
    torch.manual_seed(0)
    experts = ExpertConfig(num_experts=4, num_choices=num_choices, size=6, normalized=normalized)
    mixture = MixtureOfExperts(8, experts, activation="silu")
    for parameter in mixture.parameters():
        parameter.data = torch.randn(parameter.shape)
    return mixture


def one_expert(mixture: MixtureOfExperts, expert: int, x: torch.Tensor) -> torch.Tensor:
    gate, up = (mixture.gate_up.weight[expert] @ x).chunk(2)
    return mixture.down.weight[expert] @ (F.silu(gate) * up)


def test_a_token_is_the_mix_of_its_best_experts() -> None:
    for normalized in (True, False):
        mixture = make_mixture(num_choices=2, normalized=normalized)
        x = torch.randn(5, 8)
        shares = F.softmax(x @ mixture.router.weight.T, dim=-1)
        for row, y in enumerate(mixture(x)):
            best = shares[row].argsort(descending=True)[:2].tolist()
            total = shares[row, best].sum() if normalized else 1.0
            expected = sum(shares[row, e] / total * one_expert(mixture, e, x[row]) for e in best)
            torch.testing.assert_close(y, expected)


def test_all_experts_may_be_chosen() -> None:
    mixture = make_mixture(num_choices=4, normalized=False)
    x = torch.randn(1, 8)
    shares = F.softmax(x @ mixture.router.weight.T, dim=-1)[0]
    expected = sum(shares[e] * one_expert(mixture, e, x[0]) for e in range(4))
    torch.testing.assert_close(mixture(x)[0], expected)


def test_a_mixture_reads_the_norm_of_the_stream() -> None:
    mixture = make_mixture(num_choices=2, normalized=True)
    norm = RMSNorm(8, eps=1e-6)
    norm.weight.data = torch.rand(8) + 0.5
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    stream = ResidualStream(residual)
    stream.add(x)
    y = mixture(norm(stream))
    torch.testing.assert_close(stream.settle(), x + residual)
    torch.testing.assert_close(y, mixture(norm(x + residual)))


def test_the_norm_that_reads_the_stream_adds_up_the_choices_of_a_token() -> None:
    mixture, norm = make_mixture(num_choices=2, normalized=True), RMSNorm(8, eps=1e-6)
    norm.weight.data = torch.rand(8) + 0.5
    outputs_TCD, residual = torch.randn(3, 2, 8), torch.randn(3, 8)
    stream = ResidualStream(residual)
    stream.add(SumOfChoices.pending(outputs_TCD, mixture.down.projection))
    y = mixture.router(norm(stream))
    total = residual + outputs_TCD.sum(1)
    torch.testing.assert_close(stream.settle(), total)
    torch.testing.assert_close(as_tensor(y), norm(total) @ mixture.router.weight.T)


def test_a_mixture_is_printed_with_its_experts() -> None:
    text = str(make_mixture(num_choices=2, normalized=True))
    assert "(router): Linear(8 -> 4, bias=False)" in text and "4 experts, 8 -> 12" in text
