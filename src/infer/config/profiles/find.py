"""Find a device's profile: measured on it, measured on a GPU of its generation, or the generic profile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from infer.config.profiles.cpu import CPU
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import DeviceProfile

MEASURED = (H200,)  # profiles of GPUs: add a new profile here


class FoundProfile(NamedTuple):
    """A profile and the reason why it was chosen."""

    profile: DeviceProfile
    why: str


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: results are cached for each
class Gpu:
    """The facts about a device that the choice of a kernel depends on."""

    name: str  # name that the driver reports; "": a CPU
    capability: tuple[int, int]  # compute capability of NVIDIA; (0, 0): any other device
    num_sms: int
    profile: DeviceProfile


def find_profile(gpu: str, capability: tuple[int, int]) -> FoundProfile:
    """Return the profile of a GPU with this name and compute capability, or without a name, of the CPU."""
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


def _known(name: str, capability: tuple[int, int], num_sms: int) -> Gpu:
    return Gpu(name, capability, num_sms, find_profile(name, capability).profile)


# GPUs whose kernel choices can be shown on any machine (`infer doctor --kernels --profile`)
KNOWN_GPUS = {
    "a100": _known("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "l4": _known("NVIDIA L4", (8, 9), 58),
    "rtx4090": _known("NVIDIA GeForce RTX 4090", (8, 9), 128),
    "h100": _known("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "h100-pcie": _known("NVIDIA H100 PCIe", (9, 0), 114),
    "h200": _known("NVIDIA H200", (9, 0), 132),
    "rtx5090": _known("NVIDIA GeForce RTX 5090", (12, 0), 170),
}
