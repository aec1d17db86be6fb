"""The contract of projections: where leaves lie, when what is deferred runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from infer.layers.linear import Linear
from infer.layers.norm import RMSNorm
from infer.loader.formats.checkpoint import StoredTensor, open_checkpoint
from infer.quant.dense import Dense
from infer.quant.projection import IN, OUT, Axis, Leaf, Projection, WeightSpec
from infer.quant.residual import NormedInput, PendingProduct, ResidualStream

CPU = torch.device("cpu")
N, K, GROUP = 256, 384, 128
PARTS = {"q": 128, "k": 64, "v": 64}


class Grouped(Projection):
    """As GPTQ stores its leaves: 4 bits, groups of 128, an order of columns and a scale for each part."""

    def leaves(self) -> Mapping[str, Leaf]:
        return {
            "qweight": Leaf(torch.int32, (Axis("in", 4, 32), OUT)),
            "qzeros": Leaf(torch.int32, (Axis("in", 1, GROUP), Axis("out", 4, 32))),
            "scales": Leaf(torch.float16, (Axis("in", 1, GROUP), OUT)),
            "g_idx": Leaf(torch.int32, (IN,)),
            "weight_scale": Leaf(torch.float32, ()),
        }


def spec(**changes: object) -> WeightSpec:
    return replace(WeightSpec(N, K, torch.float32, CPU, PARTS), **changes)  # type: ignore[arg-type]


def stored(tmp_path: Path, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, StoredTensor]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path)


def random_of(leaf: Leaf, rows: int, size: int = K) -> torch.Tensor:
    return torch.randint(0, 100, leaf.shape(rows, size)).to(leaf.dtype)


def test_each_part_of_each_leaf_has_its_place(tmp_path: Path) -> None:
    projection = Grouped(spec())
    shapes = {name: tuple(tensor.shape) for name, tensor in projection.tensors.items()}
    assert shapes == {
        "qweight": (K // 8, N), "qzeros": (3, N // 8), "scales": (3, N), "g_idx": (3, K),
        "weight_scale": (3,),
    }  # fmt: skip
    leaves = projection.leaves()
    tensors = {
        f"{part}.{name}": random_of(leaf, rows)
        for part, rows in PARTS.items()
        for name, leaf in leaves.items()
    }
    for name, source in stored(tmp_path, tensors).items():
        part, leaf_name = name.split(".")
        projection.load(leaf_name, source, part=part, expert=None, transposed=False)
    for name, leaf in leaves.items():
        along, pieces = leaf.axis("out"), [tensors[f"{part}.{name}"] for part in PARTS]
        expected = torch.stack(pieces) if along is None else torch.cat(pieces, along)
        assert torch.equal(projection.tensors[name], expected), name


def test_experts_are_stacked_and_one_of_them_is_a_view(tmp_path: Path) -> None:
    projection = Grouped(spec(num_experts=2))
    leaf = projection.leaves()["scales"]
    tensors = {f"{e}.{part}": random_of(leaf, rows) for e in range(2) for part, rows in PARTS.items()}
    for name, source in stored(tmp_path, tensors).items():
        expert, part = name.split(".")
        projection.load("scales", source, part=part, expert=int(expert), transposed=False)
    for number in range(2):
        expected = torch.cat([tensors[f"{number}.{part}"] for part in PARTS], 1)
        assert torch.equal(projection.expert(number).tensors["scales"], expected)
    assert projection.expert(1).tensors["g_idx"].shape == (3, K)


def test_without_memory_the_bytes_are_the_same() -> None:
    meta = Grouped(spec(device=torch.device("meta")))
    assert meta.num_bytes() == Grouped(spec()).num_bytes() > 0


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


def test_rows_that_were_read_before_a_selection_are_selected_when_they_are_added() -> None:
    """As in a parallel block, whose MLP has the input of its attention."""
    residual_TD, update_TD = torch.randn(4, 8), torch.randn(4, 8)
    stream, kept_S = ResidualStream(residual_TD), torch.tensor([3, 1])
    stream.select(kept_S)
    stream.add(update_TD)
    stream.add(torch.ones(2, 8))
    torch.testing.assert_close(stream.settle(), (residual_TD + update_TD)[kept_S] + 1)


def test_a_pending_product_is_computed_once_and_taken_by_any_operation() -> None:
    linear = Linear(8, 8, bias=False)
    torch.nn.init.normal_(linear.weight)
    pending, x_TD = PendingProduct(linear.projection, torch.randn(3, 8)), torch.randn(3, 8)
    product_TD = pending.tensor()
    assert pending.tensor() is product_TD and len(pending) == 3
    both: torch.Tensor = torch.cat([pending, x_TD])  # type: ignore[list-item]
    torch.testing.assert_close(both, torch.cat([product_TD, x_TD]))
    torch.testing.assert_close(-pending / 2 - x_TD, -product_TD / 2 - x_TD)
