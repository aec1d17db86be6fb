"""The profile of the device that tensors are on (config/profiles), looked up once per device.

The parts of an engine are passed the sections that they read. Kernels are functions of tensors and are passed
none: they look up the profile here when they plan a launch or bind a model. The result is cached per device,
and a lookup takes less than half a microsecond. Values derived from a profile are cached by
`cached_by_profile`, so a test that sets another profile (`using_profile`) sees it used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch

from infer.config.profiles.find import FoundProfile, Gpu, find_profile
from infer.config.profiles.profile import DeviceProfile
from infer.kernels.runtime.dispatch import gpu_model, is_gpu, num_sms, nvidia_capability

F = TypeVar("F", bound=Callable[..., Any])

_set: list[DeviceProfile] = []  # profiles that replace the devices' own; the last one counts
_caches: list[Any] = []


def cached_by_profile(function: F) -> F:
    """Cache the results of a function of a device and numbers until another profile is set."""
    cached = lru_cache(maxsize=1024)(function)
    _caches.append(cached)
    return cached  # type: ignore[return-value]  # the signature is unchanged


@cached_by_profile
def device_profile(device: torch.device) -> DeviceProfile:
    """Return the profile of a device."""
    return _set[-1] if _set else explained_profile(device).profile


@cached_by_profile
def gpu_of(device: torch.device) -> Gpu:
    """Return the facts about a device that decide which kernel runs (choice.py)."""
    profile = device_profile(device)
    if is_gpu(device) and not torch.cuda.device_count():
        return Gpu("a GPU that is not here", (0, 0), 1, profile)
    return Gpu(gpu_model(device), nvidia_capability(device), num_sms(device), profile)


def explained_profile(device: torch.device) -> FoundProfile:
    """Return the profile that was made for a device, and the reason for this choice."""
    if is_gpu(device) and not torch.cuda.device_count():  # `infer plan` asks about absent GPUs
        return find_profile("a GPU that is not here", (0, 0))
    return find_profile(gpu_model(device), nvidia_capability(device))


@contextmanager
def using_profile(profile: DeviceProfile) -> Iterator[None]:
    """Use this profile for every device, for tests and benchmarks that compare numbers."""
    _set.append(profile)
    _forget()
    try:
        yield
    finally:
        _set.pop()
        _forget()


def _forget() -> None:
    for cached in _caches:
        cached.cache_clear()
