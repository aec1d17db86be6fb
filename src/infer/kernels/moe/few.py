"""The experts of few tokens in two launches, in CUDA C++ (EXPERTS of linear/pdl.cu).

    logits_TE, x_TD ──► gate and up of every choice, gated, times its weight ──► gated_TH      H = C F
    logits_TE, gated_TH ──► down of a token's choices, added up ──► y_TD, added to the residual stream

With few tokens, most chosen experts have a single token, and grouping the rows of an expert gains nothing. So
each block finds the experts of its own token from the router's logits, without launches that route, count and
order. `down` loads its weights while gate and up are computed, and its epilogue adds to the residual stream
and starts the next norm, like the epilogues of other matrices (`ResidualSum`).

Both kernels support bfloat16 on Hopper, and up to `expert_tokens` of the profile; kernels/moe/grouped.py has
the other cases. The tiling:

    gate and up   blocks of 16 rows and 4 warps, three per SM: the blocks of one token fit at once
    down          up to 8 warps, in equal shares per choice; 16 rows for one token, and 32 for more

At the shape of Qwen3-30B-A3B, more warps were slower by a tenth to a third, other depths by less than 2 %.

Shapes:  T tokens, E experts, C choices per token, D hidden size, F intermediate size of one expert, H = C F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from infer.config.profiles.profile import LinearProfile
from infer.kernels.linear import cuda, pdl
from infer.kernels.linear.coded import BAND, CELL_COLUMNS, CodedForm, CodedWeights
from infer.kernels.linear.cuda import Defines, OtherKernel, Variant
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.linear.residual import ResidualInput, ResidualSum
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.dispatch import compiles_only

Stack = torch.Tensor | CodedWeights  # matrices of all experts

_CHUNK = 64  # columns per turn of a warp
_MAX_EXPERTS = 1024  # most experts whose logits fit the registers of a warp
_MAX_CHOICES = 16
_MAX_WARPS = 8  # most warps of `down`, unless a token has more choices
_DEPTHS = (4, 3, 2, 1)  # chunks of columns in registers before the wait, by preference


class ExpertShape(NamedTuple):
    """The sizes and options for which the kernels of a layer's experts are compiled."""

    hidden_size: int
    size: int  # intermediate size of one expert
    num_experts: int
    num_choices: int
    normalized: bool
    activation: str
    form: CodedForm | None = None  # form of gate and up if weights are coded
    down_form: CodedForm | None = None


class FewExperts(OtherKernel):
    """The two kernels for one shape of experts."""

    def __init__(self, shape: ExpertShape, profile: LinearProfile) -> None:
        self.shape, self.tokens = shape, range(1, profile.expert_tokens + 1)
        self.gate_up_cut = cut_gate_up(shape)
        self.down_cuts = tuple(cut_down(shape, rows_tiles) for rows_tiles in (1, 2))

    def is_for(self, num_tokens: int) -> bool:
        """Return True if these kernels are loaded and used for this many tokens."""
        return num_tokens in self.tokens and self.num_ready > 0

    def gated(
        self, x: torch.Tensor | ResidualSum, eps: float, logits_TE: torch.Tensor, gate_up: Stack
    ) -> torch.Tensor:
        """act(gate x) * up x of every choice, times its weight: [T, H]; for a sum, x is its norm."""
        shape, total = self.shape, x if isinstance(x, ResidualSum) else None
        rows = total.scaled_MN if total is not None else x
        assert isinstance(rows, torch.Tensor)
        num_results = len(rows) * shape.num_choices
        gated = torch.empty((num_results, shape.size), dtype=rows.dtype, device=rows.device)
        squares = gated if total is None else total.squares_PM
        num_parts = 0 if total is None else len(squares)
        self._launch(
            self._gate_up_defines(parts=total is not None), self.gate_up_cut, rows, gate_up, gated,
            (gated, rows, rows, gated, squares), num_results, logits_TE,
            numbers=(0, len(rows), num_parts, eps, 0.0),
        )  # fmt: skip
        return gated.view(len(rows), -1)

    def down(
        self, gated_TH: torch.Tensor, logits_TE: torch.Tensor, down: Stack,
        stream: ResidualInput | None = None,
    ) -> torch.Tensor | ResidualSum:  # fmt: skip
        """The sum of each token's experts, [T, D]; with a stream, added to it."""
        (T, _), size = gated_TH.shape, self.shape.hidden_size
        cut, defines = self._down_cut(T), self._down_defines(self._down_cut(T), adds=stream is not None)
        y = torch.empty((T, size), dtype=gated_TH.dtype, device=gated_TH.device)
        if stream is None:
            outer, numbers = (y, y, y, y, y), (0, T, 0, 0.0, 0.0)
            self._launch(defines, cut, gated_TH, down, y, outer, T, logits_TE, numbers=numbers)
            return y
        residual, gain, offset = stream
        assert residual.stride(1) == 1 and residual.stride(0) % 2 == 0 and gain.dtype == y.dtype
        squares = torch.empty((self.num_parts(T), T), dtype=torch.float64, device=y.device)
        total = ResidualSum(torch.empty_like(y), y, squares)
        self._launch(
            defines, cut, gated_TH, down, y, (y, residual, gain, total.sum_MN, squares), T, logits_TE,
            numbers=(residual.stride(0) * 2, T, 0, 0.0, offset),
        )  # fmt: skip
        return total

    def num_parts(self, num_tokens: int) -> int:
        """The number of partial sums of squares that `down` writes for this many tokens."""
        return self._down_cut(num_tokens).num_parts(self.shape.hidden_size)

    def _down_cut(self, num_tokens: int) -> PdlConfig:
        cut = self.down_cuts[num_tokens > 1]
        assert cut is not None
        return cut

    def _launch(
        self, defines: Defines, cut: PdlConfig | None, x: torch.Tensor, w: Stack, y: torch.Tensor,
        outer: tuple[torch.Tensor, ...], num_results: int, logits_TE: torch.Tensor, *,
        numbers: tuple[float, ...],
    ) -> None:  # fmt: skip
        """Launch one block per result and tile of rows."""
        assert cut is not None
        assert logits_TE.is_contiguous() and x.stride(1) == 1 and not (x.stride(0) % 8 or x.data_ptr() % 16)
        if compiles_only():
            return
        cells = w.cells if isinstance(w, CodedWeights) else w
        stored: tuple[int, ...] = (cells.data_ptr(),)
        scale_bytes = 0
        if isinstance(w, CodedWeights):
            assert w.form == cut.form, (w.form, cut)
            stored, scale_bytes = (*stored, w.scales.data_ptr()), w.scales.stride(0) * w.scales.element_size()
        assert cells.stride(0) * cells.element_size() % 16 == 0
        cuda.load_variant(pdl.variant_of(defines), build.index_of(x.device), dispatch.PDL)(
            cut.num_parts(y.shape[1]) * num_results,
            x.data_ptr(), *stored, 0, *(tensor.data_ptr() for tensor in outer),
            x.stride(0) * 2, *numbers,
            logits_TE.data_ptr(), cells.stride(0) * cells.element_size(), scale_bytes,
        )  # fmt: skip

    def variants(self) -> list[Variant]:
        """One variant per tiling, epilogue and prologue; none if a matrix is not supported."""
        cuts = [cut for cut in self.down_cuts if cut is not None]
        if self.gate_up_cut is None or len(cuts) < len(self.down_cuts):
            return []
        ends = (False, True)
        defines = [self._gate_up_defines(parts=parts) for parts in ends]
        defines += [self._down_defines(cut, adds=adds) for cut in cuts for adds in ends]
        return [pdl.variant_of(each) for each in defines]

    def _gate_up_defines(self, *, parts: bool) -> Defines:
        shape = self.shape
        assert self.gate_up_cut is not None
        sizes = (1, shape.size, shape.hidden_size, shape.activation)
        return (
            *pdl.defines_of(self.gate_up_cut, torch.bfloat16, *sizes, parts=parts),
            *self._choice_defines(1),
        )

    def _down_defines(self, cut: PdlConfig, *, adds: bool) -> Defines:
        sizes = (1, self.shape.hidden_size, self.shape.size)
        return (*pdl.defines_of(cut, torch.bfloat16, *sizes, adds=adds), *self._choice_defines(2))

    def _choice_defines(self, half: int) -> Defines:
        return (
            ("EXPERTS", half),
            ("CHOICES", self.shape.num_choices),
            ("NUM_EXPERTS", self.shape.num_experts),
            ("NORMALIZED", int(self.shape.normalized)),
        )


def cut_gate_up(shape: ExpertShape) -> PdlConfig | None:
    """The tiling of gate and up; None: other kernels multiply these experts."""
    hidden_size, size, num_experts, *_, form, _ = shape
    if num_experts % 2 or num_experts > _MAX_EXPERTS or (form is not None and size % BAND):
        return None
    return _deepest(1, 4, form, size, hidden_size, gated=True)


def cut_down(shape: ExpertShape, rows_tiles: int) -> PdlConfig | None:
    """The tiling of down in blocks of this many tiles; None: other kernels multiply these experts."""
    hidden_size, size, _, num_choices, *_, form = shape
    if size % (_CHUNK if form is None else CELL_COLUMNS) or num_choices > _MAX_CHOICES:
        return None
    warps = max(_MAX_WARPS // num_choices, 1) * num_choices
    while warps > num_choices and warps // num_choices * 2 * _CHUNK > size:
        warps -= num_choices
    return _deepest(rows_tiles, warps, form, hidden_size, size * num_choices, gated=False)


def _deepest(
    rows_tiles: int, warps: int, form: CodedForm | None, N: int, K: int, *, gated: bool
) -> PdlConfig | None:
    """The tiling that holds the most chunks before its wait without spilling registers."""
    cuts = (PdlConfig(rows_tiles, warps, depth, form, by_words=form is not None) for depth in _DEPTHS)
    return next((cut for cut in cuts if pdl.can_launch(cut, 1, N, K, gated=gated, adds=not gated)), None)
