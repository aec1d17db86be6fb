"""fp8, int8 and int4 on a GPU: codes of the file where it has them, else rounded while they are loaded.

A matrix comes from the disk some rows at a time, is brought into its form on the device and put into place.
So loading needs memory for a few rows beside the weights (`LOADING_BYTES`), never a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

import torch

from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.coded_linear import expand
from infer.kernels.linear.invariant import linear_invariant
from infer.kernels.moe.coded_grouped import coded_experts_mlp
from infer.kernels.runtime.dispatch import moment, seconds_between, use_triton
from infer.quant.coded import CodedRows
from infer.quant.gpu_coded import Coded
from infer.quant.projection import IN, OUT, Choices, Leaf, Projection, Source, WeightSpec
from infer.quant.rounding import BLOCK_ROWS, fit_rows, round_rows, rounded_form

_CHUNK_NUMBERS = {
    8: 1 << 24,
    4: 1 << 23,
}  # at a time, by the bits of a code: int4 has a dozen float32 of each
LOADING_BYTES = 512 << 20  # beside the weights, while they are loaded


class GPUWeights(Coded):
    """A matrix in the form that its spec names, or the one that rounding to its scheme has."""

    def __init__(self, spec: WeightSpec, matrices: list[CodedWeights] | None = None) -> None:
        assert spec.form is not None, spec
        self.scheme = spec.form.codes
        self.stack: CodedWeights | None = None  # of all experts
        self._made: list[
            tuple[Any, Any]
        ] = []  # moments before and after codes were made, until they are asked
        self._making_seconds = 0.0
        super().__init__(spec, matrices)

    @classmethod
    def of(cls, scheme: str, spec: WeightSpec) -> GPUWeights:
        """The weights of a spec in a scheme; a form that the spec has already stays."""
        return cls(spec if spec.form else replace(spec, form=rounded_form(scheme, spec.size)))

    def coded_form(self) -> CodedForm:
        """The spec's."""
        assert self.spec.form is not None
        return self.spec.form

    def allocate(self) -> dict[str, torch.Tensor]:
        """As the base has it; the matrices of experts are views of one stack, which one launch reads."""
        if self.spec.num_experts is None or self.matrices:
            return super().allocate()
        spec, count = self.spec, self.spec.num_experts
        one = CodedWeights.empty(spec.num_rows, spec.size, *self.coded_form(), device="meta")
        stacks = {
            name: torch.zeros((count, *tensor.shape), dtype=tensor.dtype, device=spec.device)
            for name, tensor in one.tensors().items()
        }
        self.stack = one.with_tensors(stacks)
        self.matrices = [
            one.with_tensors({name: stack[number] for name, stack in stacks.items()})
            for number in range(count)
        ]
        return stacks

    def experts_mlp(
        self, x_TD: torch.Tensor, choices: Choices, down: Projection, activation: str
    ) -> torch.Tensor:
        """Send each token through its experts, all of them in a few launches where there are kernels."""
        both = self.stack, down.stack if isinstance(down, GPUWeights) else None
        if not use_triton(x_TD) or both[0] is None or both[1] is None:
            return super().experts_mlp(x_TD, choices, down, activation)
        return coded_experts_mlp(
            x_TD, *choices, both[0], both[1], activation=activation, invariant=self.batch_invariant
        )

    def invariant(self) -> Projection | None:
        """A projection with these codes that gives a row the same bits whatever the other rows are."""
        projection = InvariantGPUWeights(self.spec, self.matrices)
        projection.stack, projection.bias = self.stack, self.bias
        return projection

    def leaves(self) -> Mapping[str, Leaf]:
        """The matrix, plain or in whatever format the checkpoint has it."""
        return {"weight": Leaf(self.spec.dtype, (OUT, IN))}

    def load(
        self, leaf: str, source: Source, *, part: str | None, expert: int | None, transposed: bool
    ) -> None:
        """Bring a stored matrix into its rows."""
        assert leaf == "weight", leaf
        matrix, start = self.matrices[expert or 0], self.spec.part_rows(part).start
        form, device = self.coded_form(), self.spec.device
        for first, rows in self._rows(source, transposed):
            begin = moment(device)
            fitted = fit_rows(rows, form) if isinstance(rows, CodedRows) else None
            if fitted is None:
                fitted = round_rows(rows.numbers() if isinstance(rows, CodedRows) else rows, form)
            matrix.fill(start + first, *fitted)
            if not isinstance(rows, CodedRows):  # those of a file need no keeping
                self._made.append((begin, moment(device)))

    def making_seconds(self) -> float:
        """The time that the device took to round, without that of reading."""
        self._making_seconds += sum(starmap(seconds_between, self._made))
        self._made.clear()
        return self._making_seconds

    def _rows(self, source: Source, transposed: bool) -> Iterator[tuple[int, CodedRows | torch.Tensor]]:
        by_rows, size, device = source.transpose() if transposed else source, self.spec.size, self.spec.device
        step = max(1, _CHUNK_NUMBERS[self.coded_form().bits] // size // BLOCK_ROWS) * BLOCK_ROWS
        if by_rows is not None:
            yield from ((part.start, rows) for part, rows in by_rows.rows(step, device))
            return
        whole = torch.empty(source.shape, dtype=self.spec.dtype, device=device)
        source.copy_to(whole)
        yield from ((first, whole.T[first : first + step]) for first in range(0, whole.shape[1], step))


class InvariantGPUWeights(GPUWeights):
    """The same weights, unpacked for every product, so that a row's bits do not depend on the other rows."""

    batch_invariant = True
    prepare, invariant = Projection.prepare, Projection.invariant
    project_rows, reads_sum = Projection.project_rows, Projection.reads_sum

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b, each row as if it were alone."""
        codes = self.weights
        weight = expand(codes, x.dtype) if use_triton(x) else codes.dequantized().to(x.dtype)
        return linear_invariant(x, weight, self.bias)
