"""Reorder rows of queries and keys for the kernels of rotary embeddings.

The kernels rotate channel i of a head with channel i + H/2 (kernels/elementwise/rope.py). Some families pair
neighbours, and in some only the first channels are rotated:

    GLM-4, 8 channels, 4 are rotated        Phi-4-mini, 8 channels, 6 are rotated
    file      (0 1) (2 3) 4 5 6 7           (0 3) (1 4) (2 5) 6 7
    memory    0 2 4 5 | 1 3 6 7             0 1 2 6 | 3 4 5 7

Attention scores do not change if the channels of queries and keys are permuted alike. So the rows of both,
their biases and the weights of their norms are reordered during loading, in any form: a row's codes, scales,
zeros and minima move together. Values keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from infer.errors import ConfigError
from infer.layers.parallel import kind_of
from infer.loader.formats.axes import Axes
from infer.loader.formats.checkpoint import DerivedTensor, StoredTensor, slices_of
from infer.models.config import ModelConfig
from infer.quant.coded import CodedRows


def row_order(
    config: ModelConfig, module: str, part: str | None, parts: Mapping[str, int], num_rows: int
) -> list[int] | None:
    """Return, for each row of a tensor in memory, its row in the file; None: the order stays the same.

    The `num_rows` rows of the tensor fill its part of the module, or all `parts` that a rank has.
    """
    channels, kind = config.channel_order, kind_of(module)
    if channels is None:
        return None
    if kind in ("attention.q_norm", "attention.k_norm"):
        part = "q"
    elif kind != "attention.qkv":
        return None
    order: list[int] = []
    for name, count in {part: num_rows}.items() if part else parts.items():
        first, last = len(order), len(order) + count
        if name in ("q", "k"):
            heads = range(first, last, config.head_dim)
            order += [head + channel for head in heads for channel in channels]
        else:
            order += range(first, last)
    return None if order == list(range(num_rows)) or len(order) != num_rows else order  # or it is misshapen


def reordered(tensor: StoredTensor, order: list[int], name: str, head_dim: int) -> StoredTensor:
    """Return a tensor with its rows in another order; refused if rows of several heads share scales."""
    if tensor.codes is not None and tensor.codes.scale_rows % head_dim and tensor.codes.scale_rows > 1:
        raise ConfigError(
            f"{name}: {tensor.codes.scale_rows} rows share a scale, so the channels of heads of {head_dim} "
            "cannot change places; use a checkpoint whose scales belong to single rows"
        )
    return ReorderedTensor(tensor, tuple(order))


@dataclass(frozen=True, slots=True)
class ReorderedTensor(DerivedTensor):
    """The rows of a matrix, or the numbers of a bias or norm, in another order."""

    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which stays the same."""
        return self.whole.shape

    @property
    def axes(self) -> Axes:
        """Not available: tensors are cut before their rows are reordered."""
        raise NotImplementedError("rows are reordered after a cut")

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out` with the numbers, each row in its place."""
        if out.dim() > 1:
            StoredTensor.copy_to(self, out)
            return
        numbers = torch.empty(self.shape, dtype=self.dtype or torch.float32)
        self.whole.copy_to(numbers)
        out.copy_(numbers[list(self.order)])

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """Yield the rows in their new order, some at a time; all of them are read at once."""
        for _, held in self.whole.rows(self.shape[0], device):
            for part in slices_of(self.shape[0], num_rows):
                yield part, _pick(held, torch.tensor(self.order[part], device=device))


def _pick(held: CodedRows | torch.Tensor, rows: torch.Tensor) -> CodedRows | torch.Tensor:
    """Return some rows, each with its codes, scales, zeros, minima, table and outliers."""
    if isinstance(held, torch.Tensor):
        return held[rows]
    zeros = held.zeros[rows] if isinstance(held.zeros, torch.Tensor) else held.zeros
    minima = None if held.minima is None else held.minima[rows]
    table = held.table if held.table is None or len(held.table) == 1 else held.table[rows]
    outliers = None if held.outliers is None else held.outliers.pick(rows)
    return held._replace(
        codes=held.codes[rows], scales=held.scales[rows], zeros=zeros, minima=minima, table=table,
        outliers=outliers,
    )  # fmt: skip
