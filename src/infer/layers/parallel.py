"""Tensor parallelism: how the matrices of a model are split over ranks, and where ranks exchange results.

    attention   qkv: rows of some heads ──► attend, each rank its heads ──► out: columns   ──► sum
    mlp         gate, up: some rows     ──► activation                  ──► down: columns  ──► sum
    embedding   a range of the vocabulary: other ranks' rows are zeros                     ──► sum
    head        a range of the vocabulary                            ──► columns of all, side by side

So a block has two exchanges, and the residual stream is the same on every rank. The weight plan decides the
slices of a rank (loader/slices.py), and the network is built with the rank's numbers of heads and rows. This
file wraps the projections; no other part of a model depends on ranks.

Shapes:  T tokens, D hidden size, M rows, N columns of a rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from infer.kernels.cpu.collectives import column_share, own_ids
from infer.kernels.cpu.library import library
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.runtime.communicator import Communicator
from infer.kernels.runtime.dispatch import on_cpu
from infer.layers.embedding import Embedding
from infer.layers.linear import Projected
from infer.quant.projection import Neighbours, Projection, Wrapped
from infer.quant.residual import ResidualNorm

BY_ROWS = ("attention.qkv", "mlp.gate_up", "mlp.up", "shared.gate_up")
BY_COLUMNS = ("attention.out", "mlp.down", "shared.down")
BY_VOCABULARY = ("embedding", "head")


class RankPart(Wrapped):
    """A rank's part of a matrix."""

    def __init__(self, local: Projection, communicator: Communicator) -> None:
        super().__init__(local)
        self._communicator = communicator

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Prepare the part, without fusion: its product is not yet the sum of all ranks."""
        self._inner.prepare(compiled, neighbours._replace(writes_sum=False))


class RowParallel(RankPart):
    """The columns of a matrix for the inputs that this rank has: the products of all ranks are added up.

    On a GPU, for few tokens, one launch sums the products of all ranks, adds the result to the residual
    stream and begins the norm, if the reader has a kernel that finishes it.
    """

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Prepare the part."""
        super().prepare(compiled, neighbours)
        self.can_add = neighbours.writes_sum and self._communicator.can_add and not self.batch_invariant

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """Multiply, and add the products of all ranks to the stream."""
        y = self.unreduced.multiply(x)
        parts = self._communicator.num_parts(*y.shape) if y.dim() == 2 else None
        if parts is None or not reader.reads_sum(x, parts, activation):
            return self.reduced(y)
        return self._communicator.add(y.contiguous(), ResidualInput(residual, norm.weight, norm.offset))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b of the whole matrix; only rank 0 has the bias."""
        return self.reduced(self.unreduced.multiply(x))

    @property
    def unreduced(self) -> Projection:
        """The rank's part, whose products are still to be summed over ranks."""
        return self._inner.active

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        """Sum the products of all ranks."""
        return self._communicator.all_reduce(y)


class VocabularyParallel(RankPart):
    """Some rows of the head: the logits of all ranks are put side by side."""

    def __init__(self, local: Projection, communicator: Communicator, vocab_size: int) -> None:
        super().__init__(local, communicator)
        self._vocab_size = vocab_size

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, [M, V]."""
        return self._communicator.all_gather(self._inner.multiply(x), self._vocab_size)


class VocabularyShare:
    """The rows of an embedding on one rank; a sum over ranks brings in the other rows."""

    def __init__(self, communicator: Communicator, vocab_size: int, num_rows: int) -> None:
        self._communicator, self._num_rows = communicator, num_rows
        self._first = communicator.rank * column_share(vocab_size, communicator.size)

    def embed(self, embedding: Embedding, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows of all ids, on whichever rank they are."""
        c = library() if embedding.dtype is torch.float32 and on_cpu(ids_T) else None
        if c is not None:
            rows_TD = embedding.rows(own_ids(c, ids_T, self._first, self._num_rows))
        else:
            own_T = ids_T - self._first
            is_own_T = (own_T >= 0) & (own_T < self._num_rows)
            rows_TD = embedding.rows(own_T.clamp(0, self._num_rows - 1)) * is_own_T[:, None]
        return self._communicator.all_reduce(rows_TD)


def join_ranks(model: nn.Module, communicator: Communicator, vocab_size: int) -> None:
    """Connect this rank's part of a model with the other ranks."""
    for name, layer in model.named_modules():
        if isinstance(layer, Projected) and kind_of(name) in BY_COLUMNS:
            layer.projection = RowParallel(layer.projection, communicator)
        elif isinstance(layer, Projected) and name == "head":
            layer.projection = VocabularyParallel(layer.projection, communicator, vocab_size)
        elif isinstance(layer, Embedding) and name == "embedding":
            num_rows = layer.weight.shape[0]
            layer.share = VocabularyShare(communicator, vocab_size, num_rows)


def kind_of(module: str) -> str:
    """The kind of a module, without its layer's number: attention.qkv, mlp.down, head."""
    return ".".join(module.split(".")[-2:])
