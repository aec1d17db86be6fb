"""The gated delta rule in Triton: two kernels over the runs of a ragged batch.

    run         consecutive tokens of one row: first token, tokens, row of the tables, position of the first;
                no tokens: padding. A decoding row is a run of one token
    mix         the convolution and its activation; tails are read before the first token and written at the
                ends of blocks, unless the tokens are drafts; for a block of -1, nothing is written
    recur       the states. One program has the columns of some values of one head, [K, columns], and
                processes the run token by token, or in pieces of 16

Within a piece, all u are the solution of a triangular system (reference.py). Its strictly lower matrix A is
nilpotent, so the inverse of I + A is a short product, without a loop over rows:

    (I + A)^-1 = (I - A) (I + A^2) (I + A^4) (I + A^8)

Tensor cores compute products in three parts (tf32x3), which are as exact as float32; without tensor cores, a
piece would not fit the registers. Pieces begin at multiples of 16, so no piece crosses the end of a block.

Shapes:  T tokens, U runs, C channels of q, k and v, V value heads, K key size, H value size.
"""

from __future__ import annotations

import torch

from infer.kernels.delta.reference import NORM_EPS, DeltaRule, StateCache
from infer.kernels.runtime.dispatch import is_amd, jit, next_power_of_two, tl
from infer.kernels.runtime.launch import launch_triton

TILE_TOKENS, TILE_CHANNELS = 16, 128  # tile of a program of `mix`
COLUMNS = 32  # values per program of `recur`
MIN_DOT = 16  # smallest side of a matrix product


@jit
def _run_of(runs_ptr, run):
    first = tl.load(runs_ptr + run * 4).to(tl.int64)
    num = tl.load(runs_ptr + run * 4 + 1)
    row = tl.load(runs_ptr + run * 4 + 2).to(tl.int64)
    start = tl.load(runs_ptr + run * 4 + 3)
    return first, num, row, start


@jit
def _mix_kernel(
    x_ptr, weight_ptr, tails_ptr, tables_ptr, runs_ptr, y_ptr, x_stride, table_stride, num_channels,
    BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    first, num, row, start = _run_of(runs_ptr, tl.program_id(0))
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channels < num_channels
    has_past = (start > 0) & (num > 0)
    table = tables_ptr + row * table_stride
    before = tl.load(table + tl.maximum(start - 1, 0) // BLOCK_SIZE, mask=has_past, other=0).to(tl.int64)
    tail = tails_ptr + before * 3 * num_channels + channels
    for base in range(0, num, BLOCK_T):
        tokens = base + tl.arange(0, BLOCK_T)
        is_here = (tokens < num)[:, None] & is_channel[None, :]
        mixed = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(4):
            places = tokens - 3 + tap
            x = tl.load(
                x_ptr + (first + places)[:, None] * x_stride + channels[None, :],
                mask=is_here & (places >= 0)[:, None], other=0.0,
            )  # fmt: skip
            is_past = is_here & (places < 0)[:, None] & has_past
            past = tl.load(tail[None, :] + (places + 3)[:, None] * num_channels, mask=is_past, other=0.0)
            weight = tl.load(weight_ptr + channels * 4 + tap, mask=is_channel, other=0.0)
            mixed += (x.to(tl.float32) + past.to(tl.float32)) * weight.to(tl.float32)[None, :]
        mixed = mixed * tl.sigmoid(mixed)
        out = y_ptr + (first + tokens)[:, None] * num_channels + channels[None, :]
        tl.store(out, mixed.to(y_ptr.dtype.element_ty), mask=is_here)
    tl.debug_barrier()  # the tail has been read and may be overwritten
    first_block = start // BLOCK_SIZE
    num_blocks = tl.where((num > 0) & WRITES, (start + num - 1) // BLOCK_SIZE - first_block + 1, 0)
    for later in range(num_blocks):
        number = num_blocks - 1 - later  # last to first: the tail is read from a block that may be the first
        end = tl.minimum((first_block + number + 1) * BLOCK_SIZE - start, num)
        block = tl.load(table + first_block + number).to(tl.int64)
        slots = tl.arange(0, 4)
        places = end - 3 + slots
        is_kept = (slots < 3)[:, None] & is_channel[None, :]
        x = tl.load(
            x_ptr + (first + places)[:, None] * x_stride + channels[None, :],
            mask=is_kept & (places >= 0)[:, None], other=0.0,
        )  # fmt: skip
        is_past = is_kept & (places < 0)[:, None] & has_past
        past = tl.load(tail[None, :] + (places + 3)[:, None] * num_channels, mask=is_past, other=0.0)
        tl.debug_barrier()
        out = tails_ptr + (block * 3 + slots)[:, None] * num_channels + channels[None, :]
        tl.store(out, x + past, mask=is_kept & (block >= 0))
        tl.debug_barrier()


@jit
def _unit(x, eps, SIDE: tl.constexpr):
    """Normalise rows, or columns, to length one."""
    return x * tl.rsqrt(tl.sum(x * x, axis=SIDE, keep_dims=True) + eps)


@jit
def _recur_kernel(
    mixed_ptr, a_ptr, b_ptr, decay_ptr, bias_ptr, states_ptr, tables_ptr, runs_ptr, out_ptr,
    gate_stride, table_stride, half_stride, block_stride, scale, eps,
    BLOCK_SIZE: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    first, num, row, start = _run_of(runs_ptr, tl.program_id(0))
    head, half = tl.program_id(1), NUM_HEADS // 2
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_key, is_value = keys < K, values < H
    is_inside = is_key[:, None] & is_value[None, :]
    num_channels = 2 * NUM_KEY_HEADS * K + NUM_HEADS * H
    table = tables_ptr + row * table_stride
    has_past = (start > 0) & (num > 0)
    before = tl.load(table + tl.maximum(start - 1, 0) // BLOCK_SIZE, mask=has_past, other=0).to(tl.int64)
    place = (head // half) * half_stride + (head % half) * K * H
    cells = states_ptr + place + keys[:, None] * H + values[None, :]
    state = tl.load(cells + before * block_stride, mask=is_inside & has_past, other=0.0)
    decay = -tl.exp(tl.load(decay_ptr + head).to(tl.float32))
    bias = tl.load(bias_ptr + head).to(tl.float32)
    stop = start + num
    lowest = start // PIECE * PIECE
    for base in range(lowest, stop, PIECE):
        positions = base + tl.arange(0, PIECE)
        is_here = (positions >= start) & (positions < stop)
        tokens = first + positions - start
        q_at = mixed_ptr + tokens[:, None] * num_channels + key_head * K + keys[None, :]
        v_at = mixed_ptr + tokens[:, None] * num_channels + 2 * NUM_KEY_HEADS * K + head * H + values[None, :]
        has_key, has_value = is_here[:, None] & is_key[None, :], is_here[:, None] & is_value[None, :]
        q = _unit(tl.load(q_at, mask=has_key, other=0.0).to(tl.float32), eps, 1) * scale
        k = _unit(tl.load(q_at + NUM_KEY_HEADS * K, mask=has_key, other=0.0).to(tl.float32), eps, 1)
        v = tl.load(v_at, mask=has_value, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + tokens * gate_stride + head, mask=is_here, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + tokens * gate_stride + head, mask=is_here, other=0.0).to(tl.float32) + bias
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        g = tl.where(is_here, decay * softplus, 0.0)
        beta = tl.where(is_here, tl.sigmoid(b), 0.0)
        if PIECE == 1:
            state *= tl.exp(tl.sum(g, axis=0))
            k_column, q_column = tl.trans(k), tl.trans(q)  # [K, 1]
            u = (v - tl.sum(state * k_column, axis=0)[None, :]) * tl.sum(beta, axis=0)
            state += k_column * u
            out = tl.sum(state * q_column, axis=0)[None, :]
        else:
            total = tl.cumsum(g, axis=0)
            all_of_it = tl.sum(g, axis=0)
            places = tl.arange(0, PIECE)
            is_before = places[:, None] >= places[None, :]
            between = tl.exp(tl.where(is_before, total[:, None] - total[None, :], float("-inf")))
            since = tl.exp(total)[:, None]
            k_beta, k_turned = k * beta[:, None], tl.trans(k)
            system = tl.dot(k_beta, k_turned, input_precision=PRECISION) * between
            power = tl.where(places[:, None] > places[None, :], system, 0.0)
            unit = (places[:, None] == places[None, :]).to(tl.float32)
            inverse = unit - power
            power = tl.dot(power, power, input_precision=PRECISION)
            inverse = tl.dot(inverse, unit + power, input_precision=PRECISION)
            power = tl.dot(power, power, input_precision=PRECISION)
            inverse = tl.dot(inverse, unit + power, input_precision=PRECISION)
            power = tl.dot(power, power, input_precision=PRECISION)
            inverse = tl.dot(inverse, unit + power, input_precision=PRECISION)
            known = v * beta[:, None] - tl.dot(k_beta * since, state, input_precision=PRECISION)
            u = tl.dot(inverse, known, input_precision=PRECISION)
            scores = tl.dot(q, k_turned, input_precision=PRECISION) * between
            out = tl.dot(q * since, state, input_precision=PRECISION) + tl.dot(
                scores, u, input_precision=PRECISION
            )
            left = tl.exp(all_of_it - total)[:, None]
            state = state * tl.exp(all_of_it) + tl.dot(tl.trans(k * left), u, input_precision=PRECISION)
        out_at = out_ptr + (tokens[:, None] * NUM_HEADS + head) * H + values[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=has_value)
        end = tl.minimum(base + PIECE, stop)
        if ((end % BLOCK_SIZE == 0) | (end == stop)) & WRITES:
            block = tl.load(table + (end - 1) // BLOCK_SIZE).to(tl.int64)
            tl.store(cells + block * block_stride, state, mask=is_inside & (block >= 0))


def recur_runs(
    rule: DeltaRule, cache: StateCache, tables_RB: torch.Tensor, block_size: int, runs_U4: torch.Tensor,
    qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor, mixed_TC: torch.Tensor,
    out_TVH: torch.Tensor, *, are_tokens: bool, are_drafts: bool = False,
) -> None:  # fmt: skip
    """Advance the states of some runs, each of a different row, over their tokens, and write the outputs.

    `are_tokens`: each run has at most one token. `are_drafts`: states are not written.
    `mixed_TC` is memory for the mixed inputs.
    """
    num_runs, num_channels, num_heads = len(runs_U4), qkv_TC.shape[1], b_TV.shape[1]
    key_dim, value_dim = rule.key_dim, rule.value_dim
    piece = 1 if are_tokens else MIN_DOT
    least = 1 if are_tokens else MIN_DOT
    assert qkv_TC.stride(1) == b_TV.stride(1) == a_TV.stride(1) == tables_RB.stride(1) == 1
    assert b_TV.stride(0) == a_TV.stride(0) and rule.conv_CW.shape[1] == 4 and rule.conv_CW.is_contiguous()
    assert are_tokens or block_size % MIN_DOT == 0, f"blocks of {block_size} tokens end within a piece"
    launch_triton(
        _mix_kernel, (num_runs, -(-num_channels // TILE_CHANNELS)),
        (qkv_TC, rule.conv_CW, cache.tails, tables_RB, runs_U4, mixed_TC),
        (qkv_TC.stride(0), tables_RB.stride(0), num_channels),
        BLOCK_SIZE=block_size, BLOCK_T=piece, BLOCK_C=TILE_CHANNELS, WRITES=not are_drafts, num_warps=4,
    )  # fmt: skip
    columns = min(COLUMNS, max(next_power_of_two(value_dim), least))
    launch_triton(
        _recur_kernel, (num_runs, num_heads, -(-value_dim // columns)),
        (mixed_TC, a_TV, b_TV, rule.decay_V, rule.dt_bias_V, cache.states, tables_RB, runs_U4, out_TVH),
        (b_TV.stride(0), tables_RB.stride(0), cache.states.stride(0), cache.states.stride(1),
         key_dim**-0.5, NORM_EPS),
        BLOCK_SIZE=block_size, NUM_KEY_HEADS=rule.num_key_heads, NUM_HEADS=num_heads, K=key_dim, H=value_dim,
        BLOCK_K=max(next_power_of_two(key_dim), least), BLOCK_H=columns, PIECE=piece,
        PRECISION="ieee" if is_amd() else "tf32x3", WRITES=not are_drafts, num_warps=8,
    )  # fmt: skip
