"""Experts with many rows on Hopper, in CUDA C++ (linear/grouped.cu): TMA and wgmma.

    x_TD ──► gate and up of every row, gated, in order ──► gated_PF      P places: rows in padded blocks
    gated_PF ──► down of every row, times its weight ──► outputs_RD

The rows are sorted by expert (grouped.py), as for the Triton kernels. There are two differences: gate and up
store their results in sorted order, including padding, so that TMA can copy whole blocks of them for down;
and one thread block runs per SM, which loads its next tile while it stores the results of the current one.

This is for bfloat16, and for experts with enough rows that arithmetic dominates, not reads of matrices.

Shapes:  T tokens, R rows, P places, E experts, D hidden size, F intermediate size, N outputs (of the gate
half when gated), K inputs.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from infer.kernels.linear import cuda, wgmma
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.cuda import ACTIVATIONS, OtherKernel, Variant
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.dispatch import compiles_only, num_sms
from infer.kernels.runtime.tensor_map import Boxes, TensorMap

SOURCE = Path(wgmma.__file__).with_name("grouped.cu")
BLOCK_ROWS = 128
MIN_ROWS = 16  # fewest rows of an expert on average: with fewer, Triton's flatter blocks are as fast
_TALL = 256  # rows of W in a tile, gate and up together
_CHUNK = 64  # columns of a stage
_STAGES = 4
NUM_THREADS = 3 * 128  # two warpgroups that multiply, four warps that load
SHARED_BYTES = _STAGES * ((BLOCK_ROWS + _TALL) * _CHUNK * 2 + 16) + 1024  # stages, barriers, alignment
_TYPES = (*(TensorMap,) * 2, *(ctypes.c_void_p,) * 5, ctypes.c_longlong, *(ctypes.c_int,) * 5)


class ManyRows(OtherKernel):
    """The kernel for a layer's experts: gate and up with an activation, or down without."""

    def __init__(self, N: int, K: int, activation: str) -> None:
        self.N, self.K, self.activation = N, K, activation

    @classmethod
    def of(cls, compiled: CompiledLinears, num_rows: int, size: int, activation: str) -> ManyRows:
        """The kernel for matrices with this many rows, compiled and loaded with the model's other kernels."""
        kernel = cls(num_rows // 2 if activation else num_rows, size, activation)
        compiled.use(kernel)
        return kernel

    def multiply(
        self, x: torch.Tensor, w_ENK: torch.Tensor, num_rows: int, row_order: torch.Tensor,
        block_experts: torch.Tensor, weights_TC: torch.Tensor | None, *, rows_per_input: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Compute gated results in sorted order, [P, N], or the weighted results of each row, [R, N]."""
        gated, num_places, num_blocks = bool(self.activation), len(row_order), len(block_experts)
        assert num_places == num_blocks * BLOCK_ROWS, (num_places, num_blocks)
        assert w_ENK.is_contiguous() and w_ENK.shape[1:] == ((1 + gated) * self.N, self.K), w_ENK.shape
        assert x.stride(1) == 1 and not (x.stride(0) % 8 or x.data_ptr() % 16) and x.dtype is torch.bfloat16
        assert gated != (weights_TC is not None) and (gated or len(x) == num_places), (x.shape, gated)
        y = torch.empty((num_places if gated else num_rows, self.N), dtype=x.dtype, device=x.device)
        if compiles_only():
            return y
        kernel = cuda.load_variant(self._variant(), x.get_device(), dispatch.PDL)
        outputs = _TALL // (1 + gated)
        row_bytes = x.stride(0) * x.element_size()
        kernel(
            min(num_sms(x.device), num_blocks * -(-self.N // outputs)),
            Boxes(w_ENK.data_ptr(), w_ENK.dtype, w_ENK.numel() // self.K, self.K, self.K * 2, outputs),
            Boxes(x.data_ptr(), x.dtype, len(x), self.K, row_bytes, BLOCK_ROWS),
            x.data_ptr(), row_order.data_ptr(), block_experts.data_ptr(),
            0 if weights_TC is None else weights_TC.data_ptr(), y.data_ptr(),
            row_bytes, num_rows, rows_per_input, self.N, self.K, num_blocks,
        )  # fmt: skip
        return y

    def variants(self) -> list[Variant]:
        """The single variant; none if the matrix is not supported."""
        return [] if self.K % _CHUNK or self.N % 8 else [self._variant()]

    def _variant(self) -> Variant:
        defines = (
            ("IS_BFLOAT16", 1),
            ("ACTIVATION", ACTIVATIONS[self.activation]),
            ("GATHER", int(bool(self.activation))),
            ("STAGES", _STAGES),
        )
        return Variant(SOURCE, wgmma.ARCH, defines, "grouped_wgmma", NUM_THREADS, _TYPES, SHARED_BYTES)
