"""The references of the kernels of a decode step."""

from __future__ import annotations

import random

import torch

from infer.kernels.runtime.dispatch import use_triton
from infer.kernels.sampling.sample_rows import NO_TOKEN
from infer.sampling import params
from tests.kernels.step_contract import SampledRows, StepContract, random_params


class TestReferences(StepContract):
    """Without the interpreter the launchers take the reference, which must keep the same promises."""

    device = "cpu"
    vocab_size = 5003
    num_rows = 60

    def test_the_kernel_and_not_the_reference_is_under_test(self) -> None:
        assert not use_triton(torch.zeros(1))


def test_both_samplers_mean_the_same_by_no_token() -> None:
    assert NO_TOKEN == params.NO_TOKEN


def test_hundreds_of_rows_are_sampled_as_the_sampler_does() -> None:
    source, generator = random.Random(9), torch.Generator().manual_seed(9)
    rows = SampledRows([random_params(source) for _ in range(300)], "cpu", seed=9)
    rows.check(torch.randn(300, 1500, generator=generator) * 4)
