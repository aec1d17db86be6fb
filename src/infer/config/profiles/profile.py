"""A device profile: every number that was found by measuring, not by reasoning.

The number of prompt tokens that fit next to rows that decode, the step sizes that are captured, the rows from
which another kernel is faster: these numbers are true of the GPU they were measured on. They live only here:

    hopper_h200.py   what was measured, on an H200
    generic.py       the same numbers, without the ones known to be wrong elsewhere
    cpu.py           the generic ones, with the steps of a CPU

    name, compute capability ──► find_profile ──► DeviceProfile ──► resolve ──► scheduler, graphs
                                                       └──► kernels, by device (kernels/runtime/profiles.py)

A profile is made of frozen sections, one for each part that reads it, and no part sees another's section but
the few that say so. It changes what is fast, never what is computed: with any profile an engine gives right
tokens. Limits of a kernel (a head size, the width of an instruction) are not here but in its file.

docs/features/device-profile.md says how to measure one for another GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

TileTable = Mapping[tuple[int, int, bool], Mapping[int, tuple[int, ...] | None]]
"""Tiles by matrix (N, K, gated) and bucket of tokens; None: another kernel was faster."""


class StepDefaults(NamedTuple):
    """The size of a device's steps unless a knob says otherwise: long enough to be efficient.

    A sequence that decodes waits for the whole step. On a CPU 512 tokens of a prompt take nearly a second. On
    a GPU they take a small model three milliseconds, and more tokens at once take less time each, so it
    computes all waiting prompts. A large model takes twelve: it gets short chunks, unless many wait.
    """

    batch_size: int
    batched_tokens: int
    chunk_size: int | None  # tokens of one prompt; None: as long as the step
    mixed_tokens: int | None  # prompt tokens of a step in which others decode; None: no limit of their own
    busy_tokens: int = 0  # all tokens of a short step, where hurried ones are frequent; 0: never short
    packed_tokens: int | None = None  # prompt tokens of a step with many short prompts; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The size of steps, by the memory of the device and the size of the model.

    A step of a small model takes half a millisecond, and a host that another thread or the system delays by
    one or two of them would leave the GPU without work, so several steps are launched before one is read. The
    price: the first step of a new request is queued after those already launched, and a sequence that stops
    at an id has as many tokens computed for nothing. Where a step takes several milliseconds no host is
    that late, and the price is felt: there one step is ahead.
    """

    usual: StepDefaults
    large: StepDefaults  # sizes with `large_bytes` of memory or more
    large_bytes: int
    tight: StepDefaults  # sizes of a large model with `tight_bytes` of memory or less
    tight_bytes: int  # bytes up to which the memory of large steps is worth more as KV cache
    small_weights: int  # weights of all layers that one token meets; a model with more is not small
    small_mixed_tokens: int  # `mixed_tokens` of a small model
    small_busy_tokens: int  # `busy_tokens` of a small model
    small_packed_tokens: int  # `packed_tokens` where launching a layer takes longer than computing them
    steps_ahead: int  # steps of a small model launched before one is read, while all sequences decode


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingProfile:
    """The limits at which the scheduler lets prompts take longer steps."""

    backlog_tokens: int  # waiting prompt tokens; with more of them prompts are computed at full speed
    hurried_tokens: int  # prompt tokens of a step at full speed, for which decoding sequences wait longer
    recent_steps: int  # steps over which prompts are counted, to see how often a hurried one is needed
    rare: int  # one hurried step in this many is rare; between that and one in `often`,
    often: int  # short steps (`busy_tokens`) take the place of hurried ones
    short_prompt: int  # tokens of the mean prompt, up to which many are packed (`packed_tokens`)
    row_padding: int  # multiple to which decoding rows are padded: `GraphProfile.row_step`
    first_share: int  # one part in this many of a step's prompt tokens is the first prompt's
    much_shorter: int  # a waiting prompt runs next to one that has this many times as much left


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile:
    """The step sizes that are captured as graphs (execution/gpu/graphs.py)."""

    decode_rows: tuple[int, ...]  # rows of a step that only decodes, ascending
    row_step: int  # rows between the sizes above the last of them, and of short steps
    mixed_rows: tuple[int, ...]  # rows of a step with few prompt tokens
    mixed_tokens: tuple[int, ...]  # prompt tokens of these steps
    prompt_tokens: tuple[int, ...]  # prompt tokens of larger steps without rows
    many_rows: tuple[int, ...]  # rows of larger steps
    many_tokens: tuple[int, ...]  # prompt tokens of larger steps with rows
    short_parts: int  # parts of the largest step: a short one is at most one of them
    most_padding: int  # prompt tokens that a captured short step may lack
    launched_layer: float  # weights times tokens that the GPU multiplies while the CPU launches a layer
    max_chunks: int  # chunks of prompts in a captured step
    ragged_tokens: int  # tokens of the smallest step that is launched kernel by kernel when compiling ahead


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile sizes and resources that the decode kernel is compiled and launched with."""

    block_n: int  # positions per tile
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes and resources that the prefill kernel is compiled for."""

    block_n: int  # keys per tile
    num_warps: int
    num_stages: int
    block_m: int = 128  # rows of a tile
    num_parts: int = 1  # programs that share the rows of a tile
    programs_per_sm: int = 1  # programs that run at the same time
    max_registers: int | None = None  # registers of a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProfile:
    """The limits at which one attention kernel is faster than another, and its tiles (kernels/attention).

    "Heads" are rows that decode times kv heads, the items of work before any row is split.
    """

    branch_from: int  # tokens of a step; with fewer, kernels that start early gain more than two branches
    rotate_ahead: int  # tokens; with more, registers that hold what was read early cost more than a launch
    projected_heads: int  # heads up to which one kernel from the projection on is faster: one item each
    cuda_projected_heads: Mapping[int, int]  # heads up to which CUDA C++'s form is faster, by head size
    projected_registers: int  # registers per thread of it; leaves room for the next kernel on the SM
    decode: Mapping[int, DecodeConfig]  # tiles by the bytes of one head's key
    decode_one_warp: DecodeConfig  # tiles of more than `few_heads`
    few_heads: int  # heads up to which each program gets an item or two: no turns
    programs_for_few: tuple[int, int]  # programs per SM of fewer heads than a handful, and of more
    handful: int  # heads from which there may be items for a third program of each SM
    prefetched: int  # positions of a program's first item; few heads only: all of them must fit L2
    split_lens: tuple[tuple[float, int], ...]  # (heads up to, positions of the shortest split)
    most_items: tuple[tuple[float, int], ...]  # (heads up to, items wanted for all kv heads together)
    least_items: int  # items wanted for all kv heads of a row alone: one for nearly each SM
    prefill: Mapping[int, PrefillConfig]  # tiles by the bytes of one head's key
    prefill_grouped: Mapping[int, PrefillConfig]  # the same where four query heads or more share a kv head
    prefill_split_len: int  # keys; a tile with no more is not split
    merge_programs: int  # programs per SM that put splits together
    merge_rows: int  # rows that each of these programs merges at once
    merge_at_once: int  # parts that it waits for together
    cudnn_min_lens: Mapping[int, int]  # tokens from which cuDNN is faster, by head size; empty: never
    cudnn_few_heads: int  # query heads up to which a call for each prompt and layer takes the host longer,
    cudnn_few_heads_min_lens: Mapping[int, int]  # tokens from which it is faster then
    cudnn_pad_len: int  # tokens between the lengths of shapes; twice that above 16 times as many, and so on
    cudnn_batches: tuple[int, ...]  # prompts of a batch, the most first


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProfile:
    """The kernels that multiply matrices, by the number of tokens, and their tiles (kernels/linear)."""

    gemv: TileTable  # measured tiles of dot products
    skinny: TileTable  # measured tiles of Triton's kernel for tensor cores
    rule_tokens: int  # tokens up to which matrices that were not measured have the tile of the rule
    block_k: int  # columns of the rule's tile
    gated_block_k: int  # columns of a gated matrix's tile
    num_stages: int  # stages of the rule's tile
    stage_bytes: int  # shared memory of a block that its stages may take
    enough_programs: int  # programs that keep the memory busy: two for each SM
    few_weights: int  # weights of a matrix that three or four tokens pass over without tensor cores
    fold_norm_tokens: int  # tokens up to which the norm is part of the dot products
    few_coded_tokens: int  # tokens up to which Triton unpacks codes tile by tile; with more, W once
    num_sms: int  # SMs that the cuts of the kernels in CUDA C++ are made for
    resident: Mapping[int, int]  # blocks that run at once, by the blocks of a cluster
    most_sms: int  # blocks of a matrix of a layer; leaves SMs for the next kernel
    crowded: int  # blocks from which most SMs have one
    pdl_tokens: int  # tokens up to which matrices of small models are held in registers (pdl.py)
    coded_pdl_tokens: int  # the same with coded weights
    expert_tokens: int  # tokens up to which each is sent through its experts by itself (moe/few.py)
    pdl_stream: int  # width of the residual stream up to which a model is small for that
    pdl_narrow_stream: int  # the same with more than `pdl_tokens`
    pdl_bytes: int  # bytes of the largest matrix for it
    wgmma_tokens: int  # tokens up to which all matrices are multiplied through shared memory (wgmma.py)
    wgmma_gate_tokens: int  # the same for gates and what writes into the residual stream
    coded_tokens: int  # tokens multiplied with integer codes; with more, unpacking W once is faster
    fp8_tokens: int  # the same of FP8 weights with a scale for each row
    fp8_group_tokens: int  # the same of FP8 weights in groups


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Every measured number of one kind of device."""

    name: str
    measured_on: str = ""  # a word of the GPU's name; "": on none
    generation: int = 0  # major compute capability of the GPUs it is the nearest one for; 0: of none
    steps: StepProfile
    scheduling: SchedulingProfile
    graphs: GraphProfile
    attention: AttentionProfile
    linear: LinearProfile
