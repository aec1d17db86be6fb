"""The projection of coded weights on a CPU, where its products are the specification."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from infer.kernels.elementwise.gated_activation import gated_activation_reference
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.compiled import CompiledLinears
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.projection import Neighbours, WeightSpec
from tests.unit.kernels.test_linear_coded import FORMS, Filled

N, K = 96, 320


def spec(device: str = "cpu", num_experts: int | None = None) -> WeightSpec:
    form = CodedForm("int4", 64)
    return WeightSpec(N, K, torch.float32, torch.device(device), num_experts=num_experts, form=form)


def test_products_gates_and_rows_are_of_the_numbers() -> None:
    for name in FORMS:
        filled = Filled(name, N, K)
        projection = GPUWeights(spec(), [filled.weights])
        projection.prepare(CompiledLinears(torch.device("cpu")), Neighbours(reads_sum=True, writes_sum=True))
        projection.bias = torch.randn(N)
        x = torch.randn(2, 5, K)
        expected = F.linear(x, filled.numbers, projection.bias)
        torch.testing.assert_close(projection.multiply(x), expected, rtol=1e-5, atol=1e-4)
        gated = projection.project(x, "silu")
        torch.testing.assert_close(gated, gated_activation_reference(expected, "silu"), rtol=1e-4, atol=1e-3)
        assert not projection.reads_sum(x[0], 4, "") and not projection.can_add
        torch.testing.assert_close(projection.lookup(torch.tensor([3, 95])), filled.numbers[[3, 95]])


def test_memory_is_counted_without_having_any() -> None:
    counted, had = GPUWeights(spec("meta", num_experts=3)), GPUWeights(spec(num_experts=3))
    assert counted.num_bytes() == had.num_bytes() == 3 * CodedWeights.empty(N, K, "int4", 64).num_bytes
    assert had.expert(1).tensors["cells"] is had.matrices[1].cells


def test_more_tokens_unpack_the_matrix() -> None:
    matrix = GPUWeights(spec("meta"))
    assert [matrix.scratch_bytes(count) for count in (1, 64, 65, 8192)] == [0, 0, N * K * 4, N * K * 4]
    matrix.order = torch.arange(K, dtype=torch.int32)  # tokens are gathered
    assert matrix.scratch_bytes(8192) == (N + 8192) * K * 4


def test_experts_are_unpacked_for_many_tokens_where_they_have_no_biases() -> None:
    experts = GPUWeights(spec("meta", num_experts=3))
    assert [experts.scratch_bytes(count) for count in (6, 7)] == [0, 3 * N * K * 4]
    experts.bias = torch.empty(3, N, device="meta")
    assert experts.scratch_bytes(8192) == 0
