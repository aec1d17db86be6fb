"""The experts of a mixture: the choice of experts for each token, and their products.

    logits_TE ──► route ──► experts_TC, weights_TC      C experts of E for each token, and their shares
    x_TD ──► experts_mlp ──► y_TD                       sum over c of  weight_c down_c(act(gate_c x) * up_c x)

The reference loops over the experts that tokens chose. On a GPU, this would be E small products, and the host
would have to wait for the choices. Instead, the T * C pairs (token, choice), here called rows, are sorted by
expert on the device, each expert's rows are padded to whole blocks, and one launch multiplies all blocks,
each by the matrix of its expert (kernels/moe/grouped_kernels.py):

    experts_TC      [[2, 0], [0, 2], [2, 1]]        T = 3, C = 2: row 0 is (token 0, choice 0), row 1 (0, 1)
    row_order       1 2 . .   5 . . .   0 3 4 .     blocks of 4; a dot is padding
    block_experts   0         1         2           -1 for unused blocks

The largest number of blocks depends only on T, C and E, so a CUDA graph can be captured.

Rows are computed independently, written to [T, C, D] and summed over C in the order of the choices: the same
input gives the same bits, whatever else is in the batch.

Shapes:  T tokens, C choices per token, E experts, D hidden size, F intermediate size of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from infer.kernels.elementwise.gated_activation import find_activation, gated_activation_reference
from infer.kernels.moe.choice import EXPERT_WAYS, ExpertsProblem
from infer.kernels.moe.grouped_kernels import (
    count_kernel,
    grouped_kernel,
    order_kernel,
    route_kernel,
    sum_kernel,
)
from infer.kernels.moe.many import BLOCK_ROWS, ManyRows
from infer.kernels.runtime.choice import choose
from infer.kernels.runtime.dispatch import INTERPRETED, next_power_of_two, shared_bytes, use_triton

Stack = Callable[[], torch.Tensor]  # makes the matrices of all experts when they are needed
ManyOfBoth = tuple[ManyRows | None, ManyRows | None]  # gate and up; down
OneExpert = Callable[[int, torch.Tensor], torch.Tensor]  # (expert, its rows [M, D]) -> [M, D]

_CHUNK = 1024  # rows that a program of the ordering kernels processes at once
_PART_ROWS, _MOST_PARTS = 2048, 16  # rows per program; with more rows, this many programs share an expert
_GROUP = 16  # blocks that share a tile of weights before the next tile is loaded
_BLOCK_D = 1024


class Tiles(NamedTuple):
    """The tiles of the grouped product: block_n outputs by block_t rows, block_k inputs at a time."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int


# -- the specification ----------------------------------------------------------------------------------


def route_reference(
    logits_TE: torch.Tensor, num_choices: int, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each token (int32) and their probabilities (float32), best first.

    `normalized`: the chosen experts' shares add up to 1; otherwise they are probabilities over all experts.
    """
    weights_TC, experts_TC = torch.topk(logits_TE.float().softmax(dim=-1), num_choices, dim=-1)
    if normalized:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    return experts_TC.int(), weights_TC


def by_expert(
    x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, one_expert: OneExpert
) -> torch.Tensor:
    """Call `one_expert` once for every expert that some token chose, and mix the results."""
    outputs_TCD = x_TD.new_empty((*experts_TC.shape, x_TD.shape[1]))
    for expert in experts_TC.unique().tolist():
        tokens, choices = (experts_TC == expert).nonzero(as_tuple=True)
        outputs_TCD[tokens, choices] = one_expert(expert, x_TD[tokens])
    return (outputs_TCD.float() * weights_TC.unsqueeze(-1)).sum(dim=1).to(x_TD.dtype)


def experts_mlp_reference(
    x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, gate_up_EFD: torch.Tensor,
    down_EDF: torch.Tensor, activation: str,
) -> torch.Tensor:  # fmt: skip
    """The specification: `gate_up_EFD` is [E, 2F, D], gate above up; `down_EDF` is [E, D, F]."""

    def one_expert(expert: int, rows_MD: torch.Tensor) -> torch.Tensor:
        gated_MF = gated_activation_reference(F.linear(rows_MD, gate_up_EFD[expert]), activation)
        return F.linear(gated_MF, down_EDF[expert])

    return by_expert(x_TD, experts_TC, weights_TC, one_expert)


# -- the launchers --------------------------------------------------------------------------------------


def route(
    logits_TE: torch.Tensor, num_choices: int, *, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts as `route_reference` does; ties go to the first."""
    if not use_triton(logits_TE):
        return route_reference(logits_TE, num_choices, normalized)
    T, E = logits_TE.shape
    assert 1 <= num_choices <= E and logits_TE.stride(1) == 1, (num_choices, E, logits_TE.stride())
    experts_TC = torch.empty((T, num_choices), dtype=torch.int32, device=logits_TE.device)
    weights_TC = torch.empty((T, num_choices), dtype=torch.float32, device=logits_TE.device)
    if T:
        route_kernel[(T,)](
            logits_TE, experts_TC, weights_TC, logits_TE.stride(0), E,
            CHOICES=num_choices, NORMALIZED=normalized, BLOCK_E=next_power_of_two(E),
            BLOCK_C=next_power_of_two(num_choices), num_warps=1,
        )  # fmt: skip
    return experts_TC, weights_TC


def experts_mlp(
    x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, gate_up_EFD: torch.Tensor,
    down_EDF: torch.Tensor, *, activation: str, invariant: bool = False, many: ManyOfBoth = (None, None),
) -> torch.Tensor:  # fmt: skip
    """Send each token through its experts and mix the results; see `experts_mlp_reference`."""
    if not use_triton(x_TD):
        return experts_mlp_reference(x_TD, experts_TC, weights_TC, gate_up_EFD, down_EDF, activation)
    return sum_choices(
        expert_rows(
            x_TD, experts_TC, weights_TC, gate_up_EFD, down_EDF, activation=activation, invariant=invariant,
            many=many,
        )
    )  # fmt: skip


def expert_rows(
    x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, gate_up_EFD: torch.Tensor,
    down_EDF: torch.Tensor, *, activation: str, invariant: bool = False, many: ManyOfBoth = (None, None),
) -> torch.Tensor:  # fmt: skip
    """The weighted results of each token's experts on a GPU, [T, C, D], whose sum over C is the output.

    `invariant`: one tile shape for any number of tokens, so that the same instructions add.
    `many`: the kernels of both matrices for many rows of an expert, if they were compiled.
    """
    find_activation(activation)
    (T, D), num_experts, size = x_TD.shape, len(gate_up_EFD), down_EDF.shape[2]
    assert gate_up_EFD.shape == (num_experts, 2 * size, D) and down_EDF.shape == (num_experts, D, size)
    assert gate_up_EFD.is_contiguous() and down_EDF.is_contiguous(), "experts must be contiguous"
    assert experts_TC.is_contiguous() and weights_TC.is_contiguous() and x_TD.stride(1) == 1
    problem = ExpertsProblem(T, experts_TC.shape[1], num_experts, False, invariant=invariant, many=many)
    chosen = many if choose(EXPERT_WAYS, problem) == "many" else None
    return rows_in_order(
        x_TD, experts_TC, weights_TC, lambda: gate_up_EFD, lambda: down_EDF, num_experts, size,
        activation=activation, invariant=invariant, many=chosen,
    )  # fmt: skip


def rows_in_order(
    x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, gate_up: Stack, down: Stack,
    num_experts: int, size: int, *, activation: str, invariant: bool = False, many: ManyOfBoth | None,
) -> torch.Tensor:  # fmt: skip
    """`expert_rows` with matrices that are created one stack at a time, such as unpacked codes."""
    (T, D), num_choices = x_TD.shape, experts_TC.shape[1]
    num_rows = T * num_choices
    if not T:
        return x_TD.new_empty((T, num_choices, D))
    if many is not None:
        first, second = many
        assert first is not None and second is not None
        order = order_rows(experts_TC, num_experts, BLOCK_ROWS)
        gated_PF = first.multiply(x_TD, gate_up(), num_rows, *order, None, rows_per_input=num_choices)
        outputs_RD = second.multiply(gated_PF, down(), num_rows, *order, weights_TC)
        return outputs_RD.view(T, num_choices, D)
    tiles, down_tiles = choose_tiles(1 if invariant else num_rows, num_experts, x_TD.element_size())
    order = order_rows(experts_TC, num_experts, tiles.block_t)
    gated_RF = x_TD.new_empty((num_rows, size))
    multiply_rows(
        x_TD, gate_up(), gated_RF, *order, None, tiles, rows_per_input=num_choices, activation=activation
    )
    outputs_RD = x_TD.new_empty((num_rows, D))
    multiply_rows(gated_RF, down(), outputs_RD, *order, weights_TC, down_tiles)
    return outputs_RD.view(T, num_choices, D)


def sum_choices(outputs_TCD: torch.Tensor) -> torch.Tensor:
    """Add up the results of each token, in order."""
    T, num_choices, size = outputs_TCD.shape
    y_TD = outputs_TCD.new_empty((T, size))
    if T:
        sum_kernel[(T, -(-size // _BLOCK_D))](outputs_TCD, y_TD, size, CHOICES=num_choices, BLOCK_D=_BLOCK_D)
    return y_TD


def order_rows(experts_TC: torch.Tensor, num_experts: int, block_t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort rows by expert into padded blocks, with an expert per block; padding: `num_rows`, unused: -1."""
    num_rows, device = experts_TC.numel(), experts_TC.device
    num_blocks = max_blocks(num_rows, num_experts, block_t)
    parts = 1 if num_rows <= _PART_ROWS else _MOST_PARTS
    part_rows = -(-num_rows // parts)
    counts_EP = torch.empty((num_experts, parts), dtype=torch.int32, device=device)
    row_order = torch.empty(num_blocks * block_t, dtype=torch.int32, device=device)
    block_experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    grid = num_experts, parts
    count_kernel[grid](experts_TC, counts_EP, num_rows, part_rows, PARTS=parts, CHUNK=_CHUNK, num_warps=4)
    order_kernel[grid](
        experts_TC, counts_EP, row_order, block_experts, num_rows, part_rows, num_experts, num_blocks,
        BLOCK_T=block_t, PARTS=parts, BLOCK_E=next_power_of_two(num_experts), CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    return row_order, block_experts


def max_blocks(num_rows: int, num_experts: int, block_t: int) -> int:
    """The most blocks for any choice of experts: each expert may pad all but one row of its last block."""
    busy = min(num_rows, num_experts)
    return (num_rows + busy * (block_t - 1)) // block_t


def choose_tiles(num_rows: int, num_experts: int, element_size: int) -> tuple[Tiles, Tiles]:
    """The tiles of gate and up, and of down, with the same blocks of rows.

    The height of a block is about the number of rows of an expert. For few rows, it is 1.5 times as much,
    because experts are not chosen evenly: taller blocks multiply padding, flatter blocks reload weights. Down
    has no second matrix in its tiles, so they are wider. `block_k` does not depend on the number of rows, so
    neither does the order of additions.
    """
    rows = -(-num_rows // num_experts)
    block_t = min(max(next_power_of_two(min(-(-3 * rows // 2), 64)), 16), 64) if rows < 128 else 128
    block_n, num_warps = {16: (64, 4), 32: (128, 4)}.get(block_t, (128, 8))
    block_k = 128 // element_size
    tiles = Tiles(block_t, block_n, block_k, num_warps)
    if element_size > 2 or block_t == 64:
        return tiles, tiles
    return tiles, Tiles(block_t, 256, block_k, 8)


def multiply_rows(
    x: torch.Tensor, w_ENK: torch.Tensor, y_RN: torch.Tensor, row_order: torch.Tensor,
    block_experts: torch.Tensor, weights_TC: torch.Tensor | None, tiles: Tiles, *,
    rows_per_input: int = 1,  # rows of y that read the same row of x
    activation: str = "",
) -> None:  # fmt: skip
    """y[row] = x[row // rows_per_input] Wᵀ, with the W of the row's expert; gated, or times its weight."""
    num_rows, num_outputs = y_RN.shape
    num_blocks = len(block_experts)
    grid = (num_blocks * -(-num_outputs // tiles.block_n),)
    grouped_kernel[grid](
        x, w_ENK, y_RN, row_order, block_experts, weights_TC, x.stride(0),
        num_rows, num_outputs, w_ENK.shape[2], num_blocks,
        ROWS_PER_INPUT=rows_per_input, WEIGHTED=weights_TC is not None, ACTIVATION=activation,
        BLOCK_T=tiles.block_t, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP=_GROUP, WIDEN=INTERPRETED,
        num_warps=tiles.num_warps, num_stages=_num_stages(tiles, bool(activation), x),
    )  # fmt: skip


def _num_stages(tiles: Tiles, gated: bool, x: torch.Tensor) -> int:
    """The number of stages: as many as fit shared memory, up to four, or five for the narrowest tiles."""
    if INTERPRETED:
        return 1
    tile_bytes = ((1 + gated) * tiles.block_n + tiles.block_t) * tiles.block_k * x.element_size()
    return min(max((shared_bytes(x.device) - 8192) // tile_bytes, 1), 5 if tiles.block_n == 64 else 4)
