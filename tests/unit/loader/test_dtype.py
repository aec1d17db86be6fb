"""Which number format is chosen, and when a forced one is warned about."""

from __future__ import annotations

import logging
import platform
import warnings
from pathlib import Path

import pytest
import torch

from infer.errors import ConfigError
from infer.loader import dtype as dtype_module
from infer.loader.dtype import (
    avoid_refused_products,
    choose_dtype,
    cpu_has_amx,
    onednn_refuses_bfloat16,
    warn_if_slow,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    has_amx: bool = request.param
    monkeypatch.setattr(dtype_module, "cpu_has_amx", lambda: has_amx)
    return has_amx


@pytest.mark.parametrize("amx", [True, False], indirect=True)
def test_on_a_cpu_only_bfloat16_with_amx_is_kept(amx: bool) -> None:
    assert choose_dtype("auto", CPU, torch.bfloat16) is (torch.bfloat16 if amx else torch.float32)
    for stored in (torch.float32, torch.float16, torch.float64, None):
        assert choose_dtype("auto", CPU, stored) is torch.float32


@pytest.mark.parametrize("has_bf16", [True, False])
def test_on_a_gpu_the_checkpoint_decides(monkeypatch: pytest.MonkeyPatch, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    half = torch.bfloat16 if has_bf16 else torch.float16
    assert choose_dtype("auto", GPU, torch.bfloat16) is half
    assert choose_dtype("auto", GPU, None) is half  # a GGUF file
    assert choose_dtype("auto", GPU, torch.float16) is torch.float16
    assert choose_dtype("auto", GPU, torch.float32) is torch.float32


@pytest.mark.parametrize("amx", [True, False], indirect=True)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_forced_format_is_kept_and_a_slow_one_warned_about(
    amx: bool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "infer"):
        chosen = choose_dtype(name, CPU, torch.float32)
        assert chosen is getattr(torch, name)
        assert caplog.records == []  # to choose is not to load: `infer plan` chooses several times
        warn_if_slow(chosen, CPU)
        warn_if_slow(chosen, GPU)
    if name == "float16" or (name == "bfloat16" and not amx):
        (record,) = caplog.records
        assert record.getMessage().startswith(f"{name} is slow on this CPU")
        assert "kept in int8 or int4, which is several times faster" in record.getMessage()
    else:
        assert caplog.records == []


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="dtype must be one of auto, float32, bfloat16, float16, got 'int8'"
    ):
        choose_dtype("int8", CPU, None)


def test_amx_is_found_in_the_flags_and_nowhere_else(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name : amx_bf16 fan\nflags : fpu avx512_bf16 amx_bf16 amx_tile\n")
    assert cpu_has_amx(info)
    info.write_text("model name : amx_bf16 fan\nflags : fpu avx512_bf16\n")
    assert not cpu_has_amx(info)
    assert not cpu_has_amx(tmp_path / "no such file")


@pytest.mark.parametrize(
    ("machine", "has_bf16", "refuses"),
    [("aarch64", False, True), ("arm64", False, True), ("aarch64", True, False), ("x86_64", False, False)],
)
def test_onednn_refuses_bfloat16_on_arm_without_it(
    monkeypatch: pytest.MonkeyPatch, machine: str, has_bf16: bool, refuses: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert onednn_refuses_bfloat16() == refuses


@pytest.mark.parametrize(
    ("dtype", "device", "refuses", "stays"),
    [
        (torch.bfloat16, CPU, True, False),
        (torch.bfloat16, CPU, False, True),
        (torch.bfloat16, GPU, True, True),
        (torch.float32, CPU, True, True),
        (torch.float16, CPU, True, True),
    ],
)
def test_onednn_is_switched_off_only_where_it_would_be_asked_in_vain(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: torch.device, refuses: bool, stays: bool
) -> None:
    monkeypatch.setattr(dtype_module, "onednn_refuses_bfloat16", lambda: refuses)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    avoid_refused_products(dtype, device)
    assert bool(torch.backends.mkldnn.enabled) == stays


def test_pytorch_says_whether_onednn_has_bfloat16() -> None:
    """The name is not a public one: a version without it shows here."""
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False)


def test_a_product_of_bfloat16_is_right_without_onednn_and_no_word_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As this machine decides by itself, and without oneDNN whatever it decides."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    avoid_refused_products(torch.bfloat16, CPU)
    x, w = torch.randn(16, 128).bfloat16(), torch.randn(32, 128).bfloat16()
    exact = x.double() @ w.double().T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decided = torch.nn.functional.linear(x, w)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        forced = torch.nn.functional.linear(x, w)
    torch.testing.assert_close(decided.double(), exact, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(forced.double(), exact, rtol=2**-8, atol=2**-8)
