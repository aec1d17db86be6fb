"""What was measured on an H200 (132 SMs, 141 GB, compute capability 9.0); nearest for all of its kind."""

from __future__ import annotations

from infer.config.profiles.profile import (
    DeviceProfile,
    GraphProfile,
    SchedulingProfile,
    StepDefaults,
    StepProfile,
)

_USUAL = StepDefaults(
    batch_size=256, batched_tokens=8192, chunk_size=None, mixed_tokens=128, busy_tokens=1024
)

H200 = DeviceProfile(
    name="hopper_h200",
    measured_on="H200",
    generation=9,
    steps=StepProfile(
        usual=_USUAL,
        large=_USUAL._replace(batched_tokens=16384),  # the host launches half as many kernels per token
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
)
