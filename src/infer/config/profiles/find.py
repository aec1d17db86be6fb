"""Finds a device's profile: the one measured on it, the nearest of its generation, or the generic one."""

from __future__ import annotations

import re
from typing import NamedTuple

from infer.config.profiles.cpu import CPU
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import DeviceProfile

MEASURED = (H200,)  # profiles of GPUs: add a new one here


class FoundProfile(NamedTuple):
    """A profile and the reason why it was chosen."""

    profile: DeviceProfile
    why: str


def find_profile(gpu: str, capability: tuple[int, int]) -> FoundProfile:
    """Return the profile of a GPU with this name and compute capability; no name: of the CPU."""
    if not gpu:
        return FoundProfile(CPU, "the model is on a CPU")
    for profile in MEASURED:
        if re.search(rf"\b{profile.measured_on}\b", gpu):
            return FoundProfile(profile, f"measured on a GPU of this name, {gpu}")
    for profile in MEASURED:
        if profile.generation == capability[0]:
            near = f"{profile.measured_on}, which has the compute capability {capability[0]}.x of this {gpu}"
            return FoundProfile(profile, f"measured on the {near}")
    return FoundProfile(GENERIC, f"nothing was measured on this one: {gpu}")
