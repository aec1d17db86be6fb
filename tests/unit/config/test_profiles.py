"""Device profiles: which one a GPU gets, and what all of them keep to."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
import torch

from infer.config.profiles.cpu import CPU
from infer.config.profiles.find import MEASURED, find_profile
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import DeviceProfile
from infer.kernels.runtime.profiles import cached_by_profile, device_profile, explained_profile, using_profile

ALL = (*MEASURED, GENERIC, CPU)


@pytest.mark.parametrize(
    ("gpu", "capability", "profile", "why"),
    [
        ("NVIDIA H200", (9, 0), H200, "measured on a GPU of this name, NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), H200, "measured on the H200, which has the compute capability 9.x"),
        ("NVIDIA GH200 480GB", (9, 0), H200, "compute capability 9.x of this NVIDIA GH200 480GB"),
        ("NVIDIA L4", (8, 9), GENERIC, "nothing was measured on this one: NVIDIA L4"),
        ("AMD Instinct MI300X", (0, 0), GENERIC, "nothing was measured on this one: AMD Instinct MI300X"),
        ("", (0, 0), CPU, "the model is on a CPU"),
    ],
)
def test_a_gpu_has_the_profile_measured_on_it_or_the_nearest(
    gpu: str, capability: tuple[int, int], profile: DeviceProfile, why: str
) -> None:
    found = find_profile(gpu, capability)
    assert found.profile is profile and why in found.why


def test_a_gpu_that_is_not_here_is_generic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert explained_profile(torch.device("cuda")).profile is GENERIC


def test_a_gpu_is_asked_for_its_name_and_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert explained_profile(torch.device("cuda:0")) == find_profile("NVIDIA H200 NVL", (9, 0))


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_sizes_of_steps_ascend_and_fit_the_scheduler(profile: DeviceProfile) -> None:
    graphs = profile.graphs
    for sizes in (
        graphs.decode_rows, graphs.mixed_rows, graphs.mixed_tokens, graphs.prompt_tokens, graphs.many_rows,
        graphs.many_tokens,
    ):  # fmt: skip
        assert list(sizes) == sorted(set(sizes))
    assert profile.scheduling.row_padding == graphs.row_step, "a short step has rows in whole steps"
    assert profile.scheduling.often < profile.scheduling.rare
    assert graphs.mixed_tokens[-1] < graphs.prompt_tokens[0]


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_a_profile_is_frozen_sections(profile: DeviceProfile) -> None:
    for field in fields(profile):
        value = getattr(profile, field.name)
        assert isinstance(value, str | int) or is_dataclass(value), field.name
        if is_dataclass(value):
            with pytest.raises(FrozenInstanceError):
                setattr(value, fields(value)[0].name, None)


def test_names_tell_profiles_apart() -> None:
    assert len({profile.name for profile in ALL}) == len(ALL)


def test_a_profile_that_is_set_is_every_devices_until_it_is_not() -> None:
    device = torch.device("cpu")
    other = replace(GENERIC, name="other")

    @cached_by_profile
    def name(device: torch.device) -> str:
        return device_profile(device).name

    assert name(device) == "cpu"
    with using_profile(other):
        assert name(device) == "other" and device_profile(torch.device("cuda")) is other
        with using_profile(H200):
            assert name(device) == H200.name
        assert name(device) == "other"
    assert name(device) == "cpu"
