"""Matrices with LoRA adapters: a wrapper around the projection of a layer, whatever its scheme.

    y = W x                        rows without an adapter: the wrapper changes nothing
    y = W x + B[s] (A[s] x)        rows whose adapter is in slot s

All matrices of a step have the same slots for its rows, so the slots are set once per step, in the *bank*. If
no row has an adapter, the layer uses the projection itself, with fused kernels and recorded programs, and the
step costs nothing extra. On a GPU a few rows with adapters keep the fused kernels: a launch before each
of them computes A x, and B extends W by columns (linear/wgmma.py).

After the last attention a step may keep only some of its rows (models/model.py): `select` is told which.

Shapes:  T rows of the step, S of them that are kept, K columns of a matrix, N rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.low_rank import RANK_BLOCK, LowRankStack, RowSlots, add_low_rank
from infer.kernels.linear.residual import LowRankTerm, ResidualInput, ResidualSum
from infer.kernels.linear.shrink import shrink
from infer.kernels.linear.small import launch, launch_add, launch_of_sum
from infer.kernels.linear.wgmma import WgmmaConfig
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear
from infer.quant.dense import Dense
from infer.quant.projection import Neighbours, Projection, Wrapped
from infer.quant.residual import ResidualNorm

OUTER = ("embedding", "head")


class AdapterRoom(NamedTuple):
    """The memory that a model reserves for adapters."""

    num_slots: int  # number of adapters that are loaded at a time
    rank: int  # the largest rank
    outer: frozenset[str] = frozenset()  # parts of `OUTER` that can be adapted, too


class AdapterBank:
    """The adapters of one model: a stack for each matrix, and the slots of the current step."""

    def __init__(
        self,
        model: nn.Module,
        room: AdapterRoom,
        *,
        dtype: torch.dtype,
        device: torch.device,
        whole: nn.Module,
    ) -> None:
        """Allocate the stacks of all matrices of a model that can be adapted.

        `whole` is the network of all ranks together (this model, if there is one rank): every rank has whole
        adapters of the embedding and the head.
        """
        self.num_slots, self.rank = room.num_slots, room.rank
        self.rows: RowSlots | None = None  # None: no row of the step has an adapter
        kept = _padded(room.rank)
        self.stacks = {
            name: LowRankStack(rows, size, num_slots=room.num_slots, rank=kept, dtype=dtype, device=device)
            for name, rows, size in _matrices(model, room.outer, whole)
        }

    def begin(self, slots_T: torch.Tensor | None) -> None:
        """Set the slots of the rows of the next products; None: no row has an adapter."""
        self.rows = None if slots_T is None else RowSlots(slots_T)

    def select(self, indices_S: torch.Tensor) -> None:
        """Keep only these rows."""
        if self.rows is not None:
            self.rows = self.rows.select(indices_S)

    def wrap(self, model: Any) -> None:
        """Wrap the projections of all matrices that have a stack."""
        outer = {name: stack for name, stack in self.stacks.items() if name in OUTER}
        model.outer = OuterAdapters(self, outer) if outer else None
        for name, stack in self.stacks.items():
            if name in OUTER:
                continue
            layer = model.get_submodule(name)
            assert isinstance(layer, Linear), name
            layer.projection = Adapted(layer.projection, stack, self)


class OuterAdapters:
    """The adapters of the embedding and of the head, in plain PyTorch: all slots are computed at once.

    The model's caller chooses the rows that need logits. So h = A x is appended to the hidden states,
    [x | 0 h 0 ..], with zeros for all slots but the row's own: the position of h is the row's slot.
    """

    def __init__(self, bank: AdapterBank, stacks: dict[str, LowRankStack]) -> None:
        self._bank, self._embedding, self._head = bank, stacks.get("embedding"), stacks.get("head")

    def _own(self, h_TC: torch.Tensor, rows: RowSlots, stack: LowRankStack) -> torch.Tensor:
        slots = torch.arange(1, stack.num_slots + 1, device=h_TC.device).repeat_interleave(stack.rank)
        return torch.where(rows.slots_T[:, None] == slots, h_TC, 0)

    def add_embedded(self, x_TD: torch.Tensor, ids_T: torch.Tensor, factor: float | None) -> torch.Tensor:
        """Add the adapters' rows to embeddings that were multiplied by `factor`."""
        stack, rows = self._embedding, self._bank.rows
        if stack is None or rows is None:
            return x_TD
        h_TC = self._own(stack.a.flatten(0, 1)[:, ids_T].T, rows, stack)
        return torch.addmm(x_TD, h_TC, stack.b.T, alpha=1.0 if factor is None else factor)

    def extend(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Append to hidden states what `add_logits` needs, if a row has an adapter."""
        stack, rows = self._head, self._bank.rows
        if stack is None or rows is None:
            return hidden_TD
        h_TC = self._own(hidden_TD @ stack.a.flatten(0, 1).T, rows, stack)
        return torch.cat([hidden_TD, h_TC], dim=1)

    def split(self, hidden_SX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split the hidden states from what `extend` appended."""
        assert self._head is not None
        size = self._head.a.shape[-1]
        return hidden_SX[:, :size].contiguous(), hidden_SX[:, size:]

    def add_logits(self, logits_SV: torch.Tensor, h_SC: torch.Tensor) -> torch.Tensor:
        """Add the logits of the adapters."""
        assert self._head is not None
        return torch.addmm(logits_SV, h_SC, self._head.b.T)


def bank_bytes(model: nn.Module, room: AdapterRoom, dtype: torch.dtype, whole: nn.Module) -> int:
    """The bytes of a bank; the model need not have weights."""
    per_rank = sum(len(rows) * size + sum(rows) for _, rows, size in _matrices(model, room.outer, whole))
    return room.num_slots * _padded(room.rank) * per_rank * dtype.itemsize


def _matrices(
    model: nn.Module, outer: Collection[str], whole: nn.Module
) -> Iterator[tuple[str, list[int], int]]:
    """Yield each matrix that can be adapted: its name, the rows of its parts, its columns.

    Experts and routers are left out; outside the layers, only modules of `outer` have any.
    """
    for name, layer in model.named_modules():
        layer = whole.get_submodule(name) if name in outer else layer
        if isinstance(layer, Embedding) and name in outer:
            yield name, [layer.weight.shape[1]], layer.weight.shape[0]  # its columns are token ids
        elif isinstance(layer, Linear) and not layer.always_dense and name.startswith(("layers.", *outer)):
            yield name, layer.spec.row_counts, layer.spec.size


def _padded(rank: int) -> int:
    return -(-rank // RANK_BLOCK) * RANK_BLOCK


class Adapted(Wrapped):
    """A projection with the adapters of its matrix."""

    def __init__(self, base: Projection, stack: LowRankStack, bank: AdapterBank) -> None:
        super().__init__(base)
        self._bank, self._with_terms = bank, WithTerms(base, stack, bank)

    @property
    def active(self) -> Projection:
        """The projection itself in a step without adapters."""
        return self._inner if self._bank.rows is None else self._with_terms

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Prepare the projection, and then what adds the terms of adapters to it."""
        self._inner.prepare(compiled, neighbours)
        self._with_terms.prepare(compiled, neighbours)


class WithTerms(Wrapped):
    """A prepared projection in a step with adapters, whose terms are added to its products."""

    def __init__(self, base: Projection, stack: LowRankStack, bank: AdapterBank) -> None:
        super().__init__(base)
        self._stack, self._bank = stack, bank
        self._compiled: CompiledLinears | None = None  # kernels that may add the terms of adapters

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Request kernels that also add the terms of adapters."""
        base = self._inner
        if isinstance(base, Dense) and (matrix := base.matrix(neighbours)) is not None:
            self._compiled, self.can_add = compiled, base.can_add
            compiled.want_low_rank(matrix, self._stack)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b plus the terms of the adapters."""
        return add_low_rank(self._inner.multiply(x), x, self._slots, self._stack)

    def project_rows(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Multiply and add the terms in one kernel, or one after the other."""
        plan, gate = self._plan(x, activation), activation if self.bias is None else ""
        if plan is None:
            return super().project_rows(x, activation)
        y = launch(plan, x, self._weight, bias_N=self.bias, activation=gate, low_rank=self._shrink(x))
        return y if gate == activation else gated_activation(y, activation=activation)

    def project_sum(self, total: ResidualSum, eps: float, activation: str) -> torch.Tensor:
        """Finish a norm that another projection began, and multiply by the matrix and the adapter."""
        x, gate = total.scaled_MN, activation if self.bias is None else ""
        plan = self._plan(x, activation)
        assert plan is not None, "`reads_sum` returned True"
        y = launch_of_sum(
            plan, total, self._weight, eps=eps, bias_N=self.bias, activation=gate, low_rank=self._shrink(x)
        )
        return y if gate == activation else gated_activation(y, activation=activation)

    def reads_sum(self, x: torch.Tensor, num_parts: int, activation: str) -> bool:
        """Return True if a kernel can finish the norm of a sum and add the terms."""
        return self._plan(x, activation) is not None

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """Multiply, adding the terms and the residual stream."""
        plan = self._plan(x, "")
        if plan is None or not reader.reads_sum(x, plan.num_parts(self.spec.num_rows), activation):
            return self.project_rows(x, "")
        stream = ResidualInput(residual, norm.weight, norm.offset)
        return launch_add(plan, stream, x, self._weight, self.bias, low_rank=self._shrink(x))

    def _plan(self, x: torch.Tensor, activation: str) -> WgmmaConfig | None:
        """The tile shape of a kernel that adds the terms of adapters to the product; None: no such kernel."""
        if self._compiled is None or x.dim() != 2:
            return None
        (N, K), gated = self._weight.shape, bool(activation) and self.bias is None
        return self._compiled.find_low_rank(
            x, self._weight, N // 2 if gated else N, K, self._stack, gated=gated
        )

    def _shrink(self, x: torch.Tensor) -> LowRankTerm:
        return shrink(x, self._slots, self._stack)

    @property
    def _slots(self) -> RowSlots:
        assert self._bank.rows is not None
        return self._bank.rows

    @property
    def _weight(self) -> torch.Tensor:
        return self.tensors["weight"]
