"""Launch a Triton kernel again without Triton's analysis of its arguments.

`kernel[grid](...)` inspects every argument to find the variant that was compiled for it: its type, whether
it is 1 or a multiple of 16. That takes more CPU time than the launch itself, although all layers of a model
launch with the same kinds of arguments. Here the compiled variant is cached:

    key: kernel, device, grid, numbers, constants, types   ->   a compiled kernel that only needs addresses

The key holds every number by value and by type (1, 1.0 and True are equal but compiled differently), so a
number that Triton would specialise for always finds its own variant. Constants are integers, bools and
strings; a float is rejected, because 2.0 would find the variant of 2. Triton also specialises for a tensor's
alignment, so only launches whose addresses are all multiples of 16, as in newly allocated memory, use the
cache. Any other launch goes through Triton.

Integers that the kernel declares as unspecialised (`jit_for_any`) differ from launch to launch, are compiled
once for all values, and are not part of the key.

The parameters of these kernels have this order: tensors, unspecialised integers, numbers, constants.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from infer.kernels.runtime.dispatch import INTERPRETED, compiles_only, is_amd, triton

# A compiled kernel, and the arguments that follow the addresses.
Launch = tuple[Callable[..., None], tuple[Any, ...]]

_ALIGNMENT = 16  # bytes
_MAX_KNOWN = 4096  # variants: prompts have all lengths, and every length has its own grid

_address_of, _dtype_of = torch.Tensor.data_ptr, attrgetter("dtype")  # functions for map(), on every launch

_known: dict[tuple[Any, ...], Launch] = {}


def launch_triton(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[torch.Tensor, ...], numbers: tuple[int | float, ...],
    any_integers: tuple[int, ...] = (), /, **constants: Any,
) -> None:  # fmt: skip
    """`kernel[grid](*tensors, *any_integers, *numbers, **constants)`; constants may be options, too."""
    if INTERPRETED or is_amd():  # Triton specialises for more than a tensor's alignment there
        kernel[grid](*tensors, *any_integers, *numbers, **constants)
        return
    addresses = [*map(_address_of, tensors)]
    bits = 0
    for address in addresses:
        bits |= address
    device = tensors[0].get_device()
    types = (*map(_dtype_of, tensors), *map(type, numbers))
    key = (id(kernel), device, grid, numbers, types, *constants, *constants.values())
    known = _known.get(key)
    if known is None or bits % _ALIGNMENT:
        compiled = kernel[grid](*tensors, *any_integers, *numbers, **constants)
        if not bits % _ALIGNMENT and not compiles_only():
            _remember(key, kernel, compiled, grid, numbers, constants)
        return
    if compiles_only():
        return
    run, others = known
    run(*addresses, *any_integers, *others, stream=triton.runtime.driver.active.get_current_stream(device))


def _remember(
    key: tuple[Any, ...], kernel: Any, compiled: Any, grid: tuple[int, ...],
    numbers: tuple[int | float, ...], constants: dict[str, Any],
) -> None:  # fmt: skip
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    last = kernel.arg_names[len(kernel.arg_names) - len(names) :]
    assert last == names, f"{kernel.arg_names}: constants must come last"
    for name, value in constants.items():
        assert not isinstance(value, float), f"{name} is {value}: {value:g} would be the same key"
    whole_grid = (*grid, 1, 1)[:3]
    _known[key] = compiled[whole_grid], (*numbers, *(constants[name] for name in names))
