from __future__ import annotations

import pytest
import torch
from torch import nn

from infer.layers.linear import Linear


def filled(linear: Linear) -> Linear:
    for parameter in linear.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    return linear


def test_parts_name_consecutive_rows() -> None:
    linear = Linear(4, 10, bias=True, parts={"q": 6, "k": 1, "v": 3})

    assert [linear.spec.part_rows(name) for name in ("q", "k", "v")] == [
        slice(0, 6),
        slice(6, 7),
        slice(7, 10),
    ]


def test_a_fused_layer_equals_its_parts_alone() -> None:
    linear = filled(Linear(4, 10, bias=True, parts={"q": 6, "k": 1, "v": 3}))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    assert linear.bias is not None

    for name, output in zip(linear.parts, linear.split(linear(x)), strict=True):
        rows = linear.spec.part_rows(name)
        expected = x @ linear.weight[rows].T + linear.bias[rows]
        torch.testing.assert_close(output, expected)


def test_splitting_copies_nothing() -> None:
    linear = filled(Linear(4, 6, bias=False, parts={"gate": 3, "up": 3}))
    y = linear(torch.ones(2, 4))

    assert [part.untyped_storage().data_ptr() for part in linear.split(y)] == [
        y.untyped_storage().data_ptr()
    ] * 2


def test_parts_must_fill_all_rows() -> None:
    with pytest.raises(AssertionError, match="10"):
        Linear(4, 10, bias=False, parts={"q": 6, "k": 1})


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(AssertionError, match="'w'"):
        Linear(4, 2, bias=False, parts={"q": 2}).spec.part_rows("w")


def test_a_tied_weight_is_shared() -> None:
    weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    linear = Linear(2, 3, bias=False, tied_weight=weight)
    weight.data.fill_(1.0)

    assert linear(torch.ones(1, 2)).tolist() == [[2.0, 2.0, 2.0]]


def test_parameters_take_the_dtype_and_device_of_the_moment_and_no_gradient() -> None:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            linear = Linear(4, 4, bias=True)
    finally:
        torch.set_default_dtype(previous)

    for parameter in linear.parameters():
        assert (parameter.dtype, parameter.device.type, parameter.requires_grad) == (
            torch.bfloat16,
            "meta",
            False,
        )
