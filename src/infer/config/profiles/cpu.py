"""For a model on a CPU: small steps, because 512 tokens of a prompt take nearly a second."""

from __future__ import annotations

from dataclasses import replace

from infer.config.profiles.generic import GENERIC
from infer.config.profiles.profile import StepDefaults

_STEPS = StepDefaults(batch_size=64, batched_tokens=512, chunk_size=512, mixed_tokens=128)

CPU = replace(GENERIC, name="cpu", steps=replace(GENERIC.steps, usual=_STEPS))
