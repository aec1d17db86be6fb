"""Measurements of an H200 (132 SMs, 141 GB, compute capability 9.0); the nearest profile for its kind."""

from __future__ import annotations

import math

from infer.config.profiles.profile import (
    AttentionProfile,
    DecodeConfig,
    DeviceProfile,
    GraphProfile,
    LinearProfile,
    PrefillConfig,
    SchedulingProfile,
    StepDefaults,
    StepProfile,
    TileTable,
)

_USUAL = StepDefaults(
    batch_size=256, batched_tokens=8192, chunk_size=None, mixed_tokens=128, busy_tokens=1024
)
# Queries and `num_stages` tiles of keys and values share 227 KiB, and the scores and sums of a tile share the
# registers of 256 threads: tiles so short that two programs share an SM, one multiplying while the other
# computes exponentials.
_PREFILL = {
    128: PrefillConfig(block_n=64, num_warps=8, num_stages=3, programs_per_sm=2),
    256: PrefillConfig(block_n=32, num_warps=8, num_stages=4, programs_per_sm=2),
    512: PrefillConfig(block_n=32, num_warps=8, num_stages=2),
}
# Tiles of linears; rewritten by `python -m benchmarks.kernels.linear_small --sweep --apply`.
# table: begin
# fmt: off
_GEMV: TileTable = {
    (1024, 2048, False): {1: (1,1024,4,1), 2: None, 4: (4,1024,4,1)},
    (1024, 3072, False): {1: (1,1024,4,1), 2: (1,1024,4,1), 4: None},
    (2048, 2048, False): {1: (2,1024,4,2), 2: (4,1024,4,1), 4: None},
    (2048, 8192, False): {1: (2,1024,4,2), 2: None, 4: None},
    (3072, 1024, True): {1: (4,512,2,1), 2: None, 4: None},
    (3072, 2048, False): {1: (4,512,2,1), 2: (4,512,2,1), 4: None},
    (4096, 1024, False): {1: (4,512,2,1), 2: (4,512,2,1), 4: None},
    (4096, 4096, False): {1: (1,1024,4,1), 2: (4,1024,4,1), 4: None},
    (4096, 12288, False): {1: (1,1024,4,1), 2: (4,1024,4,1), 4: None},
    (6144, 4096, False): {1: (8,512,2,1), 2: (4,512,2,1), 4: (8,512,2,1)},
    (8192, 2048, True): {1: (4,512,2,1), 2: None, 4: None},
    (12288, 4096, True): {1: (4,1024,4,1), 2: (2,1024,4,1), 4: None},
    (128256, 2048, False): {1: (8,512,2,1), 2: (4,512,2,1), 4: None},
    (151936, 1024, False): {1: (8,512,2,1), 2: (8,512,2,1), 4: None},
    (151936, 4096, False): {1: (8,512,2,1), 2: (4,512,2,1), 4: None},
}
_SKINNY: TileTable = {
    (1024, 2048, False): {16: (64,256,4,4,3), 32: (16,256,1,2,4), 64: (16,256,1,4,4), 128: None},
    (1024, 3072, False): {16: (64,256,4,4,3), 32: (64,256,4,4,3), 64: (64,128,4,4,4), 128: None},
    (2048, 2048, False): {16: (64,256,4,4,3), 32: (64,256,4,4,3), 64: None, 128: None},
    (2048, 8192, False): {16: (64,256,4,4,3), 32: (64,256,4,4,3), 64: (64,256,4,4,3), 128: None},
    (3072, 1024, True): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (64,128,1,4,4), 128: None},
    (3072, 2048, False): {16: (64,256,2,4,3), 32: (64,256,2,4,3), 64: (64,128,2,4,4), 128: None},
    (4096, 1024, False): {16: (64,256,1,4,3), 32: (64,256,1,4,3), 64: (64,256,1,4,3), 128: None},
    (4096, 4096, False): {16: (64,256,2,4,3), 32: (64,256,2,4,3), 64: None, 128: None},
    (4096, 12288, False): {16: (64,256,2,4,3), 32: (64,256,2,4,3), 64: (64,256,2,4,3), 128: None},
    (6144, 4096, False): {16: (64,256,1,4,3), 32: (64,256,1,4,3), 64: None, 128: None},
    (8192, 2048, True): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (64,64,1,4,6), 128: (64,128,1,4,4)},
    (12288, 4096, True): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (64,128,1,4,4), 128: None},
    (128256, 2048, False): {16: (64,64,1,4,6), 32: (128,64,1,4,4), 64: (128,64,1,4,4), 128: None},
    (151936, 1024, False): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (128,128,1,8,4), 128: None},
    (151936, 4096, False): {16: (64,128,1,4,4), 32: (64,128,1,4,4), 64: (128,128,1,8,4), 128: None},
}
# fmt: on
# table: end

H200 = DeviceProfile(
    name="hopper_h200",
    measured_on="H200",
    generation=9,
    steps=StepProfile(
        usual=_USUAL,
        large=_USUAL._replace(batched_tokens=16384),  # half as many kernel launches per token
        large_bytes=64 << 30,
        tight=_USUAL._replace(batch_size=32, batched_tokens=1024, busy_tokens=0),
        tight_bytes=12 << 30,
        small_weights=1_500_000_000,
        small_mixed_tokens=8192,
        small_busy_tokens=4096,
        small_packed_tokens=4096,
        steps_ahead=3,
    ),
    scheduling=SchedulingProfile(
        backlog_tokens=2048,
        hurried_tokens=8192,
        recent_steps=128,
        rare=20,
        often=6,
        short_prompt=2560,
        row_padding=32,
        first_share=2,
        much_shorter=4,
    ),
    graphs=GraphProfile(
        decode_rows=(1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128),
        row_step=32,
        mixed_rows=(0, 16, 32, 64, 256),
        mixed_tokens=(32, 64, 128, 256, 512),
        prompt_tokens=(640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
        many_rows=(64, 256),
        many_tokens=(768, 1024, 1536, 2048, 3072, 4096),
        short_parts=16,
        most_padding=128,
        launched_layer=1e11,
        max_chunks=16,
        ragged_tokens=512,
    ),
    attention=AttentionProfile(
        branch_from=128,
        rotate_ahead=256,
        projected_heads=256,
        cuda_projected_heads={64: 256, 128: 64},
        projected_registers=192,
        # With tiles of 16 KiB and three stages, two of which are being loaded, a program holds 64 KiB and
        # three programs share an SM: while one is between items, two keep memory busy. Further programs
        # wait, and the first SM that is done takes them.
        decode={
            128: DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=6),
            256: DecodeConfig(block_n=64, num_warps=4, num_stages=3, programs_per_sm=6),
            512: DecodeConfig(block_n=32, num_warps=4, num_stages=3, programs_per_sm=6),
            1024: DecodeConfig(block_n=16, num_warps=4, num_stages=3, programs_per_sm=6),
        },
        # With many rows a program is one warp, which never waits for another warp, and more programs share
        # an SM: 128 rows with 400 positions and heads of 64 are read in 29.7 us instead of 39.3.
        decode_one_warp=DecodeConfig(block_n=32, num_warps=1, num_stages=3, programs_per_sm=16),
        few_heads=512,
        programs_for_few=(2, 3),
        handful=32,
        prefetched=128,
        # Few rows fill the GPU only with short splits, but each item waits for its block table and first
        # keys. So the length of splits doubles while there are more items than wanted.
        split_lens=((32, 64), (64, 128), (128, 512), (math.inf, 1024)),
        # Few rows need two items for nearly each SM. Many rows need more: with one item per row, 64 rows of
        # 500 to 6,000 positions leave most SMs idle while the long rows are still read.
        most_items=((256, 256), (math.inf, 2048)),
        least_items=128,
        prefill=_PREFILL,
        # Where four or more query heads share a kv head, finding a row's query takes the registers that a
        # second program would need; a single program per SM is faster with long tiles.
        prefill_grouped=_PREFILL | {256: PrefillConfig(block_n=128, num_warps=8, num_stages=2)},
        prefill_split_len=512,  # merging splits takes as long as 250 keys
        merge_programs=4,
        merge_rows=8,
        merge_at_once=4,
        cudnn_min_lens={64: 4096, 128: 2048},
        # A call for each prompt and layer takes the host 0.1 ms, longer than the GPU computes few heads:
        # with 16 heads, one launch for four prompts of 2,000 tokens is faster on the GPU too.
        cudnn_few_heads=16,
        cudnn_few_heads_min_lens={128: 3072},
        cudnn_pad_len=256,
        cudnn_batches=(4, 2, 1),
    ),
    linear=LinearProfile(
        gemv=_GEMV,
        skinny=_SKINNY,
        rule_tokens=64,
        block_k=128,
        gated_block_k=64,
        num_stages=4,
        stage_bytes=200 << 10,  # part of the 227 KB of a block
        enough_programs=264,
        few_weights=1 << 22,
        fold_norm_tokens=1,
        few_coded_tokens=64,
        num_sms=132,
        resident={1: 132, 2: 132, 3: 126, 4: 120, 8: 120},
        most_sms=112,
        crowded=80,
        pdl_tokens=8,
        coded_pdl_tokens=16,
        expert_tokens=8,
        pdl_stream=2048,
        pdl_narrow_stream=1024,
        pdl_bytes=128 << 20,
        wgmma_tokens=64,
        wgmma_gate_tokens=128,
        coded_tokens=512,
        fp8_tokens=1024,
        fp8_group_tokens=384,
    ),
)
