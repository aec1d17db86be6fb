from __future__ import annotations

import math

import pytest
import torch

from infer.kernels.elementwise.rope import rope
from infer.layers.facts import RopeScaling
from infer.layers.rotary import Rotary, frequencies, stretch


def turn(rotary: Rotary, position: int, x: torch.Tensor) -> torch.Tensor:
    return rope(x, x, rotary.cos_PR, rotary.sin_PR, torch.tensor([position]))[0]


def test_frequencies_fall_geometrically_from_one() -> None:
    expected = [10_000.0 ** (-2 * i / 8) for i in range(4)]

    torch.testing.assert_close(frequencies(8, 10_000.0), torch.tensor(expected))


def test_scores_depend_only_on_the_distance() -> None:
    rotary = Rotary(frequencies(8, 100.0), 64)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 1, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        return float((turn(rotary, query_position, q) * turn(rotary, key_position, k)).sum())

    assert score(10, 3) == pytest.approx(score(47, 40), abs=1e-5)
    assert score(10, 3) != pytest.approx(score(10, 4), abs=1e-3)


def test_pairs_are_the_two_halves_of_a_head() -> None:
    rotary = Rotary(torch.tensor([math.pi / 2, 0.0]), 2)  # pair 0 turns by 90 degrees a step, pair 1 never
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])

    torch.testing.assert_close(turn(rotary, 1, q), torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]]))


def test_tables_are_float32_whatever_the_model_is() -> None:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = Rotary(frequencies(16, 500_000.0), 300)
    finally:
        torch.set_default_dtype(previous)
    exact = 299 * 500_000.0 ** (-2 / 16)

    assert rotary.cos_PR.dtype == rotary.sin_PR.dtype == torch.float32
    assert float(rotary.cos_PR[299, 1]) == pytest.approx(math.cos(exact), abs=1e-4)


def test_tables_are_not_part_of_a_checkpoint() -> None:
    assert not Rotary(frequencies(8, 10_000.0), 4).state_dict()


def stretched_alone(frequency: float) -> float:
    """One frequency through the definition, case by case: wavelengths against the two bounds."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4.0:
        return frequency
    if wavelength > 8192 / 1.0:
        return frequency / 8.0
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 8.0 + smooth * frequency


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain = frequencies(128, 500_000.0)
    llama3 = RopeScaling(kind="llama3", factor=8.0, high_freq_factor=4.0, original_context_len=8192)
    stretched = stretch(plain, 500_000.0, llama3, 8192)

    torch.testing.assert_close(stretched, torch.tensor([stretched_alone(f) for f in plain.tolist()]))
    assert stretched[0] == plain[0]
    assert float(stretched[-1] / plain[-1]) == pytest.approx(1 / 8)
    assert any(0.2 < ratio < 0.9 for ratio in (stretched / plain).tolist())  # some are blended


def test_yarn_does_not_round_its_bounds_when_told_so() -> None:
    """The bounds of gpt-oss, between pairs: 8.09 and 17.40, not 8 and 18."""
    plain = frequencies(64, 150_000.0)
    yarn = RopeScaling(kind="yarn", factor=32.0, truncate=False, original_context_len=4096)
    exact = stretch(plain, 150_000.0, yarn, 4096)
    slowed = 1 - (exact / plain - 1 / 32) / (1 - 1 / 32)  # share of the stretch that each pair has

    assert [float(share) for share in slowed[[8, 18]]] == pytest.approx([0.0, 1.0], abs=1e-5)
    assert float(slowed[9]) == pytest.approx((9 - 8.0927) / (17.3980 - 8.0927), abs=1e-4)


def test_pairs_that_do_not_turn_keep_their_length() -> None:
    rotary = Rotary(frequencies(4, 10_000.0), 5, num_pairs=6, scale=1.5)

    assert torch.equal(rotary.cos_PR[:, 2:], torch.ones(5, 4))
    assert torch.equal(rotary.sin_PR[:, 2:], torch.zeros(5, 4))
    assert float(rotary.cos_PR[0, 0]) == 1.5
