"""A device profile: every number that was found by measuring, not by reasoning.

The prompt tokens that fit next to decoding rows, the captured step sizes, the number of rows from which
another kernel is faster: such numbers hold for the GPU they were measured on. They live only here:

    hopper_h200.py   the measurements of an H200
    generic.py       the same numbers, without the ones known to be wrong elsewhere
    cpu.py           the generic numbers, with the steps of a CPU

    name, compute capability ──► find_profile ──► DeviceProfile ──► resolve ──► scheduler, graphs
                                                       └──► kernels, by device (kernels/runtime/profiles.py)

A profile consists of frozen sections, one for each package that reads it; the few packages that read another
section say so. A profile changes the speed, never the result: an engine computes right tokens with any
profile. The limits of a kernel (a head size, the width of an instruction) are in the kernel's file.

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

    A decoding sequence waits for the whole step. On a CPU 512 prompt tokens take nearly a second. On a GPU
    they take a small model 3 ms, and longer steps take less time per token, so it computes all waiting
    prompts at once. They take a large model 12 ms, so it gets short chunks, unless many prompts wait.
    """

    batch_size: int
    batched_tokens: int
    chunk_size: int | None  # tokens of one prompt; None: as long as the step
    mixed_tokens: int | None  # prompt tokens of a step with decoding rows; None: no limit of their own
    busy_tokens: int = 0  # all tokens of a short step, if hurried steps are frequent; 0: never short
    packed_tokens: int | None = None  # prompt tokens of a step with many short prompts; None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The size of steps, by the memory of the device and the size of the model.

    A step of a small model takes half a millisecond. A host that is delayed by one or two steps would leave
    the GPU idle, so several steps are launched before one is read. The price: the first step of a new
    request is queued after the launched steps, and a sequence that stops at an id computes a useless token in
    each of them. Where a step takes several milliseconds, the host is never that late and the price is
    higher: there one step is ahead.
    """

    usual: StepDefaults
    large: StepDefaults  # sizes with `large_bytes` of memory or more
    large_bytes: int
    tight: StepDefaults  # sizes of a large model with `tight_bytes` of memory or less
    tight_bytes: int  # device memory up to which the memory of large steps is better spent on KV cache
    small_weights: int  # active weights per token, in all layers; a model with more is not small
    small_mixed_tokens: int  # `mixed_tokens` of a small model
    small_busy_tokens: int  # `busy_tokens` of a small model
    small_packed_tokens: int  # `packed_tokens` where launching a layer takes longer than computing them
    steps_ahead: int  # steps of a small model launched before one is read, while all sequences decode


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingProfile:
    """The limits at which the scheduler lets prompts take longer steps."""

    backlog_tokens: int  # waiting prompt tokens above which prompts are computed at full speed
    hurried_tokens: int  # prompt tokens of a step at full speed (hurried), which decoding sequences wait for
    recent_steps: int  # steps over which prompts are counted, to see how often a hurried step is needed
    rare: int  # one hurried step in this many is rare; between that and one in `often`,
    often: int  # short steps (`busy_tokens`) replace hurried steps
    short_prompt: int  # mean length of waiting prompts up to which many are packed (`packed_tokens`)
    row_padding: int  # multiple to which decoding rows are padded: `GraphProfile.row_step`
    first_share: int  # the first prompt gets one part in this many of a step's prompt tokens
    much_shorter: int  # a waiting prompt runs next to a prompt that has this many times as much left


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProfile:
    """The step sizes that are captured as graphs (execution/gpu/graphs.py)."""

    decode_rows: tuple[int, ...]  # rows of a step that only decodes, ascending
    row_step: int  # rows between sizes above the last of `decode_rows`, and between sizes of short steps
    mixed_rows: tuple[int, ...]  # rows of a step with few prompt tokens
    mixed_tokens: tuple[int, ...]  # prompt tokens of these steps
    prompt_tokens: tuple[int, ...]  # prompt tokens of larger steps without rows
    many_rows: tuple[int, ...]  # rows of larger steps
    many_tokens: tuple[int, ...]  # prompt tokens of larger steps with rows
    short_parts: int  # a short step is at most the largest step divided by this
    most_padding: int  # prompt tokens by which a captured short step may be padded
    launched_layer: float  # weights times tokens that the GPU multiplies while the CPU launches a layer
    max_chunks: int  # chunks of prompts in a captured step
    ragged_tokens: int  # tokens of the smallest step that compiling ahead launches kernel by kernel


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

    branch_from: int  # tokens of a step below which kernels that start early gain more than two branches
    rotate_ahead: int  # tokens above which registers for values read early cost more than a launch
    projected_heads: int  # heads up to which one kernel from the projection on is faster: one item per head
    cuda_projected_heads: Mapping[int, int]  # heads up to which CUDA C++'s form is faster, by head size
    projected_registers: int  # registers per thread of that kernel; leaves room for the next one on the SM
    decode: Mapping[int, DecodeConfig]  # tiles by the bytes of one head's key
    decode_one_warp: DecodeConfig  # tiles of more than `few_heads`
    few_heads: int  # heads up to which each program gets one or two items and takes no turns
    programs_for_few: tuple[int, int]  # programs per SM for fewer heads than `handful`, and for more
    handful: int  # heads from which there may be items for a third program of each SM
    prefetched: int  # positions prefetched of a program's first item; few heads only: all must fit into L2
    split_lens: tuple[tuple[float, int], ...]  # (heads up to, positions of the shortest split)
    most_items: tuple[tuple[float, int], ...]  # (heads up to, items wanted for all kv heads together)
    least_items: int  # items wanted for all kv heads of a single row: one for nearly each SM
    prefill: Mapping[int, PrefillConfig]  # tiles by the bytes of one head's key
    prefill_grouped: Mapping[int, PrefillConfig]  # the same where four query heads or more share a kv head
    prefill_split_len: int  # keys up to which a tile is not split
    merge_programs: int  # programs per SM that merge splits
    merge_rows: int  # rows that each of these programs merges at once
    merge_at_once: int  # splits that each of these programs reads together
    cudnn_min_lens: Mapping[int, int]  # tokens from which cuDNN is faster, by head size; empty: never
    cudnn_few_heads: int  # query heads up to which a call for each prompt and layer takes the host longer;
    cudnn_few_heads_min_lens: Mapping[int, int]  # tokens from which cuDNN is faster then
    cudnn_pad_len: int  # tokens between padded lengths; twice that above 16 times as many, and so on
    cudnn_batches: tuple[int, ...]  # prompts of a batch, the most first


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProfile:
    """The kernels that multiply matrices, by the number of tokens, and their tiles (kernels/linear)."""

    gemv: TileTable  # measured tiles of dot products
    skinny: TileTable  # measured tiles of Triton's kernel for tensor cores
    rule_tokens: int  # tokens up to which matrices that were not measured get the tile of the rule
    block_k: int  # columns of the rule's tile
    gated_block_k: int  # columns of a gated matrix's tile
    num_stages: int  # stages of the rule's tile
    stage_bytes: int  # shared memory of a block that its stages may take
    enough_programs: int  # programs that keep the memory busy: two for each SM
    few_weights: int  # weights up to which three or four tokens are multiplied without tensor cores
    fold_norm_tokens: int  # tokens up to which the norm is fused into the dot products
    few_coded_tokens: int  # tokens up to which Triton unpacks codes tile by tile; above, W is unpacked once
    num_sms: int  # SMs that the cuts of the kernels in CUDA C++ are made for
    resident: Mapping[int, int]  # blocks that run at once, by the blocks of a cluster
    most_sms: int  # blocks of a matrix of a layer; leaves SMs for the next kernel
    crowded: int  # blocks from which most SMs have one
    pdl_tokens: int  # tokens up to which matrices of small models are held in registers (pdl.py)
    coded_pdl_tokens: int  # the same with coded weights
    expert_tokens: int  # tokens up to which each passes its experts by itself (moe/few.py)
    pdl_stream: int  # width of the residual stream up to which a model is small for pdl.py
    pdl_narrow_stream: int  # the same with more than `pdl_tokens`
    pdl_bytes: int  # bytes of the largest matrix for pdl.py
    wgmma_tokens: int  # tokens up to which all matrices are multiplied through shared memory (wgmma.py)
    wgmma_gate_tokens: int  # the same for gates and for matrices that write into the residual stream
    coded_tokens: int  # tokens up to which integer codes are multiplied; above, unpacking W once is faster
    fp8_tokens: int  # the same of FP8 weights with a scale for each row
    fp8_group_tokens: int  # the same of FP8 weights in groups


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Every measured number of one kind of device."""

    name: str
    measured_on: str = ""  # a word of the measured GPU's name; "": not measured
    generation: int = 0  # major compute capability of the GPUs that this profile is nearest to; 0: none
    steps: StepProfile
    scheduling: SchedulingProfile
    graphs: GraphProfile
    attention: AttentionProfile
    linear: LinearProfile
