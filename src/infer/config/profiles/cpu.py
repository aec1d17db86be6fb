"""The profile of a CPU: small steps, because 512 prompt tokens take nearly a second.

GPU kernels run on a CPU only in tests, under Triton's interpreter, with the tiles of the H200.
"""

from __future__ import annotations

from dataclasses import replace

from infer.config.profiles.generic import GENERIC
from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import StepDefaults

_STEPS = StepDefaults(batch_size=64, batched_tokens=512, chunk_size=512, mixed_tokens=128)

CPU = replace(
    GENERIC,
    name="cpu",
    steps=replace(GENERIC.steps, usual=_STEPS),
    linear=replace(H200.linear, gemv={}, skinny={}, rule_tokens=GENERIC.linear.rule_tokens),
)
