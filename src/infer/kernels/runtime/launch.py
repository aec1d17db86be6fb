"""Launch a kernel again without asking Triton again which one it is.

`kernel[grid](...)` looks at every argument to find the variant that was compiled for such ones: what type it
has, whether it is 1 or a multiple of 16. That takes the CPU longer than the launch itself, and the layers of
a model all ask the same question. Here the answer is kept:

    kernel, grid, numbers, constants, types   ->   the compiled kernel, ready for addresses

Numbers are part of the question as they are, so whatever Triton makes of them was made of the same ones; with
their types, for 1, 1.0 and True are equal but compiled differently. Constants are integers, bools and names:
of these True does what 1 does, and floats are refused. Of tensors Triton looks at the alignment too: an
answer is for tensors whose addresses are all multiples of 16, as those of fresh memory are; any other launch
goes the long way.

Other integers, of 31 bits, differ from launch to launch and nothing is made of them, because the kernel says
so (`jit_for_any`): they are no part of the question.

A kernel is launched so only if its parameters come in this order: tensors, integers that may be any, numbers,
constants.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from infer.kernels.runtime.dispatch import INTERPRETED, is_amd, triton

Launch = tuple[
    Callable[..., None], tuple[Any, ...]
]  # of a compiled kernel: call it with addresses, then these

_ALIGNMENT = 16  # bytes
_MAX_KNOWN = 4096  # prompts have all lengths, and every length is a launch of its own

_address_of, _dtype_of = torch.Tensor.data_ptr, attrgetter("dtype")  # to map: every launch asks them

_known: dict[tuple[Any, ...], Launch] = {}


def launch_triton(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[torch.Tensor, ...], numbers: tuple[int | float, ...],
    any_integers: tuple[int, ...] = (), /, **constants: Any,
) -> None:  # fmt: skip
    """`kernel[grid](*tensors, *any_integers, *numbers, **constants)`; constants may be options, too."""
    if INTERPRETED or is_amd():  # there, more of a tensor counts than its alignment
        kernel[grid](*tensors, *any_integers, *numbers, **constants)
        return
    addresses = [*map(_address_of, tensors)]
    bits = 0
    for address in addresses:
        bits |= address
    device = tensors[0].get_device()
    types = (*map(_dtype_of, tensors), *map(type, numbers))
    question = (id(kernel), device, grid, numbers, types, *constants, *constants.values())
    answer = _known.get(question)
    if answer is None or bits % _ALIGNMENT:
        compiled = kernel[grid](*tensors, *any_integers, *numbers, **constants)
        if not bits % _ALIGNMENT:
            _remember(question, kernel, compiled, grid, numbers, constants)
        return
    run, others = answer
    run(*addresses, *any_integers, *others, stream=triton.runtime.driver.active.get_current_stream(device))


def _remember(
    question: tuple[Any, ...], kernel: Any, compiled: Any, grid: tuple[int, ...],
    numbers: tuple[int | float, ...], constants: dict[str, Any],
) -> None:  # fmt: skip
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    last = kernel.arg_names[len(kernel.arg_names) - len(names) :]
    assert last == names, f"{kernel.arg_names}: constants must come last"
    for name, value in constants.items():
        assert not isinstance(value, float), f"{name} is {value}: {value:g} would be the same question"
    whole_grid = (*grid, 1, 1)[:3]
    _known[question] = compiled[whole_grid], (*numbers, *(constants[name] for name in names))
