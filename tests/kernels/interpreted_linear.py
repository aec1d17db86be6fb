"""The contract of the linears under Triton's interpreter, in a process of its own.

By hand:  TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_linear.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.linear.small import linear_add
from infer.layers.bind import bind
from infer.models.registry import get_family
from scripts.make_checkpoint import Sizes, raw_config
from tests.kernels.added_contract import AddedContract
from tests.kernels.linear_contract import LinearContract
from tests.support.step import ListCache, ListStep


class TestInterpretedLinears(LinearContract):
    device = "cpu"


class TestInterpretedPairs(AddedContract):
    device = "cpu"


def test_behind_the_last_attention_wanted_rows_alone_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream has their rows too, whether a kernel adds to it or not."""
    torch.manual_seed(0)
    family = get_family("qwen3")
    model: Any = family.build(family.read_config(raw_config("qwen3", Sizes())))
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.1)
    bind(model, torch.device("cpu"), deterministic=False)()
    tokens_T = torch.arange(12)
    added: list[int] = []

    def note(stream: ResidualInput, *args: Any, **options: Any) -> ResidualSum:
        added.append(len(stream.residual_MN))
        return linear_add(stream, *args, **options)

    monkeypatch.setattr("infer.quant.dense.linear_add", note)
    with torch.no_grad():
        whole = model(tokens_T, ListStep([ListCache()], [12]))
        num_added = len(added)
        assert added == [12] * num_added and num_added > 1
        for places in ([11], [0, 3, 7, 7, 10, 11]):
            added.clear()
            step = ListStep([ListCache()], [12])
            step.logit_indices = torch.tensor(places)
            torch.testing.assert_close(model(tokens_T, step), whole[places], rtol=1e-4, atol=1e-5)
            last = [len(places)] if len(places) > 1 else []  # one token has a kernel that does not add
            assert added == [12] * (num_added - 1) + last
