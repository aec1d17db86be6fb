"""The contract of projections and the residual stream: when what is deferred runs."""

from __future__ import annotations

import torch

from infer.layers.linear import Linear
from infer.layers.norm import RMSNorm
from infer.quant.dense import Dense
from infer.quant.projection import PendingProduct, WeightSpec
from infer.quant.residual import NormedInput, ResidualStream

CPU = torch.device("cpu")


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, eps=1e-6)
    norm.weight.data = torch.rand(size) + 0.5
    return norm


def dense(rows: int, size: int) -> Dense:
    return Dense(WeightSpec(rows, size, torch.float32, CPU), {"weight": torch.randn(rows, size)})


def test_two_readers_of_one_norm_see_the_same_sum() -> None:
    """As in a block whose attention and MLP stand side by side."""
    norm, first, second = norm_of(8), dense(5, 8), dense(6, 8)
    x, update = torch.randn(3, 8), torch.randn(3, 8)
    stream = ResidualStream(x)
    stream.add(update)
    normed = norm(stream)
    y = first.project(normed)
    stream.add(torch.ones(3, 8))
    torch.testing.assert_close(second.project(normed), second.multiply(norm(x + update)))
    torch.testing.assert_close(y, first.multiply(norm(x + update)))
    torch.testing.assert_close(stream.settle(), x + update + 1)


def test_two_norms_of_one_sum() -> None:
    one, other = norm_of(8), norm_of(8)
    x = torch.randn(3, 8)
    stream = ResidualStream(x)
    a, b = one(stream), other(stream)
    stream.add(torch.ones(3, 8))  # neither has been read
    torch.testing.assert_close(a.tensor(), one(x))
    torch.testing.assert_close(b.tensor(), other(x))
    torch.testing.assert_close(stream.settle(), x + 1)


def test_what_is_deferred_behaves_as_a_tensor() -> None:
    """A family that scales a sub-layer's output before it adds it knows nothing of fusion."""
    projection, x = dense(8, 4), torch.randn(3, 4)
    pending, product = PendingProduct(projection, x), projection.multiply(x)
    torch.testing.assert_close(pending * 0.5, product * 0.5)
    torch.testing.assert_close(1.0 + pending, 1.0 + product)
    torch.testing.assert_close(torch.tanh(pending), product.tanh())  # type: ignore[arg-type]
    assert pending.shape == product.shape and torch.equal(pending[1:], product[1:])
    normed = NormedInput(norm_of(8), ResidualStream(product))
    assert torch.equal(normed.sum(0), normed.tensor().sum(0))


def test_rows_of_the_stream_are_selected_with_what_was_added() -> None:
    x, update = torch.randn(5, 8), torch.randn(5, 8)
    stream = ResidualStream(x)
    stream.add(update)
    stream.select(torch.tensor([4, 0, 0]))
    torch.testing.assert_close(stream.settle(), (x + update)[[4, 0, 0]])


def test_a_pending_product_is_computed_once_and_taken_by_any_operation() -> None:
    linear = Linear(8, 8, bias=False)
    torch.nn.init.normal_(linear.weight)
    pending, x_TD = PendingProduct(linear.projection, torch.randn(3, 8)), torch.randn(3, 8)
    product_TD = pending.tensor()
    assert pending.tensor() is product_TD and len(pending) == 3
    both: torch.Tensor = torch.cat([pending, x_TD])  # type: ignore[list-item]
    torch.testing.assert_close(both, torch.cat([product_TD, x_TD]))
    torch.testing.assert_close(-pending / 2 - x_TD, -product_TD / 2 - x_TD)
