"""The experts of many rows, emulated: barriers, gathered rows, padding, tiles that are cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from infer.kernels.linear import cuda
from infer.kernels.moe.grouped import experts_mlp_reference
from infer.kernels.moe.many import BLOCK_ROWS, ManyRows
from infer.kernels.runtime import tensor_map
from tests.kernels.emulated_wgmma import EmulatedLaunch, encode_tiled
from tests.kernels.kernel_contract import nan_in_fresh_memory
from tests.kernels.test_few_experts import order_rows_reference


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(cuda, "load_variant", EmulatedLaunch)
    monkeypatch.setattr(tensor_map, "encoder", lambda: encode_tiled)
    with nan_in_fresh_memory():
        yield


def test_each_row_meets_its_expert() -> None:
    """More chunks than stages, cut tiles, whole blocks, warpgroups of padding, an expert without rows."""
    hidden_size, size, num_experts = 320, 192, 4
    counts = [BLOCK_ROWS, 0, 3, 70]
    experts_TC = torch.arange(num_experts).repeat_interleave(torch.tensor(counts))
    experts_TC = experts_TC[torch.randperm(len(experts_TC))][:-1].int().view(-1, 2)
    x = torch.randn(len(experts_TC), hidden_size + 8).bfloat16()[:, :hidden_size]
    weights_TC = torch.rand(experts_TC.shape)
    gate_up = (torch.randn(num_experts, 2 * size, hidden_size) / 16).bfloat16()
    down = (torch.randn(num_experts, hidden_size, size) / 16).bfloat16()
    num_rows, order = experts_TC.numel(), order_rows_reference(experts_TC, num_experts, BLOCK_ROWS)
    first, second = ManyRows(size, hidden_size, "silu"), ManyRows(hidden_size, size, "")
    gated = first.multiply(x, gate_up, num_rows, *order, None, rows_per_input=2)
    outputs = second.multiply(gated, down, num_rows, *order, weights_TC)
    y = outputs.float().view(*experts_TC.shape, -1).sum(1)
    expected = experts_mlp_reference(x.float(), experts_TC, weights_TC, gate_up.float(), down.float(), "silu")
    assert (y - expected).abs().max() < 0.02 * expected.abs().max()
