"""A kernel that was launched before is launched again without Triton's analysis of arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infer.kernels.runtime import launch as launching
from infer.kernels.runtime.launch import launch_triton


class Compiled:
    """What Triton returns from a launch: a kernel that can be launched with addresses."""

    def __init__(self) -> None:
        self.runs: list[tuple[tuple[int, ...], tuple[Any, ...], int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, stream: self.runs.append((grid, args, stream))


class Kernel:
    """Looks at its arguments every time, as Triton does."""

    def __init__(self) -> None:
        self.arg_names = ["x_ptr", "y_ptr", "size", "eps", "BLOCK", "PDL"]
        self.params = [SimpleNamespace(name=name, is_constexpr=name.isupper()) for name in self.arg_names]
        self.asked: list[tuple[Any, ...]] = []
        self.compiled = Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.asked.append((grid, args, constants))
            return self.compiled

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 77))
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))
    monkeypatch.setattr(launching, "_known", {})
    return Kernel()


def aligned(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.zeros(size + 16, dtype=dtype)
    return x[-x.data_ptr() % 16 // x.element_size() :][:size]


def test_the_second_launch_takes_addresses_numbers_and_constants_in_order(kernel: Kernel) -> None:
    x, y, z = aligned(8), aligned(8), aligned(8)
    options = {"PDL": True, "num_warps": 8, "BLOCK": 64}
    launch_triton(kernel, (3, 2), (x, y), (8, 0.5), **options)
    launch_triton(kernel, (3, 2), (x, z), (8, 0.5), **options)
    assert len(kernel.asked) == 1
    expected = (x.data_ptr(), z.data_ptr(), 8, 0.5, 64, True)
    assert kernel.compiled.runs == [((3, 2, 1), expected, 77)]


def test_integers_that_may_be_any_are_passed_on_and_not_asked_about(kernel: Kernel) -> None:
    x, y = aligned(8), aligned(8)
    for number in (1, 16, 5):
        launch_triton(kernel, (3,), (x, y), (0.5,), (number,), BLOCK=64, PDL=False)
    assert [args[2:] for _, args, _ in kernel.asked] == [(1, 0.5)]
    assert [args[2:] for _, args, _ in kernel.compiled.runs] == [(16, 0.5, 64, False), (5, 0.5, 64, False)]


@pytest.mark.parametrize("change", ["grid", "number", "constant", "option", "dtype", "alignment", "kernel"])
def test_whatever_differs_is_asked_for(kernel: Kernel, change: str) -> None:
    x, y = aligned(8), aligned(8)
    launch_triton(kernel, (3,), (x, y), (8, 0.5), BLOCK=64, PDL=False, num_warps=4)
    other = Kernel() if change == "kernel" else kernel
    if change == "dtype":
        y = aligned(8, torch.float16)
    elif change == "alignment":
        y = aligned(12)[1:9]
    launch_triton(
        other, (4,) if change == "grid" else (3,), (x, y), (9 if change == "number" else 8, 0.5),
        BLOCK=32 if change == "constant" else 64, PDL=False, num_warps=8 if change == "option" else 4,
    )  # fmt: skip
    assert len(kernel.asked) + len(other.asked) * (other is not kernel) == 2
    assert not kernel.compiled.runs and not other.compiled.runs


@pytest.mark.parametrize("first, second", [(1, 1.0), (1.0, 1), (1, True), (0.0, False)])
def test_equal_numbers_of_other_types_are_other_numbers(kernel: Kernel, first: float, second: float) -> None:
    """Triton compiles an integer 1 as a constant, True as one bit and 1.0 as a parameter."""
    assert first == second
    for number in (first, second, first, second):
        launch_triton(kernel, (3,), (aligned(8), aligned(8)), (8, number), BLOCK=64, PDL=False)
    assert [type(args[3]) for _, args, _ in kernel.asked] == [type(first), type(second)]
    assert [type(args[3]) for _, args, _ in kernel.compiled.runs] == [type(first), type(second)]


def test_a_constant_is_no_float(kernel: Kernel) -> None:
    with pytest.raises(AssertionError, match="BLOCK is 64.0: 64 would be the same key"):
        launch_triton(kernel, (3,), (aligned(8), aligned(8)), (8, 0.5), BLOCK=64.0, PDL=False)


def test_tensors_that_are_not_aligned_never_become_an_answer(kernel: Kernel) -> None:
    odd = aligned(12)[1:9]
    for x in (odd, odd, aligned(8), aligned(8)):
        launch_triton(kernel, (3,), (x, aligned(8)), (8, 0.5), BLOCK=64, PDL=False)
    assert (len(kernel.asked), len(kernel.compiled.runs)) == (3, 1)


def test_answers_are_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MAX_KNOWN", 4)
    for size in range(11):
        launch_triton(kernel, (3,), (aligned(8), aligned(8)), (size, 0.5), BLOCK=64, PDL=False)
    assert len(launching._known) <= 4


def test_constants_must_come_last(kernel: Kernel) -> None:
    kernel.arg_names.reverse()
    with pytest.raises(AssertionError, match="constants must come last"):
        launch_triton(kernel, (3,), (aligned(8), aligned(8)), (8, 0.5), BLOCK=64, PDL=False)
