"""The contract of the linears under Triton's interpreter; run by `test_linear_small.py`, in its own process.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/interpreted_linear.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.kernels.linear.residual import Added
from infer.models.registry import get_family
from scripts.make_checkpoint import Sizes, raw_config
from tests.support.step import ListCache, ListStep
from tests.unit.kernels.added_contract import AddedContract
from tests.unit.kernels.linear_contract import LinearContract


class TestInterpretedLinears(LinearContract):
    device = "cpu"


class TestInterpretedPairs(AddedContract):
    device = "cpu"


@pytest.mark.parametrize("places", [[11], [0, 3, 7, 7, 10, 11]], ids=["one", "some"])
def test_behind_the_last_attention_wanted_rows_alone_are_added(places: list[int]) -> None:
    """The stream has their rows too, whether a kernel adds to it or not."""
    torch.manual_seed(0)
    family = get_family("qwen3")
    model: Any = family.build(family.read_config(raw_config("qwen3", Sizes())))
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.1)
    seen: list[Any] = []
    after = model.layers[-1].mlp.after

    def note(norm: Any, x: Any, residual_SD: torch.Tensor, reader: Any) -> Any:
        seen.append((x, len(residual_SD)))
        return after(norm, x, residual_SD, reader)

    model.layers[-1].mlp.after = note
    tokens_T = torch.arange(12)
    with torch.no_grad():
        whole = model(tokens_T, ListStep([ListCache()], [12]))
        wanted = model(tokens_T, ListStep([ListCache()], [12]), torch.tensor(places))

    torch.testing.assert_close(wanted, whole[places], rtol=1e-4, atol=1e-5)
    (x, num_rows), was_added = seen[1], len(places) > 1
    assert num_rows == len(places)
    assert isinstance(x, Added) == was_added
    assert len(x.sum_MN if isinstance(x, Added) else x) == len(places)
