"""Matrices with LoRA adapters: a wrapper around the projection of a layer, whatever its scheme.

    y = W x                        rows without an adapter, as if there were no wrapper
    y = W x + B[s] (A[s] x)        rows whose adapter is in slot s

Which row has which slot is the same for all matrices of a step, so it is told once, to the *bank*, by whoever
runs the model. Where no row has one, the wrapper hands everything to the projection that it wraps, fused
kernels and recorded programs included: that step costs nothing.

After the last attention a step may go on with some of its rows (models/model.py): `select` is told which.

Shapes:  T rows of the step, S of them that go on, K columns of a matrix, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.low_rank import RANK_BLOCK, LowRankStack, RowSlots, add_low_rank
from infer.kernels.linear.residual import ResidualSum
from infer.layers.linear import Linear
from infer.quant.projection import Neighbours, Projection, WeightSpec
from infer.quant.residual import NormedInput, ResidualNorm, as_tensor


class AdapterBank:
    """The adapters of one model: a stack for each matrix, and the slots of the step that is computed."""

    def __init__(
        self, model: nn.Module, *, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take memory for `num_slots` adapters whose ranks are at most `rank`."""
        self.num_slots, self.rank = num_slots, rank
        self.rows: RowSlots | None = None  # None: no row of the step has an adapter
        kept = _padded(rank)
        self.stacks = {
            name: LowRankStack(
                spec.row_counts, spec.size, num_slots=num_slots, rank=kept, dtype=dtype, device=device
            )
            for name, spec in _specs(model)
        }

    def begin(self, slots_T: torch.Tensor | None) -> None:
        """Let the next product be of rows with these slots; None: no row has an adapter."""
        self.rows = None if slots_T is None else RowSlots(slots_T)

    def select(self, indices_S: torch.Tensor) -> None:
        """Go on with some of the rows."""
        if self.rows is not None:
            self.rows = self.rows.select(indices_S)

    def wrap(self, model: nn.Module) -> None:
        """Wrap the projections of all matrices that have a stack."""
        for name, stack in self.stacks.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, Linear), name
            layer.projection = Adapted(layer.projection, stack, self)


def bank_bytes(model: nn.Module, *, num_slots: int, rank: int, dtype: torch.dtype) -> int:
    """The bytes of a bank; the model may be one without weights."""
    per_rank = sum(len(spec.row_counts) * spec.size + spec.num_rows for _, spec in _specs(model))
    return num_slots * _padded(rank) * per_rank * dtype.itemsize


def _specs(model: nn.Module) -> Iterator[tuple[str, WeightSpec]]:
    """The matrices that can be adapted: those of the layers, but for experts and their routers."""
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and name.startswith("layers.") and not layer.always_dense:
            yield name, layer.spec


def _padded(rank: int) -> int:
    return -(-rank // RANK_BLOCK) * RANK_BLOCK


class Adapted(Projection):
    """A projection with the adapters of its matrix."""

    def __init__(self, base: Projection, stack: LowRankStack, bank: AdapterBank) -> None:
        super().__init__(base.spec, base.tensors)
        self.scheme, self.bias, self.batch_invariant = base.scheme, base.bias, base.batch_invariant
        self._base, self._stack, self._bank = base, stack, bank

    @property
    def can_add(self) -> bool:  # type: ignore[override]  # it depends on the step
        """True if no row of the step has an adapter, and the projection adds to the residual stream."""
        return self._bank.rows is None and self._base.can_add

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Prepare the projection for steps without adapters."""
        self._base.prepare(compiled, neighbours)

    def scratch_bytes(self, num_tokens: int) -> int:
        """The scratch memory of a product of the projection."""
        return self._base.scratch_bytes(num_tokens)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b plus the terms of the adapters."""
        rows, y = self._bank.rows, self._base.multiply(x)
        return y if rows is None else add_low_rank(y, x, rows, self._stack)

    def project(self, x: torch.Tensor | NormedInput, activation: str = "") -> torch.Tensor:
        """Multiply; with adapters, the norm comes before and the gate after."""
        if self._bank.rows is None:
            return self._base.project(x, activation)
        y = self.multiply(as_tensor(x))
        return gated_activation(y, activation=activation) if activation else y

    def activate(self, y: torch.Tensor, activation: str) -> torch.Tensor:
        """The activation of the scheme that multiplies."""
        return self._base.activate(y, activation)

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """Multiply for a sum, where no row has an adapter."""
        return self._base.add_to(x, residual, norm, reader, activation)
