"""PyTorch's threads while it samples: few for few rows, and as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from infer.kernels.runtime.torch_threads import threads_for
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow, Samples, sample
from tests.support.tiny import make_engine, run_engine


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 1), (1, 1), (8, 1), (9, 3), (400, 3)])
def test_one_thread_for_few_rows(num_rows: int, expected: int) -> None:
    with threads_for(num_rows):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


def test_a_failure_leaves_them_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError), threads_for(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def test_the_device_half_samples_one_row_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(logits_SV: torch.Tensor, rows: Sequence[SampleRow], *, overwrites: bool = False) -> Samples:
        seen.append(torch.get_num_threads())
        return sample(logits_SV, rows, overwrites=overwrites)

    monkeypatch.setattr("infer.execution.host_sampling.sample", watched)
    run_engine(make_engine(), [([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))])
    assert seen == [1, 1, 1] and torch.get_num_threads() == 3
