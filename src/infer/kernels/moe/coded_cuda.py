"""Coded experts with sorted rows, in CUDA C++ (EXPERTS 3 of linear/pdl.cu).

A block multiplies up to 32 rows of one expert by 16 or 32 rows of its matrix. Codes go from memory to
registers and are unpacked there, once for all rows of the block. Other GPUs use the Triton kernel
(coded_grouped.py). Down loads its weights while gate and up are computed.

This is for experts with few rows. With more than 32 rows on average, it is faster to unpack all matrices once
and use dense products (choice.py).

Shapes:  R rows, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

import torch

from infer.kernels.linear import cuda, pdl
from infer.kernels.linear.coded import CodedForm, CodedWeights
from infer.kernels.linear.cuda import OtherKernel, Variant
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.dispatch import compiles_only, next_power_of_two

MAX_ROWS = 32  # rows of an expert on average, and of a block
_HEIGHTS = (8, 16, 32)  # rows of a block
_WARPS = (4, 2, 1)  # warps of a block, by preference
_DEPTHS = (4, 3, 2, 1)  # chunks of columns in registers, by preference


def block_height(num_rows: int, num_experts: int) -> int:
    """Rows of a block: about 1.5 times the average number of rows of an expert."""
    return min(max(next_power_of_two(-(-3 * num_rows // (2 * num_experts))), _HEIGHTS[0]), _HEIGHTS[-1])


class GroupedLinear(OtherKernel):
    """The kernels for a layer's experts in one form: gate and up with an activation, or down without."""

    def __init__(self, form: CodedForm, N: int, K: int, activation: str) -> None:
        self.form, self.N, self.K, self.activation = form, N, K, activation
        self.cuts = {height: self._cut(height) for height in _HEIGHTS}

    def multiply(
        self, x: torch.Tensor, w: CodedWeights, num_rows: int, row_order: torch.Tensor,
        block_experts: torch.Tensor, weights_TC: torch.Tensor | None, *, rows_per_input: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """y[row] = x[row // rows_per_input] Wᵀ with the W of the row's expert; gated, or times its weight."""
        num_blocks = len(block_experts)
        height = len(row_order) // num_blocks
        cut = self.cuts[height]
        y_RN = torch.empty((num_rows, self.N), dtype=x.dtype, device=x.device)
        assert cut is not None and w.form == self.form, (cut, w.form)
        assert x.stride(1) == 1 and x.stride(0) % 8 == 0, x.stride()
        if compiles_only():
            return y_RN
        weights = 0 if weights_TC is None else weights_TC.data_ptr()
        kernel = cuda.load_variant(self._variant_of(height, cut), build.index_of(x.device), dispatch.PDL)
        kernel(
            cut.num_parts(self.N) * num_blocks,
            x.data_ptr(), w.cells.data_ptr(), w.scales.data_ptr(), 0, y_RN.data_ptr(), 0, 0, 0, 0,
            x.stride(0) * 2, 0, num_rows, 0, 0.0, 0.0,
            0, w.cells.stride(0), w.scales.stride(0) * 4,
            row_order.data_ptr(), block_experts.data_ptr(), weights, num_blocks, rows_per_input,
        )  # fmt: skip
        return y_RN

    def _cut(self, height: int) -> PdlConfig | None:
        rows_tiles, gated = (1 if self.activation else 2), bool(self.activation)
        cuts = (PdlConfig(rows_tiles, warps, depth, self.form) for warps in _WARPS for depth in _DEPTHS)
        return next((cut for cut in cuts if pdl.can_launch(cut, height, self.N, self.K, gated=gated)), None)

    def variants(self) -> list[Variant]:
        """One variant per block height; none if the matrix is not supported."""
        cuts = {height: cut for height, cut in self.cuts.items() if cut is not None}
        if len(cuts) < len(self.cuts):
            return []
        return [self._variant_of(height, cut) for height, cut in cuts.items()]

    def _variant_of(self, height: int, cut: PdlConfig) -> Variant:
        is_second = int(not self.activation)
        defines = (
            *pdl.defines_of(cut, torch.bfloat16, height // 8, self.N, self.K, self.activation),
            ("EXPERTS", 3),
            ("IS_SECOND", is_second),
            ("WEIGHTED", is_second),
        )
        return pdl.variant_of(defines)
